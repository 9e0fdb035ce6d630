"""The images of the grounding quickstart, and what is asked and answered about them."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from grpo_lightning.demo.grounding_scenes import COLORS, NAMELESS_SHAPES, SHAPES, Scene, SceneTask, Thing, namings, vary

TASK = SceneTask(num_train=6, num_heldout=4)
RED_CIRCLE = Thing("red", "circle", (1, 2, 4, 6))


def scenes(purpose: str, number: int, task: SceneTask = TASK, *, is_heldout: bool = False) -> list[Scene]:
    return list(itertools.islice(task.scenes(purpose, is_heldout=is_heldout), number))


def test_boxes_by_hand() -> None:
    # widths 1 and 2 on a grid of 2: 2 + 1 places, and as many for heights
    assert len(SceneTask(num_cells=2, sides=(1, 2), num_things=1).boxes) == 9
    # 7, 6 and 5 places for widths of 2, 3 and 4
    assert len(TASK.boxes) == 18 * 18
    assert TASK.pixels((1, 2, 4, 6)) == [15, 29, 55, 83]


def test_texts_by_hand() -> None:
    assert TASK.question(RED_CIRCLE) == "Where is the red circle?"
    assert TASK.question(RED_CIRCLE, "color") == "Where is the red thing?"
    assert TASK.question(RED_CIRCLE, "shape") == "Where is the colored circle?"
    assert TASK.worked_completion(RED_CIRCLE) == "<think>red 15, 29</think><answer>[15, 29, 55, 83]</answer>"
    assert TASK.worked_completion(RED_CIRCLE, "color") == TASK.worked_completion(RED_CIRCLE)
    assert (
        TASK.worked_completion(RED_CIRCLE, "shape") == "<think>circle 15, 29</think><answer>[15, 29, 55, 83]</answer>"
    )
    assert TASK.lazy_completion() == "<think>anything</think><answer>[0, 0, 112, 112]</answer>"


def test_numbers_are_those_of_every_answer() -> None:
    said = {number for box in TASK.boxes for number in TASK.pixels(box)}
    assert set(TASK.numbers()) == said | {0, 112}


@pytest.mark.parametrize("is_heldout", [False, True])
def test_a_question_has_one_answer(is_heldout: bool) -> None:
    for scene in scenes("some", 100, is_heldout=is_heldout):
        assert len({thing.color for thing in scene}) == len({thing.shape for thing in scene}) == len(scene) == 3
        covered = np.zeros((8, 8), dtype=int)
        for thing in scene:
            left, top, right, bottom = thing.cells
            covered[top:bottom, left:right] += 1
        assert covered.max() == 1  # nothing hides anything


def test_what_is_held_out_is_nowhere_else() -> None:
    for scene in scenes("train", 200):
        assert not {(thing.color, thing.shape) for thing in scene} & TASK.heldout_pairs
        assert not {thing.cells for thing in scene} & TASK.heldout_boxes
    for scene in scenes("heldout", 100, is_heldout=True):
        assert scene[0][:2] in TASK.heldout_pairs
        assert scene[0].cells in TASK.heldout_boxes


@pytest.mark.parametrize("seed", range(4))
def test_of_every_color_and_shape_most_can_be_learned_from(seed: int) -> None:
    colors, shapes = zip(*SceneTask(seed=seed).heldout_pairs, strict=True)
    assert len(set(colors)) == len(set(shapes)) == 4


def test_what_is_varied_has_one_name_only() -> None:
    (scene,) = scenes("some", 1)
    draw = random.Random(0)
    assert vary(scene, draw, share=0.0) == scene
    every = [thing for _ in range(100) for thing in vary(scene, draw, share=1.0)]
    assert {thing.cells for thing in every} == {thing.cells for thing in scene}
    assert all((thing.color in COLORS) != (thing.shape in SHAPES) for thing in every)
    for thing in every:
        if thing.color not in COLORS:
            pixel = np.asarray(TASK.picture((thing._replace(shape="square", cells=(0, 0, 2, 2)),)))[10, 10].tolist()
            assert "#{:02x}{:02x}{:02x}".format(*pixel) == thing.color
            assert min(math.dist(pixel, named) for named in COLORS.values()) > 60
    some = [thing in scene for _ in range(100) for thing in vary(scene, draw)]
    assert 0.4 < sum(some) / len(some) < 0.6


def test_a_thing_is_asked_for_by_what_has_a_name() -> None:
    assert namings(RED_CIRCLE) == ("both", "color", "shape")
    assert set(namings(RED_CIRCLE._replace(color="#123456"))) == {"shape"}
    assert set(namings(RED_CIRCLE._replace(shape="arrow"))) == {"color"}


def test_purposes_and_seeds_draw_other_images() -> None:
    assert scenes("one", 5) == scenes("one", 5)
    assert not set(scenes("one", 50)) & set(scenes("two", 50))
    other = SceneTask(seed=1)
    assert scenes("one", 5, other) != scenes("one", 5)
    assert other.heldout_pairs != TASK.heldout_pairs


@pytest.mark.parametrize("shape", SHAPES | NAMELESS_SHAPES)
@pytest.mark.parametrize("color", ["red", "white"])
def test_a_shape_fills_its_box_and_nothing_else(shape: str, color: str) -> None:
    picture = np.asarray(TASK.picture((Thing(color, shape, (1, 2, 4, 6)),)))
    assert picture.shape == (112, 112, 3)
    rows, columns = np.nonzero((picture == COLORS[color]).all(-1))
    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == TASK.pixels((1, 2, 4, 6))
    inside = len(rows) / (40 * 54)
    area = {"circle": math.pi / 4, "square": 1.0, "cross": 5 / 9, "corner": 0.64, "arrow": 0.45}.get(shape, 0.5)
    assert inside == pytest.approx(area if shape != "hourglass" else 0.6, abs=0.04)


def test_the_background_says_where_one_is() -> None:
    empty = np.asarray(TASK.picture(())).astype(int)
    assert (np.diff(empty[..., 0], axis=1) >= 0).all()
    assert (np.diff(empty[..., 1], axis=0) >= 0).all()
    assert empty[0, -1, 0] - empty[0, 0, 0] > 200
    assert empty[-1, 0, 1] - empty[0, 0, 1] > 200


def test_files(tmp_path: Path) -> None:
    TASK.write(tmp_path)
    for name, number in (("train", 6), ("heldout", 4)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == number
        for row, scene in zip(rows, scenes(name, number, is_heldout=name == "heldout"), strict=True):
            assert row["problem"] == TASK.question(scene[0])
            assert row["solution"] == TASK.pixels(scene[0].cells)
            with Image.open(tmp_path / row["image"]) as image:
                assert np.array_equal(image, TASK.picture(scene))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_things": 5}, "num_things must be 1 to 4 .*, got 5"),
        ({"sides": (2, 9)}, r"sides must lie in 1 to num_cells \(8\), got \(2, 9\)"),
        ({"gap": 7}, "gap must be .* below half a cell .*, got 7"),
        ({"num_heldout_pairs": 0}, "num_heldout_pairs must be 1 to 4 .*, got 0"),
        ({"heldout_boxes_share": 1.0}, "heldout_boxes_share must be above 0 and below 1, got 1.0"),
        ({"num_cells": 7}, "num_cells must be even .*, got 7"),
    ],
)
def test_impossible_tasks_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SceneTask(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"sides": (8,), "num_things": 2},
        {"sides": (6, 7)},
        {"heldout_boxes_share": 0.999},
        {"num_cells": 2, "sides": (2,), "num_things": 1},
    ],
)
def test_images_that_cannot_be_are_not_waited_for(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"do not fit on . x . cells, or too much is held out"):
        next(SceneTask(**settings).scenes("some"))
