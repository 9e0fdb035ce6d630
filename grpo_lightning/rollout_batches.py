"""A rollout as the module's settings cut it: micro-batches on its device, with their images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.objective import StepCounts
from grpo_lightning.planner import give_images, plan_over_ranks
from grpo_lightning.rollout.groups import vision_of
from grpo_lightning.types import Group, MicroBatch

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


def micro_batches_of(
    module: GRPOLightningModule, groups: Sequence[Group], advantages: Tensor | None
) -> tuple[list[MicroBatch], list[StepCounts]]:
    """Cut a rollout; every rank takes part.

    Args:
        module: With the settings.
        groups: N groups of G completions, of this rank.
        advantages: [N, G]; None if they are not known yet, and all completions are to be scored.

    Returns:
        As many micro-batches on every rank as its updates have, and the counts of each update over all ranks.
    """
    # With a reference they stay, for `policy/kl`: a KL in the rewards leaves hardly an advantage at 0.
    skips = not module.objective.trains_on_zero_advantages and not module.objective.needs_reference
    micro_batches, counts = plan_over_ranks(
        groups,
        torch.zeros(len(groups), module.num_generations) if advantages is None else advantages,
        updates=module.updates_per_rollout,
        accumulate=module.trainer.accumulate_grad_batches,
        pad_id=module.tokenizer.pad_token_id,
        skip_zero_advantages=advantages is not None and skips,
        num_chunks=module.scorer.num_chunks,
    )
    give_images(micro_batches, vision_of(groups, module.encoder, module.policy, module.sharding))
    return [batch.to(module.device) for batch in micro_batches], counts


def report_empty_updates(module: GRPOLightningModule, groups: Sequence[Group], micro_batches: list[MicroBatch]) -> None:
    """Count the optimizer steps in which no completion of any rank has an advantage, and log each reason once.

    Args:
        module: With the settings and the rewards.
        groups: N groups of G completions, of this rank.
        micro_batches: What they were cut into.
    """
    is_taught = [((batch.advantages != 0)[:, None] & batch.completion_mask).any() for batch in micro_batches]
    of_updates = torch.stack(is_taught).view(module.updates_per_rollout, -1).any(dim=1)
    num_empty = int((ranks.max_over_ranks(of_updates.int()) == 0).sum())
    module.metrics.add("rollout/empty_updates", num_empty, len(of_updates))
    if not num_empty:
        return
    reason = why_empty(module, groups)
    if reason in module.said_empty:
        return
    module.said_empty.add(reason)
    others = {"the KL": module.objective.has_kl_loss, "the entropy": module.objective.trains_entropy}
    apart = " and ".join(name for name, is_trained in others.items() if is_trained)
    log.warning(
        "No completion of an optimizer step has an advantage: %s. The step learns nothing%s; rollout/empty_updates "
        "is the share of such steps.",
        reason,
        f" apart from {apart}" if apart else "",
    )


def why_empty(module: GRPOLightningModule, groups: Sequence[Group]) -> str:
    """The likeliest reason why completions of a rollout have no advantage; every rank takes part."""
    completions = [completion for group in groups for completion in group.completions]
    num_masked = sum(completion.mask is not None and not any(completion.mask) for completion in completions)
    num_scorable = 0 if module.samples is None else int((~module.samples[1].total.isnan()).sum())
    total = torch.tensor([len(completions), num_masked, num_scorable])
    num_completions, num_masked, num_scorable = ranks.sum_over_ranks(total).tolist()
    if num_masked == num_completions:
        return (
            f"all were truncated at {module.sampling.max_completion_length} tokens, and overlong_filter "
            f"{module.overlong_filter!r} leaves them out. Raise sampling.max_completion_length"
        )
    if module.samples is not None and not num_scorable:
        return "no completion could be scored, every reward gave None. See which rows and completions they apply to"
    return (
        "the completions of every group that are trained on have equal rewards. The task may be too hard or too easy; "
        "model.dynamic_sampling replaces such groups"
    )
