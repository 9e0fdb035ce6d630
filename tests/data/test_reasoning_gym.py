"""reasoning-gym: items are made alike every time and verified alike after a file; rows, settings and a run."""

from __future__ import annotations

import builtins
import csv
import enum
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.marks import SLOW, few

pytest.importorskip("reasoning_gym")

from grpo_lightning.cli import main
from grpo_lightning.data import reasoning_gym as gym
from grpo_lightning.data.mixture import load_mixture
from grpo_lightning.data.reasoning_gym import (
    EVALUATES_ANSWERS,
    ReasoningGymTasks,
    create_task,
    entries,
    make_item,
    new_questions,
    read_entry,
    task_names,
    verifier,
    write_entry,
)
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

GARBAGE = "xx {[(#\n\\boxed é"
ODD = ["arc_agi", "codeio", "graph_color", "gsm_symbolic", "knights_knaves", "rearc"]
"""Tasks with tuples, numbers for keys, fractions, and numpy's texts and numbers in their items."""


class Color(str, enum.Enum):
    """A text of a kind of its own."""

    RED = "red"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 2.5, "b", None, True]}, {"a": [1, 2.5, "b", None, True]}),
        ((1, (), {3: "red"}, {(0, 1): {2, 1}}), (1, (), {3: "red"}, {(0, 1): {2, 1}})),
        ([Color.RED, np.float64(0.5), np.str_("a"), np.int64(7)], ["red", 0.5, "a", 7]),
        ("日本\n", "日本\n"),
    ],
)
def test_values_come_back_as_they_were(value: Any, read: Any):
    entry = {"question": "q", "answer": "a", "metadata": value}
    text = write_entry(entry)
    assert "\n" not in text
    assert repr(read_entry(text)["metadata"]) == repr(read)


@pytest.mark.parametrize("value", [object(), [{"a": np.zeros(2)}], float("nan")])
def test_an_item_that_cannot_be_written_is_named(value: Any):
    with pytest.raises(ValueError, match=r"tasks.chain_sum: an item cannot be written to a file: .* literal"):
        gym.row("chain_sum", {}, {"question": "1 + 1", "answer": "2", "metadata": {"a": value}})


@pytest.mark.parametrize("text", ["{", "[1]", "{'question': '1'}", "__import__('os').getcwd()", "[" * 10_000])
def test_text_that_is_no_item_is_refused(text: str):
    with pytest.raises(ValueError, match=r"it (is not a Python literal|must have question, answer and metadata)"):
        read_entry(text)


def answers(entry: dict[str, Any], other: dict[str, Any]) -> Iterator[str | None]:
    """The right answer, a wrong one, none, what is none, and whatever the metadata hold: some hold a right one."""
    yield from (entry["answer"], other["answer"], None, "", GARBAGE)
    for value in entry["metadata"].values():
        yield value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)


def score(dataset: Any, answer: str | None, entry: Any) -> Any:
    """The verifier's value, or the type of the error it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dataset.score_answer(answer, entry)
        except Exception as error:  # noqa: BLE001 (which one is what is compared)
            return type(error)


def check_task(name: str, size: int) -> None:
    """Make items forwards and backwards, and verify them before and after a file: all must be equal."""
    first, again = (create_task(name, {}, size=size, seed=5) for _ in range(2))
    state, array_state = random.getstate(), np.random.get_state()[1].tolist()
    items = [make_item(first, name, index) for index in range(size)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (state, array_state)
    random.seed(1)
    assert [make_item(again, name, index) for index in reversed(range(size))][::-1] == items
    for item, other in zip(items, [*items[1:], items[0]], strict=True):
        read = read_entry(write_entry(item))
        for answer in answers(item, other):
            assert score(verifier(name, "{}"), answer, read) == score(first, answer, item), answer


@few(2, slow=True)
@pytest.mark.parametrize("name", [*ODD, "list_functions", "pool_matrix"])  # the last two use the global random state
def test_an_item_is_made_alike_and_means_the_same_after_a_file(name: str):
    check_task(name, 2)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", task_names())
def test_an_item_of_any_task_is_made_alike_and_means_the_same_after_a_file(name: str):
    check_task(name, 8)


@SLOW
def test_the_verifiers_that_execute_answers_are_known(monkeypatch: pytest.MonkeyPatch):
    """Watches `eval` while all verifiers are given an answer that nothing else would hand to it."""
    executing, evaluate = set(), builtins.eval

    def watch(source: Any, *scope: Any) -> Any:
        if "917" in str(source):
            executing.add(name)
        # Unlike the function, the one it stands for sees its caller's names.
        frame = sys._getframe(1)
        return evaluate(source, *(scope or (frame.f_globals, frame.f_locals)))

    for name in task_names():
        dataset = create_task(name, {}, seed=5)
        entry = make_item(dataset, name, 0)
        right = entry["answer"] or ""
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "eval", watch)
            for answer in (
                "917",
                "[917]",
                "[[917, 2], [3, 4]]",
                f"{right} + 917",
                re.sub(r"\d", "917", right, count=1),
            ):
                score(dataset, answer, entry)
    assert executing == EVALUATES_ANSWERS


# ------------------------------------------------------------------------------------------------------------ rows

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
        assert create_task("chain_sum", json.loads(row["task_config"])).score_answer(
            row["answer"], read_entry(row["entry"])
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
    assert f"chain_sum: {counts['left_out']} of 100 held-out questions are dropped" in caplog.text


@SLOW
def test_a_task_with_too_few_questions_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tasks\.chain_sum: all 20 held-out questions are also trained on"):
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
    monkeypatch.setattr(gym, "version", lambda name: "99")
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
        ({"tasks": {"chain_sum": {"min_terms": 0}}}, "does not accept the settings"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ReasoningGymTasks(**{"tasks": {"chain_sum": {}}, "folder": "gym"} | settings)


# ------------------------------------------------------------------------------------------------------- settings


@SLOW
def test_settings_are_taken_and_those_of_yaml_become_what_they_stand_for():
    dataset = create_task("chain_sum", {"min_terms": 4, "max_terms": 4})
    assert len(re.findall("[0-9]+", make_item(dataset, "chain_sum", 0)["question"])) == 4
    assert create_task("basic_arithmetic", {"operators": ["+"]}).config.operators == ("+",)
    assert create_task("word_sorting", {"transformation": "uppercase"}).config.transformation.value == "uppercase"
    assert str(create_task("time_intervals", {"min_date": "2001-02-03"}).config.min_date) == "2001-02-03"
    board = create_task("arc_agi", {"board_format_opts": {"col_delimiter": ";"}}).config.board_format_opts
    assert (board.col_delimiter, board.row_delimiter) == (";", "\n")


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chainsum", {}, "no task 'chainsum' (did you mean 'chain_sum'"),
        ("quite different", {}, "no task 'quite different'"),
        ("composite", {}, "this is a mixture of tasks"),
        ("chain_sum", {"min_term": 2}, "tasks.chain_sum: there is no setting 'min_term' (did you mean 'min_terms'"),
        ("chain_sum", {"qqq": 2}, "there is no setting 'qqq'; there are min_terms, max_terms"),
        ("chain_sum", {"size": 2}, "tasks.chain_sum.size: size cannot be set for one task"),
        ("chain_sum", {"seed": 2}, "tasks.chain_sum.seed: seed cannot be set for one task"),
        ("chain_sum", {"min_terms": 0}, "tasks.chain_sum: reasoning-gym does not accept the settings {'min_terms': 0}"),
        ("chain_sum", {"min_terms": "two"}, "does not accept the settings {'min_terms': 'two'}: TypeError"),
        ("word_sorting", {"transformation": "bold"}, "'bold' is not a valid TextTransformation"),
    ],
)
def test_wrong_settings_are_named(task: str, config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        create_task(task, config)


def test_an_item_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch):
    dataset = create_task("chain_sum", {}, size=3)
    monkeypatch.setattr(type(dataset), "__getitem__", lambda self, index: {"question": " "})
    with pytest.raises(ValueError, match="chain_sum: item 2 must have a text question, got ' '"):
        make_item(dataset, "chain_sum", 2)
    monkeypatch.setattr(type(dataset), "__getitem__", lambda self, index: 1 / 0)
    with pytest.raises(ValueError, match=r"chain_sum: reasoning-gym cannot generate item 2 .* ZeroDivisionError"):
        make_item(dataset, "chain_sum", 2)


def test_a_verifier_is_made_once_for_the_same_settings():
    assert verifier("chain_sum", '{"max_terms": 3}') is verifier("chain_sum", '{"max_terms": 3}')
    assert verifier("chain_sum", '{"max_terms": 3}').config.max_terms == 3


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'grpo-lightning[reasoning-gym]'")):
        gym.package()


# -------------------------------------------------------------------------------------------------------- in a run


RUN = """
trainer: {accelerator: cpu, max_steps: 2}
data:
  prepare:
    class_path: grpo_lightning.data.reasoning_gym.ReasoningGymTasks
    init_args:
      folder: gym
      size: 6
      heldout_size: 4
      tasks:
        TASK: {SETTING: 3}
        prime_factorization: null
  datasets:
    - {json_path: gym/train/chain_sum.jsonl}
    - {json_path: gym/train/prime_factorization.jsonl}
  val_datasets:
    - {json_path: gym/heldout/chain_sum.jsonl}
  prompt_as: text
  batch_size: 4
model:
  policy: policy
  num_generations: 4
  sampling: {max_completion_length: 4}
  rewards:
    - class_path: ReasoningGym
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, task: str = "chain_sum", setting: str = "max_terms") -> None:
    """Two steps with a tiny model that answers with noise."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    tiny_model("qwen2").save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    (folder / "run.yaml").write_text(RUN.replace("TASK", task).replace("SETTING", setting))
    main(["fit", "--config", "run.yaml"])


@pytest.mark.slow
def test_rows_are_made_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, monkeypatch)
    (path,) = (tmp_path / "runs").rglob("metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("reward/reasoning_gym")]
    assert rows
    assert all(0 <= float(row["reward/reasoning_gym"]) <= 1 for row in rows)
    # Noise is no product of whole numbers: its verifier raises.
    assert any(float(row["reward/reasoning_gym/verifier_failed"]) > 0 for row in rows)
