"""Completions in the loggers: what was drawn is what can be read there, and nothing stops a run."""

import html
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.callbacks.completion_log import CompletionTables, cells, choose, markdown
from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from tests.grounding_runs import Answers, grounding_module
from tests.module_runs import fit, make_module

TEXTS = ["<think>|x", "a *b*", "ee", "c"]
RED, BLUE = Image.new("RGB", (84, 56), "red"), Image.new("RGB", (56, 56), "blue")


def num_vowels(completions, log_extra):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("letters", [list(text[:2]) for text in texts])
    return [None if text == "c" else float(sum(c in "aeiou" for c in text)) for text in texts]


def train(loggers, *images, **options):
    """Two rollouts of four completions, of a policy that sees images if there are some."""
    make, prompt = make_module, Prompt("p", index=0)
    if images:
        parts = [{"type": "image"}] * len(images)
        prompt = Prompt([{"role": "user", "content": parts}], images=[ImageRef(image) for image in images], index=0)
        make = grounding_module
    module = make(rewards=[num_vowels], engine=Answers(*TEXTS), num_iterations=2)
    log = CompletionLog(**options)
    flags = {"max_steps": 4, "max_epochs": -1, "shuffle": False, "callbacks": [log], "log_every_n_steps": 1}
    fit(module, [prompt], batch_size=1, logger=loggers, **flags)
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_weights_and_biases_has_the_tables(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    caplog.set_level(logging.INFO)
    lines = train(WandbLogger(save_dir=tmp_path, offline=True), RED, max_rows=3, dirpath=str(tmp_path))
    wandb.finish()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    tables = sorted((run / "files/media/table/rollout").iterdir(), key=lambda path: int(path.name.split("_")[1]))
    assert len(tables) == 2  # one for each rollout, not for each update
    for number, path in enumerate(tables):
        table = json.loads(path.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        of_rollout = [line for line in lines if line["rollout"] == number]
        assert len(of_rollout) == 4
        assert rows == [cells(line) for line in of_rollout[:3]]
        assert [row["step"] for row in rows] == [2.0 * number] * 3
        assert [row["rewards/num_vowels"] for row in rows] == [1.0, 1.0, 2.0]
        assert rows[0]["letters"] == '["<", "t"]'
    assert caplog.text.count("the first 3 of 4 completions of a rollout (max_rows); completions.jsonl has all") == 1
    images = list((run / "files/media/images/rollout").iterdir())
    assert images
    assert Image.open(images[0]).size == RED.size


def events_of(folder):
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0}).Reload()


def test_tensorboard_has_text_and_images(tmp_path):
    RED.save(tmp_path / "red.png")
    logger = TensorBoardLogger(tmp_path, name="log", version=0)
    lines = train(logger, tmp_path / "red.png", BLUE, num_samples=1)
    events = events_of(tmp_path / "log/version_0")
    texts = events.Tensors("rollout/completions/text_summary")
    assert [event.step for event in texts] == [0, 2]
    for number, event in enumerate(texts):
        of_rollout = [line for line in lines if line["rollout"] == number]
        text = event.tensor_proto.string_val[0].decode()
        assert text == markdown([(label, of_rollout[row]) for label, row in choose(of_rollout, 1)])
        assert "best 1" in text
        assert "worst 1" in text
        assert "other 1" in text
    tags = events.Tags()["images"]
    assert sorted(tags) == sorted(
        f"rollout/images/{label}/{number}" for label in ("best 1", "worst 1", "other 1") for number in (1, 2)
    )
    sizes = [(event.width, event.height) for event in (events.Images(tag)[0] for tag in sorted(tags)[:2])]
    assert sizes == [RED.size, BLUE.size]


def test_several_loggers_at_once_and_one_without_tables(tmp_path, caplog):
    class Plain(Logger):
        """Has metrics only."""

        name, version, save_dir = "plain", 0, str(tmp_path)

        def log_metrics(self, metrics, step=None):
            pass

        def log_hyperparams(self, *args, **kwargs):
            pass

    caplog.set_level(logging.INFO)
    loggers = [TensorBoardLogger(tmp_path, name="log", version=0), CSVLogger(tmp_path, "csv"), Plain()]
    train(loggers, num_samples=1)
    assert "rollout/completions/text_summary" in events_of(tmp_path / "log/version_0").Tags()["tensors"]
    path = tmp_path / "log/version_0/completions.jsonl"
    assert caplog.text.count(f"Plain has no tables for completions; they are in {path}.") == 1
    assert "CSVLogger has" not in caplog.text


def test_no_samples_no_text(tmp_path):
    train(TensorBoardLogger(tmp_path, name="log", version=0), num_samples=0)
    assert not events_of(tmp_path / "log/version_0").Tags()["tensors"]


def line_of(reward, **fields):
    return {
        "rollout": 0,
        "reward": reward,
        "rewards": {"r": reward},
        "length": 3,
        "prompt": "p",
        "completion": "c",
    } | fields


def test_best_worst_and_others_by_hand():
    lines = [line_of(reward) for reward in (2.0, None, 5.0, 1.0, 4.0, 3.0)]
    chosen = dict(choose(lines, 2))
    assert (chosen["best 1"], chosen["best 2"]) == (2, 4)
    assert (chosen["worst 1"], chosen["worst 2"]) == (3, 0)
    assert {chosen["other 1"], chosen["other 2"]} == {1, 5}
    assert choose(lines, 0) == []
    assert choose([], 2) == []


@given(st.lists(st.none() | st.integers(0, 3), max_size=12), st.integers(0, 5))
def test_no_completion_is_chosen_twice(rewards, count):
    lines = [line_of(reward) for reward in rewards]
    rows = [row for _, row in choose(lines, count)]
    assert len(set(rows)) == len(rows) <= 3 * count
    assert choose(lines, count) == choose(lines, count)
    if count and lines:
        assert rows


def test_markup_in_a_completion_is_shown_as_it_is():
    nasty = "<think>a | b</think>\n# *so* `x` [y](z) \\ & _u_"
    page = markdown_to_safe_html(markdown([("best 1", line_of(0.5, completion=nasty, prompt="<b>"))]))
    assert page.count("<tr>") == 2
    assert page.count("<td>") == 6  # label, reward, rewards/r, length, prompt, completion
    cells_of = [part.split("</td>")[0] for part in page.split("<td>")[1:]]
    assert html.unescape(cells_of[-1].replace("<br>", "\n")) == nasty
    assert cells_of[1] == cells_of[2] == "0.5"


def test_what_cannot_be_scored_is_a_dash():
    assert markdown([("best 1", line_of(None))]).splitlines()[-1] == "| best 1 | - | - | 3 | p | c |"


@pytest.mark.parametrize("column", [[None, 5.0, "abc"], [True, "n/a", None], [1, [1, 2], None], [5.0, {"a": 1}, 2]])
def test_an_extra_of_any_types_is_a_column_of_text(column):
    wandb = pytest.importorskip("wandb")
    rows = [cells(line_of(1.0, extra=value)) for value in column]
    assert [row["extra"] for row in rows] == [
        value if value is None or isinstance(value, str) else json.dumps(value) for value in column
    ]
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])  # raises on mixed types
    assert table.get_column("reward") == [1.0, 1.0, 1.0]


def test_cells_have_one_type_each():
    line = line_of(1, prompt=[{"role": "user", "content": "ä"}], finish_reason="stop", extra={"a": 1}, flag=True)
    assert cells(line) == {
        "rollout": 0.0,
        "reward": 1.0,
        "length": 3.0,
        "prompt": '[{"role": "user", "content": "ä"}]',
        "completion": "c",
        "finish_reason": "stop",
        "extra": '{"a": 1}',
        "flag": "true",
        "rewards/r": 1.0,
    }


def test_an_image_that_cannot_be_shown_is_said_once_and_stops_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tables = CompletionTables(1, 1)
    prompt = Prompt("p", images=[ImageRef(tmp_path / "nowhere.png", where="rows.jsonl:3"), ImageRef(BLUE)])
    for _ in range(2):
        assert [image.size for image in tables.images(prompt)] == [BLUE.size]
    assert caplog.text.count("Some images of prompts are not shown: rows.jsonl:3") == 1
    assert list(tables.images(None)) == []
