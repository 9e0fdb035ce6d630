"""Metrics of referring expression comprehension for `Validation.metrics`: how well a policy points at things."""

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
from grpo_lightning.rewards.boxes.parsing import last_box, right_box
from grpo_lightning.rewards.boxes.rewards import IoU
from grpo_lightning.training.evaluation import Evaluation

__all__ = ["MeanIoU", "RECAccuracy"]

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """The one box that a prompt asks for."""

    right: Box
    frame: BoxFrame

    @property
    def box(self) -> Box:
        """The right box in pixels of the image in the data, clipped to it."""
        return as_box(self.frame.right([self.right]))

    def answered(self, text: str) -> Box | None:
        """The last box of a completion, likewise; None if it has none, or it lies outside the image."""
        found = last_box(text)
        given = self.frame.given([found])
        return None if found is None or not (given[0, 2:] > given[0, :2]).all() else as_box(given)

    def overlap(self, text: str) -> float:
        """IoU of a completion's last box and the right one; 0 if it has no box."""
        return iou(self.frame.given([last_box(text)]), self.frame.right([self.right])).item()


def as_box(boxes: Tensor) -> Box:
    """The first of some boxes, as numbers."""
    x1, y1, x2, y2 = boxes[0].tolist()
    return x1, y1, x2, y2


def target_of(
    group: Group, answer_column: str, coordinates: GivenCoordinates = "auto", gold: GoldCoordinates = "original"
) -> Target | None:
    """The box that a prompt asks for; None if it does not have one image, and one box in that column.

    Args:
        group: The prompt and its completions.
        answer_column: The column with the right box.
        coordinates: The coordinates of answers, as in the reward `IoU`.
        gold: The coordinates of the data, likewise.
    """
    right = right_of(group.prompt, answer_column)
    return None if right is None else Target(right, frame_of(group.image_views, coordinates, gold))


def right_of(prompt: Prompt, answer_column: str) -> Box | None:
    """The right box of a prompt with one image; None of others, and of those that ask for something else."""
    if len(prompt.images) != 1:
        return None
    try:
        return right_box(prompt.columns.get(answer_column), answer_column)
    except ValueError:  # the answer to another kind of question; boxes were checked when the data were read
        return None


class BoxMetric(Metric, ABC):
    """The mean of a number over the completions of all prompts that ask for a box, over all ranks.

    Such a prompt has one image, and one box in `answer_column`. Others are not counted, with a warning. A completion
    without a box is wrong, never left out.

    Args:
        answer_column: The column with the right box.
        coordinates: The coordinates of answers, as in the reward `IoU`: "auto" are those of the policy's family.
        gold_coordinates: The coordinates of the data: "original" pixels or "norm1000".
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
        """Raises: ValueError if a convention is unknown."""
        super().__init__()
        IoU(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)  # checks them
        self.answer_column = answer_column
        self.coordinates: GivenCoordinates = coordinates
        self.gold_coordinates: GoldCoordinates = gold_coordinates
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")
        for name in ("num_completions", "num_prompts", "num_others"):
            self.add_state(name, default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its number in logs."""

    @abstractmethod
    def score(self, overlap: float) -> float:
        """The number of a completion, given the IoU of its box and the right one."""

    def update(self, evaluation: Evaluation) -> None:
        """Add an evaluation. Raises: ValueError if a right box lies outside its image."""
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
        """The mean by its name; empty if no prompt asks for a box."""
        if self.num_others:
            counted = int(self.num_prompts)
            warn_once(
                f"{self.name} counts {counted} of {counted + int(self.num_others)} prompts: the others do not have one "
                f"image, and one box in the column {self.answer_column!r}."
            )
        return {self.name: (self.total / self.num_completions).item()} if self.num_completions else {}


class MeanIoU(BoxMetric):
    """`iou`: the mean intersection over union of the answered box and the right one.

    The reward `IoU` has the same mean, under the same name: this is for runs without it.
    """

    @property
    def name(self) -> str:
        """As that of the reward."""
        return "iou"

    def score(self, overlap: float) -> float:
        """The IoU."""
        return overlap


class RECAccuracy(BoxMetric):
    """`rec_accuracy@0.5`: the share of completions whose box overlaps the right one by more than half (IoU).

    The accuracy of referring expression comprehension (RefCOCO); VLM-R1's evaluation counts likewise: above the
    threshold, not at it, and a missing box is wrong.

    Args:
        threshold: IoU above which a box is right, at least 0 and below 1.
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
        """Raises: ValueError if the threshold is out of range, or a convention is unknown."""
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, got {threshold}.")
        self.threshold = threshold

    @property
    def name(self) -> str:
        """With the threshold."""
        return f"rec_accuracy@{self.threshold:g}"

    def score(self, overlap: float) -> float:
        """1 above the threshold, else 0."""
        return float(overlap > self.threshold)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time: there is a metric for every validation and every kind of completions."""
    log.warning("%s", message)
