r"""Ways to say whether a short answer is right, by the kind of question: the values of `accu_reward_method` (VLM-R1).

The answer of a completion is what its last `<answer>...</answer>` holds, else what stands behind its thought: there,
the last `\boxed{...}`, else all of it.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.accuracy import Accuracy, UndecidedError
from grpo_lightning.rewards.answer_reward import AnswerReward
from grpo_lightning.rewards.answers import given_answer, normalized, readable, right_answer
from grpo_lightning.rewards.base import Content, completion_text
from grpo_lightning.rewards.choices import choice
from grpo_lightning.rewards.similarity import similarity
from grpo_lightning.rewards.single_number import is_number, single_number

logger = logging.getLogger(__name__)

_YES_NO = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{3}")


class Method(AnswerReward):
    """Compares the answer of every completion with the right one.

    Args:
        answer_column: The data column with the right answer: all of it, or the part between answer tags, after `####`
            or in a box. A row without an answer is not scorable.
    """

    def __init__(self, answer_column: str = "solution") -> None:
        super().__init__(answer_column)

    def __call__(self, completions: Sequence[Content], **columns: Any) -> list[float | None]:
        """Compare. Args: completions: [B]. Returns: [B] in [0, 1], None where the row is not scorable."""
        rights = [right_answer(answer, self.answer_column) for answer in columns[self.answer_column]]
        given = [given_answer(completion_text(completion)) for completion in completions]
        return [self.score(a, right) if right else None for a, right in zip(given, rights, strict=True)]

    @abstractmethod
    def score(self, given: str, right: str) -> float | None:
        """How right a given answer is; None if the right one is not of this kind."""


class MultipleChoice(Method):
    """1 if the same option is chosen: `(B)`, `B)`, `**B**`, `b`, "Option B is right" are all B.

    An answer that names no option, or lists several ("A, B", "(A) 1 (B) 2"), is wrong. A right answer that names none
    is not scorable.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the letters."""
        letter = choice(right)
        return None if letter is None else float(choice(given) == letter)


class YesNo(Method):
    """1 if the answer has the word of the right answer, "yes" or "no", and not the other one.

    A right answer with neither or both is not scorable.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the words."""
        wanted, found = ({word.lower() for word in _YES_NO.findall(readable(text))} for text in (right, given))
        return float(found == wanted) if len(wanted) == 1 else None


class AllMatch(Method):
    """1 if the answer is the right one, save for case, whitespace and a full stop at the end."""

    def score(self, given: str, right: str) -> float | None:
        """Compare the texts."""
        return float(plain(given) == plain(right))


class Counting(Method):
    """1 if the answer has exactly one number, and it is equal to the right one ("There are 3." is 3).

    A right answer without a number, or with several, is not scorable. VLM-R1 counts by its `default`, which makes words
    that look like the right ones worth something where either has no number.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the numbers."""
        number = single_number(right)
        return None if number is None else float(single_number(given) == number)


class TextSimilarity(Method):
    """How much alike the answer and the right one are: 2 * LCS / (len(a) + len(b)), in characters.

    LCS is the longest common subsequence; case, whitespace and a full stop at the end do not count. This is the
    `Levenshtein.ratio` that VLM-R1's `default` gives to text. Words that look alike are paid for, whatever they mean.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the texts."""
        return similarity(plain(given), plain(right))


class AnyAnswer(Method):
    r"""1 if the answer is right, by what the right answer is: a number, an option, mathematics or text.

    - The same text, save for case, whitespace and a full stop: right.
    - A number: right if the answer has exactly one number, and it is equal ("There are 3." is 3); a formula ("3/4" for
      0.75, "12 cm" for 12) as mathematics.
    - One letter: as `MultipleChoice`.
    - Mathematics: as `Accuracy`.
    - Other text: wrong; with `has_partial_credit` the similarity 2 * LCS / (len(a) + len(b)), LCS being the longest
      common subsequence in characters. VLM-R1 always gives that credit, and so pays for words that look alike.

    Args:
        answer_column: As in `Method`.
        has_partial_credit: Whether other text than the right one is worth something.
    """

    def __init__(self, answer_column: str = "solution", *, has_partial_credit: bool = False) -> None:
        """Raises: ImportError if math-verify is missing."""
        super().__init__(answer_column)
        self.has_partial_credit = has_partial_credit
        self.accuracy = Accuracy(answer_column)

    def score(self, given: str, right: str) -> float | None:
        """Compare by the kind of the right answer."""
        if plain(given) == plain(right):
            return 1.0
        if len(right) == 1 and right.isalpha():
            return float(choice(given) == choice(right))
        if is_number(normalized(right)):
            if single_number(given) == single_number(normalized(right)):
                return 1.0
            if is_number(normalized(given)) or not _is_formula(given):
                return 0.0
        if _is_formula(right):
            try:
                is_right = self.accuracy.compare(right, given)
            except UndecidedError as error:
                logger.warning("AnyAnswer: %.80r could not be compared with %.80r: %s.", given, right, error)
                return None
            if is_right is not None:
                return float(is_right)
        return similarity(plain(given), plain(right)) if self.has_partial_credit else 0.0


TEXT_METHODS: dict[str, type[Method] | type[Accuracy]] = {
    "default": AnyAnswer,
    "math": Accuracy,
    "mcq": MultipleChoice,
    "yes_no": YesNo,
    "all_match": AllMatch,
    "counting": Counting,
}
"""Methods for answers in words and numbers, by their name in the column `accu_reward_method`."""


def plain(text: str) -> str:
    """The text in lower case, whitespace made single spaces, without a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(". ")


def _is_formula(text: str) -> bool:
    """Whether a text is to be compared as mathematics: of "Paris 2024" that would compare the number only."""
    return any(char.isdigit() or char in "\\^_$" for char in text) and ("\\" in text or not _WORD.search(text))
