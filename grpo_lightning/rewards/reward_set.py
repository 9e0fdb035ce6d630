"""All rewards of a run: how a batch is scored, their weighted sum, and what counts as not scorable."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.core.types import Group, Prompt
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards.arguments import Circumstances
from grpo_lightning.rewards.base import RESERVED_NAMES, RewardLike, WeightedReward
from grpo_lightning.rewards.call import FAILURES, RewardCall, StaysError
from grpo_lightning.rewards.scores import Scores
from grpo_lightning.rewards.validation import Source, applies, check_rows, check_sources, sources_of
from grpo_lightning.rewards.workers import Placement, RewardWorkers


class RewardSet:
    """The rewards of a run.

    With `workers`, sync rewards that can be pickled run in processes of their own, several calls at once and within
    limits (`RewardWorkers`). The others run one after the other in the calling thread; async ones run meanwhile,
    together, on one event loop that lives as long as the process, so that their clients keep their connections.
    Picklable if the rewards are.

    Args:
        rewards: Functions, callable objects, `Reward`s or `WeightedReward`s. Names must differ: log keys that moved
            when rewards are reordered would be worse than an error.
        weights: One per reward, instead of weights in `WeightedReward`s.
        workers: The processes for rewards; None calls all of them in this one.
    """

    def __init__(
        self,
        rewards: Sequence[RewardLike],
        weights: Sequence[float] | None = None,
        workers: RewardWorkers | None = None,
    ) -> None:
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
        self.placement = Placement(self.rewards, workers)

    @property
    def names(self) -> list[str]:
        """The rewards' names, in their order."""
        return [reward.name for reward in self.rewards]

    @property
    def success(self) -> str:
        """The name of the reward that decides what is solved: the first with `says_solved`, else the first."""
        return next((reward.name for reward in self.rewards if reward.says_solved), self.rewards[0].name)

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

    def connect(self, device: torch.device, sharding: Sharding | None = None, num_local_ranks: int = 1) -> None:
        """Have the rewards load what they need (`Reward.connect`).

        Args:
            device: The policy's on this rank.
            sharding: How the policy lies over the ranks; what rewards load does not.
            num_local_ranks: Ranks on this machine.
        """
        self.placement.start(num_local_ranks)  # which goes on while the others load
        with (sharding or Sharding()).beside():
            for reward in self.rewards:
                reward.connect(device)

    def score(self, groups: Sequence[Group], **settings: Any) -> Scores:
        """Run every reward and wait for it. Args, Raises: as `begin` and `Scoring.finish`."""
        return self.begin(groups, **settings).finish()

    def begin(
        self,
        groups: Sequence[Group],
        max_completion_length: int | None = None,
        trainer_state: Any = None,
        num_generations: int | None = None,
    ) -> Scoring:
        """Run every reward on every completion of the prompts it applies to.

            total[n, g] = sum over rewards r that apply to group n of weight[r] * value[r, n, g]

        A reward applies to a group if the prompt does not leave it out (`Prompt.rewards`) and it gave one of the
        completions a value. If it did and gave another None, that other is not scorable and its total NaN; so is a
        group to which no reward applies. Rewards of weight 0 do not count in any of this.

        Without groups (a rank whose share of the prompts is empty) no reward is called.

        Args:
            groups: N groups of G completions each.
            max_completion_length: The training run's limit, in tokens; handed to the rewards.
            trainer_state: Handed to the rewards as it is.
            num_generations: G, needed where there are no groups.

        Raises:
            ValueError: If groups differ in size, a column is missing, or prompts name an unknown reward.
            RuntimeError: If the workers do not start.
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
        circumstances = Circumstances(columns, trainer_state, max_completion_length)
        return Scoring(groups, self._weights, (len(groups), sizes[0]), circumstances, self.placement)

    @property
    def _weights(self) -> dict[str, float]:
        """The weights by name."""
        return {reward.name: weight for reward, weight in zip(self.rewards, self.weights, strict=True)}

    def _check(self, sources: Sequence[Source]) -> None:
        """Check sources against the rewards and remember their columns."""
        check_sources(sources, self.rewards, self._weights)
        columns = [name for source in sources for name in source.columns]
        self._known_columns = tuple(dict.fromkeys([*self._known_columns, *columns]))


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
