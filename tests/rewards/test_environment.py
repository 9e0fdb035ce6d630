"""Rewards get the user's own object and the counts of the environment."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Ending, Group, Prompt, Turn
from grpo_lightning.environments import ToolObject, Tools
from grpo_lightning.rewards import ExactMatch, ToolUse
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.scoring import CallContext, arguments
from tests.environments.games import Counted, double
from tests.environments.test_swift_and_trl import Wordle


def group(state: Any, role: str = "tool", **metrics: float) -> Group:
    """A group of one conversation of one call."""
    turns = [
        Turn("assistant", "call", 0, 1, is_sampled=True),
        Turn(role, "answer", 1, 1, is_sampled=False),
    ]
    completion = Completion([1], [0.0], "stop", "call", turns=turns, ending=Ending(state, metrics=metrics))
    return Group(Prompt([{"role": "user", "content": "p"}]), [1], [completion])


def with_answer(answer: str) -> Group:
    """A conversation whose row has this answer."""
    ended = group(None)
    return replace(ended, prompt=replace(ended.prompt, columns={"answer": answer}))


def called(reward: Any, *groups: Group) -> Any:
    weighted = WeightedReward(reward)
    return weighted(**arguments(weighted, groups, CallContext([*groups[0].prompt.columns])))


def of_trl(completions: Any, environments: list[Any], **columns: Any) -> list[Any]:
    """A reward function as TRL documents it: it reads the objects that the factory made."""
    return [environment.done for environment in environments]


def test_rewards_get_the_object_that_a_factory_made():
    environment = ToolObject(Wordle)
    environment.reset(secret="cat")
    environment.step('[guess(word="cat")]')
    for state in (environment, pickle.dumps(environment)):
        assert called(of_trl, group(state)) == [True]
    (given,) = called(lambda completions, environments: environments, group(pickle.dumps(Counted())))
    assert isinstance(given, Counted)


def test_rewards_of_the_text_do_not_score_the_last_observation():
    """Here an environment ends the conversation and gives the solution away: "answer"."""
    assert called(ExactMatch(extract="text"), with_answer("answer")) == [0.0]
    assert called(ExactMatch(extract="text"), with_answer("call")) == [1.0]


@pytest.mark.parametrize(
    ("text", "is_use"),
    [
        ("[double(number=3)]", 1.0),
        ("[double(number=3, times='x')] ", 0.0),
        ("<tool_call>oops</tool_call>", 0.0),
        ("<tool_call>[half(number=3)]</tool_call>", 0.0),
        ("[double(number=3, times=10**9)]", 0.0),
        ("[double(number=3), double(number='x')]", 1.0),
        ("[double(number=3, times=-10000)]", 1.0),  # it raises an error
        ("6", 0.0),
    ],
)
def test_tool_use_counts_calls_that_ran(text, is_use):
    metrics = Tools([double]).step(text).metrics
    assert called(ToolUse(), group(None, **metrics)) == [is_use]


def test_tool_use_without_counts_looks_at_messages():
    assert called(ToolUse(), group(None), group(None, role="user")) == [1.0, 0.0]
