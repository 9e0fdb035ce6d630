"""JSON that gives back what it was given."""

import datetime
import enum
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.tasks.exact_json import exact_dumps, exact_loads

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.integers())
DATES = st.dates() | st.datetimes() | st.times()
VALUES = st.recursive(
    PLAIN | DATES | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=12,
)


def is_same(one: object, other: object) -> bool:
    """Equal in value and in type, all the way down: for Python, True is 1, and 1 is 1.0."""
    return repr(one) == repr(other) or (isinstance(one, set) and type(other) is set and one == other)


@given(VALUES)
def test_whatever_it_is_given(value):
    text = exact_dumps(value)
    assert exact_loads(text) == value
    assert "\n" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, "b", None, True]}, '{"a": [1, 2.5, "b", null, true]}'),  # plain JSON stays as it is
        ((1, 2), '{"<tuple>": [1, 2]}'),
        ({3: "red"}, '{"<mapping>": [[3, "red"]]}'),
        ({(0, 1): ()}, '{"<mapping>": [[{"<tuple>": [0, 1]}, {"<tuple>": []}]]}'),
        ({2, 1}, '{"<set>": [1, 2]}'),
        (datetime.date(2024, 2, 29), '{"<date>": "2024-02-29"}'),
        (datetime.datetime(2024, 2, 29, 1, 2), '{"<datetime>": "2024-02-29T01:02:00"}'),
        (datetime.time(23, 59), '{"<time>": "23:59:00"}'),
        ({"<tuple>": [1]}, '{"<mapping>": [["<tuple>", [1]]]}'),  # no tuple, though it looks like one
        ({"<other>": [1]}, '{"<other>": [1]}'),
        ("日本", '"日本"'),
    ],
)
def test_forms_by_hand(value, text):
    assert exact_dumps(value) == text
    assert is_same(exact_loads(text), value)


class Colour(str, enum.Enum):
    """A text of a kind of its own."""

    RED = "red"


@pytest.mark.parametrize(
    ("value", "plain"),
    [(Colour.RED, "red"), (np.float64(0.5), 0.5), (np.str_("a"), "a"), (np.int64(7), 7), ({Colour.RED: 1}, {"red": 1})],
)
def test_kinds_of_texts_and_numbers_become_plain(value, plain):
    assert is_same(exact_loads(exact_dumps(value)), plain)


@pytest.mark.parametrize("value", [object(), b"bytes", [{"a": 1j}], np.zeros(2)])
def test_what_has_no_form_is_refused(value):
    with pytest.raises(TypeError, match="has no exact JSON form"):
        exact_dumps(value)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(json.JSONDecodeError):
        exact_loads("{")
