"""All rewards of a run: their weights, their weighted sum, and what counts as not scorable."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.rewards.base import CONTRACT, RewardLike, WeightedReward
from grpo_lightning.rewards.call import FAILURES, RewardCall
from grpo_lightning.types import Group


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
    """[N * G] values per column, from `log_extra`."""

    failures: dict[str, int]
    """Completions per `reward/failure` (see `FAILURES`); every key is always there."""


RESERVED_NAMES = frozenset({"equal_groups", "failures", "length", "mean", "not_scorable", "reward", "std", "truncated"})
"""Log names of the total and of completions; a reward of the same name would be mixed up with them."""


class RewardSet:
    """The rewards of a run.

    Sync rewards run one after the other in the calling thread; async ones run meanwhile, together, on one event loop
    that lives as long as the process, so that their clients keep their connections. Picklable if the rewards are.

    Args:
        rewards: Functions, callable objects, `Reward`s or `WeightedReward`s. Names must differ: log keys that moved
            when rewards are reordered would be worse than an error.
        weights: One per reward, instead of weights in `WeightedReward`s.
    """

    def __init__(self, rewards: Sequence[RewardLike], weights: Sequence[float] | None = None) -> None:
        """Raises: ValueError if there is no reward, two have one name, or the weights do not fit."""
        if not isinstance(rewards, Sequence) or not rewards:
            raise ValueError(f"rewards must be a list of at least one reward, got {rewards!r}.")
        self.rewards = [r if isinstance(r, WeightedReward) else WeightedReward(r) for r in rewards]
        if weights is None:
            self.weights = [reward.weight for reward in self.rewards]
        else:
            self.weights = _checked_weights(weights, self.rewards)
        if not any(self.weights):
            raise ValueError("Every reward has weight 0: nothing would be trained on. Give one another weight.")
        names = [reward.name for reward in self.rewards]
        if taken := sorted(RESERVED_NAMES.intersection(names)):
            raise ValueError(
                f"A reward must not be named {taken[0]!r}: the logs have another meaning for it. Name it with "
                "WeightedReward(reward, name=...)."
            )
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} rewards are named {name!r}, and their logs would mix. Give them names: "
                    f"WeightedReward(reward, name=...)."
                )
        self._known_columns: tuple[str, ...] = ()

    def validate(self, columns: Iterable[str]) -> None:
        """Check that the data have what the rewards need, and remember which columns there are.

        In a mixture one source may lack a column that another has: its rows then give None.

        Args:
            columns: The columns of all prompts together.

        Raises:
            ValueError: If a column is missing, or has the name of an argument that every reward gets.
        """
        self._known_columns = tuple(dict.fromkeys(columns))
        self._check(self._known_columns)

    def score(self, groups: Sequence[Group], *, trainer_state: Any = None) -> Scores:
        """Run every reward on every completion.

            total[n, g] = sum over rewards r that apply to group n of weight[r] * value[r, n, g]

        A reward applies to a group if it gave one of its completions a value. If it did and gave another None, that
        other is not scorable and its total NaN; so is a group to which no reward applies. Rewards of weight 0 do not
        count in any of this.

        Args:
            groups: N groups of G completions each.
            trainer_state: Handed to the rewards as it is.

        Raises:
            RuntimeError: If a reward raised and its `on_error` is "raise"; the cause is chained.
            ValueError: Likewise for what it returned; or if groups differ in size, or a column is missing.
        """
        sizes = sorted({len(group.completions) for group in groups})
        if len(sizes) != 1 or sizes == [0]:
            raise ValueError(f"groups must all have the same number of completions, at least 1; got sizes {sizes}.")
        columns = list(dict.fromkeys([*self._known_columns, *(name for g in groups for name in g.prompt.columns)]))
        self._check(columns)
        calls = [RewardCall(reward, groups, columns, trainer_state) for reward in self.rewards]
        for call in calls:
            call.start()
        by_reward = {call.reward.name: call.finish() for call in calls}
        return Scores(
            total=weighted_total(
                torch.stack(list(by_reward.values())), torch.tensor(self.weights, dtype=torch.float32)
            ),
            by_reward=by_reward,
            metrics=_merged_metrics(calls),
            extras=_merged_extras(calls),
            failures={f"{call.reward.name}/{kind}": call.failures[kind] for call in calls for kind in FAILURES},
        )

    def _check(self, columns: Sequence[str]) -> None:
        """Raises: ValueError if the rewards cannot be called with these columns."""
        taken = [name for name in columns if name in CONTRACT]
        if taken:
            raise ValueError(f"Data columns {taken} have the names of arguments that every reward gets: rename them.")
        for reward in self.rewards:
            for column in reward.required_columns:
                if column not in columns:
                    raise ValueError(
                        f"Reward {reward.name!r} needs the data column {column!r}, which the data do not have; they "
                        f"have: {', '.join(columns) or 'none'}. Rename a column, or give the parameter a default."
                    )


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


def _merged_metrics(calls: Sequence[RewardCall]) -> dict[str, float]:
    """The mean of all values each metric was given."""
    merged: dict[str, list[float]] = {}
    for call in calls:
        for name, values in call.metrics.items():
            merged.setdefault(name, []).extend(values)
    return {name: statistics.fmean(values) for name, values in merged.items()}


def _merged_extras(calls: Sequence[RewardCall]) -> dict[str, list[Any]]:
    """The columns of all rewards that did not fail. Raises: ValueError if two rewards log the same one."""
    merged: dict[str, list[Any]] = {}
    for call in calls:
        if call.failures["exception"] or call.failures["wrong_length"]:
            continue
        for column, values in call.extras.items():
            if column in merged:
                raise ValueError(f"Two rewards log_extra the column {column!r}: rename it in {call.reward.name!r}.")
            merged[column] = values
    return merged


def _checked_weights(weights: Sequence[float], rewards: Sequence[WeightedReward]) -> list[float]:
    """The weights as floats. Raises: ValueError if they do not fit the rewards."""
    if len(weights) != len(rewards):
        raise ValueError(
            f"reward_weights has {len(weights)} entries and rewards has {len(rewards)}: give one weight per reward, "
            f"or leave reward_weights out."
        )
    for weight, reward in zip(weights, rewards, strict=True):
        if reward.weight != 1:
            raise ValueError(
                f"Reward {reward.name!r} has the weight {reward.weight} and reward_weights gives it {weight}: keep one."
            )
        if not math.isfinite(weight):
            raise ValueError(f"reward_weights must be finite, got {weight} for {reward.name!r}.")
    return [float(weight) for weight in weights]
