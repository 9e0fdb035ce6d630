r"""Ways to say whether a short answer is right, by the kind of question: the values of `accu_reward_method` (VLM-R1).

The answer of a completion is what its last `<answer>...</answer>` holds, else its last `\boxed{...}`, else all of it.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.accuracy import Accuracy
from grpo_lightning.rewards.answers import given_answer, normalized, right_answer
from grpo_lightning.rewards.base import Content, Reward, completion_text
from grpo_lightning.rewards.equivalence import UndecidedError

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?![\w]|\.[0-9])")
_YES_NO = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{3}")
_LONE_LETTER = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_FIRST_LETTER = re.compile(r"[\s*_(\[$\"']*([A-Z])(?=[.):,\]*])")
_NAMED_LETTER = re.compile(r"\b(?:answer|option|choice)s?(?:\s+is)?\b[\s:*_(\[$\"']{0,8}([A-Z])\b", re.IGNORECASE)
_MARKED_LETTER = re.compile(r"\(([A-Z])\)|\*\*\(?([A-Z])\)?\*\*|\b([A-Z])\)")
_WORD_LETTER = re.compile(r"\b[A-Z]\b(?!['\u2019])")


class Method(Reward):
    """Compares the answer of every completion with the right one.

    Args:
        answer_column: The data column with the right answer: all of it, or the part between answer tags, after `####`
            or in a box. A row without an answer is not scorable.
    """

    def __init__(self, answer_column: str = "solution") -> None:
        self.answer_column = answer_column
        self.required_columns = (answer_column,)

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

    An answer that names no option, or several without choosing, is wrong. A right answer without a letter is not
    scorable.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the letters."""
        letter = choice(right)
        return None if letter is None else float(choice(given) == letter)


class YesNo(Method):
    """1 if the answer's first "yes" or "no", as a word of its own, is that of the right answer.

    A right answer with neither is not scorable.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the words."""
        wanted, found = _YES_NO.search(right), _YES_NO.search(given)
        if wanted is None:
            return None
        return float(found is not None and found.group().lower() == wanted.group().lower())


class AllMatch(Method):
    """1 if the answer is the right one, save for case, whitespace and a full stop at the end."""

    def score(self, given: str, right: str) -> float | None:
        """Compare the texts."""
        return float(plain(given) == plain(right))


class AnyAnswer(Method):
    r"""1 if the answer is right, by what the right answer is: a number, an option, mathematics or text.

    - The same text, save for case, whitespace and a full stop: right.
    - A number: right if the answer has exactly one number, and it is equal ("There are 3." is 3).
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
        if (number := _only_number(normalized(right))) is not None and _is_number(normalized(right)):
            return float(_only_number(given) == number)
        if len(right) == 1 and right.isalpha():
            return float(choice(given) == choice(right))
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
}
"""The methods shipped, by their name in the column `accu_reward_method`."""


def choice(text: str) -> str | None:
    """The option a text chooses, as a capital letter; None if it chooses none.

    In this order: it is one letter; it begins with a marked one ("B) because", "A, because I ..."); the last one that
    is named ("the answer is B"); the only one that is marked ("(B)"); the only one that stands alone.
    """
    if lone := _LONE_LETTER.fullmatch(text):
        return lone.group(1).upper()
    if first := _FIRST_LETTER.match(text):
        return first.group(1)
    named = [letter for letter in _NAMED_LETTER.findall(text) if letter.isupper()]
    if named:
        return str(named[-1])
    marked = {letter for letters in _MARKED_LETTER.findall(text) for letter in letters if letter}
    alone = marked or {_option(found, text) for found in _WORD_LETTER.finditer(text) if found.group() != "I"}
    return alone.pop() if len(alone) == 1 else None


def plain(text: str) -> str:
    """The text in lower case, whitespace made single spaces, without a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(". ")


def similarity(a: str, b: str) -> float:
    """2 * LCS / (len(a) + len(b)), 1 for two empty texts.

    LCS by bits of an integer (Hyyro 2004): as many steps as `a` has characters, each on an integer of `len(b)` bits.
    """
    total = len(a) + len(b)
    if not total:
        return 1.0
    everywhere = (1 << len(b)) - 1
    places: dict[str, int] = {}
    for position, char in enumerate(b):
        places[char] = places.get(char, 0) | 1 << position
    row = everywhere
    for char in a:
        hits = row & places.get(char, 0)
        row = ((row + hits) | (row - hits)) & everywhere
    return 2 * (len(b) - row.bit_count()) / total


def _option(found: re.Match[str], text: str) -> str | None:
    """The option that a lone capital names; None for what may as well be the article ("A cat", but also "A or B")."""
    following = text[found.end() : found.end() + 2]
    return None if found.group() == "A" and following[:1] == " " and following[1:].islower() else found.group()


def _only_number(text: str) -> float | None:
    """The number in a text, if it has exactly one value."""
    values = {float(number.replace(",", "")) for number in _NUMBER.findall(text)}
    return values.pop() if len(values) == 1 else None


def _is_number(text: str) -> bool:
    """Whether the whole text is a number."""
    return _NUMBER.fullmatch(text) is not None


def _is_formula(text: str) -> bool:
    """Whether a right answer is to be compared as mathematics: of "Paris 2024" that would compare the number only."""
    return any(char.isdigit() or char in "\\^_$" for char in text) and ("\\" in text or not _WORD.search(text))
