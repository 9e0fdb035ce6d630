"""Teams: ranks that share the groups of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import distributed as dist

from grpo_lightning.core import ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Teams:
    """The teams of a run: R ranks share the groups of their prompts.

        W / R teams;   rank r is member r // (W / R) of team r mod (W / R)

    W is the number of ranks. The first members are the ranks 0 to W / R - 1, in the order of the teams. With R = 1
    every rank is a team of its own.
    """

    ranks_per_group: int = 1
    """R."""

    @property
    def num_teams(self) -> int:
        """Number of teams."""
        return ranks.world_size() // self.ranks_per_group

    @property
    def team(self) -> int:
        """Index of this rank's team."""
        return ranks.rank() % self.num_teams

    @property
    def member(self) -> int:
        """Index of this rank in its team."""
        return ranks.rank() // self.num_teams

    @property
    def is_first(self) -> bool:
        """True for the first member of a team, which holds the complete groups."""
        return self.member == 0

    @property
    def is_shared(self) -> bool:
        """True if a group has several ranks."""
        return self.ranks_per_group > 1

    def indices(self, count: int) -> list[int]:
        """Global indices of this team's `count` items, distributed round-robin over teams."""
        return [self.team + i * self.num_teams for i in range(count)]

    def part(self, num_generations: int, member: int | None = None) -> range:
        """The completions of a group that a member samples and trains on; by default, of this rank."""
        member = self.member if member is None else member
        bounds = [i * num_generations // self.ranks_per_group for i in (member, member + 1)]
        return range(*bounds)

    def gather_from_firsts(self, value: T) -> list[T]:
        """Gather a value from the first member of every team, in the order of the teams. Collective over all ranks."""
        return ranks.gather_objects(value)[: self.num_teams]

    def broadcast(self, value: T) -> T:
        """Return the value of the team's first member, to every member. Collective in a team."""
        if not self.is_shared:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.team, group=self._process_group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Gather a value from every member of the team, on the first; an empty list elsewhere. Collective in a team."""
        if not self.is_shared:
            return [value]
        values: list[Any] | None = [None] * self.ranks_per_group if self.is_first else None
        dist.gather_object(value, values, dst=self.team, group=self._process_group)
        return values or []

    def scatter(self, values: Sequence[T]) -> T:
        """Send one value of the first member to each member of its team. Collective in a team.

        Args:
            values: One per member; ignored elsewhere than on the first member.
        """
        if not self.is_shared:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received, list(values) if self.is_first else None, src=self.team, group=self._process_group
        )
        return received[0]  # type: ignore[no-any-return]

    @cached_property
    def _process_group(self) -> Any:
        """The process group of this rank's team. Collective over all ranks at its first use."""
        members = [list(range(team, ranks.world_size(), self.num_teams)) for team in range(self.num_teams)]
        own, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")  # objects are sent from the CPU
        return own
