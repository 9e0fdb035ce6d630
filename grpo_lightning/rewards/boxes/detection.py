"""Rewards for listing the objects in an image, each with a box and a label (VLM-R1's object detection)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from grpo_lightning.core.types import Box
from grpo_lightning.functional.boxes import iou
from grpo_lightning.rewards.boxes.average_precision import average_precision, check_installed
from grpo_lightning.rewards.boxes.frame import BoxFrame, BoxReward, GivenCoordinates, GoldCoordinates
from grpo_lightning.rewards.boxes.parsing import Detection, detections, right_detections


class DetectionReward(BoxReward):
    """A reward for a list of objects. Args: as in `BoxReward`."""

    def right(self, answer: Any) -> list[Detection] | None:
        """The row's objects. Raises: ValueError if they cannot be read."""
        return right_detections(answer, self.answer_column)

    def boxes_of(self, right: Sequence[Detection]) -> list[Box]:
        """Those of the objects."""
        return [item.box for item in right if item.box]

    def given(self, text: str) -> list[Detection] | None:
        """The answer's objects."""
        return detections(text)

    def compare(self, given: list[Detection] | None, right: list[Detection], frame: BoxFrame) -> float:
        """An answer that cannot be read is worth 0; two empty lists 1, one of them 0."""
        if given is None:
            return 0.0
        return self.match(given, right, frame) if given and right else float(not given and not right)

    @abstractmethod
    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """How good a list of objects is, in [0, 1]. Both have at least one."""


class DetectionMAP(DetectionReward):
    """COCO's mean average precision of the objects that an answer lists (VLM-R1's `map`, `od_ap` and `od_ap50`).

    The last `<answer>...</answer>` of a completion is JSON, in ```json fences or bare: a list of `{"bbox_2d": [x1, y1,
    x2, y2], "label": "..."}`, or `None`. No objects where there are none is 1, none where there are some 0, and the
    other way round. An object without a label or without four numbers is a false positive; labels are compared without
    regard to case.

    Boxes of an answer have no scores: their order is the ranking, so objects listed after the last right one of their
    label cost nothing. `OdLength` makes them cost. VLM-R1 drops objects whose label is not among the right ones, so
    that naming everything is free; takes any text for an empty list; and does not map boxes to the image in the data.

    Args:
        answer_column: The data column with the right objects: a list of such mappings, or text with one. `[]` is none;
            a row without (None or empty text) is not scorable.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        iou_threshold: From which IoU on a box is right; None averages over 0.5, 0.55, ..., 0.95. VLM-R1's `od_ap50` is
            0.5.
    """

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
        iou_threshold: float | None = None,
    ) -> None:
        """Raises: ImportError if pycocotools is missing; ValueError if an argument is out of range."""
        check_installed(type(self).__name__)
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if iou_threshold is not None:
            _check_share("iou_threshold", iou_threshold)
        self.iou_threshold = iou_threshold

    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """The average precision."""
        return average_precision(
            frame.given([item.box for item in given]),
            [item.label for item in given],
            frame.right(self.boxes_of(right)),
            [item.label for item in right],
            self.iou_threshold,
        )


class OdLength(DetectionMAP):
    """`DetectionMAP`, less for listing more objects than there are (VLM-R1's `odLength`).

        r = mAP * min(1, m / n)        n objects in the answer, m in the data

    Args:
        answer_column: As in `DetectionMAP`.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        iou_threshold: As in `DetectionMAP`.
    """

    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """The average precision times the share."""
        return super().match(given, right, frame) * min(1.0, len(right) / len(given))


class WeightedSum(DetectionReward):
    """Places, labels and completeness of the objects that an answer lists, weighted (VLM-R1's `weighted_sum`).

        r = (p * sum of IoU + l * k) / m + c * (1 - ((m - t) / m + (n - t) / n) / 2), divided by p + l + c

    Of the n objects of the answer and the m of the data t are matched, of which k with the right label; only these give
    their IoU. p, l, c are the weights. Pairs are matched greedily from the largest IoU down to `iou_threshold`, each
    object once; of equal pairs those with the right label come first.

    Objects are read as in `DetectionMAP`; none where there are none is 1. VLM-R1 gives an object without a label that
    of the one before it, and does not map boxes to the image in the data.

    Args:
        answer_column: As in `DetectionMAP`.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        position_weight: p, at least 0.
        label_weight: l, likewise.
        completeness_weight: c, likewise.
        iou_threshold: From which IoU on two boxes may be a pair.
    """

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
        position_weight: float = 0.7,
        label_weight: float = 0.0,
        completeness_weight: float = 0.3,
        iou_threshold: float = 0.5,
    ) -> None:
        """Raises: ValueError if an argument is out of range."""
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        self.weights = (position_weight, label_weight, completeness_weight)
        if not all(weight >= 0 and math.isfinite(weight) for weight in self.weights) or not sum(self.weights) > 0:
            raise ValueError(
                f"position_weight, label_weight and completeness_weight must be at least 0, and one of them above, got "
                f"{self.weights}."
            )
        _check_share("iou_threshold", iou_threshold)
        self.iou_threshold = iou_threshold

    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """The weighted sum."""
        pairs = self._pairs(given, right, frame)
        overlaps = [overlap for overlap, has_label in pairs if has_label]
        missed, invented = 1 - len(pairs) / len(right), 1 - len(pairs) / len(given)
        parts = (sum(overlaps) / len(right), len(overlaps) / len(right), 1 - (missed + invented) / 2)
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True)) / sum(self.weights)

    def _pairs(
        self, given: Sequence[Detection], right: Sequence[Detection], frame: BoxFrame
    ) -> list[tuple[float, bool]]:
        """The IoU of every pair, and whether its labels are the same."""
        boxes = frame.given([item.box for item in given]), frame.right(self.boxes_of(right))
        overlaps = iou(boxes[0][:, None], boxes[1])
        near = torch.nonzero(overlaps >= self.iou_threshold).tolist()
        found = [(overlaps[i, j].item(), given[i].label == right[j].label, i, j) for i, j in near]
        pairs, taken = [], (set[int](), set[int]())
        for overlap, has_label, i, j in sorted(found, key=lambda pair: (-pair[0], not pair[1])):
            if i not in taken[0] and j not in taken[1]:
                taken[0].add(i)
                taken[1].add(j)
                pairs.append((overlap, has_label))
        return pairs


def _check_share(name: str, value: float) -> None:
    """Raises: ValueError if a threshold is not above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}.")
