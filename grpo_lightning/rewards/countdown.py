"""The numbers game: an expression that uses the given numbers and has the target value."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from grpo_lightning.rewards.answers import given_answer
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

Uses = Literal["all", "some"]

MAX_CHARACTERS = 1000
"""A longer text is no expression: this bounds the depth of the tree that Python's parser builds."""

MAX_DIGITS = 20
"""A longer number is none."""

_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212", "**/-")  # multiplication and division signs, a minus of its own
_CHARACTERS = re.compile(r"[0-9+\-*/()\s]*")
_TWO_SIGNS = re.compile(r"(?:^|[-+*/(])\s*-\s*-")
_OPERATORS = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


class Countdown(Reward):
    """1 if the answer is an expression of the row's numbers whose value is the target, else 0.

    The expression has whole numbers, + - * / (or × · ÷) and parentheses, and is computed exactly: 1/3*3 is 1. It may be
    followed by `= target`. Anything else is wrong, and nothing is executed: `99**98**97` is a wrong answer that costs
    no time.

    The task of TinyZero (its data: `nums`, `target`), whose reward calls Python's `eval` and so hangs there; and of
    reasoning-gym's `countdown` with `uses="some"`.

    Args:
        numbers_column: The data column with the numbers that may be used.
        target_column: The data column with the value.
        uses: "all" numbers must be used, each once; "some" may be left out.
    """

    says_solved = True

    def __init__(self, numbers_column: str = "nums", target_column: str = "target", uses: Uses = "all") -> None:
        """Raises: ValueError if `uses` is no choice."""
        if uses not in get_args(Uses):
            raise ValueError(f"uses must be one of {', '.join(get_args(Uses))}, got {uses!r}.")
        self.numbers_column, self.target_column, self.uses = numbers_column, target_column, uses
        self.required_columns = (numbers_column, target_column)

    def __call__(self, completions: Sequence[Content], **columns: Any) -> list[float | None]:
        """Compute. Args: completions: [B]. Returns: [B], each 0 or 1, None where the row has no target.

        Raises:
            ValueError: If a row has no whole numbers, or no whole number for its target.
        """
        rows = zip(completions, columns[self.numbers_column], columns[self.target_column], strict=True)
        return [self._score(completion_text(completion), numbers, target) for completion, numbers, target in rows]

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check numbers and target. Raises: ValueError as a call does."""
        self._task(columns.get(self.numbers_column), columns.get(self.target_column))

    def _score(self, text: str, numbers: Any, target: Any) -> float | None:
        """The reward of one completion."""
        task = self._task(numbers, target)
        if task is None:
            return None
        allowed, wanted = task
        formula, equals, rest = given_answer(text).partition("=")
        if equals and rest.strip() != str(wanted):
            return 0.0
        value, used = evaluate(formula, max_numbers=allowed.total())
        if value != wanted:
            return 0.0
        return float(used == allowed if self.uses == "all" else used <= allowed)

    def _task(self, numbers: Any, target: Any) -> tuple[Counter[int], int] | None:
        """The numbers and the target of a row; None if it has no target. Raises: ValueError if they are wrong."""
        if target is None:
            return None
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
        if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
            raise ValueError(f"column {self.numbers_column!r} must hold a list of whole numbers, got {numbers!r:.80}.")
        if wrong := [number for number in numbers if not _is_whole(number) or number < 0]:
            raise ValueError(
                f"column {self.numbers_column!r} must hold whole numbers of at least 0, got {wrong[0]!r:.40}."
            )
        if not _is_whole(target):
            raise ValueError(f"column {self.target_column!r} must hold a whole number, got {target!r:.80}.")
        return Counter(int(number) for number in numbers), int(target)


def evaluate(text: str, *, max_numbers: int) -> tuple[Fraction | None, Counter[int]]:
    """Evaluate an expression of whole numbers, + - * / and parentheses, exactly and without executing it.

    Args:
        text: The expression. Completions are untrusted: it may be anything.
        max_numbers: How many numbers it may have, which bounds the size of its value.

    Returns:
        (Its value, how often it has each number). The value is None if the text is no expression (powers, decimals,
        words, two signs, an operator too many), is too long, has too many or too long numbers, or divides by 0.
    """
    text = " ".join(text.translate(_SIGNS).split())
    numbers = re.findall(r"[0-9]+", text) if len(text) <= MAX_CHARACTERS else []
    used = Counter(int(number) for number in numbers if len(number) <= MAX_DIGITS)
    is_short = 0 < len(numbers) == used.total() <= max_numbers
    if not is_short or not _CHARACTERS.fullmatch(text) or _TWO_SIGNS.search(text):
        return None, used
    without_zeros = re.sub(r"\b0+(?=[0-9])", "", text)  # Python refuses 007
    try:
        return _value(ast.parse(without_zeros, mode="eval").body), used
    except (SyntaxError, ZeroDivisionError, MemoryError, RecursionError):  # the last two: too deep for the parser
        return None, used


def _value(node: ast.expr) -> Fraction:
    """The value of a parsed expression. Raises: SyntaxError if it has anything else in it, ZeroDivisionError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))):
        return apply(_value(node.left), _value(node.right))
    raise SyntaxError


def _is_whole(value: Any) -> bool:
    """True for a whole number; JSON has one kind of number: 72.0 is 72."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value == value and abs(value) < 1e15 and value == int(value)
