"""Optimizer steps in which no completion has an advantage: counting them, and the reason in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_lightning.core import ranks
from grpo_lightning.core.types import MicroBatch
from grpo_lightning.rollout.overlong import OverlongFilter
from grpo_lightning.rollout.record import Rollout


def num_empty_updates(micro_batches: Sequence[MicroBatch], updates_per_rollout: int) -> int:
    """The number of a cycle's updates in which no completion of any rank has an advantage. A collective."""
    is_taught = [((batch.advantages != 0)[:, None] & batch.completion_mask).any() for batch in micro_batches]
    of_updates = torch.stack(is_taught).view(updates_per_rollout, -1).any(dim=1)
    return int((ranks.max_over_ranks(of_updates.int()) == 0).sum())


def empty_reason(rollout: Rollout, overlong_filter: OverlongFilter, max_completion_length: int) -> str:
    """The likeliest reason why completions of a rollout have no advantage. A collective."""
    completions = [completion for group in rollout.groups for completion in group.completions]
    num_masked = sum(completion.mask is not None and not any(completion.mask) for completion in completions)
    num_scorable = 0 if rollout.scores is None else int((~rollout.scores.total.isnan()).sum())
    total = torch.tensor([len(completions), num_masked, num_scorable])
    num_completions, num_masked, num_scorable = ranks.sum_over_ranks(total).tolist()
    if num_masked == num_completions:
        return (
            f"all were truncated at {max_completion_length} tokens, and overlong_filter {overlong_filter!r} leaves "
            "them out. Raise sampling.max_completion_length"
        )
    if rollout.scores is not None and not num_scorable:
        return "no completion could be scored, every reward gave None. See which rows and completions they apply to"
    return (
        "the completions of every group that are trained on have equal rewards. The task may be too hard or too easy; "
        "model.dynamic_sampling replaces such groups"
    )
