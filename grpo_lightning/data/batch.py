"""A batch of prompts, made of whatever a loader yields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import refuse_media, to_prompt
from grpo_lightning.data.templates import PromptTemplate


class PromptBatch:
    """One cycle's prompts on this rank, and which micro-step of the cycle this is.

    Args:
        prompts: The prompts.
        cycle: Micro-steps that the loader gives these prompts for.
        position: This one among them.
        is_from_source: True if a `PromptSource` made it.
    """

    def __init__(
        self, prompts: list[Prompt], cycle: int = 1, position: int = 0, *, is_from_source: bool = False
    ) -> None:
        self.prompts = prompts
        self.cycle = cycle
        self.position = position
        self.is_from_source = is_from_source

    def __len__(self) -> int:
        """Prompts."""
        return len(self.prompts)

    def to(self, device: torch.device | str) -> PromptBatch:
        """Itself: prompts become tensors only after tokenization."""
        return self


class LaterBatch(PromptBatch):
    """A batch of a `PromptSource` whose prompts are taken when it is used.

    Lightning asks a loader without length for a batch ahead: what that one will be is not known yet (`more` may use
    prompts up), and a checkpoint taken meanwhile must not count it.
    """

    def __init__(self, cycle: int, take: Callable[[], tuple[list[Prompt], int]]) -> None:
        self.cycle = cycle
        self.is_from_source = True
        self._take = take
        self._taken: tuple[list[Prompt], int] | None = None

    def use(self) -> tuple[list[Prompt], int]:
        """Take the prompts, once. Returns: them and the position."""
        if self._taken is None:
            self._taken = self._take()
        return self._taken

    @property
    def prompts(self) -> list[Prompt]:  # type: ignore[override]
        """The prompts, taken now if they were not."""
        return self.use()[0]

    @property
    def position(self) -> int:  # type: ignore[override]
        """The micro-step of the cycle."""
        return self.use()[1]


def as_prompt(
    row: Prompt | Mapping[str, Any] | str, index: int = -1, template: PromptTemplate | None = None, where: str = ""
) -> Prompt:
    """A prompt from whatever a data set yields: a Prompt, a text, or a row with a prompt column.

    Args:
        row: A `Prompt` stays as it is, but for an index if it has none.
        index: Its position in the data set.
        template: What is put around the text of a row.
        where: What to call the row in errors; by default its number, from 1.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is a row without a prompt, or with an image.
    """
    where = where or (f"row {index + 1}" if index >= 0 else "the row")
    if isinstance(row, Prompt):
        return replace(row, index=index) if row.index < 0 <= index else row
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise TypeError(
            f"{where} must be a prompt: a text, a row with a prompt column or a Prompt, got {type(row).__name__} "
            f"({row!r:.80}). Give the data set itself, not batches of it: the PromptSource makes them."
        )
    prompt = to_prompt(row, where=where, index=index, template=template)
    refuse_media(prompt, where)
    return prompt


def as_prompt_batch(batch: Any) -> PromptBatch:
    """A prompt batch from whatever a loader yielded.

    Also takes lists of rows, and the columns torch's default collate makes of them. The loader does not say where in
    the data set its rows are: the prompts have no index.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(batch, PromptBatch):
        return batch
    # A mapping with a text in it is one row: taken as columns, it would be cut into letters.
    if isinstance(batch, Mapping) and not any(isinstance(value, str) for value in batch.values()):
        batch = _rows_of_columns(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return PromptBatch([as_prompt(row, where=f"row {number} of the batch") for number, row in enumerate(batch, 1)])
    raise TypeError(
        f"A training batch must be prompts (a list of texts or rows, or a PromptBatch), got {type(batch).__name__}. "
        "Wrap the data in grpo_lightning.PromptSource, or give the DataLoader `collate_fn=list`."
    )


def _rows_of_columns(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that torch's default collate made columns of.

    Raises:
        TypeError: If a column holds messages, lists (boxes, images) or mappings, which the collate mixed up between the
            rows: of two boxes it makes four pairs.
    """
    for name, values in batch.items():
        nested = [values] if isinstance(values, Mapping) else values
        is_tensor = isinstance(nested, torch.Tensor)  # of numbers, or of what every row had, stacked
        if not is_tensor and any(isinstance(value, Mapping | list | tuple | torch.Tensor) for value in nested):
            raise TypeError(
                f"Column {name!r} of the batch holds lists, messages or mappings, which torch's default collate mixes "
                "up between rows. Give the DataLoader `collate_fn=list`, or wrap the data in "
                "grpo_lightning.PromptSource."
            )
    columns = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
