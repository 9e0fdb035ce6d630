"""Every argument of every class that users configure has a test in which it changes a result."""

from importlib import import_module
from pathlib import Path

import pytest

import grpo_lightning
import grpo_lightning.callbacks
import grpo_lightning.data.reasoning_gym
import grpo_lightning.demo.arithmetic
import grpo_lightning.demo.grounding
import grpo_lightning.demo.guessing
import grpo_lightning.demo.number_games
import grpo_lightning.demo.reasoning_gym
import grpo_lightning.demo.tool_use
import grpo_lightning.environments
import grpo_lightning.grounding
import grpo_lightning.optimizers
import grpo_lightning.rewards
import grpo_lightning.schedules
from tests.arguments.registry import CASES, arguments_of, case, configured, is_varied_alone, problems, recorded

PUBLIC = [
    grpo_lightning,
    grpo_lightning.callbacks,
    grpo_lightning.demo.arithmetic,
    grpo_lightning.demo.grounding,
    grpo_lightning.demo.guessing,
    grpo_lightning.demo.number_games,
    grpo_lightning.demo.reasoning_gym,
    grpo_lightning.demo.tool_use,
    grpo_lightning.environments,
    grpo_lightning.grounding,
    grpo_lightning.optimizers,
    grpo_lightning.rewards,
    grpo_lightning.schedules,
    grpo_lightning.data.reasoning_gym,
]


def test_every_argument_has_a_case():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        import_module(f"tests.arguments.{path.stem}")  # its cases register themselves
    found = problems(configured(*PUBLIC), CASES)
    assert not found, "\n".join(found)


def test_the_classes_are_found_where_users_meet_them():
    names = {owner.__name__ for owner in configured(*PUBLIC)}
    assert {"GRPOLightningModule", "PromptDataModule", "ExactMatch", "CompletionLog", "AdamW", "Quickstart"} <= names
    # constructors take these: nobody lists them
    assert {"DatasetEntry", "Validation", "SamplingParams", "PromptTemplate", "PromptStream", "Prompt"} <= names
    # nobody makes these: they say what others have to be, or are results
    assert not names & {"Reward", "RolloutEngine", "Schedule", "Scores", "DemoFiles"}


class Configured:
    """A class that a user might configure."""

    def __init__(self, size: int = 1, color: str = "red", shape: object = None) -> None:
        self.area = size * size
        self.color, self.shape = color, shape


def test_a_missing_case_and_one_too_many_are_named():
    cases = {(Configured, "size"), (Configured, "weight")}
    assert arguments_of(Configured) == ["size", "color", "shape"]
    assert problems([Configured], cases) == [
        "Configured.color has no case: nothing shows what it changes.",
        "Configured.shape has no case: nothing shows what it changes.",
        "Configured.weight has a case, and is no argument.",
    ]


@pytest.mark.parametrize(
    ("calls", "is_enough"),
    [
        ([{"size": 1}, {"size": 2}], True),
        ([{}, {"size": 2}], True),  # the default is a value too
        ([{"size": 1}, {"size": 1}], False),
        ([{"size": 1}], False),
        ([], False),
        ([{"size": 1}, {"size": 2, "color": "blue"}], False),  # which of the two made the difference?
        ([{"size": 1}, {"size": 2, "color": "blue"}, {"size": 3}], True),
        ([{"size": 1, "shape": Configured()}, {"size": 2, "shape": Configured()}], True),  # no value to compare
        ([{"size": 1, "shape": Configured()}, {"size": 2}], False),
    ],
)
def test_an_argument_must_be_varied_alone(calls, is_enough):
    with recorded(Configured) as made:
        for arguments in calls:
            Configured(**arguments)
    assert is_varied_alone(made, "size") == is_enough


def run(test, ignored=None):
    """A case as pytest runs it, without leaving it among the others."""
    CASES.discard((Configured, "size"))
    test(owner=Configured, ignored=ignored)


def test_a_case_that_varies_nothing_fails():
    @case(Configured, "size")
    def test_size():
        assert Configured(size=1, color="red").area != Configured(size=2, color="blue").area

    with pytest.raises(AssertionError, match="test_size makes no two Configured that differ in size only"):
        run(test_size)


def test_a_case_that_cannot_fail_is_found():
    @case(Configured, "size")
    def has_teeth():
        assert (Configured(size=1).area, Configured(size=2).area) == (1, 4)

    @case(Configured, "size")
    def has_none():
        assert Configured(size=1).color == Configured(size=2).color

    run(has_teeth)
    run(has_none)
    run(has_teeth, "size")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run(has_none, "size")
