"""Collectives that are no-ops in single-process runs.

Every rank must call them in the same order: a collective that depends on a rank's own data hangs the run.
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
    """Processes of the run; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This process among them."""
    return dist.get_rank() if is_distributed() else 0


def is_distributed() -> bool:
    """True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def own_numbers(count: int) -> list[int]:
    """The numbers of this rank's `count` things among those of all ranks, which take turns."""
    return [rank() + i * world_size() for i in range(count)]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum of every rank's tensor; all have one shape."""
    return _reduced(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise largest of every rank's tensor; all have one shape."""
    return _reduced(values, dist.ReduceOp.MAX)


def is_any(flag: bool) -> bool:  # noqa: FBT001 - a question about one truth value
    """True if the flag is set on any rank."""
    return bool(max_over_ranks(torch.tensor(int(flag)))) if world_size() > 1 else flag


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, by rank; pickled, so for small things."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def in_order_of_prompts(ranks: Sequence[Sequence[T]]) -> list[T]:
    """What `gather_objects` has of each rank's prompts, in the order of the data.

    The i-th prompt of rank r is number `i * world_size + r`: ranks take turns.
    """
    turns = itertools.zip_longest(*([[item] for item in items] for items in ranks), fillvalue=[])
    return [item for turn in turns for items in turn for item in items]


def _reduced(values: Tensor, operation: Any) -> Tensor:
    """A reduction on the device that the process group can reach; the result is where `values` is."""
    if world_size() == 1:
        return values
    is_cuda_only = str(dist.get_backend()) == "nccl"
    # A copy: the reduction writes in place.
    copy = values.detach().clone().to("cuda" if is_cuda_only else values.device)
    dist.all_reduce(copy, operation)
    return copy.to(values.device)
