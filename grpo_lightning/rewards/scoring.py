"""A batch whose rewards are being computed: what is waited for, and how it is put together."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.core.types import Group
from grpo_lightning.rewards.arguments import Circumstances
from grpo_lightning.rewards.base import RESERVED_NAMES, WeightedReward
from grpo_lightning.rewards.call import FAILURES, RewardCall, StaysError
from grpo_lightning.rewards.placement import Placement
from grpo_lightning.rewards.scores import Scores
from grpo_lightning.rewards.sources import applies


class Scoring:
    """The calls of all rewards on a batch, on their way.

    Calls in workers and asynchronous ones go on while the training process does something else, until `finish`.

    Args:
        groups: N groups of G completions.
        weights: Of the rewards, by name.
        size: (N, G).
        circumstances: What is the same for all completions.
        placement: Where the rewards run.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        weights: Mapping[str, float],
        size: tuple[int, int],
        circumstances: Circumstances,
        placement: Placement,
    ) -> None:
        self.weights = weights
        self.size = size
        self.circumstances = circumstances
        self.placement = placement
        self.rows = {
            reward.name: [n for n, group in enumerate(groups) if applies(group.prompt, reward.name)]
            for reward in placement.rewards
        }
        places = {reward.name: placement.place(reward) for reward in placement.rewards}  # once they are loaded
        limits = placement.limits
        self.limit = "" if limits is None else limits.step_limit
        self.deadline = None if limits is None else time.monotonic() + limits.step_timeout_seconds
        chosen = {name: [groups[n] for n in rows] for name, rows in self.rows.items() if rows}
        self.calls = [self._call(reward, chosen[reward.name]) for reward in placement.rewards if reward.name in chosen]
        at_home = []
        for call in self.calls:
            if (place := places[call.reward.name]) is None:
                at_home.append(call)
            else:
                call.start_in(*place)
        for call in sorted(at_home, key=lambda call: not call.reward.is_async):  # once the others run
            call.start_here()

    def finish(self) -> Scores:
        """Wait for all rewards; if one stops the run, for none.

        Raises:
            RuntimeError: If a reward failed and its `on_error` is "raise"; the cause is chained.
            ValueError: Likewise for what it returned; or if it logs a metric under a name that is taken.
        """
        try:
            return self._scores()
        except BaseException:
            for call in self.calls:
                call.cancel()
            raise

    def _scores(self) -> Scores:
        """What all rewards say. Raises: as `finish`."""
        by_reward = {name: torch.full(self.size, math.nan, dtype=torch.float32) for name in self.weights}
        failures = {f"{name}/{kind}": 0 for name in self.weights for kind in FAILURES}
        for place, begun in enumerate(self.calls):
            call, values = self._finished(begun)
            self.calls[place] = call
            by_reward[call.reward.name][self.rows[call.reward.name]] = values
            failures.update({f"{call.reward.name}/{kind}": count for kind, count in call.failures.items()})
        return Scores(
            total=weighted_total(
                torch.stack(list(by_reward.values())), torch.tensor(list(self.weights.values()), dtype=torch.float32)
            ),
            by_reward=by_reward,
            metrics=self._merged_metrics(),
            extras=self._merged_extras(),
            failures=failures,
        )

    def _call(self, reward: WeightedReward, groups: Sequence[Group]) -> RewardCall:
        """A call of a reward, not begun."""
        return RewardCall(reward, groups, self.circumstances, self.deadline, self.limit)

    def _finished(self, call: RewardCall) -> tuple[RewardCall, Tensor]:
        """A call and what it gave; made anew in this process, if it turns out to belong here."""
        try:
            return call, call.finish()
        except StaysError as error:
            self.placement.keep(call.reward.name, str(error))
            again = self._call(call.reward, call.groups)
            again.start_here()
            return again, again.finish()

    def _merged_metrics(self) -> dict[str, float]:
        """The mean of all values each metric was given. Raises: ValueError if a name has another meaning."""
        merged: dict[str, list[float]] = {}
        for call in self.calls:
            for name, values in call.metrics.items():
                if name in RESERVED_NAMES or name in self.weights:
                    raise ValueError(
                        f"Reward {call.reward.name!r} calls log_metric({name!r}), which the logs have another meaning "
                        f"for: rename it, for example {call.reward.name}_{name}."
                    )
                merged.setdefault(name, []).extend(values)
        return {name: statistics.fmean(values) for name, values in merged.items()}

    def _merged_extras(self) -> dict[str, list[Any]]:
        """The columns of all rewards, over all groups.

        A column that several rewards log becomes `<reward>/<column>` for each of them.
        """
        (num_groups, size) = self.size
        logged_by = collections.Counter(column for call in self.calls for column in call.extras)
        merged: dict[str, list[Any]] = {}
        for call in self.calls:
            for column, values in call.extras.items():
                name = column if logged_by[column] == 1 else f"{call.reward.name}/{column}"
                merged[name] = [None] * (num_groups * size)
                for position, n in enumerate(self.rows[call.reward.name]):
                    merged[name][n * size : (n + 1) * size] = values[position * size : (position + 1) * size]
        return merged


def weighted_total(values: Tensor, weights: Tensor) -> Tensor:
    """Add up the rewards that apply to each group.

    Args:
        values: [R, N, G] one layer per reward; NaN is None.
        weights: [R]; rewards of weight 0 do not count.

    Returns:
        [N, G] totals; NaN where a reward that applies to the group has no value, or none applies.
    """
    applies = ~values.isnan().all(dim=2, keepdim=True) & (weights != 0).view(-1, 1, 1)  # [R, N, 1]
    total = torch.where(applies, values * weights.view(-1, 1, 1), 0.0).sum(dim=0)
    return total.masked_fill(~applies.any(dim=0), math.nan)
