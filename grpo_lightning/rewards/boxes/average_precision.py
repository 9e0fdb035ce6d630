"""The average precision of COCO, for one image."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor


def check_installed(needed_by: str) -> None:
    """Raises: ImportError if pycocotools is missing."""
    if importlib.util.find_spec("pycocotools") is None:
        raise ImportError(f"{needed_by} needs pycocotools: pip install 'grpo-lightning[grounding]'.")


def average_precision(
    given: Tensor,
    given_labels: Sequence[str | None],
    right: Tensor,
    right_labels: Sequence[str | None],
    iou_threshold: float | None = None,
) -> float:
    """COCO's mean average precision over labels, recalls and IoU thresholds, by pycocotools.

    The labels are those of both sides: one that only the answer has is worth 0, so that naming what is not there costs.
    Boxes of an answer have no scores, and their order is the ranking: what is listed first counts first. Neither their
    number nor their size is limited.

    Args:
        given: [n, 4] boxes of the answer; an empty one is a false positive.
        given_labels: n.
        right: [m, 4] boxes of the data, m > 0, none of them empty.
        right_labels: m.
        iou_threshold: From which IoU on a box is right; None averages over 0.5, 0.55, ..., 0.95.

    Returns:
        In [0, 1].
    """
    from pycocotools.cocoeval import COCOeval

    categories = {label: number for number, label in enumerate(dict.fromkeys(right_labels), start=1)}
    evaluation = COCOeval(
        _data_set(right, right_labels, categories), _data_set(given, given_labels, categories), iouType="bbox"
    )
    evaluation.params.areaRng = [[0, float("inf")]]
    evaluation.params.maxDets = [max(len(given), 1)]
    if iou_threshold is not None:
        evaluation.params.iouThrs = [iou_threshold]
    _silent(COCOeval.evaluate)(evaluation)
    _silent(COCOeval.accumulate)(evaluation)
    by_category = evaluation.eval["precision"].mean(axis=(0, 1))  # [categories, 1, 1]
    # Rounded, as pycocotools adds an epsilon to what it divides by, which leaves 1 - 1e-16 of a 1.
    return round(float(by_category.sum()) / len({*right_labels, *given_labels}), 12)


def _data_set(boxes: Tensor, labels: Sequence[str | None], categories: dict[str | None, int]) -> Any:
    """Boxes of one image as pycocotools takes them; those of other categories are left out."""
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
    _silent(COCO.createIndex)(data)
    return data


def _silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a `print` that does nothing: pycocotools reports each step, and has no switch.

    Redirecting stdout would also swallow what other threads print meanwhile.
    """
    assert isinstance(function, FunctionType)
    quiet = {**function.__globals__, "print": lambda *_, **__: None}
    return FunctionType(function.__code__, quiet, function.__name__, function.__defaults__, function.__closure__)
