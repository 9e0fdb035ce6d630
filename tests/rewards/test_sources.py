from __future__ import annotations

import logging
from typing import Any

import pytest

from grpo_lightning.core.types import Prompt
from grpo_lightning.rewards import WeightedReward
from grpo_lightning.rewards.validation import Source, check_sources, sources_of


def needs_answer(completions: Any, answer: Any) -> Any: ...


def needs_box(completions: Any, box: Any) -> Any: ...


def style(completions: Any) -> Any: ...


REWARDS = [WeightedReward(needs_answer), WeightedReward(needs_box), WeightedReward(style)]
WEIGHTS = {"needs_answer": 1.0, "needs_box": 1.0, "style": 0.0}


def check(*sources: Source) -> None:
    check_sources(sources, REWARDS, WEIGHTS)


def test_sources_of_prompts():
    prompts = [
        Prompt("p", columns={"answer": 1}, source="math"),
        Prompt("p", columns={"box": 1}, source="boxes", rewards=["needs_box"]),
        Prompt("p", columns={"answer": 1, "id": 2}, source="math"),
        Prompt("p", columns={"box": 1}, source="boxes", rewards=["needs_box", "style"]),
        Prompt("p"),
    ]
    assert sources_of(prompts) == [
        Source("math", ("answer", "id"), None),
        Source("boxes", ("box",), ("needs_box",)),
        Source("boxes", ("box",), ("needs_box", "style")),
        Source("", (), None),
    ]
    assert sources_of([]) == []


def test_rewards_as_text_are_an_error():
    with pytest.raises(ValueError, match=r"a list of names, got 'style' for gsm8k, prompt 7: write \['style'\]"):
        sources_of([Prompt("p", index=7, source="gsm8k", rewards="style")])


def test_a_column_is_needed_only_where_its_reward_applies():
    math, boxes = Source("math", ("answer",), ("needs_answer",)), Source("boxes", ("box",), ("needs_box", "style"))
    check(math, boxes)
    with pytest.raises(
        ValueError, match=r"'needs_box' needs the data column 'box', which the data of 'math' do not have"
    ):
        check(Source("math", ("answer",)))
    with pytest.raises(
        ValueError, match=r"'needs_answer' needs .* the data of 'a', 'b' do not have; they have: id, box\."
    ):
        check(
            Source("a", ("id",), ("needs_answer",)),
            Source("b", ("box",)),
            Source("c", ("answer", "box"), ("needs_box",)),
        )


def test_a_column_that_some_sources_lack_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check(Source("math", ("answer", "box")), Source("boxes", ("box",)))
    assert "'needs_answer' gets None for the column 'answer', which the prompts of 'boxes' lack" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            Source("m", ("answer",), ("need_answer",)),
            r"of 'm' name the reward 'need_answer'; there are: needs_answer, needs_box, style\. Did you mean .*answer'",
        ),
        (Source("m", (), ("zzz",)), r"name the reward 'zzz'; there are: needs_answer, needs_box, style\.$"),
        (
            Source("m", (), ("style",)),
            r"No reward of nonzero weight applies to the prompts of 'm' \(rewards: \['style'\]\)",
        ),
        (Source("", (), ()), r"No reward of nonzero weight applies to the prompts \(rewards: \[\]\)"),
        (Source("m", ("log_extra", "answer")), r"\['log_extra'\] of 'm' have the names of arguments"),
        (Source("", ("finish_reasons",)), r"\['finish_reasons'\] have the names of arguments"),
    ],
)
def test_what_does_not_fit_is_an_error(source: Source, message: str):
    with pytest.raises(ValueError, match=message):
        check(source)
