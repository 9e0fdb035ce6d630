"""JSON that gives back what it was given: tuples, sets, dates and keys that are not text too.

A verifier that compares `(0, 1)` with what it is handed says no to `[0, 1]`, and one that looks up `colors[3]` does not
find `"3"`. So what plain JSON would change is written as an object with one key, its tag: `{"<tuple>": [0, 1]}`.
"""

from __future__ import annotations

import datetime
import json
import numbers
from typing import Any

TUPLE, SET, MAPPING = "<tuple>", "<set>", "<mapping>"
_DATES: dict[str, type[datetime.date] | type[datetime.time]] = {
    "<date>": datetime.date,
    "<datetime>": datetime.datetime,
    "<time>": datetime.time,
}
_TAGS = {TUPLE, SET, MAPPING, *_DATES}


def exact_dumps(value: Any) -> str:
    """The value as one line of JSON text, which `exact_loads` reads.

    Texts and numbers of a kind of their own (an `Enum` that is text, numpy's numbers) become plain ones.

    Raises:
        TypeError: If it holds something of another type, naming it.
    """
    return json.dumps(_tagged(value), ensure_ascii=False)


def exact_loads(text: str) -> Any:
    """The value of which `exact_dumps` made this text. Raises: ValueError if it is no JSON."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    """The value with tags around what JSON has no form for. Raises: TypeError as `exact_dumps` does."""
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if isinstance(value, tuple):
        return {TUPLE: [_tagged(part) for part in value]}
    if isinstance(value, set | frozenset):
        return {SET: [_tagged(part) for part in sorted(value, key=repr)]}
    if isinstance(value, dict):
        return _tagged_mapping(value)
    for tag, kind in _DATES.items():
        if type(value) is kind:
            return {tag: value.isoformat()}
    if isinstance(value, numbers.Integral | numbers.Real):  # numpy's, which are no int
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} has no exact JSON form.")


def _tagged_mapping(value: dict[Any, Any]) -> dict[str, Any]:
    """An object where its keys are text, else a tag and a list of pairs."""
    looks_tagged = len(value) == 1 and not _TAGS.isdisjoint(value)
    if all(isinstance(key, str) for key in value) and not looks_tagged:
        return {_plain(key): _tagged(part) for key, part in value.items()}
    return {MAPPING: [[_tagged(key), _tagged(part)] for key, part in value.items()]}


def _plain(value: Any) -> Any:
    """A text or number without a kind of its own; True, False and None as they are."""
    for kind in (str, int, float):
        if isinstance(value, kind) and type(value) not in (kind, bool):
            return str.__str__(value) if kind is str else kind(value)
    return value


def _untagged(found: dict[str, Any]) -> Any:
    """An object of JSON, or what its tag says it was."""
    if len(found) != 1:
        return found
    ((tag, content),) = found.items()
    if tag == TUPLE:
        return tuple(content)
    if tag == SET:
        return set(content)
    if tag == MAPPING:
        return {key: part for key, part in content}  # noqa: C416 (lists of two)
    return _DATES[tag].fromisoformat(content) if tag in _DATES else found
