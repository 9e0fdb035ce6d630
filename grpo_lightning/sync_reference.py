"""A reference that follows the policy from a distance (TR-DPO, arXiv:2404.09656).

Every few optimizer steps: reference = alpha * policy + (1 - alpha) * reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning import ranks
from grpo_lightning.policy.reference import FrozenCopy
from grpo_lightning.policy.sharding import Sharding


@dataclass
class SyncReference:
    """When and how far the reference moves towards the policy."""

    every_n_steps: int = 512
    """Optimizer steps between two moves."""

    mixup_alpha: float = 0.6
    """Share of the policy in the new reference; 1 copies it."""

    def __post_init__(self) -> None:
        """Check ranges. Raises: ValueError naming the field, the value got and what is allowed."""
        if self.every_n_steps < 1:
            raise ValueError(f"model.sync_reference.every_n_steps must be at least 1, got {self.every_n_steps}.")
        if not 0 < self.mixup_alpha <= 1:
            raise ValueError(f"model.sync_reference.mixup_alpha must be above 0 and at most 1, got {self.mixup_alpha}.")


def check(sync: SyncReference | None, *, beta: float, has_lora: bool) -> None:
    """Refuse a reference to be moved where there is none. Raises: ValueError."""
    if sync is None:
        return
    if beta == 0:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), and there is no reference: "
            "model.objective.beta is 0. Set beta above 0, or leave sync_reference out."
        )
    if has_lora:
        raise ValueError(
            f"model.sync_reference is set (every {sync.every_n_steps} steps), and the policy trains LoRA adapters: its "
            "reference is the base without them, or the adapter it started from, and what lies between two adapters is "
            "no adapter of that rank. Leave sync_reference out; or export the run merged and start the next from it, "
            "which moves the reference all the way."
        )


def move_if_due(module: Any, step: int) -> None:
    """Move the module's reference if this optimizer step, which has just ended, is one of those that move it.

    The next rollout is compared with the new one. Every rank takes part.
    """
    sync: SyncReference | None = module.sync_reference
    if sync is not None and step % sync.every_n_steps == 0:
        mix(module.reference, module.policy, sync.mixup_alpha, module.sharding)


@torch.no_grad()
def mix(reference: FrozenCopy, policy: nn.Module, alpha: float, sharding: Sharding) -> None:
    """Move the reference towards the policy, weight by weight: no second copy of the model is made.

    Args:
        reference: Of the policy's architecture.
        policy: What it moves towards.
        alpha: The policy's share.
        sharding: How both lie over the processes.
    """
    sharding.settle(policy)
    for ours, theirs in zip(reference.model.parameters(), policy.parameters(), strict=True):
        if theirs.requires_grad:  # the others are equal, or even shared
            sharding.assign(ours, torch.lerp(sharding.whole(ours), sharding.whole(theirs).to(ours.dtype), alpha))
    reference.has_moved = True


def moved_weights(module: Any) -> dict[str, Tensor] | None:
    """The weights of a reference that has moved, whole and on the CPU; None of one that has not.

    Every rank takes part; those behind the first get none. Weights that the policy does not train have not moved.
    """
    reference = module.reference
    if not isinstance(reference, FrozenCopy) or not reference.has_moved:
        return None
    weights = {}
    for (name, weight), trained in zip(reference.model.named_parameters(), is_trained(module.policy), strict=True):
        if trained:
            whole = module.sharding.whole(weight)
            if ranks.rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
    return weights


@torch.no_grad()
def restore(module: Any, weights: dict[str, Tensor] | None) -> None:
    """Put back what `moved_weights` gave. Every rank takes part; where weights are sharded, the first one's count.

    Raises:
        ValueError: If there is no reference to put them in.
    """
    reference = module.reference
    if not isinstance(reference, FrozenCopy):
        raise ValueError(
            "The checkpoint has a reference that was moved (model.sync_reference), and this run has none: set "
            "model.objective.beta and the policy as they were."
        )
    for (name, weight), trained in zip(reference.model.named_parameters(), is_trained(module.policy), strict=True):
        if trained:
            module.sharding.assign(weight, None if weights is None else weights[name])
    reference.has_moved = True


def is_trained(policy: nn.Module) -> list[bool]:
    """Of every parameter, in their order."""
    return [parameter.requires_grad for parameter in policy.parameters()]
