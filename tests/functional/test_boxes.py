"""Overlap of boxes: by hand, against torchvision and pycocotools, and what must hold of any boxes."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_lightning.functional.boxes import area, clip, iou
from tests.marks import SLOW

boxes = st.tuples(*[st.integers(-5, 15) | st.floats(-5, 15)] * 4).map(
    lambda box: torch.tensor(box, dtype=torch.float64)
)


def of(*box: float) -> Tensor:
    return torch.tensor(box, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 0, 10, 10), (0, 0, 10, 10), 1),
        ((0, 0, 10, 10), (5, 0, 15, 10), 50 / 150),
        ((0, 0, 10, 10), (2, 2, 4, 7), 10 / 100),  # inside
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7),  # an overlap of one unit, which VLM-R1 makes 0
        ((3, 3, 4, 4), (3, 3, 4, 4), 1),  # one pixel
        ((0.1, 0.1, 0.5, 0.5), (0.1, 0.1, 0.5, 0.5), 1),  # coordinates from 0 to 1
        ((0.0, 0.0, 0.5, 0.5), (0.25, 0.0, 0.75, 0.5), 1 / 3),
        ((0, 0, 5, 5), (5, 0, 10, 5), 0),  # a common edge
        ((0, 0, 5, 5), (5, 5, 10, 10), 0),  # a common corner
        ((0, 0, 5, 5), (7, 7, 9, 9), 0),
        ((-4, -4, 0, 0), (-2, -4, 2, 0), 8 / 24),
        ((10, 10, 0, 0), (0, 0, 10, 10), 0),  # inverted
        ((10, 0, 0, 10), (10, 0, 0, 10), 0),
        ((2, 2, 2, 2), (2, 2, 2, 2), 0),  # no area, and no union to divide by
        ((2, 2, 2, 9), (0, 0, 10, 10), 0),
    ],
)
def test_by_hand(a, b, expected):
    assert iou(of(*a), of(*b)).item() == pytest.approx(expected, abs=1e-12)


def many(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Pairs of proper and degenerate boxes, of all sizes: most of them overlap, some are equal, touch or are empty."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.rand(count, 2, 4, generator=draw, dtype=torch.float64)
    low, high = torch.minimum(first[..., :2], first[..., 2:]), torch.maximum(first[..., :2], first[..., 2:])
    pairs = torch.cat([low, high], dim=-1)
    kind = torch.randint(0, 8, (count,), generator=draw)
    pairs[kind == 0] = first[kind == 0]  # any order: half of them inverted
    pairs[kind == 1] = (pairs[kind == 1] * 12).round()  # small whole numbers: touching, equal, without area
    pairs[kind == 2, 1] = pairs[kind == 2, 0]
    pairs[kind == 3, 1, :2] = pairs[kind == 3, 0, 2:]  # a common corner
    pairs[kind == 4, :, 2] = pairs[kind == 4, :, 0]  # no width
    pairs[kind == 5, :, 2:] = pairs[kind == 5, :, :2] + 1  # one pixel
    pairs[kind == 6] *= 4000
    return pairs[:, 0], pairs[:, 1]


def test_a_hundred_thousand_pairs_are_as_in_torchvision():
    box_iou = pytest.importorskip("torchvision.ops").box_iou
    a, b = many(0, 100_000)
    chunks = zip(a.split(50), b.split(50), strict=True)
    expected = torch.cat([box_iou(x, y).diagonal() for x, y in chunks])
    found = iou(a, b)
    proper = (area(a) > 0) & (area(b) > 0)
    torch.testing.assert_close(found[proper], expected[proper], rtol=0, atol=1e-12)
    # There, an empty box has a negative area or divides 0 by 0.
    assert 20_000 < (~proper).sum() < 60_000
    torch.testing.assert_close(found[~proper], expected[~proper].nan_to_num(0).clamp(min=0), rtol=0, atol=1e-12)
    assert (found > 0).sum() > 20_000


@SLOW
def test_pairs_are_as_in_pycocotools():
    mask = pytest.importorskip("pycocotools.mask")
    a, b = many(1, 100_000)
    proper = (area(a) > 0) & (area(b) > 0)
    a, b = a[proper], b[proper]
    for x, y in zip(a.split(50), b.split(50), strict=True):
        as_coco = [numpy.ascontiguousarray(torch.cat([z[:, :2], z[:, 2:] - z[:, :2]], dim=1).numpy()) for z in (x, y)]
        expected = torch.from_numpy(mask.iou(*as_coco, [0] * len(y)))
        torch.testing.assert_close(iou(x[:, None], y), expected, rtol=0, atol=1e-9)


@given(boxes, boxes, st.floats(0.01, 100), st.floats(-50, 50))
def test_order_scale_and_place_do_not_matter(a, b, scale, shift):
    found = iou(a, b).item()
    assert 0 <= found <= 1
    assert iou(b, a).item() == pytest.approx(found, abs=1e-12)
    if min(area(a), area(b)) > 1e-6:
        assert iou(a * scale, b * scale).item() == pytest.approx(found, abs=1e-9)
        assert iou(a + shift, b + shift).item() == pytest.approx(found, abs=1e-4)


@given(boxes)
def test_with_itself_it_is_one_or_nothing(a):
    assert iou(a, a).item() == pytest.approx(1.0 if area(a) > 0 else 0.0)


@given(st.lists(st.integers(0, 6), min_size=4, max_size=4), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_on_whole_numbers_it_counts_pixels(a, b):
    def pixels(x1, y1, x2, y2):
        return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}

    common, union = pixels(*a) & pixels(*b), pixels(*a) | pixels(*b)
    assert iou(of(*a), of(*b)).item() == pytest.approx(len(common) / len(union) if union else 0)


def test_the_matrix_of_all_pairs():
    a, b = many(2, 6)
    matrix = iou(a[:, None], b[:4])
    assert matrix.shape == (6, 4)
    assert all(matrix[i, j] == iou(a[i], b[j]) for i in range(6) for j in range(4))


def test_nothing_is_a_matrix_too():
    assert iou(torch.zeros(0, 1, 4), torch.zeros(3, 4)).shape == (0, 3)


def test_clip_by_hand():
    outside = of(30, 30, 40, 40)
    clipped = clip(torch.stack([of(-5, 2, 12, 50), of(1, 2, 3, 4), outside, of(9, 9, 3, 3)]), 10, 20)
    assert clipped.tolist() == [[0, 2, 10, 20], [1, 2, 3, 4], [10, 20, 10, 20], [9, 9, 3, 3]]
    assert area(clipped).tolist() == [180, 4, 0, 0]


@given(boxes, st.integers(1, 12), st.integers(1, 12))
def test_clipped_is_what_is_common_with_the_image(a, width, height):
    image = of(0, 0, width, height)
    clipped = clip(a, width, height)
    common = area(a) + area(image) - (area(a) + area(image)) / (1 + iou(a, image))
    assert area(clipped).item() == pytest.approx(common.item(), abs=1e-9)
    assert torch.equal(clip(clipped, width, height), clipped)
