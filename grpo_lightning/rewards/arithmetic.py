"""The value of an arithmetic expression, exact, in linear time: what is no such expression has none.

Completions are untrusted text. Nothing is evaluated by Python: `99**98**97` has an operator too many. Operators are
applied as they are read (Dijkstra's shunting yard), so that no depth of parentheses is too deep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()\u00d7\u00b7\u00f7\u2212]))")
_ALIKE = str.maketrans("\u00d7\u00b7\u00f7\u2212", "**/-")  # multiplication and division signs, a minus of its own

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3}
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class Expression(NamedTuple):
    """What an expression says."""

    value: Fraction
    numbers: list[int]
    """Its whole numbers, in order."""


class _NoExpressionError(ValueError):
    """The text is none."""


def evaluated(text: str, *, max_numbers: int, max_digits: int = 20) -> Expression | None:
    """The value and the numbers of an expression of whole numbers, + - * / and parentheses.

    Args:
        text: The expression; also with the signs × · ÷.
        max_numbers: How many numbers it may have: what bounds the size of its value.
        max_digits: How many digits a number may have.

    Returns:
        None if the text is no expression (powers, decimals, words, an operator too many), has more numbers or longer
        ones, or divides by 0.
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    numbers = [token for token in tokens if token[0].isdigit()]
    if not numbers or len(numbers) > max_numbers or max(map(len, numbers)) > max_digits:
        return None
    try:
        return Expression(_value(tokens), [int(number) for number in numbers])
    except (_NoExpressionError, ZeroDivisionError):
        return None


def _tokens(text: str) -> list[str] | None:
    """Numbers, operators and parentheses; None if there is anything else."""
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            return None
        tokens.append(found[1] or found[2].translate(_ALIKE))
        place = found.end()
    return tokens


def _value(tokens: Sequence[str]) -> Fraction:
    """The value of some tokens. Raises: _NoExpressionError, ZeroDivisionError."""
    values: list[Fraction] = []
    waiting: list[str] = []
    is_operand_due = True  # else an operator or a closing parenthesis
    for token in tokens:
        if token.isdigit() or token == "(":  # noqa: S105 - no password
            _expect(is_operand_due)
            if token == "(":  # noqa: S105
                waiting.append(token)
            else:
                values.append(Fraction(int(token)))
                is_operand_due = False
        elif token == ")":  # noqa: S105
            _expect(not is_operand_due)
            while waiting and waiting[-1] != "(":
                _apply(values, waiting.pop())
            _expect(waiting)
            waiting.pop()
        elif is_operand_due:  # a sign
            _expect(token == "-" and (not waiting or waiting[-1] != "neg"))  # noqa: S105
            waiting.append("neg")
        else:
            while waiting and waiting[-1] != "(" and _PRECEDENCE[waiting[-1]] >= _PRECEDENCE[token]:
                _apply(values, waiting.pop())
            waiting.append(token)
            is_operand_due = True
    _expect(not is_operand_due)
    while waiting:
        _expect(waiting[-1] != "(")
        _apply(values, waiting.pop())
    return values[0]


def _apply(values: list[Fraction], operator: str) -> None:
    """Apply an operator to the last values."""
    if operator == "neg":
        values.append(-values.pop())
        return
    right, left = values.pop(), values.pop()
    values.append(_APPLY[operator](left, right))


def _expect(is_so: object) -> None:
    """Raises: _NoExpressionError if not."""
    if not is_so:
        raise _NoExpressionError
