from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards.similarity import similarity


def lcs(a: str, b: str) -> int:
    """The longest common subsequence by the textbook table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


@given(st.text("abcé", max_size=12), st.text("abcé", max_size=12))
def test_similarity_equals_the_table(a: str, b: str):
    expected = 2 * lcs(a, b) / (len(a) + len(b)) if a or b else 1.0
    assert similarity(a, b) == pytest.approx(expected)
    assert similarity(b, a) == pytest.approx(expected)


@pytest.mark.parametrize(("a", "b"), [("日本é🙂", "日é"), ("e\u0301", "\xe9"), ("\ud800a", "a")])
def test_any_character_counts_as_one(a: str, b: str):
    assert similarity(a, b) == pytest.approx(2 * lcs(a, b) / (len(a) + len(b)))


def test_by_hand():
    assert similarity("", "") == similarity("abc", "abc") == 1
    assert similarity("abc", "") == similarity("abc", "xyz") == 0
    assert similarity("abcd", "acd") == pytest.approx(6 / 7)
