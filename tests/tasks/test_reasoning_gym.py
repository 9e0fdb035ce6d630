"""All tasks of reasoning-gym: drawn alike every time, and verified alike after a file."""

from __future__ import annotations

import builtins
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

gym = pytest.importorskip("reasoning_gym")

from grpo_lightning.tasks import reasoning_gym as tasks  # noqa: E402
from grpo_lightning.tasks.exact_json import exact_dumps, exact_loads  # noqa: E402
from grpo_lightning.tasks.reasoning_gym import EVALUATES_ANSWERS, created, drawn, task_names, verifier  # noqa: E402

NAMES = task_names()
GARBAGE = "xx {[(#\n\\boxed é"


def answers(entry: dict[str, Any], other: dict[str, Any]) -> Iterator[str | None]:
    """The right answer, a wrong one, none, what is none, and whatever the metadata hold: some hold a right one."""
    yield from (entry["answer"], other["answer"], None, "", GARBAGE)
    for value in entry["metadata"].values():
        yield value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)


def score(dataset: Any, answer: str | None, entry: Any) -> Any:
    """What a verifier says, or the type of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dataset.score_answer(answer, entry)
        except Exception as error:  # noqa: BLE001 (which one is what is compared)
            return type(error)


def compared(name: str, size: int, trip: Any) -> list[tuple[Any, Any]]:
    """What the verifiers say of every answer: of the item itself, and of the one that made the trip through a file."""
    dataset = created(name, {}, size=size, seed=5)
    items = [drawn(dataset, name, index) for index in range(size)]
    pairs = []
    for item, other in zip(items, [*items[1:], items[0]], strict=True):
        for answer in answers(item, other):
            pairs.append((score(dataset, answer, item), score(verifier(name, "{}"), answer, trip(item))))
    return pairs


def exact(item: Any) -> Any:
    """An item as it comes out of a file."""
    return exact_loads(exact_dumps(item))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_changes_no_verdict(name: str):
    pairs = compared(name, 2, exact)
    assert [of_file for _, of_file in pairs] == [of_item for of_item, _ in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_changes_no_verdict_on_many_items(name: str):
    pairs = compared(name, 25, exact)
    assert [of_file for _, of_file in pairs] == [of_item for of_item, _ in pairs]


@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_plain_json_would_change_some(name: str):
    """Their verifiers compare tuples, which plain JSON makes lists: the right answer was wrong."""
    pairs = compared(name, 2, lambda item: json.loads(json.dumps(item)))
    assert pairs[0] == (1.0, 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_items_do_not_depend_on_what_was_drawn_before(name: str):
    first, again = (created(name, {}, size=2, seed=3) for _ in range(2))
    state, array_state = random.getstate(), numpy.random.get_state()[1].tolist()
    forwards = [drawn(first, name, index) for index in (0, 1)]
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == (state, array_state)
    random.seed(1)
    backwards = [drawn(again, name, index) for index in (1, 0)]
    assert backwards[::-1] == forwards
    assert exact(forwards) == forwards


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_is_worth_next_to_nothing_and_the_right_one_everything(name: str):
    dataset = created(name, {}, seed=7)
    entry = drawn(dataset, name, 0)
    assert score(dataset, None, entry) in (0, 0.01)  # some give 0.01 for anything
    if isinstance(entry["answer"], str):
        assert score(dataset, entry["answer"], entry) == 1
    if name not in EVALUATES_ANSWERS:
        garbage = score(dataset, GARBAGE, entry)
        # Every answer that is not empty is right for this one, as docs/reasoning_gym.md says.
        assert garbage == 1 if name == "game_of_life_halting" else isinstance(garbage, type) or garbage < 0.5


def test_some_verifiers_raise():
    """These are why an exception has a meaning of its own: `int("3 x 5 x")`, and JSON that is no plan."""
    raising = set()
    for name in sorted(set(NAMES) - EVALUATES_ANSWERS):
        dataset = created(name, {}, seed=5)
        entry = drawn(dataset, name, 0)
        if any(isinstance(score(dataset, answer, entry), type) for answer in (GARBAGE, "917", "[917]")):
            raising.add(name)
    assert raising == {"boxnet", "prime_factorization"}


def test_the_verifiers_that_execute_answers_are_known(monkeypatch: pytest.MonkeyPatch):
    """Watches `eval` while all verifiers are given an answer that nothing else would hand to it."""
    executing, evaluate = set(), builtins.eval

    def watch(source: Any, *scope: Any) -> Any:
        if "917" in str(source):
            executing.add(name)
        # Unlike the function, the one it stands for sees its caller's names.
        frame = sys._getframe(1)
        return evaluate(source, *(scope or (frame.f_globals, frame.f_locals)))

    for name in NAMES:
        dataset = created(name, {}, seed=5)
        entry = drawn(dataset, name, 0)
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


# ------------------------------------------------------------------------------------------------------- settings


def test_settings_are_taken_and_those_of_yaml_become_what_they_stand_for():
    dataset = created("chain_sum", {"min_terms": 4, "max_terms": 4})
    assert len(re.findall("[0-9]+", drawn(dataset, "chain_sum", 0)["question"])) == 4
    assert created("basic_arithmetic", {"operators": ["+"]}).config.operators == ("+",)
    assert created("word_sorting", {"transformation": "uppercase"}).config.transformation.value == "uppercase"
    assert str(created("time_intervals", {"min_date": "2001-02-03"}).config.min_date) == "2001-02-03"
    board = created("arc_agi", {"board_format_opts": {"col_delimiter": ";"}}).config.board_format_opts
    assert (board.col_delimiter, board.row_delimiter) == (";", "\n")


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chainsum", {}, "no task 'chainsum' (did you mean 'chain_sum'"),
        ("quite different", {}, "no task 'quite different'"),
        ("composite", {}, "this is a mixture of tasks"),
        ("chain_sum", {"min_term": 2}, "tasks.chain_sum: there is no setting 'min_term' (did you mean 'min_terms'"),
        ("chain_sum", {"qqq": 2}, "there is no setting 'qqq'; there are min_terms, max_terms"),
        ("chain_sum", {"size": 2}, "tasks.chain_sum.size: size is not a setting of one task"),
        ("chain_sum", {"seed": 2}, "tasks.chain_sum.seed: seed is not a setting of one task"),
        ("chain_sum", {"min_terms": 0}, "tasks.chain_sum: reasoning-gym does not take the settings {'min_terms': 0}"),
        ("chain_sum", {"min_terms": "two"}, "does not take the settings {'min_terms': 'two'}: TypeError"),
        ("word_sorting", {"transformation": "bold"}, "'bold' is not a valid TextTransformation"),
    ],
)
def test_wrong_settings_are_named(task: str, config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        created(task, config)


def test_an_item_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch):
    dataset = created("chain_sum", {}, size=3)
    monkeypatch.setattr(type(dataset), "__getitem__", lambda self, index: {"question": " "})
    with pytest.raises(ValueError, match="chain_sum: item 2 has no text for its question, got ' '"):
        drawn(dataset, "chain_sum", 2)
    monkeypatch.setattr(type(dataset), "__getitem__", lambda self, index: 1 / 0)
    with pytest.raises(ValueError, match=r"chain_sum: reasoning-gym cannot make item 2 .* ZeroDivisionError"):
        drawn(dataset, "chain_sum", 2)


def test_a_verifier_is_made_once_for_the_same_settings():
    assert verifier("chain_sum", '{"max_terms": 3}') is verifier("chain_sum", '{"max_terms": 3}')
    assert verifier("chain_sum", '{"max_terms": 3}').config.max_terms == 3


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'grpo-lightning[reasoning-gym]'")):
        tasks.package()
