from __future__ import annotations

import pytest

from grpo_lightning.rewards.single_number import is_number, single_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("There are 3.", 3),
        ("3 dogs, really 3.0", 3),
        ("-3", -3),
        ("+1,000.5 dollars", 1000.5),
        ("1,00", None),
        ("3 dogs and 2 cats", None),
        ("B3", None),
        ("3b", None),
        ("3个", 3),
        ("有3个苹果", 3),
        ("\uff13", 3),
        ("\uff11\uff0c\uff10\uff10\uff10", 1000),
        ("3개", 3),
        ("3個と4個", None),
        ("1.2.3", None),
        ("three", None),
        ("", None),
    ],
)
def test_single_number(text: str, number: float | None):
    assert single_number(text) == number


def test_is_number():
    assert all(is_number(text) for text in ["3", "-3.5", "1,000"])
    assert not any(is_number(text) for text in ["3 ", "3 4", "1,00", "three", ""])
