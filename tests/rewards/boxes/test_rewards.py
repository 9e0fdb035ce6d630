"""Rewards for boxes: by hand, with what the originals get wrong."""

from __future__ import annotations

import importlib.util
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import (
    BoxRepetition,
    DetectionMAP,
    FormatRec,
    IoU,
    OdLength,
    RewardSet,
    WeightedReward,
    WeightedSum,
)

pytest.importorskip("pycocotools")

VIEW = ImageView(100, 100, 100, 100, "resized")


def overlap(text: str, solution: Any, view: ImageView = VIEW, **settings: Any) -> float | None:
    (value,) = IoU(**settings)(completions=[text], image_views=[[view]], solution=[solution])
    return value


def test_iou_by_hand():
    for answer, solution, expected in [
        ("[10, 10, 30, 30]", [10, 10, 30, 30], 1),
        ("[10, 10, 30, 30]", "<answer> [10, 10, 30, 30] </answer>", 1),
        ("[10, 10, 30, 30]", [20, 10, 40, 30], 200 / 600),
        ("[0, 0, 2, 2]", [1, 1, 3, 3], 1 / 7),  # an overlap of one pixel, 0 in VLM-R1
        ("[5, 5, 6, 6]", [5, 5, 6, 6], 1),
        ("[0.1, 0.1, 2.5, 2.5]", [0.1, 0.1, 2.5, 2.5], 1),  # decimals, which VLM-R1 does not read
        ("[-10, 0, 10, 10]", [0, 0, 10, 10], 1),  # clipped
        ("[0, 0, 1000, 1000]", [0, 0, 50, 100], 0.5),
        ("[30, 30, 10, 10]", [10, 10, 30, 30], 0),  # inverted
        ("[10, 10, 10, 10]", [10, 10, 30, 30], 0),  # no area: VLM-R1 divides by 0 where both have none
        ("[500, 500, 600, 600]", [10, 10, 30, 30], 0),
        ("no idea", [10, 10, 30, 30], 0),
        ("[10, 10, 30, 30]", None, None),
        ("no idea", "", None),
    ]:
        found = overlap(f"<think>it is [1, 1, 2, 2]</think><answer>{answer}</answer>", solution)
        assert found == (expected if expected is None else pytest.approx(expected)), (answer, solution)


def test_the_policys_coordinates_are_mapped():
    seen_half = ImageView(400, 200, 200, 100, "resized")
    assert overlap("[20, 10, 120, 50]", [40, 20, 240, 100], seen_half) == pytest.approx(1)
    per_thousand = ImageView(400, 200, 200, 100, "norm1000")
    assert overlap("[100, 100, 600, 500]", [40, 20, 240, 100], per_thousand) == pytest.approx(1)
    assert overlap("[100, 100, 600, 500]", [100, 100, 600, 500], per_thousand, gold_coordinates="norm1000") == 1
    assert overlap("[40, 20, 240, 100]", [40, 20, 240, 100], seen_half, coordinates="original") == 1


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_it_is_the_same_in_every_convention(box: list[int]):
    gold = [20, 30, 60, 70]
    pixels = overlap(str(box), gold)
    norm = ImageView(100, 100, 56, 84, "norm1000")
    resized = ImageView(100, 100, 200, 50, "resized")
    assert overlap(str([10 * x for x in box]), gold, norm) == pytest.approx(pixels)
    scaled = [box[0] * 2, box[1] / 2, box[2] * 2, box[3] / 2]
    assert overlap(str(scaled), gold, resized) == pytest.approx(pixels)


def test_the_threshold():
    half = "[0, 0, 10, 5]"
    gold = [0, 0, 10, 10]
    assert overlap(half, gold) == pytest.approx(0.5)
    assert overlap(half, gold, threshold=0.5) == 0  # above it, as in VLM-R1's evaluation
    assert overlap(half, gold, threshold=0.49) == 1
    assert overlap("none", gold, threshold=0.0) == 0
    for threshold in (-0.1, 1.0, 50.0):
        with pytest.raises(ValueError, match="threshold must be None or at least 0 and below 1"):
            IoU(threshold=threshold)


def test_a_wrong_right_box_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match="column 'solution' must hold one box"):
        overlap("[1, 2, 3, 4]", [1, 2, 3])
    with pytest.raises(ValueError, match="lies outside its image, 100 x 100 pixels"):
        overlap("[1, 2, 3, 4]", [150, 150, 300, 300])


def test_answers_without_a_box_are_counted():
    logged = []
    IoU()(
        completions=["[1, 2, 3, 4]", "none", "no", "none"],
        image_views=[[VIEW]] * 4,
        solution=[[1, 2, 3, 4]] * 3 + [None],
        log_metric=lambda name, value: logged.append((name, value)),
    )
    assert logged == [("iou/unreadable", pytest.approx(2 / 3))]  # of those that can be scored


def group(content: Any, texts: list[str], views: list[ImageView], **columns: Any) -> Group:
    return Group(
        Prompt(content, columns=columns),
        [1],
        [Completion([1], [0.0], "stop", text) for text in texts],
        image_views=views,
    )


def test_in_a_run_every_prompt_has_its_own_image():
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the cat"}]}]
    groups = [
        group(chat, ["[1, 1, 2, 2]", "x"], [ImageView(40, 40, 20, 20, "resized")], solution=[2, 2, 4, 4]),
        group(chat, ["[1, 1, 2, 2]", "[2, 2, 4, 4]"], [ImageView(40, 40, 40, 40, "resized")], solution=[2, 2, 4, 4]),
        group("text", ["[1, 1, 2, 2]", "x"], [], solution=None),
    ]
    scores = RewardSet([IoU()]).score(groups)
    assert scores.by_reward["iou"][:2].tolist() == [[1, 0], [0, 1]]
    assert scores.by_reward["iou"][2].isnan().all()
    assert scores.metrics == {"iou/unreadable": 0.25}
    assert not any(scores.failures.values())


def test_a_row_that_cannot_be_scored_names_its_prompt():
    row = group("text", ["[1, 1, 2, 2]"], [], solution=[1, 1, 2, 2])
    with pytest.raises(RuntimeError, match=r"'iou' raised ValueError: .*need the size of an image.*prompt -1"):
        RewardSet([IoU()]).score([row])
    failures = RewardSet([WeightedReward(IoU(), on_error="none")]).score([row]).failures
    assert failures["iou/exception"] == 1


def test_format_rec_by_hand():
    for text, with_json, without in [
        ('<think>a</think><answer>{"bbox_2d": [1, 2, 3, 4]}</answer>', 1, 1),
        ('<think>a</think>\n<answer>\n```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "x"}]\n```\n</answer>\n', 1, 1),
        ('<think>a</think><answer>{"box": [0.5, -2, 3.0, 4e0]}</answer>', 1, 1),  # VLM-R1: whole numbers only
        ('<think>a</think><answer>{"box": [ 1, 2, 3, 4 ]}</answer>', 1, 1),
        ("<think>a</think><answer>[1, 2, 3, 4]</answer>", 0, 1),
        ("<think>a</think><answer>the box is [1, 2, 3, 4]</answer>", 0, 1),
        ("<think>a</think><answer>{the box [1, 2, 3, 4]}</answer>", 0, 1),  # braces, but no JSON: passes in VLM-R1
        ('<think>a</think><answer>{"box": [1, 2, 3]}</answer>', 0, 0),
        ('<think>a</think><answer>{"box": "1, 2, 3, 4"}</answer>', 0, 0),
        ("<think>a</think><answer>{}</answer>", 0, 0),
        ("<think>a</think><answer>[]</answer>", 0, 0),
        ("<think>a</think><answer></answer>", 0, 0),
        ('<think>a</think><answer>{</answer>"box": [1, 2, 3, 4]}', 0, 0),  # straddles: passes in VLM-R1
        ('so <think>a</think><answer>{"box": [1, 2, 3, 4]}</answer>', 0, 0),  # likewise
        ('<think>a</think><answer>{"box": [1, 2, 3, 4]}</answer> done', 0, 0),
        ('<think>a</think><answer>1</answer><answer>{"box": [1, 2, 3, 4]}</answer>', 0, 0),
        ('<answer>{"box": [1, 2, 3, 4]}</answer>', 0, 0),
        ('<think>{"box": [1, 2, 3, 4]}</think><answer>7</answer>', 0, 0),
        ("", 0, 0),
    ]:
        for form in (text, [{"role": "assistant", "content": text}]):
            assert FormatRec()(completions=[form]) == [with_json], text
            assert FormatRec(needs_json=False)(completions=[form]) == [without], text


def test_a_prompt_may_open_the_thought():
    text = 'a</think><answer>{"box": [1, 2, 3, 4]}</answer>'
    assert FormatRec(prompt_opens_first=True)(completions=[text]) == [1]
    assert FormatRec()(completions=[text]) == [0]


CAT = {"bbox_2d": [0, 0, 10, 10], "label": "cat"}
DOG = {"bbox_2d": [20, 0, 30, 10], "label": "dog"}
FAR = {"bbox_2d": [50, 50, 60, 60], "label": "cat"}
COW = {"bbox_2d": [50, 50, 60, 60], "label": "cow"}
KINDS = [DetectionMAP, OdLength, WeightedSum]


def value(kind: Any, answer: Any, solution: Any, **settings: Any) -> float | None:
    """Compute the reward of one answer; in tags, in fences and in chat form it must be the same."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    chat = [{"role": "assistant", "content": f"<think>[1]</think><answer>{text}</answer>"}]
    forms = [chat, f"<answer>\n{text}\n</answer>"]
    if not isinstance(answer, str):
        forms.append(f"<think>a</think><answer>so\n```json\n{text}\n```</answer>")
    reward = kind(**{"coordinates": "original"} | settings)
    first, *others = reward(completions=forms, solution=[solution] * len(forms))
    assert all(other == first for other in others)
    return first


def test_mean_average_precision_by_hand():
    for answer, solution, expected in [
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
    ]:
        for gold in (solution, f"<answer>\n```json\n{json.dumps(solution)}\n```\n</answer>" if solution else solution):
            found = value(DetectionMAP, answer, gold)
            assert found == (expected if expected is None else pytest.approx(expected)), (answer, solution)


def test_one_threshold():
    low = [{"bbox_2d": [0, 0, 10, 6], "label": "cat"}]
    assert value(DetectionMAP, low, [CAT]) == pytest.approx(0.3)
    assert value(DetectionMAP, low, [CAT], iou_threshold=0.5) == 1
    assert value(OdLength, low * 2, [CAT], iou_threshold=0.5) == pytest.approx(0.5)


def test_length_by_hand():
    for answer, solution, expected in [
        ([CAT, DOG], [CAT, DOG], 1),
        ([CAT], [CAT, DOG], 0.5),  # fewer cost nothing more
        ([CAT, FAR], [CAT], 1 / 2),
        ([CAT, FAR, FAR, FAR], [CAT], 1 / 4),
        ([CAT, COW], [CAT], 0.5 / 2),
        ([CAT, {"label": "cat"}], [CAT], 1 / 2),  # what has no box is counted too
        ([], [], 1),
        ([CAT], [], 0),
    ]:
        assert value(OdLength, answer, solution) == pytest.approx(expected), (answer, solution)


def test_weighted_sum_by_hand():
    for answer, solution, expected in [
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
    ]:
        assert value(WeightedSum, answer, solution) == pytest.approx(expected), (answer, solution)


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
    with pytest.raises(ValueError, match=r"a label and a bbox_2d .* for every object"):
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
        (WeightedSum, {"label_weight": -1.0}, r"must be at least 0, and one of them above 0, got \(0.7, -1.0, 0.3\)"),
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
    with pytest.raises(ImportError, match="OdLength needs pycocotools"):
        OdLength()
    WeightedSum()  # needs nothing


@pytest.mark.parametrize("kind", KINDS)
def test_detection_rewards_are_picklable(kind: Any):
    reward = kind("gold", coordinates="original", iou_threshold=0.5)
    again = pickle.loads(pickle.dumps(reward))
    arguments = {"completions": [json.dumps([CAT, FAR])], "gold": [[CAT]]}
    assert again(**arguments) == reward(**arguments)


def test_iou_and_format_are_picklable():
    for reward in (IoU("gold", threshold=0.5), FormatRec(needs_json=False)):
        again = pickle.loads(pickle.dumps(reward))
        arguments = {"completions": ["[1, 2, 3, 4]"], "image_views": [[VIEW]], "gold": [[1, 2, 3, 4]]}
        assert again(**arguments) == reward(**arguments)


def test_labels_that_are_numbers_match():
    right = [{"bbox_2d": [1, 2, 30, 40], "label": 7}]
    for label in (7, "7", 7.0):
        answer = json.dumps([{"bbox_2d": [1, 2, 30, 40], "label": label}])
        completion = f"<answer>```json\n{answer}\n```</answer>"
        for solution in (right, json.dumps(right)):
            found = DetectionMAP(coordinates="original")(completions=[completion], solution=[solution])
            assert found == [1.0]


ONE, OTHER = {"bbox_2d": [0, 0, 1, 1], "label": "cat"}, {"bbox_2d": [0, 0, 1, 1], "label": "dog"}
ELSEWHERE = {"bbox_2d": [0, 0, 1, 2], "label": "cat"}
WORDS = "a b c d e f g a b c d e f g"  # 9 of 6 words, 7 of them different


def test_repetition_of_boxes_by_hand():
    for answer, options, value in [
        ([ONE], {}, 0),
        ([ONE, OTHER, ELSEWHERE], {}, 0),  # another box or label is another object
        ([ONE, ONE], {}, -1 / 2),
        ([ONE, ONE, ONE, OTHER], {}, -2 / 4),
        ([ONE, {**ONE, "label": "Cat"}, {**ONE, "bbox_2d": [0.0, 0, 1, 1.0]}], {}, -2 / 3),
        ([ONE, ONE], {"max_penalty": -0.5}, -1 / 4),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], {}, -1 / 2),
        ([], {}, 0),
        (WORDS, {}, -2 / 9),  # no list of boxes: as text
        ('{"answer": 3}', {}, 0),
        ('{"answer": "x x x x x x x x x x "}', {}, -3 / 7),  # JSON, but no boxes: as text
        (WORDS, {"n_grams": 1}, -1 / 2),
        (WORDS, {"max_penalty": -0.5}, -1 / 9),
        ([ONE, ONE], {"n_grams": 1}, -1 / 2),
        ("", {}, 0),
    ]:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        forms = [text, [{"role": "assistant", "content": text}]]
        if not isinstance(answer, str):
            forms += [f"<think>a</think><answer>{text}</answer>", f"here:\n```json\n{text}\n```"]
        assert BoxRepetition(**options)(completions=forms) == pytest.approx([value] * len(forms)), (answer, options)


def test_settings_of_repetition_of_boxes_are_checked():
    with pytest.raises(ValueError, match="n_grams must be at least 1"):
        BoxRepetition(n_grams=0)
    with pytest.raises(ValueError, match="max_penalty must be finite and at most 0"):
        BoxRepetition(max_penalty=1.0)
    assert vars(pickle.loads(pickle.dumps(BoxRepetition(max_penalty=-2.0))))["max_penalty"] == -2
