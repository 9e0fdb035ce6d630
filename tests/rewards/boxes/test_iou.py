"""IoU and FormatRec: by hand, with what the originals get wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import Completion, Group, ImageView, Prompt
from grpo_lightning.rewards import FormatRec, IoU, RewardSet, WeightedReward

VIEW = ImageView(100, 100, 100, 100, "resized")


def overlap(text: str, solution: Any, view: ImageView = VIEW, **settings: Any) -> float | None:
    (value,) = IoU(**settings)(completions=[text], image_views=[[view]], solution=[solution])
    return value


@pytest.mark.parametrize(
    ("answer", "solution", "expected"),
    [
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
    ],
)
def test_iou_by_hand(answer: str, solution: Any, expected: float | None):
    found = overlap(f"<think>it is [1, 1, 2, 2]</think><answer>{answer}</answer>", solution)
    assert found == (expected if expected is None else pytest.approx(expected))


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


@pytest.mark.parametrize(
    ("text", "with_json", "without"),
    [
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
    ],
)
def test_format_rec_by_hand(text: str, with_json: float, without: float):
    for form in (text, [{"role": "assistant", "content": text}]):
        assert FormatRec()(completions=[form]) == [with_json]
        assert FormatRec(needs_json=False)(completions=[form]) == [without]


def test_a_prompt_may_open_the_thought():
    text = 'a</think><answer>{"box": [1, 2, 3, 4]}</answer>'
    assert FormatRec(prompt_opens_first=True)(completions=[text]) == [1]
    assert FormatRec()(completions=[text]) == [0]


def test_they_are_picklable():
    for reward in (IoU("gold", threshold=0.5), FormatRec(needs_json=False)):
        again = pickle.loads(pickle.dumps(reward))
        arguments = {"completions": ["[1, 2, 3, 4]"], "image_views": [[VIEW]], "gold": [[1, 2, 3, 4]]}
        assert again(**arguments) == reward(**arguments)
