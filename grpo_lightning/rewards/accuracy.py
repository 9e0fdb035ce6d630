"""Is the answer mathematically equal to the right one?"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.answer_reward import AnswerReward
from grpo_lightning.rewards.answers import (
    after_thought,
    between_answer_tags,
    chat_answer,
    in_box,
    readable,
    right_answer,
)
from grpo_lightning.rewards.base import Content, completion_text
from grpo_lightning.rewards.equivalence import UndecidedError, check_installed, equivalence

logger = logging.getLogger(__name__)

MOST_UNDECIDED = 4
"""Comparisons with one right answer that may fail or take too long in a call."""


class Accuracy(AnswerReward):
    r"""1 if the completion's answer equals the row's answer as mathematics, else 0: `\frac{1}{2}` is 0.5.

    The answer of a completion is what its last `<answer>...</answer>` holds, else its last `\boxed{...}`, else what is
    announced near the end ("the final answer is $x$"), follows `####`, or is bold, else the end of its last line, if it
    is not truncated. No answer is a wrong one, and so is what cannot be read, and what tries several: "3 and 4", or a
    line each. A row whose right answer cannot be read as mathematics is not scorable, nor is a completion whose
    comparison fails or takes too long; both are said in a warning.

    Comparing is done by math-verify (extra `math`) in a process of its own, from any thread. After four answers to a
    question whose comparisons took too long, further ones are not compared, and not scorable: a call must end.

    Args:
        answer_column: The data column with the right answer, text or a number: all of it, or the part after `####`,
            between answer tags or in `\boxed{}`.
        timeout_seconds: For one comparison.
        max_answer_characters: A longer answer is not read; an announced one must be among the last so many.
    """

    def __init__(
        self, answer_column: str = "solution", *, timeout_seconds: float = 5.0, max_answer_characters: int = 1000
    ) -> None:
        """Raises: ImportError if math-verify is missing; ValueError if a limit is not positive."""
        check_installed("Accuracy")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}.")
        if max_answer_characters < 1:
            raise ValueError(f"max_answer_characters must be at least 1, got {max_answer_characters}.")
        super().__init__(answer_column)
        self.timeout_seconds = timeout_seconds
        self.max_answer_characters = max_answer_characters

    def __call__(
        self, completions: Sequence[Content], finish_reasons: Sequence[str] | None = None, **columns: Any
    ) -> list[float | None]:
        """Compare. Args: completions, finish_reasons: [B]. Returns: [B], None where it is not scorable."""
        golds = [right_answer(answer, self.answer_column) for answer in columns[self.answer_column]]
        texts = [completion_text(completion) for completion in completions]
        decided: dict[tuple[str, str, str], float | None] = {}  # completions of a group often agree
        undecided: Counter[str] = Counter()  # by right answer
        values = []
        for text, gold, reason in zip(texts, golds, finish_reasons or ["stop"] * len(texts), strict=True):
            question = (gold, *self._answer(text, reason))
            if question not in decided:
                is_asked = bool(gold) and undecided[gold] < MOST_UNDECIDED
                decided[question] = self._score(*question, undecided) if is_asked else None
            values.append(decided[question])
        return values

    def warm_up(self) -> None:
        """Start the process that compares."""
        equivalence().start()

    def compare(self, gold: str, answer: str, announced_in: str = "") -> bool | None:
        """Whether an answer is the right one; None if the right one cannot be read as mathematics.

        Args:
            gold: The right answer.
            answer: An answer.
            announced_in: A text; the formula that it announces as the answer, if there is one, is taken instead.

        Raises:
            UndecidedError: If the comparison failed or took too long.
        """
        limit = self.max_answer_characters
        if len(gold) > limit:
            return None
        return equivalence().decide(
            readable(gold),
            readable(answer) if len(answer) <= limit else "",
            announced_in=announced_in[-limit:],
            timeout_seconds=self.timeout_seconds,
        )

    def _answer(self, text: str, finish_reason: str) -> tuple[str, str]:
        """A completion's answer, and a text that may announce another; both may be empty."""
        tagged, said = between_answer_tags(text), after_thought(text)
        boxed = in_box(tagged if tagged is not None else said if said.strip() else text)
        if boxed is not None or tagged is not None:
            return (boxed if boxed is not None else tagged or ""), ""
        said = said[-self.max_answer_characters :]
        return chat_answer(said, finish_reason) or "", "" if "####" in said else said

    def _score(self, gold: str, answer: str, announced_in: str, undecided: Counter[str]) -> float | None:
        """One reward; what cannot be scored is said, and counted in `undecided`."""
        try:
            is_right = self.compare(gold, answer, announced_in)
        except UndecidedError as error:
            undecided[gold] += 1
            last = " No other answers to this question are compared." if undecided[gold] == MOST_UNDECIDED else ""
            logger.warning("Accuracy: %.80r could not be compared with %.80r: %s.%s", answer, gold, error, last)
            return None
        if is_right is None:
            logger.warning("Accuracy: the right answer %.80r cannot be read as mathematics.", gold)
        return None if is_right is None else float(is_right)
