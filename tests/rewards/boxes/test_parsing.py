"""Boxes read from answers and data rows: by hand, round trip, and what must not break the parser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.rewards.boxes.parsing import (
    Detection,
    detections,
    gold_box,
    gold_detections,
    has_json_box,
    last_box,
)

CAT = Detection((1, 2, 3, 4), "cat")
CAT_JSON = '[{"bbox_2d": [1, 2, 3, 4], "label": "Cat"}]'

numbers = st.integers(-1000, 5000) | st.floats(-1e4, 1e4).map(lambda x: round(x, 3))
boxes = st.tuples(numbers, numbers, numbers, numbers)


def test_the_last_box_by_hand():
    for text, box in [
        ("<answer>[1, 2, 3, 4]</answer>", (1, 2, 3, 4)),
        ("<answer>[ 1,2 , 3,\n4 ]</answer>", (1, 2, 3, 4)),
        ("<answer>[0.5, -2, +3.25, 4.]</answer>", (0.5, -2, 3.25, 4)),
        ("<answer>[1e2, .5, 2E+2, 30e-1]</answer>", (100, 0.5, 200, 3)),
        ('<answer>{"bbox_2d": [1, 2, 3, 4], "label": "cat"}</answer>', (1, 2, 3, 4)),
        (f"<answer>```json\n{CAT_JSON}\n```</answer>", (1, 2, 3, 4)),
        ("<answer><box>[[1, 2, 3, 4]]</box></answer>", (1, 2, 3, 4)),  # InternVL
        ("<answer>(1,2),(3,4)</answer>", (1, 2, 3, 4)),  # Qwen2-VL
        ("<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>", (1, 2, 3, 4)),
        ("<answer>( -1.5 , 2 ) ,\n( 3 , .4 )</answer>", (-1.5, 2, 3, 0.4)),
        ("<answer>(9,9),(9,9) (1,2),(3,4)</answer>", (1, 2, 3, 4)),
        ("<answer>(9,9),(9,9) [1, 2, 3, 4]</answer>", (1, 2, 3, 4)),
        ("<answer>[1, 2, 3, 4] with the corners (1,2),(3,4)</answer>", (1, 2, 3, 4)),
        ("<answer>[1, 2, 3, 4], center and size (2, 3), (2, 2)</answer>", (1, 2, 3, 4)),
        ('<answer>{"bbox_2d": [1, 2, 3, 4], "label": "the tile at (9,9),(9,9)"}</answer>', (1, 2, 3, 4)),
        ("<answer>corners: (1,2),(3,2),(3,4),(1,4)</answer>", None),
        ("<answer>(9,9),(1,2),(3,4)</answer>", None),
        ("<answer>(1,2) (3,4)</answer>", None),
        ("<answer>(1,2),(3,4</answer>", None),
        ("<answer>(1,2)</answer>", None),
        ("<answer>(1,2,3,4)</answer>", None),
        ("<answer>(1,2),(3,1e999)</answer>", None),
        ("<answer>not [9, 9, 9, 9] but [1, 2, 3, 4]</answer>", (1, 2, 3, 4)),  # VLM-R1 takes the first
        ("<answer>[9, 9, 9, 9]</answer> or <answer>[1, 2, 3, 4]</answer>", (1, 2, 3, 4)),
        ("<think>[9, 9, 9, 9]</think><answer>[1, 2, 3, 4]</answer> [8, 8, 8, 8]", (1, 2, 3, 4)),
        ("<think>[9, 9, 9, 9]</think> [1, 2, 3, 4]", (1, 2, 3, 4)),
        ("[1, 2, 3, 4]", (1, 2, 3, 4)),
        ("<think>[1, 2, 3, 4]", None),  # cut while thinking
        ("<think>[1, 2, 3, 4]</think>", None),
        ("<think>[1, 2, 3, 4]</think><answer>none</answer>", None),
        ("<answer>[1, 2, 3]</answer>", None),
        ("<answer>[1, 2, 3, 4, 5]</answer>", None),
        ("<answer>[1, 2, 3, four]</answer>", None),
        ("<answer>[1, 2, 3, 4</answer>", None),
        ("<answer>1, 2, 3, 4</answer>", None),
        ("<answer>[1 2 3 4]</answer>", None),
        ("<answer>[1, 2, 3, NaN]</answer>", None),
        ("<answer>[1.2.3, 2, 3, 4]</answer>", None),
        ("<answer>[٣, 2, 3, 4]</answer>", None),
        ("<answer>[1, 2, 3, 1e999]</answer>", None),
        (f"<answer>[1, 2, 3, {'9' * 5000}]</answer>", None),  # more digits than int() takes
        ("", None),
    ]:
        assert last_box(text) == box, text


@given(boxes, st.text("[]{}<>123,. ab", max_size=20))
def test_the_last_box_comes_back(box: tuple[float, ...], before: str):
    points = f"({box[0]},{box[1]}),({box[2]},{box[3]})"
    for form in (json.dumps(box), json.dumps({"bbox_2d": box, "label": "a"}), json.dumps([[box]]), points):
        assert last_box(f"<think>{before}</think><answer>{before} {form}</answer>") == box


def test_detections_by_hand():
    for answer, found in [
        (CAT_JSON, [CAT]),
        ('{"bbox_2d": [1, 2, 3, 4], "label": " cat. "}', [CAT]),
        (f"Here:\n```json\n{CAT_JSON}\n```\nDone.", [CAT]),
        (f"```\n{CAT_JSON}\n```", [CAT]),
        (f"```JSON {CAT_JSON}```", [CAT]),
        (f"```json\n[]\n``` no, rather ```json\n{CAT_JSON}\n```", [CAT]),
        (f"```json\n{CAT_JSON}", [CAT]),  # never closed, but complete
        (f"{CAT_JSON}\n```", [CAT]),
        (f"I see: {CAT_JSON}.", [CAT]),
        (f"<answer>[]</answer><answer>{CAT_JSON}</answer>", [CAT]),
        (f"<think>[]</think>{CAT_JSON}", [CAT]),
        ("[[1, 2, 3, 4]]", [Detection((1, 2, 3, 4), None)]),
        ("[1, 2, 3, 4]", [Detection((1, 2, 3, 4), None)]),
        ("[1, 2, 3]", [Detection(None, None)] * 3),
        (
            '[{"label": "cat"}, {"bbox_2d": [1, 2, 3, 4]}, 7]',
            [
                Detection(None, "cat"),
                Detection((1, 2, 3, 4), None),
                Detection(None, None),
            ],
        ),
        ('[{"bbox_2d": [1, 2, 3], "label": "cat"}]', [Detection(None, "cat")]),
        ('[{"bbox_2d": ["1", 2, 3, 4], "label": 7}]', [Detection(None, "7")]),
        ('[{"bbox_2d": [true, 2, 3, 4], "label": null}]', [Detection(None, None)]),
        ('[{"bbox_2d": [NaN, 2, 3, Infinity], "label": ["cat"]}]', [Detection(None, None)]),
        ("[]", []),
        ("None", []),
        ("none.", []),
        ('"None"', []),
        ("null", []),
        ("```json\nNone\n```", []),
        ("<answer>None</answer>", []),
        ("```json\n[]\n```", []),
        ("", None),
        ("there are none of them", None),
        ("[{]", None),
        ('"cat"', None),
        ("12", None),
        (CAT_JSON[:-1], None),  # cut
        ("[" * 100_000, None),  # deeper than the parser goes
        ('{"a":' * 100_000, None),
    ]:
        assert detections(answer) == found, answer


@given(st.lists(st.tuples(boxes, st.text(max_size=8)), max_size=4))
def test_detections_come_back(objects: list[tuple[tuple[float, ...], str]]):
    text = json.dumps([{"bbox_2d": box, "label": label} for box, label in objects])
    for form in (f"<answer>{text}</answer>", f"<answer>\n```json\n{text}\n```\n</answer>"):
        found = detections(form)
        if "answer>" in text or "```" in text:
            continue
        assert found is not None
        assert [item.box for item in found] == [box for box, _ in objects]


@given(st.text("[]{}\"':,.`<>/answerjson0123456789-e \n", max_size=80))
def test_any_text_is_read_without_an_error(text: str):
    for form in (text, f"<answer>{text}</answer>", f"```json{text}```"):
        last_box(form)
        detections(form)
        has_json_box(form)


def test_a_right_box_in_any_form():
    for gold in [
        [1, 2, 3, 4],
        (1.0, 2, 3, 4),
        [[1, 2, 3, 4]],
        {"bbox_2d": [1, 2, 3, 4], "label": "cat"},
        [{"bbox_2d": [1, 2, 3, 4]}],
        "[1, 2, 3, 4]",
        "<answer> [1, 2, 3, 4] </answer>",
        CAT_JSON,
        f"```json\n{CAT_JSON}\n```",
    ]:
        assert gold_box(gold, "solution") == (1, 2, 3, 4), gold


@pytest.mark.parametrize("boxes", [np.array([1, 2, 3, 4]), torch.tensor([1.0, 2.0, 3.0, 4.0])])
def test_right_boxes_of_arrays(boxes: Any):
    assert gold_box(boxes, "solution") == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="have a label and a bbox_2d"):
        gold_detections(boxes, "solution")


def test_a_row_without_a_right_box():
    assert gold_box(None, "solution") is None
    assert gold_box("", "solution") is None


@pytest.mark.parametrize(
    ("gold", "problem"),
    [
        ([1, 2, 3], r"one box, \[x1, y1, x2, y2\], got \[1, 2, 3\]"),
        ([], "one box"),
        ("cat", "one box.* got 'cat'"),
        ("[1, 2, 3, 4] [5, 6, 7, 8]", "one box"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], "one box"),
        (["1", 2, 3, 4], "one box"),
        ([True, 2, 3, 4], "one box"),
        ([1, 2, 3, float("nan")], "one box"),
        (5, "one box"),
        ([3, 2, 1, 4], "x1 < x2 and y1 < y2, got \\[3, 2, 1, 4\\]"),
        ("[1, 2, 3, 2]", "x1 < x2"),
    ],
)
def test_a_right_box_that_is_none_names_its_row(gold: Any, problem: str):
    with pytest.raises(ValueError, match=f"column 'gold' must hold .*{problem}"):
        gold_box(gold, "gold")


@pytest.mark.parametrize(
    "gold", [[{"bbox_2d": [1, 2, 3, 4], "label": "CAT"}], CAT_JSON, f"<answer>\n```json\n{CAT_JSON}\n```\n</answer>"]
)
def test_right_objects_in_any_form(gold: Any):
    assert gold_detections(gold, "solution") == [CAT]


def test_rows_without_right_objects():
    assert gold_detections([], "solution") == gold_detections("None", "solution") == []
    assert gold_detections(None, "solution") is gold_detections("", "solution") is None


@pytest.mark.parametrize(
    ("gold", "problem"),
    [
        ("two cats", "must hold a list like .*got 'two cats'"),
        (5, "must hold a list like"),
        ([[1, 2, 3, 4]], "a label and a bbox_2d .* object 0 has none"),
        ([{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"bbox_2d": [1, 2], "label": "b"}], "object 1 has none"),
        ([{"bbox_2d": [1, 2, 1, 4], "label": "a"}], "x1 < x2"),
    ],
)
def test_right_objects_that_are_none_name_their_row(gold: Any, problem: str):
    with pytest.raises(ValueError, match=f"column 'gold' {problem}|column 'gold' must have .*{problem}"):
        gold_detections(gold, "gold")
