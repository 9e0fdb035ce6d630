"""The result of evaluating a policy on prompts."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lightning.rewards import Scores
from grpo_lightning.types import Group


@dataclass
class Evaluation:
    """Completions with their rewards, and sums and counts of what is reported about them."""

    groups: list[Group]
    scores: Scores
    totals: dict[str, tuple[float, float]]
    """(sum, count) of `reward`, every reward by name, `length` (tokens) and `truncated`."""

    @classmethod
    def of(cls, groups: list[Group], scores: Scores) -> Evaluation:
        """Summarise scored groups."""
        completions = [completion for group in groups for completion in group.completions]
        values = {"reward": scores.total, **scores.by_reward}
        totals = {name: (float(value.nansum()), float((~value.isnan()).sum())) for name, value in values.items()}
        totals["length"] = (float(sum(len(c.token_ids) for c in completions)), float(len(completions)))
        totals["truncated"] = (float(sum(c.is_truncated for c in completions)), float(len(completions)))
        return cls(groups, scores, totals)

    def __add__(self, other: Evaluation) -> dict[str, tuple[float, float]]:
        """Totals of both together."""
        return {
            name: (total + other.totals[name][0], count + other.totals[name][1])
            for name, (total, count) in self.totals.items()
        }
