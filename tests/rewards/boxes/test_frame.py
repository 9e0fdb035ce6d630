"""Boxes of answers and data in one frame: the conventions, with and without an image."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import ImageView
from grpo_lightning.rewards import IoU
from grpo_lightning.rewards.boxes.frame import frame_of

# 400 x 200 in the data; the policy sees half of it in each direction.
RESIZED = ImageView(400, 200, 200, 100, "resized")
NORM = ImageView(400, 200, 200, 100, "norm1000")

sizes = st.integers(1, 3000)
parts = st.tuples(*[st.floats(0, 1)] * 4)


def test_one_box_in_every_convention():
    box, norm = (40, 20, 240, 100), (100, 100, 600, 500)
    for view, coordinates, given_box in (
        (RESIZED, "auto", (20, 10, 120, 50)),
        (NORM, "auto", norm),
        (NORM, "resized", (20, 10, 120, 50)),
        (RESIZED, "norm1000", norm),
        (RESIZED, "original", box),
        (NORM, "original", box),
    ):
        for gold, gold_box in (("original", box), ("norm1000", norm)):
            frame = frame_of([view], coordinates, gold)
            assert frame.answer_boxes([given_box]).tolist() == [list(box)], (view, coordinates)
            assert frame.gold_boxes([gold_box]).tolist() == [list(box)], (view, gold)


@given(sizes, sizes, sizes, sizes, parts, st.sampled_from(["resized", "norm1000"]))
def test_what_the_policy_would_write_comes_back(width, height, seen_width, seen_height, part, coordinates):
    view = ImageView(width, height, seen_width, seen_height, coordinates)
    box = part[0] * width, part[1] * height, part[2] * width, part[3] * height
    x, y = view.scale
    written = box[0] / x, box[1] / y, box[2] / x, box[3] / y
    assert frame_of([view], "auto", "original").answer_boxes([written])[0].tolist() == pytest.approx(box, abs=1e-6)


def test_boxes_are_clipped_to_the_image():
    frame = frame_of([RESIZED], "original", "original")
    assert frame.answer_boxes([(-5, 10, 500, 100), (500, 10, 600, 50)]).tolist() == [
        [0, 10, 400, 100],
        [400, 10, 400, 50],
    ]
    assert frame.gold_boxes([(390, 190, 401, 210)]).tolist() == [[390, 190, 400, 200]]
    assert frame.answer_boxes([None]).tolist() == [[0, 0, 0, 0]]


def test_a_right_box_outside_its_image_is_an_error():
    with pytest.raises(
        ValueError, match=r"\[600.*\] lies outside its image, 400 x 200 pixels: check that gold_coordinates matches"
    ):
        frame_of([RESIZED], "auto", "original").gold_boxes([(600, 500, 900, 990)])


def test_a_right_box_without_an_area_is_an_error_where_no_size_is_known():
    with pytest.raises(ValueError, match=r"^The ground-truth box \[5, 5, 5, 9\] has no area: ") as caught:
        frame_of([], "original", "original").gold_boxes([(5, 5, 5, 9)])
    assert "0 x 0" not in str(caught.value)


def test_without_an_image_the_conventions_must_agree():
    assert frame_of([], "original", "original").answer_boxes([(-5, 0, 5000, 9)]).tolist() == [[-5, 0, 5000, 9]]
    assert frame_of([], "norm1000", "norm1000").answer_boxes([(-5, 0, 5000, 9)]).tolist() == [[0, 0, 1000, 9]]
    for given_in, right_in in [("auto", "original"), ("resized", "original"), ("norm1000", "original")]:
        with pytest.raises(
            ValueError, match=f"coordinates '{given_in}' and gold_coordinates '{right_in}' need the size"
        ):
            frame_of([], given_in, right_in)


def test_several_images_are_an_error():
    with pytest.raises(ValueError, match="prompts with one image, got 2"):
        frame_of([RESIZED, RESIZED], "original", "original")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coordinates": "pixels"}, "coordinates must be one of auto, original, resized, norm1000, got 'pixels'"),
        ({"gold_coordinates": "resized"}, "gold_coordinates must be one of original, norm1000, got 'resized'"),
    ],
)
def test_unknown_conventions_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        IoU(**settings)
