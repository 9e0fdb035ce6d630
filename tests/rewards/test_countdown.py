"""Expressions of given numbers: by hand, against Python's own arithmetic, and texts that would hang it."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core.types import Prompt
from grpo_lightning.rewards import Countdown, RewardSet
from grpo_lightning.rewards.countdown import evaluate


def value(text: str, nums: Any = (3, 4, 5, 6), target: Any = 28, **options: Any) -> float | None:
    """The reward of an answer between tags, behind a thought, and bare."""
    forms = [f"<think>1 + 1</think><answer>{text}</answer>", f"<think>9 * 9</think> {text}", text]
    first, *others = Countdown(**options)(completions=forms, nums=[nums] * 3, target=[target] * 3)
    assert all(other == first for other in others)
    return first


def test_wrong_by_hand():
    for text in (
        "28",  # the value is right, the number is not there
        "4 * 7",
        "4 * (3 + 4)",  # one is used twice
        "6 * 5 - 3 + 1",
        "(6 - 5) * 4 * (3 + 4)",
        "4 * (3 + 5) - 6",  # all numbers, and 26
        "3 * 6 + 4 + 5",  # 27
        "5 * 4 + 6 + 3",  # 29
        "4 * (5 + 6) / 3",  # 44 / 3
        "four",
        "",
    ):
        assert value(text) == value(text, uses="some") == 0, text


def test_right_by_hand():
    for text, nums, target in (
        ("3 * 4 + 5 + 6", (3, 4, 5, 6), 23),
        ("((3 * 4)) + (5) + 6", (6, 5, 4, 3), 23),
        ("3*4+5+6 = 23", (3, 4, 5, 6), 23),
        ("3 \u00d7 4 + 5 + 6", (3, 4, 5, 6), 23),
        ("1 / 3 * 3", (1, 3, 3), 1),  # exact: floats give 1.0 here, and 0.9999 elsewhere
        ("6 / (1 - 5 / 7)", (6, 1, 5, 7), 21),
        ("-3 + 5", (3, 5), 2),
        ("2 - -3", (2, 3), 5),
        ("2 * -3", (2, 3), -6),
        ("-(2 + 3) * 4", (2, 3, 4), -20),
        ("8 - 3 - 2", (8, 3, 2), 3),
        ("8 / 4 / 2", (8, 4, 2), 1),
        ("2 + 3 * 4 - 6 / 2", (2, 2, 3, 4, 6), 11),
        ("007 - 00", (7, 0), 7),
        ("((" * 20 + "1" + "))" * 20, (1,), 1),
    ):
        assert value(text, nums, target) == 1, text
        assert value(text, nums, target + 1) == 0, text
        assert value(text, (*nums, 99), target) == 0, f"{text}: not all are used"
        assert value(text, (*nums, 99), target, uses="some") == 1, text
        assert value(text, nums[1:] or (99,), target, uses="some") == 0, f"{text}: one is not there"


LATEX = [
    *(r"25 + 3 \times 7", r"25+3\cdot 7", r"25 \div 1 + 3 \times 7", "25 + 3 * 7.", "25 + 3 * 7 = 46."),
    *(r"25 + 3 \times 7 = 46", r"$25 + 3 \times 7 = 46$", "$25+3*7$", "$$25 + 3 * 7$$", r"\(25 + 3 \times 7\)"),
    *(r"\[25 + 3 \times 7\]", r"\left(25 + 3 \times 7\right)", r"\frac{7 \cdot 3 + 25}{\frac{7}{7}}"),
    r"\frac{25 \cdot 7}{7} + \dfrac{3 \times 7}{1}",
]


def test_latex_by_hand():
    for text in LATEX:
        boxed = rf"So $\boxed{{{text}}}$."
        numbers = [int(number) for number in re.findall("[0-9]+", text.partition("=")[0])]
        for answer in (text, boxed):
            assert value(answer, numbers, 46) == 1, answer
            assert value(answer, numbers, 47) == 0, answer
            assert value(answer, [*numbers, 99], 46) == 0, f"{answer}: not all are used"
            assert value(answer, numbers[1:], 46, uses="some") == 0, f"{answer}: one is not there"


WRONG_LATEX = [
    *(r"\frac{1}{2", r"\frac12", r"\frac{1}2", r"\frac{1}", r"\frac{1}{2}{3}", r"{1}{2}", r"{1} + 2", r"\frac"),
    *(r"\frac{}{}", r"\times", r"1 \timesx 2", r"1 \time 2", r"1 \plus 2", r"2^{3}", r"\sqrt{4}", r"1 \\ 2", "1$2"),
    *("$1$ $2$", "1$+$2", r"2\frac{1}{2}", r"\frac{1}{2}3", r"\frac{1}{2}(3)", r"3 \left 4 \right", r"1\div0"),
    *(r"\frac{1}{0}", r"1\times\times2", r"1\div\div2", "1 + 2 = 3 = 3.", "1 + 2. = 3", "1..", "1.5", "1. + 2"),
    *(r"\frac{1.}{2}", r"\frac{" * 200 + "1" + "}{1}" * 200, r"\frac" * 200),
]


def test_latex_that_is_no_expression_of_the_numbers_is_wrong():
    for text in WRONG_LATEX:
        for target in (0, 1, 2, 3, 4, 5, 6, 8, 12):
            assert value(text, (0, 1, 2, 3, 4, 5, 12), target, uses="some") == 0, f"{text:.50} = {target}"


WRONG = [
    *("99**98**97", "9**9", "2^3", "1 +", "+ 1", "* 1", "1 2", "(1", "1)", ")1(", "()", "(", "1 + ()", "--1", "1..2"),
    *("1.0", "1e3", "__import__('os')", "1 if 1 else 2", "1/0", "1/(2-2)", "1//2", "1%2", "1,2", "٣", "²", "1_0"),
    *("= 23", "3 * 4 + 5 + 6 = 24", "3 * 4 + 5 + 6 = 23 = 23", "23 = 3 * 4 + 5 + 6", "1 (2)", "(1)(2)", "2 - - -3"),
]

HOSTILE = [
    *("9**9**9**9**9", "(" * 100_000 + "23" + ")" * 100_000, "9" * 100_000, "-" * 100_000 + "1", "1+" * 100_000),
    *("(" * 499 + "23" + ")" * 499, "1+" * 499 + "1", "-(" * 300 + "1" + ")" * 300),
]


def test_what_is_no_expression_is_wrong():
    for text in WRONG + HOSTILE:
        assert value(text, (1, 2, 3, 4, 5, 6, 98, 99), 23, uses="some") == 0, f"{text:.50}"


def tree(draw: random.Random, depth: int) -> str:
    """A random expression, with parentheses that Python reads alike."""
    if not depth or draw.random() < 0.2:
        return str(draw.randrange(20))
    left, right = tree(draw, depth - 1), tree(draw, depth - 1)
    text = f"{left} {draw.choice('+-*/')} {right}"
    text = f"({text})" if draw.random() < 0.5 else text
    return f"-{text}" if text.startswith("(") and draw.random() < 0.2 else text


@settings(max_examples=300)
@given(st.integers(0, 10**9))
def test_the_value_is_that_of_python(seed: int):
    text = tree(random.Random(seed), 4)
    wrapped = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
    try:
        want = eval(wrapped, {"Fraction": Fraction})
    except ZeroDivisionError:
        want = None
    assert evaluate(text, max_numbers=100) == (want, Counter(int(part) for part in _parts(text) if part.isdigit()))


def _parts(text: str) -> list[str]:
    """Numbers and what stands between them."""
    return re.findall(r"[0-9]+|[^0-9]", text)


def test_limits_of_an_expression():
    assert evaluate("1 + 2", max_numbers=2) == (Fraction(3), Counter([1, 2]))
    assert evaluate("1 + 2 + 3", max_numbers=2)[0] is None
    assert evaluate("9" * 20, max_numbers=1)[0] == int("9" * 20)
    assert evaluate("9" * 21, max_numbers=1)[0] is None


def test_rows_that_cannot_be_judged_are_named():
    bad = [
        ({"nums": [1, 2], "target": "3"}, "'target' must hold an integer, got '3'"),
        ({"nums": [1, 2.5], "target": 3}, "'nums' must hold integers of at least 0, got 2.5"),
        ({"nums": [1, -2], "target": 3}, "'nums' must hold integers of at least 0, got -2"),
        ({"nums": "1 2", "target": 3}, "'nums' must hold a list of integers, got '1 2'"),
        ({"nums": [], "target": 3}, "'nums' must hold a list"),
        ({"nums": [1], "target": True}, "'target' must hold an integer, got True"),
        ({"nums": [1], "target": float("nan")}, "'target' must hold an integer, got nan"),
    ]
    prompts = [Prompt("q", columns, where=f"a.jsonl:{n}") for n, (columns, _) in enumerate(bad)]
    with pytest.raises(ValueError, match="7 rows cannot be scored") as caught:
        RewardSet([Countdown()]).check_rows(prompts)
    for n, (_, said) in enumerate(bad):
        assert f"a.jsonl:{n}: reward 'countdown': column {said}" in str(caught.value)


def test_a_row_without_a_target_is_not_scorable():
    assert Countdown()(completions=["1", "1"], nums=[[1], None], target=[1.0, None]) == [1, None]


def test_an_unknown_use_is_named():
    with pytest.raises(ValueError, match="uses must be one of all, some, got 'none'"):
        Countdown(uses="none")  # type: ignore[arg-type]
