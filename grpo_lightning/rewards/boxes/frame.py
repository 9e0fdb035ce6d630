"""Base class of box rewards."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from grpo_lightning.core.types import Box, ImageView
from grpo_lightning.functional.boxes import clip, is_share
from grpo_lightning.rewards.base import Content, ImageSize, Reward, completion_text

GivenCoordinates = Literal["auto", "original", "resized", "norm1000"]
GoldCoordinates = Literal["original", "norm1000"]

Scale = tuple[float, float]
"""Size of one unit of x and of y, in pixels of the image in the data."""


class BoxFrame(NamedTuple):
    """Converts answer boxes and ground-truth boxes to the same units."""

    given_scale: Scale
    right_scale: Scale
    size: tuple[float, float] | None
    """Width and height of the image; None if unknown."""

    def answer_boxes(self, boxes: Sequence[Box | None]) -> Tensor:
        """Convert answer boxes to [n, 4] float64, clipped to the image; an empty box for `None`."""
        return self._place([box or (0.0, 0.0, 0.0, 0.0) for box in boxes], self.given_scale)

    def gold_boxes(self, boxes: Sequence[Box]) -> Tensor:
        """Convert ground-truth boxes to [n, 4] float64, clipped to the image. Raises: ValueError of `check_inside`."""
        for box in boxes:
            check_inside(box, self.right_scale, self.size)
        return self._place(boxes, self.right_scale)

    def _place(self, boxes: Sequence[Box], scale: Scale) -> Tensor:
        """Scale boxes to the common units, and clip them to the image. Returns: [n, 4] float64."""
        placed = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4) * torch.tensor(scale * 2, dtype=torch.float64)
        return placed if self.size is None else clip(placed, *self.size)


class BoxReward(Reward):
    """Base class of box rewards, for prompts with at most one image.

    Args:
        answer_column: The data column with the ground-truth boxes. The reward does not apply to rows in which this
            column is None or an empty string.
        coordinates: Coordinate system of the boxes in answers. "auto" is the one that the policy's model family uses
            (`ImageView.coordinates`). "original" means pixels of the image in the data. "resized" means pixels of the
            image after the policy's preprocessing. "norm1000" means 0 to 1000 along each axis of the image.
        gold_coordinates: Coordinate system of the ground-truth boxes: "original" (pixels), or "norm1000" (VLM-R1's data
            for InternVL).
    """

    says_solved = True

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
    ) -> None:
        """Raises: ValueError if `coordinates` or `gold_coordinates` is unknown."""
        if coordinates not in get_args(GivenCoordinates):
            raise ValueError(
                f"coordinates must be one of {', '.join(get_args(GivenCoordinates))}, got {coordinates!r}."
            )
        if gold_coordinates not in get_args(GoldCoordinates):
            known = ", ".join(get_args(GoldCoordinates))
            raise ValueError(f"gold_coordinates must be one of {known}, got {gold_coordinates!r}.")
        self.answer_column = answer_column
        self.coordinates: GivenCoordinates = coordinates
        self.gold_coordinates: GoldCoordinates = gold_coordinates
        self.required_columns = (answer_column,)

    def __call__(
        self,
        completions: Sequence[Content],
        image_views: Sequence[Sequence[ImageView]] | None = None,
        log_metric: Any = None,
        log_extra: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score completions.

        The metric `reward/<name>/unreadable` is the fraction of answers that cannot be parsed. Such an answer is wrong,
        but `WeightedReward.on_error` does not apply. The log of completions gets a column `boxes` with the boxes of
        answer and ground truth, in pixels of the image in the data.

        Args:
            completions: [B].
            image_views: [B] the images of each prompt.
            log_metric: Logs a metric.
            log_extra: Logs a column of the log of completions.
            columns: [B] values of each data column.

        Returns:
            [B] in [0, 1], None where the reward does not apply to the row.

        Raises:
            ValueError: If a row's ground-truth boxes cannot be parsed, or lie outside its image.
            ValueError: If a row's prompt has several images, or has no image although the image size is needed.
        """
        answers = columns[self.answer_column]
        views: Sequence[Sequence[ImageView]] = [()] * len(completions) if image_views is None else image_views
        values: list[float | None] = []
        unreadable = []
        boxes: list[dict[str, list[list[float]]] | None] = []
        for completion, answer, images in zip(completions, answers, views, strict=True):
            right = self.right(answer)
            if right is None:
                values.append(None)
                boxes.append(None)
                continue
            given = self.parse_answer(completion_text(completion))
            unreadable.append(given is None)
            frame = frame_of(images, self.coordinates, self.gold_coordinates)
            values.append(self.compare(given, right, frame))
            if log_extra is not None:
                placed = {
                    "answer": frame.answer_boxes(self.given_boxes(given)),
                    "ground_truth": frame.gold_boxes(self.boxes_of(right)),
                }
                boxes.append({name: own.round(decimals=2).tolist() for name, own in placed.items()})
        if log_metric is not None and unreadable:
            log_metric(f"{self.name}/unreadable", sum(unreadable) / len(unreadable))
        if log_extra is not None and any(boxes):
            log_extra("boxes", boxes)
        return values

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check the ground-truth boxes, also against the image if its size is known. Raises: ValueError if invalid."""
        right = self.right(columns.get(self.answer_column))
        if right is None:
            return
        check_num_images(len(image_sizes), self.coordinates, self.gold_coordinates)
        scale, size = _right_units(image_sizes[0] if image_sizes else None, self.gold_coordinates)
        for box in self.boxes_of(right):
            check_inside(box, scale, size)

    @abstractmethod
    def right(self, answer: Any) -> Any:
        """Parse the ground truth of a row; None for a row without ground truth.

        Raises:
            ValueError: If the ground truth is invalid.
        """

    def boxes_of(self, right: Any) -> Sequence[Box]:
        """The boxes of a parsed ground truth, for `check_row` and the log of completions.

        By default, there are none, and `check_row` checks no boxes.
        """
        return ()

    def given_boxes(self, given: Any) -> Sequence[Box]:
        """The boxes of a parsed answer, for the log of completions. By default, there are none."""
        return ()

    @abstractmethod
    def parse_answer(self, text: str) -> Any:
        """Parse the answer of a completion; None if it cannot be parsed."""

    @abstractmethod
    def compare(self, given: Any, right: Any, frame: BoxFrame) -> float:
        """Return the score of an answer, from 0 to 1. If the answer could not be parsed, `given` is None."""


def frame_of(views: Sequence[ImageView], given: GivenCoordinates, right: GoldCoordinates) -> BoxFrame:
    """Make a prompt's `BoxFrame`.

    If the prompt has no image, "original" boxes are not clipped.

    Raises:
        ValueError: If the prompt has several images.
        ValueError: If the prompt has no image, and `given` differs from `right`.
    """
    check_num_images(len(views), given, right)
    if not views:
        return BoxFrame((1, 1), *_right_units(None, right))
    view = views[0]
    return BoxFrame(_scale(view, given), *_right_units((view.width, view.height), right))


def check_num_images(num_images: int, given: GivenCoordinates, right: GoldCoordinates) -> None:
    """Check that a prompt has at most one image, and exactly one image if the image size is needed.

    Raises: ValueError as in `frame_of`.
    """
    if num_images > 1:
        raise ValueError(
            f"Box rewards need prompts with one image, got {num_images}: it is unknown which one the boxes refer to. "
            "Score these rows with another reward (`rewards` of the dataset's entry)."
        )
    if not num_images and given != right:
        raise ValueError(
            f"coordinates {given!r} and gold_coordinates {right!r} need the size of an image, but the prompt has none: "
            "add an image, set both to the same value ('original' or 'norm1000'), or score the row with another reward."
        )


def check_inside(box: Box, scale: Scale, size: tuple[float, float] | None) -> None:
    """Check that a ground-truth box, in the units of the data, overlaps its image (`size` in pixels).

    Raises:
        ValueError: If the box lies completely outside the image, has no area, or ends within the first pixel (its
            coordinates are probably fractions from 0 to 1).
    """
    if size is not None and is_share(box, size):
        raise ValueError(
            f"The ground-truth box {list(box)} ends within the first pixel of its image, {size[0]:g} x {size[1]:g} "
            "pixels: if its coordinates are fractions from 0 to 1, multiply them by the image's width and height."
        )
    limits = size or (math.inf, math.inf)
    least = 0.0 if size else -math.inf
    across = min(box[2] * scale[0], limits[0]) - max(box[0] * scale[0], least)
    down = min(box[3] * scale[1], limits[1]) - max(box[1] * scale[1], least)
    # The area is checked too: the product of tiny sides may underflow to 0.
    if not (across > 0 and down > 0 and across * down > 0):
        if size is None:
            raise ValueError(f"The ground-truth box {list(box)} has no area: (x2 - x1) * (y2 - y1) must be above 0.")
        raise ValueError(
            f"The ground-truth box {list(box)} lies outside its image, {size[0]:g} x {size[1]:g} pixels: check that "
            "gold_coordinates matches the data."
        )


def _right_units(size: tuple[float, float] | None, right: GoldCoordinates) -> tuple[Scale, tuple[float, float] | None]:
    """The scale of ground-truth boxes, and the size to which they are clipped."""
    if right == "original":
        return (1, 1), size
    if size is None:
        return (1, 1), (1000, 1000)
    return (size[0] / 1000, size[1] / 1000), size


def _scale(view: ImageView, coordinates: GivenCoordinates) -> Scale:
    """The size of one unit, in pixels of the image in the data."""
    if coordinates == "original":
        return 1, 1
    return view.scale if coordinates == "auto" else dataclasses.replace(view, coordinates=coordinates).scale
