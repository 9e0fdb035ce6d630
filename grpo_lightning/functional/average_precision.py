"""Average precision of the boxes of one image, as COCO defines it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def average_precision(
    given: Tensor,
    given_labels: Sequence[str | None],
    right: Tensor,
    right_labels: Sequence[str | None],
    iou_threshold: float | None = None,
) -> float:
    """COCO's mean average precision over labels, recalls and IoU thresholds, by pycocotools.

    The mean runs over the labels of the answer and of the ground truth. A label that is in the answer but not in the
    ground truth counts as 0. The boxes are ranked in the order of `given`. COCO's limits on the number and the size of
    boxes do not apply.

    Args:
        given: [n, 4] boxes of the answer; an empty box is a false positive.
        given_labels: [n] labels.
        right: [m, 4] ground-truth boxes, m > 0, no empty boxes.
        right_labels: [m] labels.
        iou_threshold: Minimum IoU of a correct box; None averages over 0.5, 0.55, ..., 0.95.

    Returns:
        The mean average precision, in [0, 1].
    """
    from pycocotools.cocoeval import COCOeval

    categories = {label: number for number, label in enumerate(dict.fromkeys(right_labels), start=1)}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints each step, which cannot be turned off
        evaluation = COCOeval(
            _coco(right, right_labels, categories), _coco(given, given_labels, categories), iouType="bbox"
        )
        evaluation.params.areaRng = [[0, float("inf")]]
        evaluation.params.maxDets = [max(len(given), 1)]
        if iou_threshold is not None:
            evaluation.params.iouThrs = [iou_threshold]
        evaluation.evaluate()
        evaluation.accumulate()
    by_category = evaluation.eval["precision"].mean(axis=(0, 1))  # [categories, 1, 1]
    # Rounded, because pycocotools adds an epsilon to the denominator, which turns 1 into 1 - 1e-16.
    return round(float(by_category.sum()) / len({*right_labels, *given_labels}), 12)


def _coco(boxes: Tensor, labels: Sequence[str | None], categories: dict[str | None, int]) -> Any:
    """Convert the boxes of one image to pycocotools' format, without boxes whose label is not in `categories`."""
    from pycocotools.coco import COCO

    sizes = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).tolist()
    data = COCO()
    data.dataset = {
        "images": [{"id": 1}],
        "categories": [{"id": number} for number in categories.values()],
        "annotations": [
            {
                "id": number,
                "image_id": 1,
                "category_id": categories[label],
                "bbox": [*corner, width, height],
                "area": width * height,
                "iscrowd": 0,
                "score": 1.0,
            }
            for number, (label, corner, (width, height)) in enumerate(
                zip(labels, boxes[:, :2].tolist(), sizes, strict=True), start=1
            )
            if label in categories
        ],
    }
    data.createIndex()
    return data
