"""An environment returns a step or a part of it, and `reset` gets the columns that it names."""

import re
from decimal import Decimal

import numpy as np
import pytest

from grpo_lightning.environments import GuessTheNumber, Step
from grpo_lightning.environments.base import InvalidStepError, as_step, messages_of, named_columns


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("hotter", Step("hotter")),
        (None, Step(done=True)),
        (("colder", False), Step("colder")),
        (("over", True, 0.5), Step("over", done=True, reward=0.5)),
        ((None, True), Step(done=True)),
        ({"role": "tool", "content": "4"}, Step({"role": "tool", "content": "4"})),
        (Step("a", reward=1.0), Step("a", reward=1.0)),
        (Step("a", reward=np.float32(0.5)), Step("a", reward=0.5)),  # type: ignore[arg-type]
        (Step("a", metrics={"n": np.int64(2), "won": True}), Step("a", metrics={"n": 2.0, "won": 1.0})),
        (Step("a", keep=0), Step("a", keep=0)),
    ],
)
def test_a_part_of_a_step_is_a_step(returned, expected):
    assert as_step(returned) == expected


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "An observation must be text, a message"),
        (("a", "yes"), "done = 'yes'"),
        (("a", True, float("nan")), "the reward nan"),
        (("a", True, True), "the reward True"),
        ("", "returned no observation"),
        ((None, False), "returned no observation"),
        (Step(["a"]), "must be text, a message"),  # type: ignore[list-item]
        (Step({"role": "user", "content": [{"type": "image"}]}), "or a list of parts .* returned {'type': 'image'}"),
        (Step({"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}), "returned {'type': 'video'"),
        (Step({"role": "user", "content": 3}), "must be text, or a list of parts .* returned 3"),
        (Step([{"role": "user", "content": "a"}], keep=2), "not text"),
        (Step(()), "returned no observation"),
        (Step("a", keep="2"), "keep = '2': it must be a whole number"),  # type: ignore[arg-type]
        (Step("a", keep=-1), "keep = -1: it must be a whole number"),
        (Step("a", metrics=None), "the metrics None"),  # type: ignore[arg-type]
        (Step("a", metrics={"a": "b"}), "the metric 'a' = 'b'"),  # type: ignore[dict-item]
        (Step("a", metrics={1: 2.0}), "the metric 1 = 2.0"),  # type: ignore[dict-item]
        (Step("a", metrics={"a": float("inf")}), "the metric 'a' = inf"),
        ([{"role": "user", "content": "a"}] * 300, "has 300 messages; at most 256"),
    ],
)
def test_other_values_are_refused(returned, message):
    with pytest.raises(InvalidStepError, match=message):
        as_step(returned)


def test_text_gets_the_role_and_messages_keep_theirs():
    assert messages_of("a", "tool") == [{"role": "tool", "content": "a"}]
    assert messages_of([{"role": "user", "content": "b"}], "tool") == [{"role": "user", "content": "b"}]


def test_reset_gets_the_columns_that_it_names():
    columns = {"prompt": "p", "number": 3, "level": 1}
    assert named_columns(lambda number: None, columns) == {"number": 3}
    assert named_columns(lambda number, **others: None, columns) == columns
    assert named_columns(lambda size=4: None, columns) == {}
    with pytest.raises(ValueError, match="needs the data column 'size'; the row has prompt, number, level"):
        named_columns(lambda size: None, columns)


def test_the_number_game():
    game = GuessTheNumber(max_guesses=3)
    game.reset("7")
    assert game.step("maybe 5").observation == "higher"
    assert game.step("then 9, no: 8").observation == "lower"
    assert game.step("7") == Step(done=True, reward=1.0, metrics={"guesses": 3})
    game.reset(-2)
    assert game.step("what?").observation == "Write a number."
    assert [game.step("-3").observation, game.step("-1").reward] == ["higher", 0.0]
    game.reset(5.0)
    assert game.step("5.5").observation == "lower", "one guess, not 5"
    assert game.step("It is 5.").reward == 1.0
    game.reset(2**53 + 1)  # no float is this number
    assert game.step(f"{2**53 + 1}").reward == 1.0
    for wrong in ("seven", 3.7, np.float32(3.5), Decimal("3.7"), None):
        with pytest.raises(ValueError, match=re.escape(f"must hold a whole number, got {wrong!r}")):
            game.reset(wrong)
