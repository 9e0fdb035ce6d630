"""Every reward that compares an answer with the right one refuses the same rows, before the run and in it."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lightning.rewards import (
    Accuracy,
    AllMatch,
    AnyAnswer,
    Counting,
    ExactMatch,
    LLMJudge,
    MultipleChoice,
    Reward,
    TextSimilarity,
    YesNo,
)

REWARDS = [
    *(kind("gold") for kind in (Accuracy, AllMatch, AnyAnswer, Counting, ExactMatch, MultipleChoice, YesNo)),
    TextSimilarity("gold"),
    LLMJudge("m", "http://localhost", answer_column="gold"),
]


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.name)
@pytest.mark.parametrize("answer", [None, "", "B", "#### 7", 7, 7.5])
def test_text_numbers_and_no_answer_are_rows_to_judge(reward: Reward, answer: Any):
    reward.check_row({"gold": answer, "solution": [1]}, [])
    reward.check_row({}, [(3, 4)])


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.name)
@pytest.mark.parametrize("answer", [["B"], {"answer": 3}, True])
def test_other_answers_are_refused_before_the_run_as_in_it(reward: Reward, answer: Any):
    assert reward.required_columns == ("gold",)
    with pytest.raises(ValueError, match="column 'gold' must hold text or a number, got") as before:
        reward.check_row({"gold": answer}, [])
    if not isinstance(reward, LLMJudge):
        with pytest.raises(ValueError, match="column 'gold'") as in_it:
            reward(completions=["B"], gold=[answer])
        assert str(in_it.value) == str(before.value)
