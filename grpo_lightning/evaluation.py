"""The result of evaluating a policy on prompts."""

from __future__ import annotations

from collections.abc import Iterable
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


def means(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """The means over several evaluations together; what none of them has a value for is left out."""
    sums: dict[str, tuple[float, float]] = {}
    for evaluation in evaluations:
        for name, (total, count) in evaluation.totals.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return {name: total / count for name, (total, count) in sums.items() if count}
