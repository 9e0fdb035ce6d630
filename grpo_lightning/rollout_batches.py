"""A rollout as the module's settings cut it: micro-batches on its device, with their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning.objective import StepCounts
from grpo_lightning.planner import give_images, plan_over_ranks
from grpo_lightning.rollout.groups import vision_of
from grpo_lightning.types import Group, MicroBatch

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule


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
