"""Split a rollout into the micro-batches of its optimizer steps.

A rollout of N groups becomes `updates x accumulate` micro-batches. The order of the data decides which completions
share an update. Which of them share a micro-batch affects only memory and padding, not the gradient, because the loss
is divided by the counts of the entire update.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, Group, MicroBatch, PromptVision, VisionInputs
from grpo_lightning.data.batch import PromptBatch
from grpo_lightning.objective import StepCounts
from grpo_lightning.policy.hf import left_pad

Item = TypeVar("Item")


@dataclass
class CompletionRow:
    """One completion of a micro-batch."""

    group: int
    """Index of its group in the rollout."""

    prompt_ids: list[int]
    completion: Completion
    advantage: float

    number: int = -1
    """Index of the completion in its group."""

    @property
    def length(self) -> int:
        """Number of completion tokens."""
        return len(self.completion.token_ids)

    @property
    def mask(self) -> list[bool]:
        """[T] True where trained on."""
        return [True] * self.length if self.completion.mask is None else self.completion.mask


@dataclass
class Turn:
    """One micro-step of a cycle."""

    batch: MicroBatch
    counts: StepCounts
    """The counts of the update this micro-batch belongs to."""

    closes_update: bool
    """True for the last micro-batch before the optimizer steps."""

    opens_update: bool
    """True for the first micro-batch of the update."""

    number: int
    """Index of the update in its cycle."""

    update: list[MicroBatch]
    """All micro-batches of the update, this one among them."""


@dataclass(frozen=True)
class CycleShape:
    """Number of micro-steps, updates and epochs over each rollout."""

    accumulate_grad_batches: int
    """Micro-batches per update."""

    updates_per_rollout: int
    """Optimizer steps that a rollout is split into."""

    num_iterations: int
    """Epochs over a rollout."""

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of a cycle."""
        return self.accumulate_grad_batches * self.updates_per_rollout * self.num_iterations

    def wrong_loader(self, given: int, *, is_from_source: bool) -> str:
        """Error message for a loader that yields every batch `given` times."""
        cycle = f"cycle=module.cycle_length({self.accumulate_grad_batches})"
        return (
            f"A rollout is trained for {self.num_micro_steps} micro-steps (accumulate_grad_batches "
            f"{self.accumulate_grad_batches} x updates_per_rollout {self.updates_per_rollout} x num_iterations "
            f"{self.num_iterations}), but the training loader yields every batch {given} time(s). "
            + (
                f"Give the PromptSource {cycle}."
                if is_from_source
                else f"Wrap the data: grpo_lightning.PromptSource(data, batch_size=..., {cycle})."
            )
        )

    def check_position(self, pending: Cycle | None, batch: PromptBatch, position: int) -> None:
        """Check that a micro-step can be trained.

        Args:
            pending: The current cycle, if there is one.
            batch: Batch of the loader.
            position: The trainer's index of the micro-step in its cycle.

        Raises:
            RuntimeError: If the loader does not repeat the prompts of a cycle or is at another position, or the
                cycle's rollout is missing.
        """
        cycle = self.num_micro_steps
        if batch.cycle != cycle:
            raise RuntimeError(self.wrong_loader(batch.cycle, is_from_source=batch.is_from_source))
        if batch.position != position:
            raise RuntimeError(
                f"The loader is at micro-step {batch.position} of {cycle}, the trainer at {position}: the checkpoint "
                "was saved inside an optimizer step, when the run was interrupted. Resume from an earlier checkpoint, "
                "or start a new run from its weights."
            )
        if position and (pending is None or pending.position != position):
            raise RuntimeError(
                f"Micro-step {position} of {cycle} needs the rollout of its cycle, which is missing: the checkpoint "
                "was saved inside a cycle, without it. Resume from one saved at the end of a cycle, or start a new run "
                "from its weights."
            )


class Cycle:
    """The micro-batches of one rollout, and the position of training in them.

    A cycle is `num_iterations` epochs over `updates x accumulate` micro-batches.

    Args:
        micro_batches: updates x accumulate micro-batches, in training order.
        counts: One per update.
        num_iterations: Epochs over the rollout.
        position: Micro-steps done.
    """

    def __init__(
        self, micro_batches: list[MicroBatch], counts: list[StepCounts], num_iterations: int, position: int = 0
    ) -> None:
        self.micro_batches = micro_batches
        self.counts = counts
        self.num_iterations = num_iterations
        self.position = position

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""
        return len(self.micro_batches) // len(self.counts)

    @property
    def is_finished(self) -> bool:
        """True once every micro-batch has been trained on `num_iterations` times."""
        return self.position == len(self.micro_batches) * self.num_iterations

    def next(self) -> Turn:
        """Advance to the next micro-step."""
        index, number = self.position % len(self.micro_batches), self.position // self.accumulate
        first = index - index % self.accumulate
        self.position += 1
        return Turn(
            batch=self.micro_batches[index],
            counts=self.counts[index // self.accumulate],
            closes_update=self.position % self.accumulate == 0,
            opens_update=index == first,
            number=number,
            update=self.micro_batches[first : first + self.accumulate],
        )

    def to(self, device: torch.device | str) -> Cycle:
        """Move its micro-batches to `device`, in place."""
        self.micro_batches = [batch.to(device) for batch in self.micro_batches]
        return self

    def state_dict(self) -> dict[str, Any]:
        """State to resume inside the cycle: ids, masks, log-probs and advantages, without images.

        Images are read again (`give_images`).
        """
        return {
            "micro_batches": [vars(replace(batch.to("cpu"), vision=None)) for batch in self.micro_batches],
            "counts": [tuple(counts) for counts in self.counts],
            "num_iterations": self.num_iterations,
            "position": self.position,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Cycle:
        """Restore a cycle on the CPU from its `state_dict`."""
        return cls(
            [MicroBatch(**batch) for batch in state["micro_batches"]],
            [StepCounts(*counts) for counts in state["counts"]],
            state["num_iterations"],
            state["position"],
        )


@dataclass(frozen=True)
class Share:
    """This rank's share of a global rollout: its i-th group is number `i * world_size + rank` of `num_groups`."""

    num_groups: int
    rank: int = 0
    world_size: int = 1


def plan_micro_batches(
    groups: Sequence[Group],
    advantages: Tensor,
    *,
    updates: int,
    accumulate: int,
    pad_id: int,
    skip_zero_advantages: bool,
    share: Share | None = None,
) -> tuple[list[MicroBatch], list[StepCounts]]:
    """Split a rollout into `updates x accumulate` micro-batches.

    Args:
        groups: N groups of G completions.
        advantages: [N, G].
        updates: Optimizer steps that the rollout is split into.
        accumulate: Micro-batches per update.
        pad_id: Any token id.
        skip_zero_advantages: Leave completions with advantage 0 out of the micro-batches; the counts include them.
        share: This rank's share of the rollout of all ranks; None if the groups are the complete rollout.

    Returns:
        The micro-batches in order, and this rank's counts of every update.
    """
    rows = [
        [
            CompletionRow(index, group.prompt_ids, completion, advantage, number)
            for number, (completion, advantage) in enumerate(zip(group.completions, group_advantages, strict=True))
        ]
        for index, (group, group_advantages) in enumerate(zip(groups, advantages.tolist(), strict=True))
    ]
    micro_batches, counts = [], []
    for update in split_updates(rows, updates, share or Share(len(groups))):
        trained = [sum(row.mask) for row in update]
        counts.append(StepCounts(sum(trained), sum(tokens > 0 for tokens in trained)))
        kept = [
            row
            for row, tokens in zip(update, trained, strict=True)
            if tokens and (row.advantage != 0 or not skip_zero_advantages)  # no token, no gradient
        ]
        parts = split_update(kept, accumulate)
        batches = [collate(part, pad_id) if part else idle_micro_batch(rows, pad_id) for part in parts]
        micro_batches += batches
    return micro_batches, counts


def plan_over_ranks(
    groups: Sequence[Group],
    advantages: Tensor,
    *,
    num_chunks: Callable[[MicroBatch], int],
    **settings: Any,
) -> tuple[list[MicroBatch], list[StepCounts]]:
    """Split the rollout of all ranks into micro-batches. Collective: every rank gets its own.

    Args:
        groups: N groups of G completions, of this rank; may be empty.
        advantages: [N, G].
        num_chunks: Returns the number of forward passes that a micro-batch needs.
        **settings: Arguments of `plan_micro_batches`.

    Returns:
        The micro-batches in order, with the maximum number of forward passes over all ranks (gathering sharded weights
        is collective), and the counts of every update over all ranks.
    """
    num_groups = int(ranks.sum_over_ranks(torch.tensor(len(groups))))
    share = Share(num_groups, ranks.rank(), ranks.world_size())
    micro_batches, counts = plan_micro_batches(groups, advantages, share=share, **settings)
    most = ranks.max_over_ranks(torch.tensor([num_chunks(batch) for batch in micro_batches])).tolist()
    for batch, number in zip(micro_batches, most, strict=True):
        batch.num_chunks = number
    return micro_batches, [StepCounts(*of_all) for of_all in ranks.sum_over_ranks(torch.tensor(counts)).tolist()]


def give_images(micro_batches: Sequence[MicroBatch], vision: VisionInputs | None) -> None:
    """Add the images of their prompts to micro-batches.

    Args:
        micro_batches: Micro-batches of one rollout.
        vision: Vision inputs of all groups of the rollout, in order; None for a text-only policy.
    """
    for batch in micro_batches if vision else ():
        assert vision is not None
        prompts = [vision.prompts[number] if number >= 0 else PromptVision() for number in batch.groups]
        batch.vision = VisionInputs(prompts, vision.blank)


def split_updates(groups: list[list[CompletionRow]], updates: int, share: Share) -> list[list[CompletionRow]]:
    """Split groups into updates, in order; single completions if all ranks together have fewer groups than updates.

    Uses the indices among the groups of all ranks, so that a group's update does not depend on the number of ranks.
    """
    numbers = range(share.rank, share.rank + len(groups) * share.world_size, share.world_size)
    units, num_units = list(zip(numbers, groups, strict=True)), share.num_groups
    if share.num_groups < updates:
        size = len(groups[0]) if groups else 1
        units = [(number * size + i, [row]) for number, group in units for i, row in enumerate(group)]
        num_units *= size
    bounds = [round(i * num_units / updates) for i in range(updates + 1)]
    return [
        [row for number, unit in units if first <= number < last for row in unit]
        for first, last in itertools.pairwise(bounds)
    ]


def split_update(rows: list[CompletionRow], parts: int) -> list[list[CompletionRow]]:
    """Split one update's completions into `parts` micro-batches of balanced padded cost.

    Either complete groups share a micro-batch, so that each prompt runs once, or completions of similar length do,
    which saves padding but may run a prompt in several micro-batches: whichever needs fewer tokens including padding.
    With fewer groups than micro-batches, groups are always split, to keep micro-batches small.
    """
    if parts == 1:
        return [rows]
    groups: dict[int, list[CompletionRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    units: list[list[list[CompletionRow]]] = [[[row] for row in sorted(rows, key=lambda row: row.length)]]
    if len(groups) >= parts:
        units.insert(0, sorted(groups.values(), key=lambda group: max(row.length for row in group)))
    plans = [
        balanced_split(unit, parts, lambda part: padded_cost([row for group in part for row in group]))
        for unit in units
    ]
    splits = [
        [sorted((row for group in part for row in group), key=lambda row: row.group) for part in plan] for plan in plans
    ]
    return min(splits, key=lambda plan: sum(map(padded_cost, plan)))


def padded_cost(rows: list[CompletionRow]) -> int:
    """Tokens of a micro-batch including padding: its prompts once, its completions padded to the longest."""
    if not rows:
        return 0
    prompts = {row.group: len(row.prompt_ids) for row in rows}
    return len(prompts) * max(prompts.values()) + len(rows) * max(row.length for row in rows)


def balanced_split(items: list[Item], parts: int, cost: Callable[[list[Item]], int]) -> list[list[Item]]:
    """Split a list into `parts` runs, minimising the cost of the most expensive run (bisection on its cost)."""

    def cut(limit: int) -> list[list[Item]]:
        runs, start = [], 0
        while start < len(items):
            ends = range(start + 1, len(items) + 1)  # a longer run never costs less
            end = max(start + 1, start + bisect_right(ends, limit, key=lambda end: cost(items[start:end])))
            runs.append(items[start:end])
            start = end
        return runs

    low, high = 0, cost(items)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= parts else (middle + 1, high)
    runs = cut(high)
    return runs + [[] for _ in range(parts - len(runs))]


def collate(rows: list[CompletionRow], pad_id: int) -> MicroBatch:
    """Collate completions into a padded micro-batch; each prompt is stored once."""
    prompts = {row.group: row.prompt_ids for row in rows}
    prompt_ids, prompt_mask = left_pad(list(prompts.values()), pad_id)
    position = {group: i for i, group in enumerate(prompts)}
    width = max(1, *(row.length for row in rows)) if rows else 1

    def padded(values: Callable[[CompletionRow], Sequence[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*values(row), *[fill] * (width - row.length)] for row in rows], dtype=dtype)

    return MicroBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor([position[row.group] for row in rows]),
        groups=list(prompts),
        numbers=[row.number for row in rows],
        completion_ids=padded(lambda row: row.completion.token_ids, pad_id, torch.long),
        attention_mask=padded(lambda row: [True] * row.length, False, torch.bool),
        completion_mask=padded(lambda row: row.mask, False, torch.bool),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        rollout_logprobs=padded(lambda row: row.completion.logprobs, 0.0, torch.float32),
        ref_logprobs=padded(lambda row: row.completion.ref_logprobs or [0.0] * row.length, 0.0, torch.float32)
        if any(row.completion.ref_logprobs is not None for row in rows)
        else None,
    )


def idle_micro_batch(groups: list[list[CompletionRow]], pad_id: int) -> MicroBatch:
    """Make a fully masked micro-batch, which makes the same module calls as any other so that ranks stay in step.

    Args:
        groups: Groups of this rank; one of their tokens is the placeholder, or a padding token if there is none.
        pad_id: Any token id.
    """
    row = groups[0][0] if groups else CompletionRow(-1, [pad_id], Completion([pad_id], [0.0], "length"), 0.0)
    token = Completion([*row.completion.token_ids[:1]] or [pad_id], [0.0], "length", mask=[False])
    return collate([CompletionRow(row.group, row.prompt_ids, token, 0.0)], pad_id)
