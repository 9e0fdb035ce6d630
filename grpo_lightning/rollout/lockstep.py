"""Sampling from sharded weights: they are gathered once per rollout, or all ranks run the policy in lockstep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from grpo_lightning.core import ranks
from grpo_lightning.policy.hf import compute_device
from grpo_lightning.policy.sharding import full_shape

log = logging.getLogger(__name__)

Gather = Literal["auto"] | bool

LARGEST_SHARE = 0.5
"""Maximum fraction of the free memory that gathered weights may take. The rest is for the KV cache, the logits, and the
optimizer states, which are not allocated yet when the first rollout is sampled."""


class Lockstep:
    """Synchronizes the number of forward calls over ranks while the weights stay sharded.

    With sharded weights, a forward call of the policy is collective, but completions end at different steps on each
    rank. All ranks therefore make the same calls until the last rank is done. When other ranks decode, a rank without
    unfinished rows runs a dummy row. When other ranks prefill prompts, a rank without waiting prompts runs a dummy
    prefill.

    Args:
        is_needed: True if forward calls are collective. Otherwise no rank waits for another.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed

    def num_waves(self, own: int) -> int:
        """Return the number of waves to run: the maximum over ranks, where this rank has `own` waves.

        In a wave, prompts are decoded together. A rank with fewer waves than the maximum takes part in the forward
        calls of the other ranks with dummy rows.
        """
        return int(ranks.max_over_ranks(torch.tensor(own, device="cpu"))) if self.is_needed else own

    def union(self, own: Sequence[int]) -> set[int]:
        """The union of `own` over all ranks; without lockstep, the set of this rank's `own` numbers."""
        return set().union(*ranks.gather_objects(set(own))) if self.is_needed else set(own)

    def agree(self, *own: bool) -> list[bool]:
        """For each kind of forward call (decoding, prefill), return whether any rank makes such a call next.

        Args:
            own: For each kind, whether this rank makes such a call next.
        """
        if not self.is_needed:
            return list(own)
        return ranks.max_over_ranks(torch.tensor(own, dtype=torch.long, device="cpu")).bool().tolist()


def is_gathered(policy: nn.Module, gather: Gather, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Decide whether all ranks gather sharded weights once per rollout; returns the decision and the reason."""
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
    """Bytes of the full (unsharded) weights if they are gathered in `dtype`; None keeps the dtype of each weight."""
    size = None if dtype is None else dtype.itemsize
    return sum(full_shape(p).numel() * (size or p.element_size()) for p in policy.parameters())


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including memory that torch has reserved but not allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
