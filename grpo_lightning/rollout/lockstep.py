"""Sampling from sharded weights: gathered once for all tokens, or layer by layer with the ranks in step.

Where the weights stay sharded, a forward call needs every rank, and completions end at different steps on each. So the
ranks make the same calls until the last of them is done: those without open rows run one that nobody looks at.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import nn

from grpo_lightning.core import ranks
from grpo_lightning.policy.inputs import compute_device

log = logging.getLogger(__name__)

Gather = Literal["auto"] | bool

LARGEST_SHARE = 0.5
"""Of the free memory that gathered weights may take: the rest is for the cache and the scores of what is sampled, and
for the optimizer's states, which do not exist yet when a run samples first."""


class Lockstep:
    """Which calls the ranks make together.

    Args:
        is_needed: True if a forward call needs every rank. Otherwise no rank waits for another.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed

    def num_waves(self, own: int) -> int:
        """How many waves this rank runs: the most that any has, those beyond its own without a prompt."""
        return int(ranks.max_over_ranks(torch.tensor(own, device="cpu"))) if self.is_needed else own

    def goes_on(self, has_open_rows: bool) -> bool:  # noqa: FBT001 - a question about one truth value
        """True if another token is decoded: some rank needs it."""
        return ranks.is_any(has_open_rows) if self.is_needed else has_open_rows


def is_gathered(policy: nn.Module, gather: Gather, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Whether the ranks gather a sharded policy to sample from it, the same on all of them, and why."""
    if gather != "auto":
        return gather, "asked for"
    device = compute_device(policy)
    if device.type != "cuda":
        return True, "there is no GPU memory to run out of"
    whole, free = whole_bytes(policy, dtype), free_bytes(device)
    is_too_large = ranks.is_any(whole > LARGEST_SHARE * free)
    sizes = f"of {whole / 2**30:.1f} GiB, with {free / 2**30:.1f} GiB free on this device"
    if is_too_large:
        return False, f"whole weights {sizes}, would take more than half of some device's free memory"
    return True, f"whole weights {sizes}, leave more than half of every device's free memory"


def say_gathering(gathers: bool, reason: str) -> None:  # noqa: FBT001 - what was chosen
    """Name the choice, on the first rank."""
    how = "gathered once per rollout" if gathers else "gathered layer by layer at every token, all ranks in step"
    if ranks.rank() == 0:
        log.info("Sampling from sharded weights, %s (engine.gather_for_generation): %s.", how, reason)


def whole_bytes(policy: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of all weights, whole, in the precision they are gathered in (None: as they are)."""
    size = None if dtype is None else dtype.itemsize
    # DeepSpeed empties a parameter and notes its size; torch's DTensor says the whole size itself.
    return sum(getattr(p, "ds_numel", p.numel()) * (size or p.element_size()) for p in policy.parameters())


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nothing uses; what torch holds in reserve counts as free."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
