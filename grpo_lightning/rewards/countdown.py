"""Reward for the numbers game Countdown, in which an expression of given numbers must equal a target."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from grpo_lightning.rewards.answers import given_answer, in_box
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

Uses = Literal["all", "some"]

MAX_CHARACTERS = 1000
"""Longer texts are not parsed, which bounds the depth of the parsed tree."""

MAX_DIGITS = 20
"""Longer numbers are not parsed."""

_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212", "**/-")  # Unicode multiplication, division and minus signs
_LATEX_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/"}
_LATEX_SIGN = re.compile(r"\\(?:times|cdot|div)(?![A-Za-z])")
_LATEX_SIZE = re.compile(r"\\(?:left|right)(?=[()])")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")  # without a fraction inside
_CHARACTERS = re.compile(r"[0-9+\-*/()\s]*")
_TWO_SIGNS = re.compile(r"(?:^|[-+*/(])\s*-\s*-")
_OPERATORS = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


class Countdown(Reward):
    r"""1 if the answer is an expression of the row's numbers that equals the target, else 0.

    The expression has integers, + - * / (or × · ÷) and parentheses, and is evaluated exactly, so 1/3*3 is 1. It can
    also have `\times`, `\cdot`, `\div` and `\frac{...}{...}` of LaTeX. The expression can be followed by `= target` and
    a full stop. Any other answer is wrong. Answers are never executed as code.

    With the defaults, the task is that of TinyZero (data columns `nums` and `target`). With `uses="some"`, the task is
    `countdown` of reasoning-gym.

    Args:
        numbers_column: The data column with the numbers that can be used.
        target_column: The data column with the target value.
        uses: "all" requires each number exactly once. "some" allows each number at most once.
    """

    says_solved = True

    def __init__(self, numbers_column: str = "nums", target_column: str = "target", uses: Uses = "all") -> None:
        """Raises: ValueError if `uses` is unknown."""
        if uses not in get_args(Uses):
            raise ValueError(f"uses must be one of {', '.join(get_args(Uses))}, got {uses!r}.")
        self.numbers_column, self.target_column, self.uses = numbers_column, target_column, uses
        self.required_columns = (numbers_column, target_column)

    def __call__(self, completions: Sequence[Content], **columns: Any) -> list[float | None]:
        """Score completions.

        Returns:
            [B], each 0 or 1, None where the row has no target.

        Raises:
            ValueError: If the numbers or the target of a row are not integers.
        """
        rows = zip(completions, columns[self.numbers_column], columns[self.target_column], strict=True)
        return [self._score(completion_text(completion), numbers, target) for completion, numbers, target in rows]

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check the numbers and target of a row. Raises: ValueError if they are invalid."""
        self._task(columns.get(self.numbers_column), columns.get(self.target_column))

    def _score(self, text: str, numbers: Any, target: Any) -> float | None:
        task = self._task(numbers, target)
        if task is None:
            return None
        allowed, wanted = task
        answer = given_answer(text)
        boxed = in_box(answer)
        answer = (answer if boxed is None else boxed).strip().removesuffix(".")
        formula, equals, rest = without_delimiters(answer).partition("=")
        if equals and without_delimiters(rest) != str(wanted):
            return 0.0
        value, used = evaluate(from_latex(without_delimiters(formula)), max_numbers=allowed.total())
        if value != wanted:
            return 0.0
        return float(used == allowed if self.uses == "all" else used <= allowed)

    def _task(self, numbers: Any, target: Any) -> tuple[Counter[int], int] | None:
        """Read the numbers and target of a row; None if it has no target."""
        if target is None:
            return None
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
        if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
            raise ValueError(f"column {self.numbers_column!r} must hold a list of integers, got {numbers!r:.80}.")
        if wrong := [number for number in numbers if not _is_whole(number) or number < 0]:
            raise ValueError(f"column {self.numbers_column!r} must hold integers of at least 0, got {wrong[0]!r:.40}.")
        if not _is_whole(target):
            raise ValueError(f"column {self.target_column!r} must hold an integer, got {target!r:.80}.")
        return Counter(int(number) for number in numbers), int(target)


def without_delimiters(text: str) -> str:
    r"""Remove whitespace, `$`, `\(...\)` and `\[...\]` around a text."""
    text = text.strip(" \t\r\n$")
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return text


def from_latex(text: str) -> str:
    r"""Replace the operators and fractions of LaTeX. `\frac{1}{2} \times 3` becomes "((1)/(2)) * 3"."""
    if len(text) > MAX_CHARACTERS:
        return text
    text = _LATEX_SIZE.sub("", _LATEX_SIGN.sub(lambda found: _LATEX_SIGNS[found[0]], text))
    found = 1
    while found:  # fractions inside fractions come first
        text, found = _LATEX_FRACTION.subn(r"((\1)/(\2))", text)
    return text


def evaluate(text: str, *, max_numbers: int) -> tuple[Fraction | None, Counter[int]]:
    """Evaluate an expression of integers, + - * / and parentheses, exactly and without executing it.

    Returns:
        (The value of the expression, the count of each number in the text). The value is None if the expression divides
        by 0, or if the text exceeds a limit. The value is also None if the text is not an expression of this form.
        Examples of such texts are `2**3`, `0.5` and `--1`.
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
    """Evaluate a parsed expression. Raises: SyntaxError if it has other nodes; ZeroDivisionError if it divides by 0."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))):
        return apply(_value(node.left), _value(node.right))
    raise SyntaxError


def _is_whole(value: Any) -> bool:
    """Whether a value is an integer, such as 72 or 72.0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value == value and abs(value) < 1e15 and value == int(value)
