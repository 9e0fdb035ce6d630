"""Rewards for pointing at one thing in an image by a box (referring expressions, VLM-R1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_lightning.core.types import Box
from grpo_lightning.functional.boxes import iou
from grpo_lightning.rewards.answers import between_answer_tags
from grpo_lightning.rewards.base import Content, Reward, completion_text
from grpo_lightning.rewards.boxes.frame import BoxFrame, BoxReward, GivenCoordinates, GoldCoordinates
from grpo_lightning.rewards.boxes.parsing import boxes_in, has_json_box, last_box, right_box
from grpo_lightning.rewards.text import Format


class IoU(BoxReward):
    """Intersection over union of the answer's box and the right one.

    The box of a completion is the last `[x1, y1, x2, y2]` in its last `<answer>...</answer>`, else after `</think>`,
    else in all of it; whole numbers or not, inside JSON or bare. It is mapped to pixels of the image in the data and
    clipped to the image. No box, an inverted or empty one: 0.

    VLM-R1's `iou_reward` counts overlaps of at most one unit as 0, reads whole numbers only and the first box instead
    of the last, maps by patches of 14 pixels whatever the family, and makes every error a 0.

    Args:
        answer_column: The data column with the right box: four numbers, a mapping with `bbox_2d`, or text with
            `[x1, y1, x2, y2]`. What of it lies outside the image is cut off. A row without is not scorable.
        coordinates: As in `BoxReward`.
        gold_coordinates: As in `BoxReward`.
        threshold: None gives the IoU itself; a number gives 1 above it and 0 otherwise.
    """

    def __init__(
        self,
        answer_column: str = "solution",
        *,
        coordinates: GivenCoordinates = "auto",
        gold_coordinates: GoldCoordinates = "original",
        threshold: float | None = None,
    ) -> None:
        """Raises: ValueError if a convention is unknown, or the threshold is not in [0, 1)."""
        super().__init__(answer_column, coordinates=coordinates, gold_coordinates=gold_coordinates)
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"threshold must be None or at least 0 and below 1, got {threshold}.")
        self.threshold = threshold

    @property
    def name(self) -> str:
        """One word."""
        return "iou"

    def right(self, answer: Any) -> Box | None:
        """The row's box. Raises: ValueError if it is none."""
        return right_box(answer, self.answer_column)

    def boxes_of(self, right: Box) -> Sequence[Box]:
        """It alone."""
        return [right]

    def given(self, text: str) -> Box | None:
        """The answer's box."""
        return last_box(text)

    def compare(self, given: Box | None, right: Box, frame: BoxFrame) -> float:
        """The overlap, or whether it is enough."""
        overlap = iou(frame.given([given]), frame.right([right])).item()
        return overlap if self.threshold is None else float(overlap > self.threshold)


class FormatRec(Reward):
    """1 if the completion is `<think>...</think><answer>...</answer>` and the answer has a box of four numbers, else 0.

    Whitespace may stand around and between the two parts, and no other text; each tag is there exactly once. VLM-R1's
    `format_reward_rec` is a pattern that takes minutes for a text of some thousand characters, refuses decimals,
    negatives and `[ 1`, and lets pass text around the tags, invalid JSON, and braces that straddle `</answer>`.

    Args:
        needs_json: True if the answer must be JSON, alone or in ```json fences: an object with a box, or a list with
            one (VLM-R1 for Qwen). False if `[x1, y1, x2, y2]` anywhere in it is enough (VLM-R1 for InternVL).
        prompt_opens_first: As in `Format`.
    """

    def __init__(self, *, needs_json: bool = True, prompt_opens_first: bool = False) -> None:
        self.needs_json = needs_json
        self._tags = Format(prompt_opens_first=prompt_opens_first)

    def __call__(self, completions: Sequence[Content], **_: Any) -> list[float | None]:
        """Check. Args: completions: [B]. Returns: [B], each 0 or 1."""
        tagged = self._tags(completions=completions)
        texts = [completion_text(completion) for completion in completions]
        return [float(kept == 1 and self._has_box(text)) for kept, text in zip(tagged, texts, strict=True)]

    def _has_box(self, text: str) -> bool:
        """Whether the answer has a box."""
        answer = between_answer_tags(text) or ""
        return has_json_box(answer) if self.needs_json else any(boxes_in(answer))
