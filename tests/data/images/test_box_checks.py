"""A box of the data is inside of its image, or somebody is told."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.images.box_checks import check_solution, looks_like_box
from grpo_lightning.rewards import IoU

SIZE = (640, 480)


@pytest.mark.parametrize("boxes", ["auto", "original"])
@pytest.mark.parametrize(
    "solution",
    [
        [0, 0, 640, 480],
        [10.5, 20, 10.75, 21],
        [-1, 0, 641, 481],  # counted to the last pixel, or rounded
        "[1, 2, 3, 4]",
        "<answer> [1, 2, 3, 4] </answer>",
    ],
)
def test_boxes_that_are_right(solution, boxes):
    assert check_solution(solution, [SIZE], boxes) is solution


@pytest.mark.parametrize("boxes", ["auto", "original"])
@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ([0, 0, 642, 480], r"\[0, 0, 642, 480\] is not inside its image, which is 640 x 480"),
        ([0, 0, 640, 482], "not inside"),
        ([-2, 0, 10, 10], "not inside"),
        ([0, -2, 10, 10], "not inside"),
        ([640, 10, 641, 50], r"\[640, 10, 641, 50\] has no area in its image, which is 640 x 480"),
        ([-1, 0, 0, 5], "has no area in its image"),
        ([10, 480, 50, 481], "has no area in its image"),
        ([10, -1, 50, 0], "has no area in its image"),
        ([640.2, 480.2, 641, 481], "has no area in its image"),
        ([0.1, 0.2, 0.5, 0.6], "ends within the first pixel of its image, which is 640 x 480: .*multiply them by its"),
        ([0, 0, 1, 1], "ends within the first pixel"),
        ([0, 0, 1e-200, 1e-200], "ends within the first pixel"),
        ([30, 10, 20, 20], "inverted or empty"),
        ([10, 30, 20, 20], "inverted or empty"),
        ([10, 10, 10, 20], "inverted or empty"),
        ([10, 10, 20, 10], "inverted or empty"),
        ([10, 10, 20, "20"], "must be four finite numbers, got '20'"),
        (["10", "10", "20", "20"], "must be four finite numbers, got '10'"),
        ([10, 10, 20, None], "must be four finite numbers, got None"),
        ([10, 10, 20, True], "must be four finite numbers, got True"),
        ([10, 10, 20, math.inf], "must be four finite numbers, got inf"),
        ([math.nan, 10, 20, 20], "must be four finite numbers, got nan"),
        ("<answer> [0, 0, 900, 10] </answer>", "not inside"),
    ],
)
def test_boxes_that_are_wrong(solution, reason, boxes):
    with pytest.raises(ValueError, match=reason):
        check_solution(solution, [SIZE], boxes)


NO_BOXES = [None, "B", "a cat", 4, [1, 2, 3], ["a", "b", "c", "d"], "[" * 10_000]


@pytest.mark.parametrize("solution", NO_BOXES)
def test_other_answers_are_no_boxes_unless_said(solution):
    assert check_solution(solution, [SIZE], "auto") is solution
    assert check_solution(solution, [SIZE], "none") is solution
    for boxes in ("original", "norm1000"):
        with pytest.raises(ValueError, match=r"must be a box of four numbers|must be four finite numbers"):
            check_solution(solution, [SIZE], boxes)


@pytest.mark.parametrize(
    "solution",
    [
        '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]',
        [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}],
        {"bbox_2d": [1, 2, 3, 4]},
        '```json\n[{"bbox_2d": [1, 2, 3, 4]}]\n```',
    ],
)
def test_lists_of_objects_are_told_what_to_set(solution):
    assert check_solution(solution, [SIZE], "auto") is solution
    with pytest.raises(
        ValueError, match=r"^boxes: original is for .* lists objects .*: set boxes: none in the entry"
    ) as c:
        check_solution(solution, [SIZE], "original")
    assert "gold_coordinates" not in str(c.value)
    with pytest.raises(ValueError, match=r"set boxes: none in .* and gold_coordinates: norm1000 in the reward"):
        check_solution(solution, [SIZE], "norm1000")


def test_which_rows_are_looked_at():
    outside = [0, 0, 900, 900]
    assert check_solution(outside, [SIZE, SIZE], "auto") is outside
    assert check_solution(outside, [], "original") is outside
    assert check_solution(outside, [SIZE], "none") is outside
    with pytest.raises(ValueError, match="the row has 2 images, so the image of the box"):
        check_solution([0, 0, 1, 1], [SIZE, SIZE], "original")


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4, unique=True), st.integers(1, 5000), st.integers(1, 5000))
def test_a_thousand_is_the_whole_image(numbers, width, height):
    x1, x2 = sorted(numbers[:2])
    y1, y2 = sorted(numbers[2:])
    found = check_solution([x1, y1, x2, y2], [(width, height)], "norm1000")
    assert found == pytest.approx([x1 * width / 1000, y1 * height / 1000, x2 * width / 1000, y2 * height / 1000])


def test_a_box_of_a_thousand_may_be_outside_of_the_pixels():
    assert check_solution("[500, 500, 1000, 900]", [SIZE], "norm1000") == [320, 240, 640, 432]
    with pytest.raises(ValueError, match="which is 1000 x 1000"):
        check_solution([500, 500, 1002, 900], [SIZE], "norm1000")


@given(st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda s: st.lists(s, max_size=5), max_leaves=8))
def test_any_value_is_a_box_or_none(value):
    assert isinstance(looks_like_box(value), bool)


@pytest.mark.parametrize("solution", [np.array([10, 10, 50, 50]), [10, 10, 50, 50]])
def test_boxes_of_numpy_are_boxes(solution):
    assert list(check_solution(solution, [(100, 100)], "original")) == [10, 10, 50, 50]


sides = st.lists(st.integers(-1, 4) | st.floats(-1, 4), min_size=2, max_size=2, unique=True).map(sorted)


@given(sides, sides, st.integers(1, 3), st.integers(1, 3))
def test_what_passes_here_a_reward_takes(x, y, width, height):
    """Otherwise a row that `bad_images: drop` should leave out stops the run."""
    box = [x[0], y[0], x[1], y[1]]
    try:
        check_solution(box, [(width, height)], "original")
    except ValueError:
        return
    IoU().check_row({"solution": box}, [(width, height)])


def test_an_endless_integer_is_no_number():
    with pytest.raises(ValueError, match="four finite numbers"):
        check_solution([0, 0, 1, 10**400], [(100, 100)], "original")
