"""Parse the boxes in an answer: `[x1, y1, x2, y2]`, Qwen2-VL's `(x1,y1),(x2,y2)`, or JSON with boxes and labels.

Completions are untrusted text, so all functions take linear time. Adjacent parts of the regular expression start with
different characters, so that backtracking fails at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_lightning.core.types import Box
from grpo_lightning.rewards.answers import after_reasoning, between_answer_tags, plain

LARGEST = 1e9
"""Maximum absolute coordinate, so that areas stay finite."""

_NUMBER = r"\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
_BOX = re.compile(r"\[" + ",".join([_NUMBER] * 4) + r"\]")
_POINT = re.compile(r"\(" + ",".join([_NUMBER] * 2) + r"\)")
_POINTS = re.compile(_POINT.pattern + r"(?:\s*,\s*" + _POINT.pattern + ")*")
_FENCE = "```"
_INVALID = object()


class Detection(NamedTuple):
    """One object in an answer or in the data."""

    box: Box | None
    """None if the box is not four numbers."""

    label: str | None
    """Lowercase, with single spaces; None if the object has no label."""


def answer_of(text: str) -> str:
    """The text in the last `<answer>` tags of a completion or, if there are none, the text after `</think>`."""
    answer = between_answer_tags(text)
    return after_reasoning(text) if answer is None else answer


def last_box(text: str) -> Box | None:
    """The last box in a completion's answer (see `boxes_in`); None if there is none."""
    found = boxes_in(answer_of(text))
    return found[-1] if found else None


def boxes_in(answer: str) -> list[Box | None]:
    """All `[x1, y1, x2, y2]` of an answer, in order; None for a box with a coordinate beyond `LARGEST`.

    If the answer has no `[x1, y1, x2, y2]`, the boxes are the pairs of points `(x1,y1),(x2,y2)` (Qwen2-VL's notation).
    A list of more than two points is not a box.
    """
    found = [box.groups() for box in _BOX.finditer(answer)]
    if not found:
        lists = [_POINT.findall(points[0]) for points in _POINTS.finditer(answer)]
        found = [(*points[0], *points[1]) for points in lists if len(points) == 2]
    return [_as_box([float(number) for number in numbers]) for numbers in found]


def detections(text: str) -> list[Detection] | None:
    """Parse the objects listed in a completion's answer; None if the answer is not a list of objects.

    The list is JSON, in the last code fences or without fences. Words can surround it. Its items have the form
    `{"bbox_2d": [x1, y1, x2, y2], "label": "..."}`. A single item is accepted without a list. An item that is only a
    box counts as an object without a label, and an item of any other form counts as an object without a box. If the
    answer is the text `None`, `null` or `[]`, the result is an empty list.
    """
    answer = _in_fences(answer_of(text))
    if plain(answer).strip("\"'`") == "none":
        return []
    value = _parse_json(answer)
    if value is _INVALID:
        starts = [at for at in (answer.find("["), answer.find("{")) if at >= 0]
        end = max(answer.rfind("]"), answer.rfind("}")) + 1
        value = _parse_json(answer[min(starts) : end]) if starts else _INVALID
    return _to_objects(value)


def has_json_box(answer: str) -> bool:
    """Whether an answer is a JSON object that contains a box, or a JSON list with at least one such object."""
    answer = answer.strip()
    value = _parse_json(_in_fences(answer) if answer.startswith(_FENCE) and answer.endswith(_FENCE) else answer)
    items = value if isinstance(value, list) else [value]
    return any(_as_box(part) is not None for item in items if isinstance(item, dict) for part in item.values())


def gold_box(answer: Any, column: str) -> Box | None:
    """Parse the ground-truth box of a row from four numbers, a mapping with `bbox_2d`, or text (see `boxes_in`).

    Answer tags around a text are allowed (VLM-R1). For None or an empty string, the result is None.

    Raises:
        ValueError: If `answer` is not exactly one box, or the box has no area.
    """
    if answer is None or (isinstance(answer, str) and not answer):
        return None
    if isinstance(answer, str):
        found = boxes_in(answer_of(answer))
    else:
        found = [detection.box for detection in _to_objects(answer) or ()]
    if len(found) != 1 or found[0] is None:
        raise ValueError(f"column {column!r} must hold one box, [x1, y1, x2, y2], got {answer!r:.200}.")
    if not _has_inside(found[0]):
        raise ValueError(f"column {column!r} must hold a box with x1 < x2 and y1 < y2, got {answer!r:.200}.")
    return found[0]


def gold_detections(answer: Any, column: str) -> list[Detection] | None:
    """Parse the ground-truth objects of a row.

    `answer` is a text (see `detections`), a mapping with `bbox_2d` and `label`, or a list of such mappings. `[]` and
    the string "None" mean no objects. For the value None or an empty string, the result is None.

    Raises:
        ValueError: If `answer` has another form, or is a text that `detections` cannot parse.
        ValueError: If an object has no label, or no box.
        ValueError: If the box of an object has no area.
    """
    if answer is None or (isinstance(answer, str) and not answer):
        return None
    found = detections(answer) if isinstance(answer, str) else _to_objects(answer)
    if found is None:
        example = '[{"bbox_2d": [x1, y1, x2, y2], "label": "..."}]'
        raise ValueError(f"column {column!r} must hold a list like {example}, got {answer!r:.200}.")
    for number, detection in enumerate(found):
        if detection.label is None or detection.box is None or not _has_inside(detection.box):
            raise ValueError(
                f"column {column!r} must have a label and a bbox_2d with x1 < x2 and y1 < y2 for every object, but "
                f"object {number} has none, got {answer!r:.200}."
            )
    return found


def _in_fences(answer: str) -> str:
    """The content of the last code fences of an answer, without a leading "json"; without fences, the whole answer."""
    before, closing, after = answer.rpartition(_FENCE)
    if not closing:
        return answer.strip()
    _, opening, inside = before.rpartition(_FENCE)
    inside = (inside if opening else after or before).strip()
    return inside.removeprefix("json").lstrip()


def _parse_json(text: str) -> Any:
    """Parse JSON, or return `_INVALID`. Integers become floats, so that a huge integer becomes infinity."""
    try:
        return json.loads(text, parse_int=float)
    except (ValueError, RecursionError):  # RecursionError: too many nested brackets
        return _INVALID


def _to_objects(value: Any) -> list[Detection] | None:
    """Convert parsed JSON, or a value of a data column, to objects; None if it is not a list of objects."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return []
    if isinstance(value, Mapping) or _as_box(value) is not None:
        value = [value]
    return [_as_detection(item) for item in value] if isinstance(value, list | tuple) else None


def _as_detection(item: Any) -> Detection:
    """Convert an item to an object; a missing or unreadable box or label becomes None."""
    if not isinstance(item, Mapping):
        return Detection(_as_box(item), None)
    label = item.get("label")
    if isinstance(label, float) and label.is_integer():  # numbers of JSON texts are all floats
        label = int(label)
    return Detection(_as_box(item.get("bbox_2d")), plain(str(label)) if isinstance(label, str | int | float) else None)


def _as_box(value: Any) -> Box | None:
    """Convert four numbers to a box; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    if not all(abs(number) <= LARGEST for number in value):  # false for NaN too
        return None
    x1, y1, x2, y2 = map(float, value)
    return x1, y1, x2, y2


def _has_inside(box: Box) -> bool:
    """Whether a box has an area and is not inverted."""
    return box[0] < box[2] and box[1] < box[3]
