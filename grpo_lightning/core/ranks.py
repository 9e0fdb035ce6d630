"""Collectives, which are no-ops in single-process runs, and the classes `Lockstep` and `Teams`.

`Lockstep` makes all ranks run the policy equally often while the policy's weights are sharded. `Teams` divides the
ranks into teams.

All ranks must make the same collective calls in the same order. For a collective of a team, this applies only to the
ranks of the team. The run hangs if one rank skips a call that the others make.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

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


def sum_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over ranks. The shape must be the same on every rank."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """Elementwise maximum over ranks. The shape must be the same on every rank."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def any_over_ranks(flag: bool) -> bool:  # noqa: FBT001 - a question about one truth value
    """True if the flag is True on at least one rank."""
    return bool(max_over_ranks(torch.tensor(int(flag)))) if world_size() > 1 else flag


def gather_objects(value: Any) -> list[Any]:
    """Gather a value from every rank, ordered by rank. Values are pickled, so keep them small."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(rows: Tensor) -> list[Tensor]:
    """Gather one tensor per rank, in the order of the ranks. The tensors can differ in their first dimension."""
    if world_size() == 1:
        return [rows]
    sizes = gather_objects(len(rows))
    padded = rows.new_zeros(max(sizes), *rows.shape[1:]).to("cuda" if _is_cuda_only() else rows.device)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size].to(rows.device) for part, size in zip(parts, sizes, strict=True)]


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """Take items from the parts in turn (round-robin).

    Prompts go round-robin to the ranks, so prompt i of rank r has index `i * world_size + r` among all prompts. The
    lists of all ranks are thus merged in the order of the prompts. If ranks share groups, prompts go round-robin to
    the teams (`Teams`), and only the first member of each team has a list with items.
    """
    turns = itertools.zip_longest(*([[item] for item in items] for items in parts), fillvalue=[])
    return [item for turn in turns for items in turn for item in items]


def _all_reduce(values: Tensor, operation: Any) -> Tensor:
    """All-reduce on a device that the process group supports."""
    if world_size() == 1:
        return values
    # A copy, because all_reduce works in place.
    copy = values.detach().clone().to("cuda" if _is_cuda_only() else values.device)
    dist.all_reduce(copy, operation)
    return copy.to(values.device)


def timeout_of(group: Any) -> timedelta:
    """Timeout of the collectives of a process group. PyTorch has no public attribute for it."""
    device = torch.device("cuda" if str(dist.get_backend(group)) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout  # type: ignore[no-any-return]


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of the collectives of a process group."""
    run = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    run(timeout, group)


def _is_cuda_only() -> bool:
    """True if the process group has no collectives for CPU tensors."""
    return str(dist.get_backend()) == "nccl"


def part_of_group(num_generations: int, member: int, ranks_per_group: int) -> range:
    """The part of a prompt's G completions that one rank of a team samples and trains on.

    The part has every R-th completion (see `Teams`), so consecutive completions belong to different members. If
    `split_updates` divides a group among several updates, each update gets consecutive completions. The members then
    share these completions almost equally.
    """
    return range(member, num_generations, ranks_per_group)


class Lockstep:
    """Synchronizes the number of forward calls over ranks while the weights stay sharded.

    With sharded weights, a forward call of the policy is collective, but some ranks need more calls than others. All
    ranks therefore make the same calls until the last rank is done. A rank without work of its own runs dummy rows.

    Args:
        is_needed: True if forward calls are collective. If False, no rank waits for another rank, and each method
            returns this rank's own values.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed

    def num_waves(self, own: int) -> int:
        """Number of waves to run, which is the maximum of `own` over all ranks.

        A wave is a set of prompts that are decoded together.
        """
        return int(max_over_ranks(torch.tensor(own, device="cpu"))) if self.is_needed else own

    def union(self, own: Sequence[int]) -> set[int]:
        """The union of `own` over all ranks."""
        return set().union(*gather_objects(set(own))) if self.is_needed else set(own)

    def agree(self, *own: bool) -> list[bool]:
        """For each kind of forward call (decoding, prefill), return whether any rank makes such a call next."""
        if not self.is_needed:
            return list(own)
        return max_over_ranks(torch.tensor(own, dtype=torch.long, device="cpu")).bool().tolist()


@dataclass(frozen=True)
class Teams:
    """Divides the W ranks of a run into W / R teams of R ranks.

    The ranks of a team get the same prompts. Each rank samples a part of the G completions of every prompt, and trains
    on this part.

        rank r is member r mod R of team r // R

    The members of a team are consecutive ranks, so they are on the same node if R divides the number of ranks per node.
    The first member (member 0) of a team also holds the complete groups. With R = 1, every rank is a team of its own.
    """

    ranks_per_group: int = 1
    """R."""

    @property
    def num_teams(self) -> int:
        """Number of teams."""
        return world_size() // self.ranks_per_group

    @property
    def team(self) -> int:
        """Index of this rank's team."""
        return rank() // self.ranks_per_group

    @property
    def member(self) -> int:
        """Index of this rank in its team."""
        return rank() % self.ranks_per_group

    @property
    def first_rank(self) -> int:
        """Rank of the first member of this rank's team."""
        return self.team * self.ranks_per_group

    @property
    def is_first(self) -> bool:
        """True for the first member of a team, which holds the complete groups."""
        return self.member == 0

    @property
    def is_shared(self) -> bool:
        """True if teams have several ranks, which share their groups."""
        return self.ranks_per_group > 1

    def indices(self, count: int) -> list[int]:
        """Indices of this team's `count` prompts among the prompts of all teams."""
        return [self.team + i * self.num_teams for i in range(count)]

    def part(self, num_generations: int, member: int | None = None) -> range:
        """Indices, in a group, of the completions that a member samples and trains on. `member` None is this rank."""
        return part_of_group(num_generations, self.member if member is None else member, self.ranks_per_group)

    def sampling_rank(self, number: int) -> int:
        """Rank that samples the completion with this index in a group of this team."""
        return self.first_rank + number % self.ranks_per_group

    def gather_from_firsts(self, value: T) -> list[T]:
        """Gather a value from the first member of every team, in the order of the teams.

        Every rank gets the list. Collective: every rank must call this.
        """
        return gather_objects(value)[:: self.ranks_per_group]

    def broadcast(self, value: T) -> T:
        """Return the first member's `value` on every member of the team.

        Collective: every member of the team must call this.
        """
        if not self.is_shared:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.first_rank, group=self._process_group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Gather the values of all members on the first member. The other members get an empty list.

        Collective: every member of the team must call this.
        """
        if not self.is_shared:
            return [value]
        values: list[Any] | None = [None] * self.ranks_per_group if self.is_first else None
        dist.gather_object(value, values, dst=self.first_rank, group=self._process_group)
        return values or []

    def scatter(self, values: Sequence[T]) -> T:
        """Send value i of the first member's `values` to member i of the team.

        Collective: every member of the team must call this.
        """
        if not self.is_shared:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received, list(values) if self.is_first else None, src=self.first_rank, group=self._process_group
        )
        return received[0]  # type: ignore[no-any-return]

    def check(self, problem: str | None) -> None:
        """Raise a ValueError on every member of the team if the first member has found a problem.

        Collective: every member of the team must call this.
        """
        problem = self.broadcast(problem)
        if problem is not None:
            raise ValueError(problem)

    @cached_property
    def _process_group(self) -> Any:
        """The process group of this rank's team.

        The first access is collective: all ranks must make it, because each rank creates the groups of all teams. The
        collectives of the team have the timeout of the run's process group (`timeout` of the strategy).
        """
        firsts = range(0, world_size(), self.ranks_per_group)
        members = [list(range(first, first + self.ranks_per_group)) for first in firsts]
        own, _ = dist.new_subgroups_by_enumeration(
            members,
            timeout=timeout_of(dist.group.WORLD),
            backend="gloo",  # objects are sent from the CPU
        )
        return own
