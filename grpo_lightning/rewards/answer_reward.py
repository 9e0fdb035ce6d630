"""Rewards that compare an answer with the right one of its row, text or a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.answers import right_answer
from grpo_lightning.rewards.base import ImageSize, Reward


class AnswerReward(Reward):
    """A reward that reads the right answer with `right_answer`.

    Args:
        answer_column: The data column with the right answer.
    """

    says_solved = True

    def __init__(self, answer_column: str) -> None:
        self.answer_column = answer_column
        self.required_columns = (answer_column,)

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check the right answer. Raises: ValueError if it is not text or a number."""
        right_answer(columns.get(self.answer_column), self.answer_column)
