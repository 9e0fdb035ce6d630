"""A data set of known length: prompts by number, in the order of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import log_prompt_columns


class LazyPrompts(Sequence[Prompt]):
    """The prompts of a data set that is read when they are asked for (a `datasets.Dataset`, a torch `Dataset`)."""

    def __init__(self, rows: Any, convert: Callable[[Any, int], Prompt]) -> None:
        self.rows = rows
        self.convert = convert
        self.logged_columns: set[str] = set()
        self._heads: dict[int, list[Prompt]] = {}

    def __len__(self) -> int:
        """Prompts."""
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """One prompt, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self.convert(self.rows[number], number)

    def head(self, size: int = 64) -> list[Prompt]:
        """The first prompts: what can be known of the data without reading all of it. Read once."""
        if size not in self._heads:
            self._heads[size] = self[:size]
            log_prompt_columns(self._heads[size], self.logged_columns)
        return list(self._heads[size])


class ListedOrder:
    """One pass over prompts of known number: blocks of their numbers by position."""

    def __init__(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        self.prompts = prompts
        self.numbers: Sequence[int] = range(len(prompts))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.numbers = torch.randperm(len(prompts), generator=generator).tolist()

    def take(self, start: int, size: int) -> tuple[Sequence[int], int]:
        """Up to `size` numbers from position `start` on, fewer at the end, and the position after them."""
        return self.numbers[start : start + size], min(start + size, len(self.numbers))

    def share(self, block: Sequence[int]) -> list[Prompt]:
        """The prompts of a part of a block: only these are read."""
        return [self.prompts[number] for number in block]
