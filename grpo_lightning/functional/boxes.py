"""Boxes (x1, y1, x2, y2) in the plane: how much two of them overlap, what of one lies in an image.

A box is half-open: the right and bottom edges are outside, so its width is x2 - x1, in any unit. Where
x2 <= x1 or y2 <= y1 it is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def area(boxes: Tensor) -> Tensor:
    """The area of each box; 0 if it is empty. Args: boxes: [..., 4]. Returns: [...] in square units."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union.

        IoU = area(a and b) / (area(a) + area(b) - area(a and b)), and 0 if both are empty

    VLM-R1 subtracts 1 from the right edges of the intersection only, which makes overlaps of at most one unit 0: all of
    them where coordinates go from 0 to 1.

    Args:
        a: [..., 4] boxes of floats.
        b: [..., 4] likewise; shapes broadcast, so `iou(a[:, None], b)` is the matrix of every pair.

    Returns:
        [...] in [0, 1].
    """
    common = area(torch.cat([torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], dim=-1))
    union = area(a) + area(b) - common
    return torch.where(union > 0, common / union.where(union > 0, 1.0), 0.0)


def clip(boxes: Tensor, width: float, height: float) -> Tensor:
    """The part of each box inside an image; a box outside becomes empty.

    Args:
        boxes: [..., 4].
        width: Of the image, in the units of the boxes.
        height: Likewise.
    """
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))


def is_share(box: Sequence[float], size: tuple[float, float]) -> bool:
    """Whether a box in pixels ends within the first pixel of an image, wider and higher than two.

    So small is nothing that is requested: its numbers are shares of the width and the height, from 0 to 1.
    """
    return max(box) <= 1 and min(size) > 2
