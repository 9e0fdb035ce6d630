"""What rewards say about completions: values by reward, their weighted sum, what was logged and what went wrong."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Scores:
    """What the rewards say about N groups of G completions."""

    total: Tensor
    """[N, G] float32: the weighted sum of the rewards that apply; NaN where a completion is not scorable."""

    by_reward: dict[str, Tensor]
    """[N, G] float32 per reward, before its weight; NaN where it gave None."""

    metrics: dict[str, float]
    """The mean of the values each name was given by `log_metric`."""

    extras: dict[str, list[Any]]
    """[N * G] values per column, from `log_extra`; None where the reward does not apply. A column that several rewards
    log is `<reward>/<column>` for each."""

    failures: dict[str, int]
    """Completions per `reward/failure` (see `FAILURES`); every key is always there."""

    @classmethod
    def of_totals(cls, total: Tensor) -> Scores:
        """The scores [N, G] of something that knows the totals alone."""
        return cls(total, {}, {}, {}, {})

    def select(self, rows: Sequence[int]) -> Scores:
        """Those of some of the groups, in the order given; metrics and failures stay those of all."""
        rows, size = list(rows), self.total.shape[1]
        return replace(
            self,
            total=self.total[rows],
            by_reward={name: values[rows] for name, values in self.by_reward.items()},
            extras={
                name: [value for row in rows for value in values[row * size : (row + 1) * size]]
                for name, values in self.extras.items()
            },
        )


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of groups that were scored in several calls, one part after the other.

    A metric is the mean over the calls that logged it.
    """
    columns = dict.fromkeys(name for part in parts for name in part.extras)
    metrics: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            metrics.setdefault(name, []).append(value)
    return Scores(
        total=torch.cat([part.total for part in parts]),
        by_reward={name: torch.cat([part.by_reward[name] for part in parts]) for name in parts[0].by_reward},
        metrics={name: statistics.fmean(values) for name, values in metrics.items()},
        extras={
            name: [value for part in parts for value in part.extras.get(name, [None] * part.total.numel())]
            for name in columns
        },
        failures={name: sum(part.failures[name] for part in parts) for name in parts[0].failures},
    )
