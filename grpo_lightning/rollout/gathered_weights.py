"""Whether sharded weights are gathered once per rollout for sampling, or layer by layer at every token."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import nn

from grpo_lightning.core import ranks
from grpo_lightning.policy.sharding import full_shape
from grpo_lightning.policy.transformers_internals import compute_device

log = logging.getLogger(__name__)

Gather = Literal["auto"] | bool

LARGEST_SHARE = 0.5
"""Maximum fraction of the free memory for gathered weights. The rest is for the KV cache, the logits, and the optimizer
states, which are not allocated yet at the first rollout."""


def is_gathered(policy: nn.Module, gather: Gather, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Choose how sharded weights are gathered for sampling.

    Returns:
        (True, the reason) if the weights are gathered once per rollout. (False, the reason) if the weights are gathered
        layer by layer at every token.
    """
    if gather != "auto":
        return gather, "requested"
    device = compute_device(policy)
    if device.type != "cuda":
        return True, "the policy is not on a GPU"
    full, free = full_bytes(policy, dtype), free_bytes(device)
    is_too_large = ranks.any_over_ranks(full > LARGEST_SHARE * free)
    sizes = f"{full / 2**30:.1f} GiB, with {free / 2**30:.1f} GiB free on this device"
    if is_too_large:
        return False, f"the full weights ({sizes}) would take more than half of some device's free memory"
    return True, f"the full weights ({sizes}) leave at least half of every device's free memory"


def log_gathering(gathers: bool, reason: str) -> None:  # noqa: FBT001 - what was chosen
    """Log the choice on rank 0."""
    how = "gathered once per rollout" if gathers else "gathered layer by layer at every token, all ranks in lockstep"
    if ranks.rank() == 0:
        log.info("Sampling from sharded weights, %s (engine.gather_for_generation): %s.", how, reason)


def full_bytes(policy: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of the unsharded weights in `dtype`; None keeps the dtype of each weight."""
    size = None if dtype is None else dtype.itemsize
    return sum(full_shape(p).numel() * (size or p.element_size()) for p in policy.parameters())


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including memory that torch has reserved but not allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
