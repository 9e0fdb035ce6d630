"""Rewards for lists of objects: by hand, with what the originals get wrong."""

from __future__ import annotations

import importlib.util
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core.types import ImageView
from grpo_lightning.rewards import DetectionMAP, OdLength, WeightedSum

pytest.importorskip("pycocotools")

CAT = {"bbox_2d": [0, 0, 10, 10], "label": "cat"}
DOG = {"bbox_2d": [20, 0, 30, 10], "label": "dog"}
FAR = {"bbox_2d": [50, 50, 60, 60], "label": "cat"}
COW = {"bbox_2d": [50, 50, 60, 60], "label": "cow"}
KINDS = [DetectionMAP, OdLength, WeightedSum]


def value(kind: Any, answer: Any, solution: Any, **settings: Any) -> float | None:
    """Of one answer; in tags, in fences and in chat form it must be the same."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    chat = [{"role": "assistant", "content": f"<think>[1]</think><answer>{text}</answer>"}]
    forms = [chat, f"<answer>\n{text}\n</answer>"]
    if not isinstance(answer, str):
        forms.append(f"<think>a</think><answer>so\n```json\n{text}\n```</answer>")
    reward = kind(**{"coordinates": "original"} | settings)
    first, *others = reward(completions=forms, solution=[solution] * len(forms))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("answer", "solution", "expected"),
    [
        ([CAT, DOG], [CAT, DOG], 1),
        ([DOG, CAT], [CAT, DOG], 1),
        ([CAT], [CAT, DOG], 0.5),
        ([CAT, COW], [CAT], 0.5),  # VLM-R1: 1
        ([CAT, FAR], [CAT], 1),
        ([FAR, CAT], [CAT], 0.5),
        ([{**CAT, "label": " CAT. "}], [CAT], 1),
        ([{"bbox_2d": CAT["bbox_2d"]}], [CAT], 0),  # no label
        ([{"label": "cat"}], [CAT], 0),
        ([{"bbox_2d": [0, 0, 10], "label": "cat"}, CAT], [CAT], 0.5),
        (CAT, [CAT], 1),
        ([], [], 1),
        ("None", [], 1),
        ([CAT], [], 0),
        ([], [CAT], 0),
        ("I see nothing of the kind", [], 0),  # VLM-R1 takes any text for an empty list: 1
        ("I see nothing of the kind", [CAT], 0),
        ([CAT], None, None),
        ([CAT], "", None),
    ],
)
def test_mean_average_precision_by_hand(answer: Any, solution: Any, expected: float | None):
    for gold in (solution, f"<answer>\n```json\n{json.dumps(solution)}\n```\n</answer>" if solution else solution):
        found = value(DetectionMAP, answer, gold)
        assert found == (expected if expected is None else pytest.approx(expected))


def test_one_threshold():
    low = [{"bbox_2d": [0, 0, 10, 6], "label": "cat"}]
    assert value(DetectionMAP, low, [CAT]) == pytest.approx(0.3)
    assert value(DetectionMAP, low, [CAT], iou_threshold=0.5) == 1
    assert value(OdLength, low * 2, [CAT], iou_threshold=0.5) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answer", "solution", "expected"),
    [
        ([CAT, DOG], [CAT, DOG], 1),
        ([CAT], [CAT, DOG], 0.5),  # fewer cost nothing more
        ([CAT, FAR], [CAT], 1 / 2),
        ([CAT, FAR, FAR, FAR], [CAT], 1 / 4),
        ([CAT, COW], [CAT], 0.5 / 2),
        ([CAT, {"label": "cat"}], [CAT], 1 / 2),  # what has no box is counted too
        ([], [], 1),
        ([CAT], [], 0),
    ],
)
def test_length_by_hand(answer: Any, solution: Any, expected: float):
    assert value(OdLength, answer, solution) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "solution", "expected"),
    [
        ([CAT, DOG], [CAT, DOG], 1),
        ([CAT], [CAT, DOG], 0.7 / 2 + 0.3 * (1 - 0.5 / 2)),
        ([CAT, FAR], [CAT], 0.7 + 0.3 * (1 - 0.5 / 2)),
        ([{**CAT, "label": "dog"}], [CAT], 0.3),  # the right place only
        ([{"bbox_2d": [0, 0, 10, 6], "label": "cat"}], [CAT], 0.7 * 0.6 + 0.3),
        ([{"bbox_2d": [0, 0, 10, 5], "label": "cat"}], [CAT], 0.7 * 0.5 + 0.3),  # just a pair
        ([{"bbox_2d": [0, 0, 10, 4], "label": "cat"}], [CAT], 0),  # none
        ([CAT, CAT], [CAT], 0.7 + 0.3 * (1 - 0.5 / 2)),  # each object once
        # VLM-R1 gives the second the label of the first, which makes it right.
        ([CAT, {"bbox_2d": [20, 0, 30, 10]}], [CAT, {**DOG, "label": "cat"}], 0.7 / 2 + 0.3),
        ([FAR], [CAT], 0),
        ([], [], 1),
        ([], [CAT], 0),
        ("nothing", [CAT], 0),
    ],
)
def test_weighted_sum_by_hand(answer: Any, solution: Any, expected: float):
    assert value(WeightedSum, answer, solution) == pytest.approx(expected)


def test_pairs_are_matched_from_the_best_down():
    """The first object overlaps both, and would take the second's partner if it chose first."""
    answer = [{"bbox_2d": [0, 0, 10, 9], "label": "cat"}, {"bbox_2d": [0, 0, 10, 10], "label": "cat"}]
    solution = [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [0, 0, 10, 7], "label": "cat"}]
    expected = 0.7 * (1 + 7 / 9) / 2 + 0.3
    assert value(WeightedSum, answer, solution) == pytest.approx(expected)
    assert value(WeightedSum, answer[::-1], solution[::-1]) == pytest.approx(expected)


def test_of_equal_pairs_the_right_label_comes_first():
    same_place = [{**CAT, "label": "dog"}, CAT]
    assert value(WeightedSum, [CAT], same_place) == pytest.approx(0.7 / 2 + 0.3 * (1 - 0.5 / 2))


def test_the_weights():
    weights = {"position_weight": 1.0, "label_weight": 2.0, "completeness_weight": 1.0}
    answer = [{"bbox_2d": [0, 0, 10, 6], "label": "cat"}, {**DOG, "label": "cow"}]
    # position 0.6 / 2, label 1 / 2, completeness 1
    assert value(WeightedSum, answer, [CAT, DOG], **weights) == pytest.approx((0.3 + 2 * 0.5 + 1) / 4)


objects = st.lists(
    st.builds(
        lambda x, y, w, h, label: {"bbox_2d": [x, y, x + w, y + h], "label": label},
        *[st.integers(0, 50)] * 2,
        *[st.integers(1, 40)] * 2,
        st.sampled_from(["cat", "dog"]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(answer=objects, solution=objects)
def test_values_are_shares_and_the_right_answer_is_worth_one(kind: Any, answer: Any, solution: Any):
    reward = kind(coordinates="original")
    texts = [json.dumps(answer), json.dumps(solution), json.dumps([*solution, COW, COW])]
    found, right, more = reward(completions=texts, solution=[solution] * 3)
    assert 0 <= found <= 1
    assert right == pytest.approx(1)
    assert more < 1  # what is not there costs


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_mapped_to_the_image_in_the_data(kind: Any):
    solution = [{"bbox_2d": [40, 20, 240, 100], "label": "cat"}]
    answers = [
        ([20, 10, 120, 50], ImageView(400, 200, 200, 100, "resized")),
        ([100, 100, 600, 500], ImageView(400, 200, 200, 100, "norm1000")),
    ]
    texts = [json.dumps([{"bbox_2d": box, "label": "cat"}]) for box, _ in answers]
    views = [[view] for _, view in answers]
    assert kind()(completions=texts, image_views=views, solution=[solution] * 2) == pytest.approx([1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_right_objects_are_errors_and_no_zeros(kind: Any):
    with pytest.raises(ValueError, match="column 'solution' must hold a list like"):
        value(kind, [CAT], "a cat")
    with pytest.raises(ValueError, match="every object a label and a bbox_2d"):
        value(kind, [CAT], [[0, 0, 10, 10]])
    with pytest.raises(ValueError, match="lies outside its image"):
        kind()(completions=[json.dumps(CAT)], image_views=[[ImageView(5, 5, 5, 5, "resized")]], solution=[[FAR]])


def test_unreadable_answers_are_counted():
    logged = []
    DetectionMAP(coordinates="original")(
        completions=["[]", "a cat", "None", "cat"],
        solution=[[CAT]] * 3 + [None],
        log_metric=lambda name, value: logged.append((name, value)),
    )
    assert logged == [("detection_map/unreadable", pytest.approx(1 / 3))]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (DetectionMAP, {"iou_threshold": 0.0}, "iou_threshold must be above 0 and at most 1, got 0.0"),
        (WeightedSum, {"iou_threshold": 50.0}, "iou_threshold must be above 0"),
        (WeightedSum, {"label_weight": -1.0}, r"must be at least 0, and one of them above, got \(0.7, -1.0, 0.3\)"),
        (WeightedSum, {"position_weight": 0.0, "completeness_weight": 0.0}, "one of them above"),
    ],
)
def test_settings_are_checked(kind: Any, arguments: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"DetectionMAP needs pycocotools: pip install 'grpo-lightning\[grounding\]'"):
        DetectionMAP()
    WeightedSum()  # needs nothing


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_picklable(kind: Any):
    reward = kind("gold", coordinates="original", iou_threshold=0.5)
    again = pickle.loads(pickle.dumps(reward))
    arguments = {"completions": [json.dumps([CAT, FAR])], "gold": [[CAT]]}
    assert again(**arguments) == reward(**arguments)


def test_labels_that_are_numbers_match():
    right = [{"bbox_2d": [1, 2, 30, 40], "label": 7}]
    for label in (7, "7", 7.0):
        answer = json.dumps([{"bbox_2d": [1, 2, 30, 40], "label": label}])
        completion = f"<answer>```json\n{answer}\n```</answer>"
        for solution in (right, json.dumps(right)):
            found = DetectionMAP(coordinates="original")(completions=[completion], solution=[solution])
            assert found == [1.0]
