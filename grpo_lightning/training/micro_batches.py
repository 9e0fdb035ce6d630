"""Split a rollout into the micro-batches of its optimizer steps.

A rollout is split into optimizer steps (updates). Each update is split into micro-batches. The order of the data
decides to which update a completion belongs. The split of an update into micro-batches affects memory and padding. The
split does not affect the gradient, because the divisor of the loss is computed for the entire update.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import (
    Completion,
    Group,
    MicroBatch,
    ObservedImages,
    Prompt,
    PromptVision,
    VisionInputs,
)
from grpo_lightning.data.batch import PromptBatch
from grpo_lightning.data.images.references import ImageFinder
from grpo_lightning.environments.base import load_observation
from grpo_lightning.objective import StepCounts
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.transformers_internals import left_pad
from grpo_lightning.policy.vision import whole

Item = TypeVar("Item")


@dataclass
class CompletionRow:
    """One completion of a micro-batch."""

    group: int
    """Index of the completion's group in the rollout."""

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
    def has_advantage(self) -> bool:
        """False if the advantage of all tokens is 0."""
        return any(self.advantage + credit != 0 for credit in self.completion.turn_advantages or [0.0])

    @property
    def mask(self) -> list[bool]:
        """[T] True for tokens that are trained on."""
        return [True] * self.length if self.completion.mask is None else self.completion.mask


@dataclass
class MicroStep:
    """The training on one micro-batch."""

    batch: MicroBatch
    counts: StepCounts
    """Counts of trained tokens and completions in the update."""

    closes_update: bool
    """True for the last micro-batch of the update."""

    opens_update: bool
    """True for the first micro-batch of the update."""

    number: int
    """Index of the update in its cycle."""

    update: list[MicroBatch]
    """All micro-batches of the update, including `batch`."""


@dataclass(frozen=True)
class CycleShape:
    """Numbers of micro-steps, updates and epochs of a cycle (the training on one rollout)."""

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

    def cycles_left(self, max_steps: int, num_steps: int) -> float:
        """Number of cycles after the one that starts now, at step `num_steps`; infinity if `max_steps` is -1."""
        if max_steps < 0:
            return math.inf
        per_cycle = self.updates_per_rollout * self.num_iterations
        return max(0, math.ceil((max_steps - num_steps) / per_cycle) - 1)

    def wrong_loader(self, given: int, *, is_from_source: bool) -> str:
        """Error message for a loader that yields every batch `given` times."""
        times = "once" if given == 1 else f"{given} times"
        cycle = f"cycle=module.cycle_length({self.accumulate_grad_batches})"
        return (
            f"A rollout is trained for {self.num_micro_steps} micro-steps (accumulate_grad_batches "
            f"{self.accumulate_grad_batches} x updates_per_rollout {self.updates_per_rollout} x num_iterations "
            f"{self.num_iterations}), but the training loader yields every batch {times}. "
            + (
                f"Give the PromptSource {cycle}."
                if is_from_source
                else f"Wrap the data: grpo_lightning.PromptSource(data, batch_size=..., {cycle})."
            )
        )

    def check_cycle(self, cycle: Cycle) -> Cycle:
        """Check and return a cycle. Raises: ValueError if the number of micro-batches or updates is wrong."""
        given, expected = len(cycle.micro_batches), self.accumulate_grad_batches * self.updates_per_rollout
        if (given, len(cycle.counts)) != (expected, self.updates_per_rollout):
            raise ValueError(
                f"`split_rollout` must return a Cycle with {expected} micro-batches (accumulate_grad_batches "
                f"{self.accumulate_grad_batches} x updates_per_rollout {self.updates_per_rollout}) and the counts of "
                f"{self.updates_per_rollout} updates; got {given} micro-batches and counts of {len(cycle.counts)} "
                "updates."
            )
        return cycle

    def check_resumed(self, *, num_updates: int, num_iterations: int) -> None:
        """Check the pending cycle of a checkpoint.

        Raises:
            ValueError: If its number of updates or of epochs differs from this run's.
        """
        if (num_updates, num_iterations) != (self.updates_per_rollout, self.num_iterations):
            raise ValueError(
                f"The checkpoint was saved inside a cycle with model.updates_per_rollout {num_updates} and "
                f"model.num_iterations {num_iterations}; this run has {self.updates_per_rollout} and "
                f"{self.num_iterations}. Resume with the original values, or from a checkpoint at the end of a cycle."
            )

    def check_position(self, pending: Cycle | None, batch: PromptBatch, position: int) -> None:
        """Check that the loader, the current cycle and the trainer are at the same micro-step.

        Raises:
            RuntimeError: If the loader does not repeat each batch for every micro-step of a cycle, if the loader is at
                another micro-step than the trainer, or if the rollout of the cycle is missing.
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
    """The micro-batches of one rollout, and the number of micro-steps done so far.

    A cycle consists of `num_iterations` epochs over the rollout. An epoch consists of optimizer steps (updates) of
    `accumulate` micro-batches each.

    Args:
        micro_batches: The micro-batches of all updates of one epoch, in training order.
        counts: Counts of trained tokens and completions of each update, over all ranks.
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

    def next(self) -> MicroStep:
        """Advance to the next micro-step."""
        index, number = self.position % len(self.micro_batches), self.position // self.accumulate
        first = index - index % self.accumulate
        self.position += 1
        return MicroStep(
            batch=self.micro_batches[index],
            counts=self.counts[index // self.accumulate],
            closes_update=self.position % self.accumulate == 0,
            opens_update=index == first,
            number=number,
            update=self.micro_batches[first : first + self.accumulate],
        )

    def to(self, device: torch.device | str) -> Cycle:
        """Move the cycle's micro-batches to `device`, in place."""
        self.micro_batches = [batch.to(device) for batch in self.micro_batches]
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the data for resuming inside the cycle.

        Images of the prompts are not included. Images that environments have shown are included as `data:` URLs.
        """

        def save(batch: MicroBatch) -> dict[str, Any]:
            without = replace(batch.to("cpu"), vision=None, conversation_vision=None)
            return vars(without) | {"images": saved_images(batch.images)}

        return {
            "micro_batches": [save(batch) for batch in self.micro_batches],
            "counts": [tuple(counts) for counts in self.counts],
            "num_iterations": self.num_iterations,
            "position": self.position,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Cycle:
        """Restore a cycle on the CPU from its `state_dict`."""
        return cls(
            [loaded_batch(batch) for batch in state["micro_batches"]],
            [StepCounts(*counts) for counts in state["counts"]],
            state["num_iterations"],
            state["position"],
        )


@dataclass(frozen=True)
class Share:
    """This rank's part of the rollout of all ranks.

    A team consists of the ranks that share the same groups. The groups of all teams are ordered round-robin. In a round
    of dynamic sampling, teams can have unequal numbers of groups.
    """

    counts: Sequence[int]
    """Number of groups of each team."""

    team: int = 0
    member: int = 0
    ranks_per_group: int = 1
    """This rank has every `ranks_per_group`-th completion of a group, beginning with the index `member`."""

    num_generations: int | None = None
    """Group size G. May be None if this rank has all completions of its groups."""

    @property
    def num_groups(self) -> int:
        """Number of groups of all teams."""
        return sum(self.counts)

    def index(self, i: int) -> int:
        """Global index of the i-th group of this rank's team.

        The global index counts the groups of all teams in round-robin order.
        """
        return sum(min(count, i + (team < self.team)) for team, count in enumerate(self.counts))


def plan_micro_batches(
    groups: Sequence[Group],
    advantages: Tensor,
    *,
    updates: int,
    accumulate: int,
    pad_id: int,
    skip_zero_advantages: bool,
    share: Share | None = None,
    cost: RowsCost | None = None,
) -> tuple[list[MicroBatch], list[StepCounts]]:
    """Split a rollout into `updates x accumulate` micro-batches.

    Args:
        groups: N groups of G completions.
        advantages: [N, G] advantages.
        updates: Number of optimizer steps.
        accumulate: Micro-batches per update.
        pad_id: Any token id, because padding is masked.
        skip_zero_advantages: If true, completions whose tokens all have advantage 0 are left out of the micro-batches,
            but not of the counts.
        share: This rank's part of the rollout; None if `groups` is the complete rollout.
        cost: As in `split_update`.

    Returns:
        This rank's micro-batches in order, and its counts for each update: unmasked completion tokens, and completions
        with at least one such token.
    """
    rows = [
        [
            CompletionRow(index, group.prompt_ids, completion, advantage, number)
            for number, (completion, advantage) in enumerate(zip(group.completions, group_advantages, strict=True))
        ]
        for index, (group, group_advantages) in enumerate(zip(groups, advantages.tolist(), strict=True))
    ]
    micro_batches, counts = [], []
    for update in split_updates(rows, updates, share or Share([len(groups)])):
        trained = [sum(row.mask) for row in update]
        counts.append(StepCounts(sum(trained), sum(tokens > 0 for tokens in trained)))
        kept = [
            row
            for row, tokens in zip(update, trained, strict=True)
            if tokens and (row.has_advantage or not skip_zero_advantages)  # without trained tokens, no gradient
        ]
        parts = split_update(kept, accumulate, cost)
        batches = [collate(part, pad_id) if part else dummy_micro_batch(rows, pad_id) for part in parts]
        micro_batches += batches
    return micro_batches, counts


def plan_over_ranks(
    groups: Sequence[Group],
    advantages: Tensor,
    *,
    teams: Teams | None = None,
    **settings: Any,
) -> tuple[list[MicroBatch], list[StepCounts]]:
    """Split the rollout of all ranks into micro-batches. Collective: all ranks call it.

    `groups` are the N groups of this rank's team. N may be 0. Each group contains only the K completions of this rank.
    `advantages` is [N, K]. `settings` are the other arguments of `plan_micro_batches`, except `share`.

    Returns:
        This rank's micro-batches in order, and the counts of each update, summed over all ranks.
    """
    teams = teams or Teams()
    num_groups = teams.gather_from_firsts(len(groups))
    num_completions = int(ranks.sum_over_ranks(torch.tensor(sum(len(group.completions) for group in groups))))
    num_generations = num_completions // sum(num_groups) if any(num_groups) else None
    share = Share(num_groups, teams.team, teams.member, teams.ranks_per_group, num_generations)
    micro_batches, counts = plan_micro_batches(groups, advantages, share=share, **settings)
    return micro_batches, [StepCounts(*of_all) for of_all in ranks.sum_over_ranks(torch.tensor(counts)).tolist()]


def agree_on_chunks(micro_batches: Sequence[MicroBatch], scorer: Scorer) -> None:
    """Make all ranks use equally many chunks (forward passes) for each micro-batch. Collective: all ranks call it.

    The ranks gather sharded weights together. Call this function before the first forward pass.
    """
    needed = [[scorer.num_chunks(batch), scorer.num_image_chunks(batch)] for batch in micro_batches]
    most = ranks.max_over_ranks(torch.tensor(needed)).tolist()
    for batch, (number, with_images) in zip(micro_batches, most, strict=True):
        batch.num_chunks, batch.num_image_chunks = number, with_images


def give_images(
    micro_batches: Sequence[MicroBatch], vision: VisionInputs | None, blank: Mapping[str, Tensor] | None = None
) -> None:
    """Add to each micro-batch the images of its prompts and completions.

    If a completion of any rank contains images, `blank` is the encoder's blank image. For a
    micro-batch without such completions, the vision tower runs on `blank`, so that all ranks run the same forward
    passes.
    """
    for batch in micro_batches if vision else ():
        assert vision is not None
        prompts = [vision.prompts[number] if number >= 0 else PromptVision() for number in batch.groups]
        batch.vision = replace(vision, prompts=prompts)
        if any(batch.images) or blank is not None:
            batch.conversation_vision = VisionInputs(list(conversations_of(batch, prompts)), blank)


def forget_features(micro_batches: Sequence[MicroBatch]) -> None:
    """Remove the stored image features of all prompts, because the vision tower is being trained."""
    for batch in micro_batches:
        for prompt in batch.vision.prompts if batch.vision else ():
            prompt.features = None


def blank_of(micro_batches: Sequence[MicroBatch], encoder: Encoder) -> Mapping[str, Tensor] | None:
    """The encoder's blank image (see `give_images`) if a completion of any rank has images. Collective."""
    if not encoder.is_multimodal or encoder.family is None:
        return None
    return encoder.blank if ranks.any_over_ranks(any(any(batch.images) for batch in micro_batches)) else None


def conversations_of(batch: MicroBatch, prompts: Sequence[PromptVision]) -> Iterator[PromptVision]:
    """Yield the vision inputs of prompt and completion together, empty for completions without images."""
    prompt_ids = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    images = batch.images or [()] * len(batch.completion_ids)
    rows = zip(batch.prompt_index.tolist(), batch.completion_ids, batch.attention_mask, images, strict=True)
    for prompt, ids, mask, observed in rows:
        yield whole(prompts[prompt], prompt_ids[prompt], ids[mask].tolist(), observed) if observed else PromptVision()


def saved_images(images: Sequence[Sequence[ObservedImages]]) -> list[list[dict[str, Any]]]:
    """Encode the images in completions as `data:` URLs for a checkpoint."""
    return [
        [
            {
                "start": each.start,
                "end": each.end,
                "text": each.vision.text,
                "files": [source.data_url() for source in each.vision.sources],
            }
            for each in of_row
        ]
        for of_row in images
    ]


def loaded_batch(fields: Mapping[str, Any]) -> MicroBatch:
    """Restore a checkpoint's micro-batch. `restore_observed` then encodes the images in completions."""
    finder = ImageFinder("the checkpoint")
    images = [
        [
            ObservedImages(
                each["start"],
                each["end"],
                [],
                PromptVision(sources=[finder.ref(file, "an image") for file in each["files"]], text=each["text"]),
            )
            for each in of_row
        ]
        for of_row in fields.get("images", ())
    ]
    return MicroBatch(**{**fields, "images": images})


def restore_observed(micro_batches: Sequence[MicroBatch], encoder: Encoder) -> None:
    """Encode the images in the completions of a resumed cycle again."""
    for batch in micro_batches:
        for each in (observed for of_row in batch.images for observed in of_row):
            encoded = encoder.from_text(each.vision.text, each.vision.sources, "the checkpoint").vision
            assert encoded is not None
            # The completion lacks the observation's first token if the policy's turn already ended with this token.
            length = each.end - each.start
            encoded.token_types = {name: types[-length:] for name, types in encoded.token_types.items()}
            each.vision = encoded


def find_prompts(micro_batches: Sequence[MicroBatch], prompts: Sequence[Prompt]) -> None:
    """In a resumed cycle, set each micro-batch's `groups` to the positions of its prompts in the loader's batch.

    The prompts are found by `Prompt.key`.

    Raises:
        ValueError: If the loader's batch lacks a prompt of the cycle.
    """
    positions: dict[int | str, int] = {prompt.key: i for i, prompt in enumerate(prompts)} | {"": -1}
    for batch in micro_batches:
        if missing := [key for key in batch.prompt_keys if key not in positions]:
            raise ValueError(
                f"The checkpoint was saved inside a cycle that trains on the prompt {missing[0]!r}, which the data "
                "loader does not yield for this cycle, so its images cannot be read. Resume from a checkpoint at the "
                "end of a cycle."
            )
        batch.groups = [positions[key] for key in batch.prompt_keys]


def known_observations(cycle: Cycle) -> dict[int | str, Any]:
    """The environments' first observations in a resumed cycle (`Prompt.observation`), by `Prompt.key`."""
    return {
        key: load_observation(observation)
        for batch in cycle.micro_batches
        for key, observation in zip(batch.prompt_keys, batch.prompt_observations, strict=False)
        if observation
    }


def split_updates(groups: list[list[CompletionRow]], updates: int, share: Share) -> list[list[CompletionRow]]:
    """Split this rank's groups among the updates, in order.

    If all ranks together have fewer groups than updates, completions of one group can be in different updates. Groups
    and completions have indices across all ranks. The index determines the update, so the updates do not depend on the
    number of ranks.
    """
    units, num_units = [(share.index(i), group) for i, group in enumerate(groups)], share.num_groups
    if share.num_groups < updates:
        size = share.num_generations or (len(groups[0]) if groups else 1)
        units = [
            (number * size + share.member + i * share.ranks_per_group, [row])
            for number, group in units
            for i, row in enumerate(group)
        ]
        num_units *= size
    bounds = [round(i * num_units / updates) for i in range(updates + 1)]
    return [
        [row for number, unit in units if first <= number < last for row in unit]
        for first, last in itertools.pairwise(bounds)
    ]


RowsCost = Callable[[list[CompletionRow]], float]
"""Computes the cost of a micro-batch in tokens; 0 if there are no completions."""


def split_update(rows: list[CompletionRow], parts: int, cost: RowsCost | None = None) -> list[list[CompletionRow]]:
    """Split one update's completions into `parts` micro-batches of about equal cost.

    The function tries three methods:

    - Cut only between groups. The policy then processes each prompt once. The function skips this method if there are
      fewer groups than micro-batches.
    - List the completions group by group, and cut the list. Each cut divides at most one group. The policy then
      processes the prompt of this group again.
    - Sort the completions by length, and cut the list. There is less padding, but the policy processes many prompts
      several times.

    Each method makes two splits. In one split, the parts have about equal numbers of tokens without padding
    (`num_tokens`). In the other split, the parts have about equal numbers of tokens with padding (`padded_cost`). The
    function returns the split with the smallest

        (sum of the costs of all micro-batches) + parts * (largest cost of a micro-batch)

    The second term is the time if the ranks wait for each other in every micro-batch. In the returned
    split, the most expensive micro-batch is the first one.

    Args:
        rows: The completions of an update.
        parts: Number of micro-batches.
        cost: Computes the cost of a micro-batch (`Scorer.cost`). None uses `padded_cost`.
    """
    if parts == 1:
        return [rows]
    cost = cost or padded_cost
    by_group: dict[int, list[CompletionRow]] = {}
    for row in sorted(rows, key=lambda row: row.length):
        by_group.setdefault(row.group, []).append(row)
    groups = sorted(by_group.values(), key=lambda group: group[-1].length)
    orders: list[list[list[CompletionRow]]] = [
        [[row] for group in groups for row in group],
        [[row] for row in sorted(rows, key=lambda row: row.length)],
    ]
    if len(groups) >= parts:
        orders.insert(0, groups)
    splits = [
        [join_units(part) for part in balanced_split(order, parts, lambda part, size=size: size(join_units(part)))]  # type: ignore[misc]
        for order in orders
        for size in (num_tokens, padded_cost)
    ]
    costs = [[cost(part) for part in split] for split in splits]
    best = min(range(len(splits)), key=lambda i: sum(costs[i]) + parts * max(costs[i]))
    order_of_best = sorted(range(parts), key=lambda part: costs[best][part], reverse=True)
    return [sorted(splits[best][part], key=lambda row: row.group) for part in order_of_best]


def join_units(units: list[list[CompletionRow]]) -> list[CompletionRow]:
    """Concatenate lists of completions."""
    return list(itertools.chain.from_iterable(units))


def prompt_lengths(rows: Sequence[CompletionRow]) -> list[int]:
    """Number of tokens of each prompt. A prompt that several of the completions share occurs once."""
    return list({row.group: len(row.prompt_ids) for row in rows}.values())


def num_tokens(rows: list[CompletionRow]) -> int:
    """Number of tokens of a micro-batch without padding."""
    return sum(prompt_lengths(rows)) + sum(row.length for row in rows)


def padded_cost(rows: list[CompletionRow]) -> int:
    """Tokens of a micro-batch, padded to the longest prompt and the longest completion."""
    if not rows:
        return 0
    prompts = prompt_lengths(rows)
    return len(prompts) * max(prompts) + len(rows) * max(row.length for row in rows)


def balanced_split(items: list[Item], parts: int, cost: Callable[[list[Item]], int]) -> list[list[Item]]:
    """Cut a list into `parts` pieces. The largest cost of a piece is at most 1 % above the lowest possible value."""

    def cut(limit: int) -> list[list[Item]]:
        runs, start = [], 0
        while start < len(items):
            ends = range(start + 1, len(items) + 1)  # a longer piece never costs less
            end = max(start + 1, start + bisect_right(ends, limit, key=lambda end: cost(items[start:end])))
            runs.append(items[start:end])
            start = end
        return runs

    low, high = 0, cost(items)
    while high - low > low // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= parts else (middle + 1, high)
    runs = cut(high)
    return runs + [[] for _ in range(parts - len(runs))]


def collate(rows: list[CompletionRow], pad_id: int) -> MicroBatch:
    """Collate completions into a padded micro-batch, which contains each prompt only once."""
    prompts = {row.group: row.prompt_ids for row in rows}
    prompt_ids, prompt_mask = left_pad(list(prompts.values()), pad_id)
    position = {group: i for i, group in enumerate(prompts)}
    width = max(1, *(row.length for row in rows)) if rows else 1

    def pad(values: Callable[[CompletionRow], Sequence[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*values(row), *[fill] * (width - row.length)] for row in rows], dtype=dtype)

    return MicroBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor([position[row.group] for row in rows]),
        groups=list(prompts),
        numbers=[row.number for row in rows],
        completion_ids=pad(lambda row: row.completion.token_ids, pad_id, torch.long),
        attention_mask=pad(lambda row: [True] * row.length, False, torch.bool),
        completion_mask=pad(lambda row: row.mask, False, torch.bool),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        rollout_logprobs=pad(lambda row: row.completion.logprobs, 0.0, torch.float32),
        ref_logprobs=pad(lambda row: row.completion.ref_logprobs or [0.0] * row.length, 0.0, torch.float32)
        if any(row.completion.ref_logprobs is not None for row in rows)
        else None,
        images=[row.completion.images for row in rows] if any(row.completion.images for row in rows) else (),
        turn_advantages=pad(lambda row: row.completion.turn_advantages or [0.0] * row.length, 0.0, torch.float32)
        if any(row.completion.turn_advantages is not None for row in rows)
        else None,
    )


def dummy_micro_batch(groups: list[list[CompletionRow]], pad_id: int) -> MicroBatch:
    """Make a micro-batch of one masked token, for a rank without completions in this micro-step.

    With it, all ranks take part in the same collective operations.
    """
    row = groups[0][0] if groups else CompletionRow(-1, [pad_id], Completion([pad_id], [0.0], "length"), 0.0)
    token = Completion([*row.completion.token_ids[:1]] or [pad_id], [0.0], "length", mask=[False])
    return collate([CompletionRow(row.group, row.prompt_ids, token, 0.0)], pad_id)
