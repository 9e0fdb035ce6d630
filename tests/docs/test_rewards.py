"""docs/rewards.md: every reward of its table is there, and its examples of packages, answers and rewards hold."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_lightning import rewards
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import ExactMatch, Plugin, RewardSet, RewardWorkers
from grpo_lightning.rewards.registry import SHIPPED
from tests.helpers.doc_keys import arguments
from tests.helpers.pages import blocks, read, tables

PAGE = read("rewards.md")


def test_every_reward_of_the_table_exists_and_none_is_left_out():
    names = [name for row in tables(PAGE) if row.heading == "Shipped rewards" for name in row.names()]
    assert len(names) > 10
    assert [name for name in names if not hasattr(rewards, name)] == []
    assert {reward.__name__ for reward in SHIPPED.values()} == {*names}


def test_a_package_announces_its_reward_as_it_is_written(tmp_path, monkeypatch):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    (block,) = blocks(PAGE, "toml")
    ((group, points),) = tomllib.loads(block)["project"]["entry-points"].items()
    ((name, value),) = points.items()
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rewards.py").write_text(
        "class Brevity:\n    def __call__(self, completions):\n        return [1 / len(text) for text in completions]\n"
    )
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"init_args: {{name: {name}}}" in PAGE
    assert Plugin(name)(completions=["abcd"]) == [0.25]


def test_the_limits_of_workers_are_the_defaults():
    rows = {row.names()[0]: row.cells[1] for row in tables(PAGE) if row.heading == "Worker processes"}
    assert rows.keys() == arguments(RewardWorkers)
    defaults = RewardWorkers()
    assert [f"{getattr(defaults, name):g}" for name in rows if name != "num_workers"] == [
        cell for name, cell in rows.items() if name != "num_workers"
    ]


FORMS = re.findall(r"^\d\. .*?(?:`(.+?7.*?)`|\"([^\"]+7\.?)\")", re.sub(r"\n +", " ", PAGE), re.MULTILINE)


@pytest.mark.parametrize("text", FORMS)
def test_every_form_of_an_answer_is_read(text):
    answer = text[0] or text[1]
    assert ExactMatch()(completions=[answer, answer.replace("7", "8")], answer=["7", "7"]) == [1, 0]


def test_the_forms_are_found():
    assert len(FORMS) == 5


@pytest.mark.parametrize("text", ["6 or 7", "not 7"])
def test_what_counts_as_wrong(text):
    assert f'"{text}"' in PAGE
    assert ExactMatch()(completions=[f"The answer is {text}."], answer=["7"]) == [0]


def test_every_example_of_a_reward_scores():
    """Each gets what a chat and a plain text have, and its values differ."""
    short, long = "7", "7" * 100
    given = {"completion_ids": [[1], [1] * 100], "answer": ["7", "7"]}
    for block in (block for block in blocks(PAGE, "python") if "async def" not in block):
        scope: dict = {}
        exec(compile(block, "rewards.md", "exec"), scope)
        (reward,) = [value for name, value in scope.items() if name in ("brief", "exact")]
        chat = 'completion[0]["content"]' in block
        texts = [[{"role": "assistant", "content": text}] if chat else text for text in (short, long)]
        better, worse = reward(completions=texts, **given)
        assert better > worse


def test_the_example_of_a_service_loses_only_the_completion_whose_request_fails():
    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if query["text"] == "crash" else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"score": float(query["text"] == query["answer"])}).encode())

        def log_message(self, *args: object) -> None:
            pass

    (block,) = [block for block in blocks(PAGE, "python") if "async def" in block]
    scope: dict = {"__name__": "my_rewards"}
    exec(compile(block, "rewards.md", "exec"), scope)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reward = scope["Graded"](f"http://127.0.0.1:{server.server_address[1]}/score")
        texts = [Completion([1], [0.0], "stop", text) for text in ("7", "8", "crash")]
        group = Group(Prompt([{"role": "user", "content": "?"}], columns={"answer": "7"}), [1], texts)
        values = RewardSet([reward]).score([group]).by_reward["graded"].tolist()
        server.shutdown()
    assert values == [[1, 0, pytest.approx(math.nan, nan_ok=True)]]
