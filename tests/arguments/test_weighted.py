"""Arguments of WeightedReward and Plugin: another total, another name, another way to go on after a failure."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import ExactMatch, Plugin, RewardSet, WeightedReward
from tests.arguments.registry import case


def characters(completions):
    return [len(completion) if isinstance(completion, str) else -1 for completion in completions]


def ones(completions):
    return [1.0 for _ in completions]


def zero(completions):
    return [0.0 for _ in completions]


def broken(completions):
    raise OSError("no network")


def scores(reward: WeightedReward, *, is_chat: bool = False) -> Any:
    """Score two completions, next to a reward that is always 0."""
    content = [{"role": "user", "content": "p"}] if is_chat else "p"
    prompt = Prompt(content, {"solution": "ab", "label": "b"}, index=0)
    completions = [Completion([1, 2], [0.0, 0.0], "stop", text) for text in ("<answer>ab</answer>", "AB")]
    return RewardSet([reward, zero]).score([Group(prompt, [1], completions)])


@case(WeightedReward, "reward", "weight", "name")
def test_reward_weight_and_name():
    assert scores(WeightedReward(characters)).total.tolist() == [[19, 2]]
    assert scores(WeightedReward(characters, weight=2.0)).total.tolist() == [[38, 4]]
    assert scores(WeightedReward(ones)).total.tolist() == [[1, 1]]
    assert list(scores(WeightedReward(characters)).by_reward) == ["characters", "zero"]
    assert list(scores(WeightedReward(characters, name="size")).by_reward) == ["size", "zero"]


@case(WeightedReward, "on_error")
def test_on_error():
    with pytest.raises(RuntimeError, match="raised OSError: no network"):
        scores(WeightedReward(broken, on_error="raise"))
    found = scores(WeightedReward(broken, on_error="none"))
    assert found.by_reward["broken"].isnan().all()
    assert found.failures["broken/exception"] == 2


@case(WeightedReward, "error_value")
def test_error_value():
    for stand_in in (0.5, -1.0):
        found = scores(WeightedReward(broken, on_error="value", error_value=stand_in))
        assert found.total.tolist() == [[stand_in, stand_in]]


@case(WeightedReward, "completions_as")
def test_completions_as():
    wanted = {("auto", False): 19, ("auto", True): -1, ("text", True): 19, ("messages", False): -1}
    for (form, is_chat), first in wanted.items():
        assert scores(WeightedReward(characters, completions_as=form), is_chat=is_chat).total[0, 0] == first


SOLUTION = {"answer_column": "solution"}


@case(Plugin, "name", "init_args", "weight", "log_name")
def test_plugin():
    assert scores(Plugin("exact_match", SOLUTION)).total.tolist() == [[1, 0]]
    assert scores(Plugin("all_match", SOLUTION)).total.tolist() == [[1, 1]]  # whatever the case, and without tags
    assert scores(Plugin("exact_match", {"answer_column": "label"})).total.tolist() == [[0, 0]]
    assert scores(Plugin("exact_match", SOLUTION, weight=3.0)).total.tolist() == [[3, 0]]
    assert list(scores(Plugin("exact_match", SOLUTION)).by_reward) == ["exact_match", "zero"]
    assert list(scores(Plugin("exact_match", SOLUTION, log_name="right")).by_reward) == ["right", "zero"]


@case(Plugin, "on_error", "error_value", "completions_as")
def test_plugin_in_trouble(monkeypatch):
    def fail(self, completions, **columns):
        if isinstance(completions[0], str):
            raise OSError("no network")
        return [2.0 for _ in completions]

    monkeypatch.setattr(ExactMatch, "__call__", fail)
    with pytest.raises(RuntimeError, match="raised OSError: no network"):
        scores(Plugin("exact_match", SOLUTION, on_error="raise"))
    assert scores(Plugin("exact_match", SOLUTION, on_error="none")).by_reward["exact_match"].isnan().all()
    for stand_in in (0.5, -1.0):
        found = scores(Plugin("exact_match", SOLUTION, on_error="value", error_value=stand_in))
        assert found.total.tolist() == [[stand_in, stand_in]]
    assert scores(Plugin("exact_match", SOLUTION, completions_as="messages")).total.tolist() == [[2, 2]]
