"""The one number that a text gives: "There are 3." is 3.

Completions are untrusted text, so the pattern cannot backtrack over what it has read.
"""

from __future__ import annotations

import re

from grpo_lightning.rewards.answers import readable

_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?![\w]|\.[0-9])")


def single_number(text: str) -> float | None:
    """The number in a text; None if it has none, or several of different value."""
    values = {float(number.replace(",", "")) for number in _NUMBER.findall(readable(text))}
    return values.pop() if len(values) == 1 else None


def is_number(text: str) -> bool:
    """Whether the whole text is a number."""
    return _NUMBER.fullmatch(readable(text)) is not None
