"""What a strategy keeps on every device: weights, gradients and optimizer states, and how it shares them out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

PROBE_WEIGHTS = 64 * 1024
"""8-bit optimizers keep small tensors in 32 bits: the probe must not be one (bitsandbytes: 4096)."""

BUCKET_NUMBERS = 200_000_000
"""Of a DeepSpeed reduction, as Lightning sets it; stages 1 and 2 fill one while they send another."""


@dataclass(frozen=True)
class Division:
    """Over how many ranks a strategy divides each part (1 is a whole copy on every device), and where it keeps it."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    has_buckets: bool = False
    """A second copy of the gradients, in the buckets they are averaged in."""

    has_masters: bool = False
    """32-bit weights in the optimizer, beside those the model runs with; DeepSpeed converts the model itself."""

    gathers_layers: bool = False
    """Weights of a layer are collected while it runs."""

    gathers_ends: bool = False
    """Embeddings and head are one unit, which stays collected through a forward and backward (FSDP2's root)."""

    is_optimizer_offloaded: bool = False
    """Optimizer states, masters and their gradients are on the CPU."""

    are_weights_offloaded: bool = False
    """The shares of the weights are on the CPU."""

    stepped_numbers: int | None = None
    """Weights of a rank that the optimizer steps at a time (stage 3's `sub_group_size`); None: all."""

    sums_in_float32: bool = False
    """Gradients of several micro-batches are added up in 32 bits, whatever the model's width (ZeRO-2 and -3)."""

    bucket_numbers: int = 0
    """Numbers in the buckets of DeepSpeed's reductions, which are there in full for small models, too."""


def division_of(strategy: str, world_size: int) -> Division:
    """What a strategy divides among W ranks.

    | strategy            | weights | gradients | optimizer |
    |---------------------|---------|-----------|-----------|
    | one device, DDP     | 1       | 1         | 1         |
    | ZeRO stage 1        | 1       | 1         | W         |
    | ZeRO stage 2        | 1       | W         | W         |
    | ZeRO stage 3, FSDP  | W       | W         | W         |

    Source: ZeRO (arXiv:1910.02054), section 3 and figure 1; DDP's buckets: torch, `gradient_as_bucket_view=False`.

    Args:
        strategy: `trainer.strategy`: a name, or the class of a strategy (`DeepSpeedStrategy` with its stage: `zero3`).
            "..._offload" keeps on the CPU what can be there.
        world_size: W.

    Raises:
        ValueError: If the strategy is not known here.
    """
    name, W = strategy.lower(), world_size
    for stage in (1, 2, 3):
        if name.startswith((f"deepspeed_stage_{stage}", f"zero{stage}")):
            division = Division(
                weights=W if stage == 3 else 1,
                gradients=W if stage >= 2 else 1,
                optimizer=W,
                has_masters=True,
                gathers_layers=stage == 3,
                sums_in_float32=stage >= 2,
                bucket_numbers=BUCKET_NUMBERS if stage == 3 else 2 * BUCKET_NUMBERS,
            )
            return offloaded(division, weights=stage == 3) if name.endswith("_offload") else division
    if name.startswith(("fsdp", "modelparallel")):
        return Division(W, W, W, gathers_layers=True, gathers_ends=True)
    if name.startswith("ddp") or (name == "auto" and W > 1):
        return Division(has_buckets=W > 1)
    if name in ("auto", "single", "single_device") or name.startswith("singledevice"):
        return Division()
    raise ValueError(
        f"How the strategy {strategy!r} divides memory is not known here; auto, single_device, ddp, fsdp2, zero1, "
        "zero2, zero3 and zero3_offload are."
    )


def offloaded(division: Division, *, optimizer: bool = True, weights: bool = False) -> Division:
    """The division with parts of it on the CPU."""
    return dataclasses.replace(division, is_optimizer_offloaded=optimizer, are_weights_offloaded=weights)


def optimizer_bytes_per_weight(factory: Callable[[Iterable[Parameter]], Optimizer], dtype: torch.dtype) -> float:
    """Bytes of optimizer state per trained weight: counted on a small tensor after one step of the real optimizer.

    AdamW keeps two numbers as wide as the weight: 8 bytes at 32 bits, and its counter, which does not grow, is left
    out.
    Exact for optimizers that treat every number alike; those that factor a matrix need less on larger ones.
    """
    probe = Parameter(torch.zeros(256, PROBE_WEIGHTS // 256, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    optimizer = factory([probe])
    optimizer.step()
    states = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    return sum(state.nbytes for state in states if state.numel() > 1) / probe.numel()


def shard_bytes(num_weights: int, bytes_per_weight: float, ranks: int) -> int:
    """Bytes of one rank's share, the last number rounded up to a whole one."""
    return math.ceil(math.ceil(num_weights / ranks) * bytes_per_weight)
