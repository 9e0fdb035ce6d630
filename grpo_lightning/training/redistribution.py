"""Redistribute the pending cycle of a checkpoint over a different number of ranks.

The completions are assigned to ranks as in a run that began with the new number of ranks (see `Teams`):

    group g belongs to team g mod (W / R);   completion c of the group belongs to member c mod R

W is the new number of ranks, and R = `ranks_per_group`. A completion stays in its optimizer step, and keeps its
advantage and log-probs. So loss and gradient of every step are unchanged, apart from the order in which floats are
summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, MicroBatch
from grpo_lightning.objective import StepCounts
from grpo_lightning.training.micro_batches import (
    CompletionRow,
    Cycle,
    CycleShape,
    collate,
    dummy_micro_batch,
    loaded_batch,
    split_update,
)

UNKNOWN_COMPLETIONS = (
    "The checkpoint was saved inside a cycle by a run with another number of ranks or of micro-batches. Its rollout "
    "cannot be redistributed: the micro-batches of `split_rollout` do not state which completions they contain. Set "
    "`MicroBatch.groups` and `MicroBatch.numbers` in `split_rollout`, or resume with the original numbers of ranks and "
    "micro-batches."
)


@dataclass
class SavedRow(CompletionRow):
    """A completion of a saved micro-batch. `group` and `number` are indices over all ranks, starting at 0."""

    prompt_key: int | str = ""
    """`Prompt.key` of the completion's prompt; empty for a text-only policy."""

    prompt_observation: str = ""
    """See `MicroBatch.prompt_observations`."""

    old_logprobs: Tensor | None = None
    """[T]"""

    selected: Tensor | None = None
    """[T] bool, a row of `MicroBatch.selected`."""


def saved_share(rank: int, world_size: int, ranks_per_group: int) -> dict[str, int]:
    """The entries of a rank's saved cycle that describe its part of the rollout.

    The i-th group of the rank has index `first_group + i * group_step` among the groups of all ranks. Within a group,
    the i-th completion of the rank has index `first_completion + i * completion_step`.
    """
    return {
        "first_group": rank // ranks_per_group,
        "group_step": world_size // ranks_per_group,
        "first_completion": rank % ranks_per_group,
        "completion_step": ranks_per_group,
    }


def redistribute(saved: Sequence[Mapping[str, Any]], shape: CycleShape, *, teams: Teams, pad_id: int) -> Cycle:
    """Redistribute a pending cycle for this run's numbers of ranks and micro-batches.

    For every rank of the run that saved the checkpoint, `saved` contains the rank's `StepEnd.cycle_state`.

    Returns:
        This rank's part of the cycle, without `MicroBatch.num_chunks`.

    Raises:
        ValueError: If an override of `split_rollout` has not set `MicroBatch.groups` and `MicroBatch.numbers`, or has
            set wrong values.
    """
    updates = [list[SavedRow]() for _ in saved[0]["counts"]]
    has_images = False
    for cycle in saved:
        for index, fields in enumerate(cycle["micro_batches"]):
            has_images |= bool(fields["prompt_keys"])
            for row in saved_rows(loaded_batch(fields), cycle):
                row.group, team = divmod(row.group, teams.num_teams)
                row.number, member = divmod(row.number, teams.ranks_per_group)
                if (team, member) == (teams.team, teams.member):
                    updates[index // saved_accumulate(cycle)].append(row)
    rows = [row for update in updates for row in update]
    prompts: dict[int, list[int]] = {}
    for update in updates:
        if len({(row.group, row.number) for row in update}) < len(update) or any(
            prompts.setdefault(row.group, row.prompt_ids) != row.prompt_ids for row in update
        ):
            raise ValueError(UNKNOWN_COMPLETIONS)
    micro_batches = []
    for update in updates:
        update.sort(key=lambda row: (row.group, row.number))
        parts: list[list[SavedRow]] = split_update(update, shape.accumulate_grad_batches)  # type: ignore[arg-type, assignment]
        micro_batches += [
            collate_saved(part, pad_id) if part else dummy_micro_batch([[row] for row in rows[:1]], pad_id)
            for part in parts
        ]
    if has_images:
        name_prompts(micro_batches, rows)
    return Cycle(
        micro_batches,
        [StepCounts(*counts) for counts in saved[0]["counts"]],
        saved[0]["num_iterations"],
        saved[0]["position"] // saved_accumulate(saved[0]) * shape.accumulate_grad_batches,
    )


def name_prompts(micro_batches: Sequence[MicroBatch], rows: Sequence[SavedRow]) -> None:
    """Set `prompt_keys` and `prompt_observations`, with which a resumed run finds the images of prompts."""
    names = {row.group: (row.prompt_key, row.prompt_observation) for row in rows}
    for batch in micro_batches:
        named = [names[group] if group >= 0 else ("", "") for group in batch.groups]
        batch.prompt_keys = [key for key, _ in named]
        if any(observation for _, observation in names.values()):
            batch.prompt_observations = [observation for _, observation in named]


def saved_accumulate(cycle: Mapping[str, Any]) -> int:
    """Micro-batches per update of a saved cycle."""
    return len(cycle["micro_batches"]) // len(cycle["counts"])


def saved_rows(batch: MicroBatch, share: Mapping[str, int]) -> Iterator[SavedRow]:
    """Yield the completions of a saved micro-batch, with indices over all ranks. A dummy micro-batch yields none."""
    if len(batch.groups) != len(batch.prompt_ids) or len(batch.numbers) != len(batch.completion_ids):
        raise ValueError(UNKNOWN_COMPLETIONS)
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    keys = batch.prompt_keys or [""] * len(prompts)
    observations = batch.prompt_observations or [""] * len(prompts)
    for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
        if number < 0 and not batch.completion_mask[row].any():
            continue
        if number < 0:
            raise ValueError(UNKNOWN_COMPLETIONS)
        length = int(batch.attention_mask[row].sum())

        def values(of_all: Tensor | None, row: int = row, length: int = length) -> Tensor | None:
            return None if of_all is None else of_all[row, :length]

        reference, credit = values(batch.ref_logprobs), values(batch.turn_advantages)
        yield SavedRow(
            group=share["first_group"] + batch.groups[prompt] * share["group_step"],
            prompt_ids=prompts[prompt],
            completion=Completion(
                token_ids=batch.completion_ids[row, :length].tolist(),
                logprobs=batch.rollout_logprobs[row, :length].tolist(),
                finish_reason="stop",
                mask=batch.completion_mask[row, :length].tolist(),
                ref_logprobs=None if reference is None else reference.tolist(),
                turn_advantages=None if credit is None else credit.tolist(),
                images=list(batch.images[row]) if batch.images else [],
            ),
            advantage=float(batch.advantages[row]),
            number=share["first_completion"] + number * share["completion_step"],
            prompt_key=keys[prompt],
            prompt_observation=observations[prompt],
            old_logprobs=values(batch.old_logprobs),
            selected=values(batch.selected),
        )


def collate_saved(rows: Sequence[SavedRow], pad_id: int) -> MicroBatch:
    """Collate saved completions into a micro-batch, with their old log-probs."""
    batch = collate([*rows], pad_id)
    batch.old_logprobs = pad_rows([row.old_logprobs for row in rows], batch.completion_ids.shape[1])
    batch.selected = pad_rows([row.selected for row in rows], batch.completion_ids.shape[1])
    return batch


def pad_rows(rows: Sequence[Tensor | None], width: int) -> Tensor | None:
    """Stack rows [T] of different lengths, padded with 0 (False), into [B, `width`]; None if the rows are None."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    assert len(known) == len(rows), "all completions of an update have old log-probs, or none has"
    stacked = known[0].new_zeros(len(rows), width)
    for place, row in zip(stacked, known, strict=True):
        place[: len(row)] = row
    return stacked
