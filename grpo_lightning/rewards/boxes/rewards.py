"""Box rewards of VLM-R1: IoU for referring expressions, and detection rewards."""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from grpo_lightning.core.types import Box
from grpo_lightning.functional.average_precision import average_precision
from grpo_lightning.functional.boxes import iou
from grpo_lightning.rewards.answers import between_answer_tags
from grpo_lightning.rewards.base import Content, Reward, completion_text
from grpo_lightning.rewards.boxes.frame import BoxFrame, BoxReward, GivenCoordinates, GoldCoordinates
from grpo_lightning.rewards.boxes.parsing import (
    Detection,
    boxes_in,
    detections,
    gold_box,
    gold_detections,
    has_json_box,
    last_box,
)
from grpo_lightning.rewards.text import Format, Repetition


class IoU(BoxReward):
    """Intersection over union of the answer's box and the ground-truth box.

    The box of a completion is the last `[x1, y1, x2, y2]` in its last `<answer>...</answer>`. If the answer has no such
    box, the last `(x1,y1),(x2,y2)` is read (Qwen2-VL's notation). Without answer tags, the box is searched for after
    `</think>` or, if that tag is missing too, in the whole completion. The numbers may be integers or decimals, and the
    box may be inside JSON or outside of it. This box and the ground-truth box are
    converted to pixels of the original image (the image before it is resized for the policy) and clipped to this image.
    The reward is 0 if there is no box, or if the box is inverted or empty. VLM-R1's `iou_reward` differs (see
    docs/vision.md).

    Args:
        answer_column: The data column with the ground-truth box: four numbers, a mapping with `bbox_2d`, or text with
            `[x1, y1, x2, y2]` or `(x1,y1),(x2,y2)`. The reward does not apply to a row in which this column is None or
            an empty string.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        threshold: The reward is 1 if the IoU is above `threshold`, else 0. With None, the reward is the IoU itself.
    """

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
        threshold: float | None = None,
    ) -> None:
        """Raises: ValueError if a coordinate system is unknown, or the threshold is not in [0, 1)."""
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"threshold must be None or at least 0 and below 1, got {threshold}.")
        self.threshold = threshold

    @property
    def name(self) -> str:
        """`iou`, where the default would be `io_u`."""
        return "iou"

    def right(self, answer: Any) -> Box | None:
        """Parse the row's box. Raises: ValueError if it is not one box."""
        return gold_box(answer, self.answer_column)

    def boxes_of(self, right: Box) -> Sequence[Box]:
        """The ground-truth box."""
        return [right]

    def parse_answer(self, text: str) -> Box | None:
        """Parse the answer's last box."""
        return last_box(text)

    def given_boxes(self, given: Box | None) -> Sequence[Box]:
        """The answer's box."""
        return [] if given is None else [given]

    def compare(self, given: Box | None, right: Box, frame: BoxFrame) -> float:
        """Compute the IoU. With a threshold, return 1 if the IoU is above the threshold, and 0 if not."""
        overlap = iou(frame.answer_boxes([given]), frame.gold_boxes([right])).item()
        return overlap if self.threshold is None else float(overlap > self.threshold)


class FormatRec(Reward):
    """1 if the completion is `<think>...</think><answer>...</answer>` and the answer has a box of four numbers, else 0.

    Only whitespace is allowed around and between the two parts. Each tag must occur exactly once.

    VLM-R1's `format_reward_rec` differs (see docs/vision.md).

    Args:
        needs_json: If true, the answer must be JSON, with or without ```json fences. The JSON must be an object with a
            box, or a list with such an object. VLM-R1 uses this form for Qwen. If false, `[x1, y1, x2, y2]` or
            `(x1,y1),(x2,y2)` anywhere in the answer is enough. For InternVL, VLM-R1 accepts only `[x1, y1, x2, y2]`.
        prompt_opens_first: As in `Format`.
    """

    def __init__(self, *, needs_json: bool = True, prompt_opens_first: bool = False) -> None:
        self.needs_json = needs_json
        self._tags = Format(prompt_opens_first=prompt_opens_first)

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check the format.

        Args:
            completions: [B].

        Returns:
            [B], each 0 or 1.
        """
        formats = self._tags(completions=completions)
        texts = [completion_text(completion) for completion in completions]
        return [float(value == 1 and self._has_box(text)) for value, text in zip(formats, texts, strict=True)]

    def _has_box(self, text: str) -> bool:
        """Whether the answer has a box."""
        answer = between_answer_tags(text) or ""
        return has_json_box(answer) if self.needs_json else any(boxes_in(answer))


class DetectionReward(BoxReward):
    """Base class of rewards for answers that list objects."""

    def right(self, answer: Any) -> list[Detection] | None:
        """Parse the row's objects. Raises: ValueError if they cannot be parsed."""
        return gold_detections(answer, self.answer_column)

    def boxes_of(self, right: Sequence[Detection]) -> list[Box]:
        """The boxes of the objects."""
        return [item.box for item in right if item.box]

    def parse_answer(self, text: str) -> list[Detection] | None:
        """Parse the answer's objects."""
        return detections(text)

    def given_boxes(self, given: Sequence[Detection] | None) -> list[Box]:
        """The boxes of the answer's objects."""
        return [item.box for item in given or () if item.box]

    def compare(self, given: list[Detection] | None, right: list[Detection], frame: BoxFrame) -> float:
        """Score an answer.

        An unparsable answer gets 0. Two empty lists get 1. One empty list gets 0.
        """
        if given is None:
            return 0.0
        return self.match(given, right, frame) if given and right else float(not given and not right)

    @abstractmethod
    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """Score from 0 to 1; both lists have at least one object."""


class DetectionMAP(DetectionReward):
    """COCO's mean average precision of the objects listed in an answer (VLM-R1's `map`, `od_ap` and `od_ap50`).

    The answer of a completion is the content of its last `<answer>...</answer>`. Without these tags, the answer is the
    text after `</think>`. The answer must be the word `None` (no objects), or contain a JSON list of
    `{"bbox_2d": [x1, y1, x2, y2], "label": "..."}`. If neither the answer nor the ground truth has an object, the
    reward is 1. If only one of the two has objects, the reward is 0. An object without a label is a false positive. An
    object without a box of four numbers is also a false positive. Labels are compared case-insensitively.

    Average precision ranks the boxes of each label. A box that comes earlier in the answer has a higher rank. If a
    wrong object comes after the last correct object of the same label, the wrong object does not lower the reward.
    `OdLength` lowers the reward of an answer that has more objects than the ground truth has.

    VLM-R1 differs (see docs/vision.md).

    Args:
        answer_column: The data column with the list of ground-truth objects, or with this list as text. Each object is
            a mapping with the keys `bbox_2d` and `label`. `[]` means that there are no objects. The reward does not
            apply to a row in which this column is None or an empty string.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        iou_threshold: Minimum IoU of a correct box. If `iou_threshold` is None, the average precision is averaged over
            the ten thresholds 0.5, 0.55, ..., 0.95. The threshold of VLM-R1's `od_ap50` is 0.5.
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
        if importlib.util.find_spec("pycocotools") is None:
            raise ImportError(f"{type(self).__name__} needs pycocotools: pip install 'grpo-lightning[grounding]'.")
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if iou_threshold is not None:
            _check_share("iou_threshold", iou_threshold)
        self.iou_threshold = iou_threshold

    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """The average precision."""
        return average_precision(
            frame.answer_boxes([item.box for item in given]),
            [item.label for item in given],
            frame.gold_boxes(self.boxes_of(right)),
            [item.label for item in right],
            self.iou_threshold,
        )


class OdLength(DetectionMAP):
    """`DetectionMAP` with a penalty for listing too many objects (VLM-R1's `odLength`).

        r = mAP * min(1, m / n)        n objects in the answer, m in the ground truth

    Args:
        answer_column: As in `DetectionMAP`.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        iou_threshold: As in `DetectionMAP`.
    """

    def match(self, given: list[Detection], right: list[Detection], frame: BoxFrame) -> float:
        """The average precision times min(1, m / n)."""
        return super().match(given, right, frame) * min(1.0, len(right) / len(given))


class WeightedSum(DetectionReward):
    """Weighted sum of scores for position, label and completeness of the listed objects (VLM-R1's `weighted_sum`).

        r = ((p * s + l * k) / m + c * (1 - ((m - t) / m + (n - t) / n) / 2)) / (p + l + c)

    The answer has n objects, the ground truth has m objects, and t pairs of objects are matched. The label is correct
    in k of these pairs, and s is the sum of the IoUs of these k pairs. Pairs are matched greedily, from the largest IoU
    down to `iou_threshold`, and each object at most once. Among pairs of equal IoU, pairs with the correct label come
    first.

    Objects are parsed as in `DetectionMAP`. The reward is 1 if neither the answer nor the ground truth lists an object.
    docs/vision.md lists the differences between `WeightedSum` and VLM-R1's `weighted_sum`.

    Args:
        answer_column: As in `DetectionMAP`.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        position_weight: p, at least 0.
        label_weight: l, at least 0.
        completeness_weight: c, at least 0.
        iou_threshold: Minimum IoU of a pair.
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
                "position_weight, label_weight and completeness_weight must be at least 0, and one of them above 0, "
                f"got {self.weights}."
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
        """Match objects. Returns: the IoU of each pair, and whether its labels are equal."""
        boxes = frame.answer_boxes([item.box for item in given]), frame.gold_boxes(self.boxes_of(right))
        overlaps = iou(boxes[0][:, None], boxes[1])
        near = torch.nonzero(overlaps >= self.iou_threshold).tolist()
        found = [(overlaps[i, j].item(), given[i].label == right[j].label, i, j) for i, j in near]
        pairs, matched = [], (set[int](), set[int]())
        for overlap, has_label, i, j in sorted(found, key=lambda pair: (-pair[0], not pair[1])):
            if i not in matched[0] and j not in matched[1]:
                matched[0].add(i)
                matched[1].add(j)
                pairs.append((overlap, has_label))
        return pairs


def _check_share(name: str, value: float) -> None:
    """Check the range of a threshold. Raises: ValueError unless 0 < value <= 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}.")


class BoxRepetition(Reward):
    """The fraction of listed objects that repeat an earlier object, times a penalty (VLM-R1's `repetition`).

        r = (1 - unique objects / objects) * max_penalty

    Two objects are equal if their boxes and their labels are equal. Objects are parsed as in `DetectionMAP`. If the
    answer has no boxes, `Repetition` scores the text of the completion.

    Args:
        n_grams: Words per n-gram, for an answer without boxes.
        max_penalty: As in `Repetition`.
    """

    def __init__(self, n_grams: int = 6, max_penalty: float = -1.0) -> None:
        """Raises: ValueError if a setting is out of range."""
        self._texts = Repetition(n_grams, max_penalty)
        self.max_penalty = max_penalty

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Score repetition.

        Args:
            completions: [B].

        Returns:
            [B] in [max_penalty, 0].
        """
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float | None:
        """Compute the penalty of one completion."""
        objects = detections(text) or []
        if not any(item.box for item in objects):
            return self._texts(completions=[text], completion_ids=[[]])[0]
        return (1 - len(set(objects)) / len(objects)) * self.max_penalty
