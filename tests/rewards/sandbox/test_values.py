"""Plain values between processes."""

from __future__ import annotations

import collections
import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards.sandbox.values import PlainError, ProgramError, Remote, _receive, decode, encode, refuse

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=10,
)


def passed_on(value: Any) -> Any:
    """A value as it arrives in another process."""
    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


def shown(value: Any) -> Any:
    """Return a form in which 1, True and 1.0 differ."""
    return type(value), repr(value) if not isinstance(value, set | frozenset) else sorted(map(repr, value))


@given(PLAIN)
def test_a_plain_value_arrives_unchanged(value):
    assert passed_on(value) == value
    assert type(passed_on(value)) is type(value)


def test_by_hand():
    scalars = [1, True, 1.0, -0.0, float("inf"), 1j, b"\0", "\ud800"]
    for value in [*scalars, (), [()], {1: {2}}, range(3), {(1,): 2}]:
        assert shown(passed_on(value)) == shown(value)
    assert passed_on(10**5000) == 10**5000
    assert encode([1, "a"], refuse) == ["l", [["i", "0x1"], "a"]]


def test_subclasses_become_the_builtin_type():
    Point = collections.namedtuple("Point", "x y")
    Color = enum.IntEnum("Color", "RED")

    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    values = (Point(1, 2), Color.RED, Text("a"), collections.Counter("a"), collections.OrderedDict(a=1))
    assert [shown(passed_on(value)) for value in values] == [
        *(shown((1, 2)), shown(1), shown("a"), shown({"a": 1}), shown({"a": 1}))
    ]


def test_others_are_refused():
    for value in (object(), len, iter([]), [object()], {"a": Exception()}):
        with pytest.raises(PlainError, match="objects cannot be passed to another process"):
            encode(value, refuse)


@pytest.mark.parametrize(
    "data",
    [
        *(5, [], ["l"], ["l", 3], ["i", 3], ["i", "x"], ["s", [["l", []]]], ["d", [[1]]], ["?", []], {"a": 1}),
        *(["f", "x"], ["f", "0x1p99999"], ["s", [["i", hex(n * (2**61 - 1))] for n in range(200)]]),
    ],
)
def test_malformed_answers_are_errors_of_the_program(data):
    with pytest.raises(ProgramError, match="the program's answer is malformed"):
        _receive(data, lambda request: None)


def test_an_object_of_the_program_decides_nothing():
    remote = Remote(lambda request: {"value": ["o", 0, "A"]}, "a", "A")
    for use in (
        lambda: remote == 1,
        lambda: remote != 1,
        lambda: bool(remote),
        lambda: remote() == remote(),
        lambda: remote.attribute == 3,
        lambda: 3 in [remote],
    ):
        with pytest.raises(ProgramError, match="returned an object of type 'A', which is not plain data"):
            use()
