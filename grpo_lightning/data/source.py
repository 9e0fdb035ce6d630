"""The prompt source: the loader that gives every cycle its prompts.

A cycle is all the micro-steps one rollout is trained for. The source yields the cycle's prompts as often as the cycle
has micro-steps, so that Lightning counts batches, accumulates and checkpoints as it always does. It is no DataLoader on
purpose: Lightning would replace a DataLoader's sampler by a shuffling one and scatter the repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grpo_lightning.data.formats import to_prompt
from grpo_lightning.seeding import derived_seed
from grpo_lightning.types import Prompt


class PromptBatch:
    """One cycle's prompts on this rank, and which micro-step of the cycle this is."""

    def __init__(self, prompts: list[Prompt], cycle: int = 1, position: int = 0) -> None:
        self.prompts = prompts
        self.cycle = cycle
        self.position = position

    def __len__(self) -> int:
        """Prompts."""
        return len(self.prompts)

    def to(self, device: torch.device | str) -> PromptBatch:
        """Itself: prompts become tensors only after tokenization."""
        return self


class PromptSource:
    """Yields prompts, cycle by cycle, in a seeded order.

    Every epoch is one pass: the last cycle may have fewer prompts, none is dropped.

    Args:
        prompts: The data set: prompts, or rows with a prompt column.
        batch_size: Prompts per rank and rollout.
        cycle: Micro-steps per rollout, `GRPOLightningModule.cycle_length(accumulate_grad_batches)`.
        shuffle: A new order every epoch; False keeps that of the data.
        seed: Of the order.
        rank: This process, of `world_size`; each takes its share of every cycle's prompts.
        world_size: Processes.

    Raises:
        ValueError: If there is no prompt or a size is below 1.
    """

    batch_sampler = None  # Lightning looks for it on everything that has a `sampler`

    def __init__(
        self,
        prompts: Sequence[Prompt | Mapping[str, Any]],
        batch_size: int,
        *,
        cycle: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not len(prompts):
            raise ValueError("The prompt source has no prompts: the data set is empty.")
        for name, value in {"batch_size": batch_size, "cycle": cycle, "world_size": world_size}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.prompts = [as_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        self.batch_size, self.cycle = batch_size, cycle
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.prompts_used = 0  # of this epoch, over all ranks; the running cycle's are used
        self.cycle_start = 0  # where in the order the running cycle's prompts begin
        self.position = 0  # micro-steps of the running cycle that were yielded; 0 between cycles
        self.resume_from: dict[str, int] | None = None

    def __len__(self) -> int:
        """Micro-steps of an epoch."""
        return -(-len(self.prompts) // (self.batch_size * self.world_size)) * self.cycle

    @property
    def sampler(self) -> PromptSource:
        """Itself: Lightning calls `sampler.set_epoch` when an epoch begins."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next."""
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """Prompt numbers in the order of an epoch."""
        if not self.shuffle:
            return list(range(len(self.prompts)))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.prompts), generator=generator).tolist()

    def __iter__(self) -> Iterator[PromptBatch]:
        """One epoch, or what is left of it after a resume."""
        resume, self.resume_from = self.resume_from, None
        if resume is None or resume["epoch"] != self.epoch:
            resume = {"prompts_used": 0, "cycle_start": 0, "position": 0}
        self.prompts_used, self.cycle_start, self.position = (
            resume[name] for name in ("prompts_used", "cycle_start", "position")
        )
        order = self.order(self.epoch)
        while self.position or self.prompts_used < len(order):
            if not self.position:
                self.cycle_start = self.prompts_used
                self.take(self.batch_size)
            prompts = self.share(order, self.cycle_start, self.batch_size)
            for position in range(self.position, self.cycle):
                self.position = (position + 1) % self.cycle
                yield PromptBatch(prompts, self.cycle, position)

    def take(self, size: int) -> None:
        """Mark the next `size` prompts per rank as used."""
        self.prompts_used = min(self.prompts_used + size * self.world_size, len(self.prompts))

    def share(self, order: Sequence[int], start: int, size: int) -> list[Prompt]:
        """This rank's part of the `size` prompts per rank that begin at `start`."""
        block = order[start : start + size * self.world_size]
        return [self.prompts[i] for i in block[self.rank :: self.world_size]]

    def upcoming(self, size: int) -> list[Prompt]:
        """The next `size` prompts of this rank in this epoch, fewer at its end; they stay unused."""
        return self.share(self.order(self.epoch), self.prompts_used, size)

    def more(self, size: int) -> list[Prompt]:
        """Use up to `size` further prompts of this rank now: they do not come again in this epoch.

        Every rank must call it with the same `size`, as all draw from one order.
        """
        prompts = self.upcoming(size)
        self.take(size)
        return prompts

    def state_dict(self) -> dict[str, int]:
        """The position in the data: the same on every rank."""
        if self.resume_from is not None:
            return dict(self.resume_from)
        is_epoch_over = self.position == 0 and self.prompts_used == len(self.prompts)
        return {
            "epoch": self.epoch + is_epoch_over,
            "prompts_used": 0 if is_epoch_over else self.prompts_used,
            "cycle_start": 0 if is_epoch_over else self.cycle_start,
            "position": self.position,
            "num_prompts": len(self.prompts),
            "seed": self.seed,
            "cycle": self.cycle,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: If the data or the cycle are not those of the checkpoint.
        """
        now = self.state_dict()
        changed = [
            f"{name} was {state[name]}, is {now[name]}"
            for name in ("num_prompts", "seed", "cycle")
            if state[name] != now[name]
        ]
        if changed:
            raise ValueError(
                f"The checkpoint was taken with other data or settings: {'; '.join(changed)}. Resume with the original "
                "ones, or start a new run from the checkpoint's weights."
            )
        self.resume_from = dict(state)


def as_prompt(row: Prompt | Mapping[str, Any] | str, index: int = -1) -> Prompt:
    """A prompt from whatever a data set yields: a Prompt, a text, or a row with a prompt column."""
    if isinstance(row, Prompt):
        return row
    if isinstance(row, str):
        return Prompt(row, index=index)
    return to_prompt(row, where=f"row {index}", index=index)


def as_prompt_batch(batch: Any) -> PromptBatch:
    """What a loader yielded, as a prompt batch.

    Also takes lists of rows, and the columns torch's default collate makes of them.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(batch, PromptBatch):
        return batch
    # A mapping with a text in it is one row: taken as columns, it would be cut into letters.
    if isinstance(batch, Mapping) and not any(isinstance(value, str) for value in batch.values()):
        columns = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        batch = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return PromptBatch([as_prompt(row, index) for index, row in enumerate(batch)])
    raise TypeError(
        f"A training batch must be prompts (a list of texts or rows, or a PromptBatch), got {type(batch).__name__}. "
        "Wrap the data in grpo_lightning.PromptSource, or give the DataLoader `collate_fn=list`."
    )
