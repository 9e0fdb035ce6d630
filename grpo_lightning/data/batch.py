"""PromptBatch: the prompts of a training batch, and the conversion of other dataloaders' batches to a `PromptBatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import refuse_media, to_prompt
from grpo_lightning.data.templates import PromptTemplate


class PromptBatch:
    """This rank's prompts of one cycle (the micro-steps that train on one rollout), and the current micro-step."""

    def __init__(
        self, prompts: list[Prompt], cycle: int = 1, position: int = 0, *, is_from_source: bool = False
    ) -> None:
        self.prompts = prompts
        self.cycle = cycle
        self.position = position
        self.is_from_source = is_from_source

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def to(self, device: torch.device | str) -> PromptBatch:
        """Return the batch itself."""
        return self


class LaterBatch(PromptBatch):
    """A batch whose prompts are taken from the dataset of a `PromptSource` only when they are first used.

    If a loader has no length, Lightning fetches the next batch before it trains on the current batch. Dynamic sampling
    may then still take further prompts for the current rollout (`PromptSource.more`). In addition, a checkpoint saved
    at that time must not count the prompts of the next batch as used.
    """

    def __init__(self, cycle: int, take: Callable[[], tuple[list[Prompt], int]]) -> None:
        self.cycle = cycle
        self.is_from_source = True
        self._take = take
        self._contents: tuple[list[Prompt], int] | None = None

    def use(self) -> tuple[list[Prompt], int]:
        """Read the prompts at the first call. Returns: the prompts, and the current micro-step, counted from 0."""
        if self._contents is None:
            self._contents = self._take()
        return self._contents

    @property
    def prompts(self) -> list[Prompt]:  # type: ignore[override]
        """The prompts, read at first use."""
        return self.use()[0]

    @property
    def position(self) -> int:  # type: ignore[override]
        """The micro-step of the cycle."""
        return self.use()[1]


def as_prompt(
    row: Prompt | Mapping[str, Any] | str,
    index: int = -1,
    template: PromptTemplate | None = None,
    where: str = "",
    remedy: str = "Pass the dataset itself, not batches of it.",
) -> Prompt:
    """Convert an item of a dataset (a `Prompt`, a text, or a row with a prompt column) to a prompt.

    A `Prompt` is returned unchanged, except that it gets `index` if it has no index.

    Raises:
        TypeError: If the item is not a `Prompt`, a text or a row.
        ValueError: If a row has no valid prompt, or has video or audio.
    """
    where = where or (f"row {index + 1}" if index >= 0 else "the row")
    if isinstance(row, Prompt):
        return replace(row, index=index) if row.index < 0 <= index else row
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise TypeError(
            f"{where} must be a prompt: a text, a row with a prompt column or a Prompt, got {type(row).__name__} "
            f"({row!r:.80}). {remedy}"
        )
    prompt = to_prompt(row, where=where, index=index, template=template)
    refuse_media(prompt, where)
    return prompt


WRAP = "Wrap the data in grpo_lightning.PromptSource, or give the DataLoader `collate_fn=list`."
"""Remedy in errors about batches that are not prompts."""


def as_prompt_batch(batch: Any) -> PromptBatch:
    """Convert a batch of any dataloader to a `PromptBatch`. A `PromptBatch` is returned unchanged.

    Apart from a `PromptBatch`, a batch has one of two forms:

    - A list. Each item is either a `Prompt`, or a text, or a row.
    - A mapping of columns. Torch's default collate function makes such mappings.

    A `Prompt` in a list keeps its index. The other prompts have no index.

    Raises:
        TypeError: If the batch has another form, such as a single row.
        TypeError: If a column of the mapping holds messages, lists (boxes, images) or mappings.
        TypeError, ValueError: As in `as_prompt`.
    """
    if isinstance(batch, PromptBatch):
        return batch
    # A mapping with a string value is one row: read as columns, the string would be split into letters.
    if isinstance(batch, Mapping) and not any(isinstance(value, str) for value in batch.values()):
        batch = _rows_of_columns(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        where = "row {} of the batch"
        return PromptBatch(
            [as_prompt(row, where=where.format(number), remedy=WRAP) for number, row in enumerate(batch, 1)]
        )
    raise TypeError(
        "A batch of the data loader must be prompts (a list of texts or rows, or a PromptBatch), got "
        f"{type(batch).__name__}. {WRAP}"
    )


def _rows_of_columns(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Invert torch's default collate function: convert columns back to rows.

    Raises:
        TypeError: If a column holds messages, lists (boxes, images) or mappings.
    """
    for name, values in batch.items():
        nested = [values] if isinstance(values, Mapping) else values
        is_tensor = isinstance(nested, torch.Tensor)  # the rows' numbers or tensors, stacked
        if not is_tensor and any(isinstance(value, Mapping | list | tuple | torch.Tensor) for value in nested):
            raise TypeError(
                f"Column {name!r} of the batch holds lists, messages or mappings, which torch's default collate mixes "
                "up between rows. Give the DataLoader `collate_fn=list`, or wrap the data in "
                "grpo_lightning.PromptSource."
            )
    columns = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
