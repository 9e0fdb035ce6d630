"""Log-probs that stay as they are for a cycle: of the policy when it drew the rollout, and of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from grpo_lightning.types import MicroBatch

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule


def add_old_logprobs(module: GRPOLightningModule, micro_batches: Sequence[MicroBatch]) -> None:
    """Score all but the first update with the weights as they are, or take the engine's log-probs for it.

    The first update's own forward passes see the weights as they still are: they need no pass before.
    """
    if module.old_logprobs == "rollout":
        for batch in micro_batches:
            batch.old_logprobs = batch.rollout_logprobs
    elif later := micro_batches[module.trainer.accumulate_grad_batches :]:
        with torch.no_grad(), module.phase("old_logprobs"):
            module.policy.train()
            for batch in later:
                batch.old_logprobs = module.logprobs(module.policy, batch)


def add_ref_logprobs(module: GRPOLightningModule, micro_batches: Sequence[MicroBatch]) -> None:
    """Score the rollout with the reference, if there is one."""
    if module.reference is not None:
        with torch.no_grad(), module.phase("ref_logprobs"), module.reference.scoring(module.policy) as model:
            for batch in micro_batches:
                batch.ref_logprobs = module.logprobs(model, batch)
