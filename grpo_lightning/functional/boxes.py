"""Area and IoU of bounding boxes (x1, y1, x2, y2), and clipping to an image.

The right and bottom edges of a box are exclusive, so its width is x2 - x1, in any unit. A box is empty if x2 <= x1 or
y2 <= y1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def area(boxes: Tensor) -> Tensor:
    """Area of each box, 0 if the box is empty.

    Args:
        boxes: [..., 4].

    Returns:
        [...] in square units.
    """
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union.

        IoU = area(a and b) / (area(a) + area(b) - area(a and b)), and 0 if both are empty

    Args:
        a: [..., 4] float boxes.
        b: [..., 4] float boxes; shapes broadcast, so `iou(a[:, None], b)` is the matrix of all pairs.

    Returns:
        [...] in [0, 1].
    """
    common = area(torch.cat([torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], dim=-1))
    union = area(a) + area(b) - common
    return torch.where(union > 0, common / union.where(union > 0, 1.0), 0.0)


def clip(boxes: Tensor, width: float, height: float) -> Tensor:
    """Clip each box to the image. A box outside of the image becomes empty.

    Args:
        boxes: [..., 4].
        width: Image width, in the units of the boxes.
        height: Image height, in the units of the boxes.
    """
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))


def is_share(box: Sequence[float], size: tuple[float, float]) -> bool:
    """True if a box that should be in pixels looks normalized, because no coordinate is above 1.

    No annotated object lies within the first pixel of an image. The result is always False for images of at most 2
    pixels in width or height.
    """
    return max(box) <= 1 and min(size) > 2
