"""Groups whose completions are sampled and trained on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from grpo_lightning.core.teams import Teams
from grpo_lightning.core.types import Completion, Group
from grpo_lightning.rollout.groups import Rollout


class SharedGroups:
    """Collects the groups that a team has sampled, and spreads their completions over the team for training.

    Every member of a team samples its part of the completions of each prompt (`Teams.part`). The first member then
    holds the complete groups, so that rewards, advantages, dynamic sampling and logs see whole groups. The other
    members hold none. For log-probs and training each member gets its part back.

    Args:
        teams: The teams of the run.
    """

    def __init__(self, teams: Teams) -> None:
        self.teams = teams
        self._sampled: list[Group] = []
        """This rank's part of the groups sampled in this cycle, with the vision inputs, which are not sent."""

    def collect(self, parts: list[Group]) -> list[Group]:
        """Complete the groups of which each member has sampled a part. Collective in a team.

        Args:
            parts: N groups with this rank's part of the completions.

        Returns:
            The N complete groups on the first member; none on the other members.
        """
        if not self.teams.is_shared:
            return parts
        first = len(self._sampled)
        self._sampled += parts
        of_members = self.teams.gather([part.completions for part in parts])
        if not of_members:
            return []
        return [
            replace(part, completions=[c for member in of_members for c in member[i]], number=first + i)
            for i, part in enumerate(parts)
        ]

    def spread(self, rollout: Rollout) -> Rollout:
        """Give each member its part of the completions, with their advantages. Collective in a team.

        Args:
            rollout: N complete groups on the first member, and their advantages [N, G] if they are known; no group on
                the other members.

        Returns:
            N groups on every member, with its part of the completions and advantages.

        Raises:
            ValueError: If a group was not sampled by `GRPOLightningModule.generate`: no other member knows its prompt.
        """
        if not self.teams.is_shared:
            return rollout
        if any(group.number < 0 for group in rollout.groups):
            raise ValueError(
                "With model.ranks_per_group, `sample` must return groups of `self.generate`, which samples a part of "
                "each group on every rank; got a group from elsewhere."
            )
        of_members = [self._part_of(rollout, member) for member in range(self.teams.ranks_per_group)]
        numbers, completions, advantages = self.teams.scatter(of_members)
        groups = [
            replace(self._sampled[number], completions=own, number=number)
            for number, own in zip(numbers, completions, strict=True)
        ]
        return Rollout(groups, advantages=advantages)

    def return_ref_logprobs(self, groups: Sequence[Group], parts: Sequence[Group]) -> None:
        """Copy the reference log-probs of the members' parts to the complete groups. Collective in a team.

        Args:
            groups: N complete groups on the first member.
            parts: N groups with this rank's part of the completions, from `spread`.
        """
        if not self.teams.is_shared:
            return
        of_members = self.teams.gather([[c.ref_logprobs for c in part.completions] for part in parts])
        for i, group in enumerate(groups):
            logprobs = [values for member in of_members for values in member[i]]
            for completion, values in zip(group.completions, logprobs, strict=True):
                completion.ref_logprobs = values

    def forget(self) -> None:
        """Free the parts of a cycle whose micro-batches are complete."""
        self._sampled = []

    def _part_of(self, rollout: Rollout, member: int) -> tuple[list[int], list[list[Completion]], Tensor | None]:
        """A member's part of each group: the group's number, completions [N][part], and advantages [N, part]."""
        parts = [self.teams.part(len(group.completions), member) for group in rollout.groups]
        completions = [
            group.completions[part.start : part.stop] for group, part in zip(rollout.groups, parts, strict=True)
        ]
        advantages = rollout.advantages
        if advantages is not None and parts:
            advantages = advantages[:, parts[0].start : parts[0].stop]
        return [group.number for group in rollout.groups], completions, advantages
