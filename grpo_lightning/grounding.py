"""Grounding metrics for `Validation.metrics`: the mean IoU, and the accuracy of referring expression comprehension."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from grpo_lightning.core.types import Box, Group, Prompt
from grpo_lightning.functional.boxes import iou
from grpo_lightning.rewards.boxes.frame import BoxFrame, GivenCoordinates, GoldCoordinates, frame_of
from grpo_lightning.rewards.boxes.parsing import gold_box, last_box
from grpo_lightning.rewards.boxes.rewards import IoU
from grpo_lightning.training.validation import Evaluation

__all__ = ["MeanIoU", "RECAccuracy"]

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """The ground-truth box of a prompt, with its coordinate frame."""

    right: Box
    frame: BoxFrame

    @property
    def box(self) -> Box:
        """The ground-truth box in pixels of the original image, clipped to the image."""
        return as_box(self.frame.gold_boxes([self.right]))

    def predicted_box(self, text: str) -> Box | None:
        """The last box of a completion, in pixels of the original image; None if missing or outside the image."""
        found = last_box(text)
        given = self.frame.answer_boxes([found])
        return None if found is None or not (given[0, 2:] > given[0, :2]).all() else as_box(given)

    def overlap(self, text: str) -> float:
        """IoU of a completion's last box and the ground-truth box; 0 if the completion has no box."""
        return iou(self.frame.answer_boxes([last_box(text)]), self.frame.gold_boxes([self.right])).item()


def as_box(boxes: Tensor) -> Box:
    """Convert the first row of a [n, 4] tensor to a box."""
    x1, y1, x2, y2 = boxes[0].tolist()
    return x1, y1, x2, y2


def target_of(
    group: Group, answer_column: str, coordinates: GivenCoordinates = "auto", gold: GoldCoordinates = "original"
) -> Target | None:
    """The ground-truth box of a group's prompt; None if the prompt does not have exactly one image and one box.

    `coordinates` and `gold` are the arguments `coordinates` and `gold_coordinates` of `BoxReward`.
    """
    right = prompt_box(group.prompt, answer_column)
    return None if right is None else Target(right, frame_of(group.image_views, coordinates, gold))


def prompt_box(prompt: Prompt, answer_column: str) -> Box | None:
    """The ground-truth box of a prompt with exactly one image and exactly one box; None for other prompts.

    The box is in the units of the data.
    """
    if len(prompt.images) != 1:
        return None
    try:
        return gold_box(prompt.columns.get(answer_column), answer_column)
    except ValueError:  # another kind of answer; boxes were checked when the data were loaded
        return None


class BoxMetric(Metric, ABC):
    """Base class of metrics that score the boxes of completions, and average the scores over all ranks.

    A prompt counts only if it has exactly one image and its `answer_column` contains exactly one box. Other prompts are
    skipped with a warning. A completion without a box counts as wrong.

    Args:
        answer_column: The data column with the ground-truth box.
        coordinates: Coordinate system of the completions' boxes; "auto" is that of the policy's model family.
        gold_coordinates: Coordinate system of the data: "original" (pixels of the original image) or "norm1000".
    """

    full_state_update = False
    total: Tensor
    num_completions: Tensor
    num_prompts: Tensor
    num_others: Tensor

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
    ) -> None:
        """Raises: ValueError if a coordinate convention is unknown."""
        super().__init__()
        IoU(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)  # checks the arguments
        self.answer_column = answer_column
        self.coordinates: GivenCoordinates = coordinates
        self.gold_coordinates: GoldCoordinates = gold_coordinates
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
        for name in ("num_completions", "num_prompts", "num_others"):
            self.add_state(name, default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the metric in logs."""

    @abstractmethod
    def score(self, overlap: float) -> float:
        """Score a completion by the IoU of its box and the ground-truth box."""

    def update(self, evaluation: Evaluation) -> None:
        """Add an evaluation. Raises: ValueError if a ground-truth box lies outside its image."""
        for group in evaluation.groups:
            target = target_of(group, self.answer_column, self.coordinates, self.gold_coordinates)
            if target is None:
                self.num_others += 1
                continue
            scores = [self.score(target.overlap(completion.text)) for completion in group.completions]
            self.total += sum(scores)
            self.num_completions += len(scores)
            self.num_prompts += 1

    def compute(self) -> dict[str, float]:
        """The mean score as {name: mean}, or an empty dict if no prompt has a ground-truth box."""
        if self.num_others:
            counted = int(self.num_prompts)
            warn_once(
                f"{self.name} covers {counted} of {counted + int(self.num_others)} prompts: the others do not have one "
                f"image and one box in the column {self.answer_column!r}."
            )
        return {self.name: (self.total / self.num_completions).item()} if self.num_completions else {}


class MeanIoU(BoxMetric):
    """`iou`: the mean intersection over union of the predicted and the ground-truth box.

    Use it for runs without the reward `IoU`, which logs the same mean under the same name.
    """

    @property
    def name(self) -> str:
        """The same name as the reward's."""
        return "iou"

    def score(self, overlap: float) -> float:
        """The IoU."""
        return overlap


class RECAccuracy(BoxMetric):
    """`rec_accuracy@<threshold>`: fraction of completions whose IoU with the ground-truth box is above the threshold.

    With a threshold of 0.5, this is the accuracy of referring expression comprehension (REC) on RefCOCO, as in VLM-R1's
    evaluation. A completion without a box is wrong.

    Args:
        threshold: IoU above which a box is correct; at least 0 and below 1.
        answer_column: As in `BoxMetric`.
        coordinates: As in `BoxMetric`.
        gold_coordinates: As in `BoxMetric`.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
    ) -> None:
        """Raises: ValueError if the threshold is out of range, or a coordinate convention is unknown."""
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, got {threshold}.")
        self.threshold = threshold

    @property
    def name(self) -> str:
        """The metric's name, which contains the threshold."""
        return f"rec_accuracy@{self.threshold:g}"

    def score(self, overlap: float) -> float:
        """1 above the threshold, else 0."""
        return float(overlap > self.threshold)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning only once.

    The metric cannot remember its warnings, because every validation creates new metric objects.
    """
    log.warning("%s", message)
