"""Collectives that are no-ops in single-process runs.

Every rank must call these functions in the same order. The run hangs if only some ranks make a call, for example
because the call depends on the data of the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def is_distributed() -> bool:
    """True if a process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def own_indices(count: int) -> list[int]:
    """Global indices of this rank's `count` items, distributed round-robin over ranks."""
    return [rank() + i * world_size() for i in range(count)]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over ranks; the shape must be the same on every rank."""
    return _reduced(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """Elementwise maximum over ranks; the shape must be the same on every rank."""
    return _reduced(values, dist.ReduceOp.MAX)


def is_any(flag: bool) -> bool:  # noqa: FBT001 - a question about one truth value
    """True if the flag is set on any rank."""
    return bool(max_over_ranks(torch.tensor(int(flag)))) if world_size() > 1 else flag


def gather_objects(value: Any) -> list[Any]:
    """Gather a value from every rank, ordered by rank. Values are pickled: keep them small."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(rows: Tensor) -> list[Tensor]:
    """Gather a tensor from every rank, ordered by rank. Its first dimension may differ between ranks.

    Args:
        rows: [M, ...] on any device.

    Returns:
        The tensors of all ranks, on the device of `rows`.
    """
    if world_size() == 1:
        return [rows]
    sizes = gather_objects(len(rows))
    padded = rows.new_zeros(max(sizes), *rows.shape[1:]).to("cuda" if _is_cuda_only() else rows.device)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size].to(rows.device) for part, size in zip(parts, sizes, strict=True)]


def in_order_of_prompts(ranks: Sequence[Sequence[T]]) -> list[T]:
    """Interleave the per-rank items of `gather_objects` into the order of the data.

    The i-th prompt of rank r has global index `i * world_size + r` (round-robin).
    """
    turns = itertools.zip_longest(*([[item] for item in items] for items in ranks), fillvalue=[])
    return [item for turn in turns for items in turn for item in items]


def _reduced(values: Tensor, operation: Any) -> Tensor:
    """All-reduce on a device that the process group supports; the result is on the device of `values`."""
    if world_size() == 1:
        return values
    # A copy, because all_reduce works in place.
    copy = values.detach().clone().to("cuda" if _is_cuda_only() else values.device)
    dist.all_reduce(copy, operation)
    return copy.to(values.device)


def _is_cuda_only() -> bool:
    """True if the process group has no collectives for CPU tensors."""
    return str(dist.get_backend()) == "nccl"
