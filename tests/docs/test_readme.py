"""The front page: short, its files, code and commands run as a newcomer would, and its numbers are recorded ones."""

import json
import re
import shlex
import sys
from pathlib import Path

from grpo_lightning.cli import instantiate, main, parse
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.demo.arithmetic import DemoTask
from tests.docs.newcomer import README, SHORT, commands, files, newcomer, save_policy  # noqa: F401 - a fixture
from tests.helpers.pages import blocks, broken_links, tables
from tests.helpers.paths import DOCS, ROOT

MAX_LINES = 150


def test_it_is_short():
    assert len(README.splitlines()) <= MAX_LINES


def test_the_files_and_commands_are_found():
    assert list(files()) == ["make_rows.py", "my_rewards.py", "my_run.yaml"]
    assert [command.split()[1] for command in commands(README)] == ["fit", "plan", "fit", "report", "fit"]


def test_the_commands_run_one_after_the_other(newcomer, capsys):  # noqa: F811
    for command in commands(README):
        _, verb, *arguments = shlex.split(command)
        if verb == "fit" and "quickstart" in arguments:
            parse(arguments)  # tests/recipes/test_recipes.py runs it
        elif verb == "fit":
            main([verb, *arguments, *SHORT, "--trainer.max_steps=2"])
        else:
            main([verb, *arguments])
    assert "completions per rollout" in capsys.readouterr().out  # plan
    run = Path("runs/my_run/version_0")
    for name in ("metrics.csv", "completions.jsonl", "config.yaml", "checkpoints", "report.html"):
        assert (run / name).exists(), name


def test_the_first_recipe_solves_its_rows_when_the_model_answers_right(newcomer):  # noqa: F811
    """Its `avg@1` can rise: the reward that decides gives what a chat model writes 1, and no wrong answer."""
    sys.path.insert(0, str(newcomer))
    (model,) = instantiate(parse(["--config", "my_run.yaml"]), "model")
    assert model.validation.success is None
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    for answer, solved in (("{}", 1), ("The answer is {}.", 1), ("It is **{}**.", 1), ("It is 1{}.", 0)):
        texts = [answer.format(row["answer"]) for row in rows]
        groups = [
            Group(Prompt([{"role": "user", "content": "?"}], columns=row), [1], [Completion([1], [0.0], "stop", text)])
            for row, text in zip(rows, texts, strict=True)
        ]
        scores = model.reward_set.score(groups)
        assert scores.by_reward[model.reward_set.success].flatten().tolist() == [solved] * len(rows), answer


def test_python_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_policy("name-or-path")
    assert len(blocks(README, "python")) == 3
    for block in blocks(README, "python"):
        code = block.replace("L.Trainer(", 'L.Trainer(accelerator="cpu", logger=False, ')
        exec(compile(code, "README.md", "exec"), {"__name__": "example"})


def test_links_and_files_named_exist():
    assert broken_links(README, ROOT / "README.md") == []
    for name in re.findall(r"(?:recipes|docs|grpo_lightning|benchmarks)/[\w/.]+\.(?:yaml|py|md|json)\b", README):
        assert (ROOT / name).is_file(), name


def test_every_page_is_reachable():
    """From the front page, or that of the documentation if there is one, by links from page to page."""
    reached, pages = set(), [ROOT / "README.md", *DOCS.glob("index.md")]
    while pages:
        page = pages.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\((?!https?://)([\w./-]+\.md)", page.read_text(encoding="utf-8"))
            pages += [(page.parent / link).resolve() for link in links]
    assert {*DOCS.glob("*.md")} <= reached


def test_the_task_shown_is_the_quickstart_s():
    """The problems are held-out ones of seed 0, with the completions that the warm-up teaches."""
    task = DemoTask()
    shown = [row for row in tables(README) if row.heading == "Quickstart"]
    assert len(shown) == 2
    for row, digits in zip(shown, task.split().heldout, strict=False):
        cells = [cell.strip("`") for cell in row.cells]
        completions = [task.short_completion(digits), task.worked_completion(digits)]
        assert cells == [task.question(digits), *completions, str(task.truth(digits))]
