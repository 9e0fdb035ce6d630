"""Questions of reasoning-gym as files of rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from grpo_lightning.data import reasoning_gym as prepare
from grpo_lightning.data.mixture import load_mixture
from grpo_lightning.data.reasoning_gym import created, entries, new_questions
from grpo_lightning.tasks import ReasoningGymTasks

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # a + b or a - b: 200 questions


def written(folder: Path, **changed: Any) -> dict[str, str]:
    """The files of a folder by their paths in it."""
    settings: dict[str, Any] = {"tasks": {"chain_sum": SUMS, "rotate_matrix": None}, "size": 5, "heldout_size": 3}
    ReasoningGymTasks(folder=str(folder), **{"seed": 0} | settings | changed)()
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_files_of_two_tasks(tmp_path: Path):
    files = written(tmp_path / "gym")
    assert list(files) == [
        "counts.json",
        *("heldout/chain_sum.jsonl", "heldout/rotate_matrix.jsonl"),
        "recipe.json",
        *("train/chain_sum.jsonl", "train/rotate_matrix.jsonl"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["gym"]
    rows = [json.loads(line) for line in files["train/chain_sum.jsonl"].splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert list(row) == ["question", "answer", "task", "task_config", "entry"]
        assert row["question"].startswith("State the final answer")
        assert created("chain_sum", json.loads(row["task_config"])).score_answer(
            row["answer"], json.loads(row["entry"])
        )
    (prompt, *_) = load_mixture([{"json_path": str(tmp_path / "gym" / "train" / "rotate_matrix.jsonl")}], seed=0)
    assert prompt.source == "rotate_matrix"
    assert prompt.columns["task"] == "rotate_matrix"


def test_held_out_questions_are_new_and_those_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        files = written(tmp_path / "gym", tasks={"chain_sum": SUMS}, size=150, heldout_size=100)
    train, heldout = (
        [json.loads(line)["question"] for line in files[f"{part}/chain_sum.jsonl"].splitlines()]
        for part in ("train", "heldout")
    )
    assert not set(train) & set(heldout)
    assert len(set(heldout)) == len(heldout) < 100
    counts = {"train": 150, "heldout": len(heldout), "left_out": 100 - len(heldout)}
    assert json.loads(files["counts.json"]) == {"chain_sum": counts}
    assert f"chain_sum: {counts['left_out']} of 100 held-out questions are left out" in caplog.text


def test_a_task_with_too_few_questions_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tasks\.chain_sum: all 20 held-out questions are trained on too"):
        written(tmp_path / "gym", tasks={"chain_sum": SUMS}, size=5000, heldout_size=20)
    assert list(tmp_path.iterdir()) == []


def test_new_questions_by_hand():
    train, later = ([{"question": letter} for letter in letters] for letters in ("abc", "xaydxz"))
    assert [entry["question"] for entry in new_questions(later, train)] == list("xydz")


def test_seeds_do_not_share_items():
    """reasoning-gym draws item i with seed + i: item 1 of seed 0 would be item 0 of seed 1."""
    config = {"min_terms": 6, "max_terms": 6}
    first, second = ({entry["question"] for entry in entries("chain_sum", config, seed, range(50))} for seed in (0, 1))
    assert not first & second
    assert entries("chain_sum", config, 0, range(3, 5)) == entries("chain_sum", config, 0, range(5))[3:]


def test_the_folder_is_written_once_and_again_when_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gym"
    files = written(folder)
    before = (folder / "counts.json").stat().st_ino
    assert written(folder) == files
    assert (folder / "counts.json").stat().st_ino == before
    assert list(written(folder, tasks={"chain_sum": SUMS})) == [  # no file of the other task is left
        *("counts.json", "heldout/chain_sum.jsonl", "recipe.json", "train/chain_sum.jsonl")
    ]
    assert written(folder) == files
    monkeypatch.setattr(prepare, "version", lambda name: "99")
    assert json.loads(written(folder)["recipe.json"])["reasoning-gym"] == "99"
    assert (folder / "counts.json").stat().st_ino != before


def test_the_seed_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert written(tmp_path / "one", seed=None) == written(tmp_path / "two", seed=3)


def test_files_of_somebody_else_are_kept(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files"):
        written(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": {}}, "tasks is empty"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"heldout_size": 0}, "heldout_size must be at least 1, got 0"),
        ({"tasks": {"chain_sums": {}}}, r"^ReasoningGymTasks\.tasks: .*did you mean 'chain_sum'"),
        ({"tasks": {"chain_sum": {"min_terms": 0}}}, "does not take the settings"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ReasoningGymTasks(**{"tasks": {"chain_sum": {}}, "folder": "gym"} | settings)


def test_what_cannot_be_written_is_named():
    with pytest.raises(ValueError, match=r"tasks.chain_sum: an item of it cannot be written .* builtins.object"):
        prepare.row("chain_sum", {}, {"question": "1 + 1", "answer": "2", "metadata": {"a": object()}})
