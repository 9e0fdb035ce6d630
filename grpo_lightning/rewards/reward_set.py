"""All rewards of a run: their weights, their weighted sum, and what counts as not scorable."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards.base import RewardLike, WeightedReward
from grpo_lightning.rewards.call import FAILURES, RewardCall
from grpo_lightning.rewards.row_checks import check_rows
from grpo_lightning.rewards.sources import Source, applies, check_sources, sources_of
from grpo_lightning.types import Group, Prompt


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
        if isinstance(rewards, str) or not isinstance(rewards, Sequence) or not rewards:
            hint = "" if isinstance(rewards, Sequence) and not isinstance(rewards, str) else f": write [{rewards!r}]"
            raise ValueError(f"rewards must be a list of at least one reward, got {rewards!r}{hint}.")
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

    @property
    def names(self) -> list[str]:
        """The rewards' names, in their order."""
        return [reward.name for reward in self.rewards]

    def validate(self, columns: Iterable[str], names: Iterable[str] | None = None) -> None:
        """Check that data have what the rewards need, and remember which columns there are.

        Args:
            columns: The columns of all prompts together. One may lack a column that another has: it is None there.
            names: The rewards that the prompts name; None if all apply.

        Raises:
            ValueError: If a column is missing, or has the name of an argument that every reward gets; if a name is
                unknown, or none of the rewards named has a weight.
        """
        self._check([Source("", tuple(columns), None if names is None else tuple(names))])

    def validate_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Check that prompts have what the rewards need, source by source, and remember which columns there are.

        A reward is checked against the sources it applies to (`Prompt.rewards`).

        Raises:
            ValueError: As `validate`, naming the sources; or if prompts name a method in `accu_reward_method` and none
                of the rewards that apply to them reads it.
        """
        self._check(sources_of(prompts))

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """Have every reward check the rows that it is going to judge (`Reward.check_row`).

        Raises:
            ValueError: If there are rows that a reward cannot judge, naming them, and its `on_error` is "raise".
        """
        check_rows(prompts, self.rewards)

    def check(self, max_completion_length: int) -> None:
        """Check the rewards' settings against the run's, before any weights load.

        Args:
            max_completion_length: The training run's limit, in tokens.

        Raises:
            ValueError: If a reward's settings do not fit, naming the reward.
        """
        for reward in self.rewards:
            reward.check(max_completion_length)

    def connect(self, device: torch.device, sharding: Sharding | None = None) -> None:
        """Have the rewards load what they need (`Reward.connect`).

        Args:
            device: The policy's on this rank.
            sharding: How the policy lies over the ranks; what rewards load does not.
        """
        with (sharding or Sharding()).beside():
            for reward in self.rewards:
                reward.connect(device)

    def score(
        self,
        groups: Sequence[Group],
        *,
        trainer_state: Any = None,
        max_completion_length: int | None = None,
        num_generations: int | None = None,
    ) -> Scores:
        """Run every reward on every completion of the prompts it applies to.

            total[n, g] = sum over rewards r that apply to group n of weight[r] * value[r, n, g]

        A reward applies to a group if the prompt does not leave it out (`Prompt.rewards`) and it gave one of the
        completions a value. If it did and gave another None, that other is not scorable and its total NaN; so is a
        group to which no reward applies. Rewards of weight 0 do not count in any of this.

        Without groups (a rank whose share of the prompts is empty) no reward is called.

        Args:
            groups: N groups of G completions each.
            trainer_state: Handed to the rewards as it is.
            max_completion_length: The training run's limit, in tokens; handed to the rewards.
            num_generations: G, needed where there are no groups.

        Raises:
            RuntimeError: If a reward raised and its `on_error` is "raise"; the cause is chained.
            ValueError: Likewise for what it returned; or if groups differ in size, a column is missing, prompts name
                an unknown reward, or a reward logs a metric under a name that is taken.
        """
        sizes = sorted({len(group.completions) for group in groups})
        if not groups and num_generations is not None:
            sizes = [num_generations]
        if len(sizes) != 1 or sizes == [0]:
            raise ValueError(f"groups must all have the same number of completions, at least 1; got sizes {sizes}.")
        batch = sources_of(group.prompt for group in groups)
        columns = list(dict.fromkeys([*self._known_columns, *(name for source in batch for name in source.columns)]))
        check_sources(
            [Source(source.name, tuple(columns), source.rewards) for source in batch], self.rewards, self._weights
        )
        rows = {
            reward.name: [n for n, group in enumerate(groups) if applies(group.prompt, reward.name)]
            for reward in self.rewards
        }
        calls = [
            RewardCall(reward, [groups[n] for n in chosen], columns, trainer_state, max_completion_length)
            for reward in self.rewards
            if (chosen := rows[reward.name])
        ]
        for call in calls:
            call.start()
        by_reward = {
            reward.name: torch.full((len(groups), sizes[0]), math.nan, dtype=torch.float32) for reward in self.rewards
        }
        failures = {f"{reward.name}/{kind}": 0 for reward in self.rewards for kind in FAILURES}
        for call in calls:
            by_reward[call.reward.name][rows[call.reward.name]] = call.finish()
            failures.update({f"{call.reward.name}/{kind}": count for kind, count in call.failures.items()})
        return Scores(
            total=weighted_total(
                torch.stack(list(by_reward.values())), torch.tensor(self.weights, dtype=torch.float32)
            ),
            by_reward=by_reward,
            metrics=self._merged_metrics(calls),
            extras=_merged_extras(calls, rows, len(groups)),
            failures=failures,
        )

    @property
    def _weights(self) -> dict[str, float]:
        """The weights by name."""
        return {reward.name: weight for reward, weight in zip(self.rewards, self.weights, strict=True)}

    def _check(self, sources: Sequence[Source]) -> None:
        """Check sources against the rewards and remember their columns."""
        check_sources(sources, self.rewards, self._weights)
        columns = [name for source in sources for name in source.columns]
        self._known_columns = tuple(dict.fromkeys([*self._known_columns, *columns]))

    def _merged_metrics(self, calls: Sequence[RewardCall]) -> dict[str, float]:
        """The mean of all values each metric was given. Raises: ValueError if a name has another meaning."""
        merged: dict[str, list[float]] = {}
        for call in calls:
            for name, values in call.metrics.items():
                if name in RESERVED_NAMES or name in self._weights:
                    raise ValueError(
                        f"Reward {call.reward.name!r} calls log_metric({name!r}), which the logs have another meaning "
                        f"for: rename it, for example {call.reward.name}_{name}."
                    )
                merged.setdefault(name, []).extend(values)
        return {name: statistics.fmean(values) for name, values in merged.items()}


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


def _merged_extras(calls: Sequence[RewardCall], rows: Mapping[str, list[int]], num_groups: int) -> dict[str, list[Any]]:
    """The columns of all rewards that did not fail, over all groups.

    A column that several rewards log becomes `<reward>/<column>` for each of them.
    """
    logged_by = collections.Counter(column for call in calls for column in call.extras)
    merged: dict[str, list[Any]] = {}
    for call in calls:
        if call.failures["exception"] or call.failures["wrong_length"]:
            continue
        group_size = call.size[1]
        for column, values in call.extras.items():
            name = column if logged_by[column] == 1 else f"{call.reward.name}/{column}"
            merged[name] = [None] * (num_groups * group_size)
            for position, n in enumerate(rows[call.reward.name]):
                of_group = values[position * group_size : (position + 1) * group_size]
                merged[name][n * group_size : (n + 1) * group_size] = of_group
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
