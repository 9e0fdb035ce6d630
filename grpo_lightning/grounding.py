"""How well a policy points at things in images: metrics for `Validation.metrics`."""

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
        """In pixels of the image in the data, what of it lies inside."""
        return as_box(self.frame.right([self.right]))

    def answered(self, text: str) -> Box | None:
        """The last box of a completion likewise; None if it has none, or none of it lies inside."""
        found = last_box(text)
        given = self.frame.given([found])
        return None if found is None or not (given[0, 2:] > given[0, :2]).all() else as_box(given)

    def overlap(self, text: str) -> float:
        """IoU of a completion's last box and the right one; 0 without a box."""
        return iou(self.frame.given([last_box(text)]), self.frame.right([self.right])).item()


def as_box(boxes: Tensor) -> Box:
    """The first of some boxes, as numbers."""
    x1, y1, x2, y2 = boxes[0].tolist()
    return x1, y1, x2, y2


def target_of(
    group: Group, answer_column: str, coordinates: GivenCoordinates = "auto", gold: GoldCoordinates = "original"
) -> Target | None:
    """The box that a prompt asks for; None if it has not one image, or no box in that column.

    Args:
        group: The prompt and its completions.
        answer_column: The column with the right box.
        coordinates: What answers are in, as of the reward `IoU`.
        gold: What the data are in, likewise.
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
    """The mean of a number over the completions of all prompts that ask for a box, of all ranks.

    Such a prompt has one image, and one box in `answer_column`. Others are not counted, which is said. A completion
    without a box is wrong, never left out.

    Args:
        answer_column: The column with the right box.
        coordinates: What answers are in, as of the reward `IoU`: "auto" is what the policy's family writes.
        gold_coordinates: What the data are in: "original" pixels or "norm1000".
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
        """What its number is called in logs."""

    @abstractmethod
    def score(self, overlap: float) -> float:
        """The number of a completion whose box overlaps the right one so much (IoU)."""

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
        """The mean by its name; nothing where no prompt asks for a box."""
        if self.num_others:
            counted = int(self.num_prompts)
            say_once(
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
        """One word."""
        return "iou"

    def score(self, overlap: float) -> float:
        """The overlap."""
        return overlap


class RECAccuracy(BoxMetric):
    """`rec_accuracy@0.5`: the share of completions whose box overlaps the right one by more than half (IoU).

    The accuracy of referring expression comprehension (RefCOCO); VLM-R1's evaluation counts likewise: above the
    threshold, not at it, and a missing box is wrong.

    Args:
        threshold: Of the IoU, at least 0 and below 1.
        answer_column: As of `BoxMetric`.
        coordinates: As of `BoxMetric`.
        gold_coordinates: As of `BoxMetric`.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
    ) -> None:
        """Raises: ValueError if the threshold or a convention is none."""
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
def say_once(message: str) -> None:
    """Log a message the first time: there is a metric for every validation and every kind of completions."""
    log.warning("%s", message)
