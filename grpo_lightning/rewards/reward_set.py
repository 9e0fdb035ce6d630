"""RewardSet: the rewards of a run and their weights, checked against the data and called on rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_lightning.core.types import Group, Prompt
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards.base import RESERVED_NAMES, RewardLike, WeightedReward
from grpo_lightning.rewards.scoring import CallContext, Scores, Scoring
from grpo_lightning.rewards.validation import Source, check_rows, check_sources, sources_of
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool


class RewardSet:
    """The rewards of a run.

    With `workers`, picklable sync rewards run in worker processes, several calls at a time and within limits
    (`RewardWorkers`). Other sync rewards run one after the other in the calling thread. Async rewards run concurrently
    with them, on one event loop for the lifetime of the process, so that their clients keep their connections.
    Picklable if the rewards are.

    Args:
        rewards: Functions, callable objects, `Reward`s or `WeightedReward`s. Names must be unique, so that log keys
            do not depend on the order of the rewards.
        weights: One per reward, instead of weights in `WeightedReward`s.
        workers: Settings of the worker processes; None runs all rewards in this process.
    """

    def __init__(
        self,
        rewards: Sequence[RewardLike],
        weights: Sequence[float] | None = None,
        workers: RewardWorkers | None = None,
    ) -> None:
        """Raises: ValueError if there is no reward, two have the same name, or the weights do not match."""
        if isinstance(rewards, str) or not isinstance(rewards, Sequence) or not rewards:
            hint = "" if isinstance(rewards, Sequence) and not isinstance(rewards, str) else f": write [{rewards!r}]"
            raise ValueError(f"rewards must be a list of at least one reward, got {rewards!r}{hint}.")
        self.rewards = [r if isinstance(r, WeightedReward) else WeightedReward(r) for r in rewards]
        if weights is None:
            self.weights = [reward.weight for reward in self.rewards]
        else:
            self.weights = _check_weights(weights, self.rewards)
        if not any(self.weights):
            raise ValueError("All rewards have weight 0, so there is nothing to train on: give one a nonzero weight.")
        names = [reward.name for reward in self.rewards]
        if taken := sorted(RESERVED_NAMES.intersection(names)):
            raise ValueError(
                f"A reward must not be named {taken[0]!r}: the logs use it for another metric. Rename it with "
                "WeightedReward(reward, name=...)."
            )
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} rewards are named {name!r}, so their logs would collide. Rename them with "
                    f"WeightedReward(reward, name=...)."
                )
        self._known_columns: tuple[str, ...] = ()
        self.pool = WorkerPool(self.rewards, workers)

    @property
    def names(self) -> list[str]:
        """The rewards' names, in order."""
        return [reward.name for reward in self.rewards]

    @property
    def success(self) -> str:
        """The name of the reward that decides what is solved: the first with `says_solved`, otherwise the first."""
        return next((reward.name for reward in self.rewards if reward.says_solved), self.rewards[0].name)

    def validate_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Check that prompts have the columns the rewards need, source by source, and record the known columns.

        A reward is checked against the sources it applies to (`Prompt.rewards`).

        Raises:
            ValueError: Naming the sources, if a column is missing, or has the name of a reward argument; if prompts
                name an unknown reward, or only rewards of weight 0, or a method in `accu_reward_method` that none of
                their rewards reads.
        """
        sources = sources_of(prompts)
        check_sources(sources, self.rewards, self._weights)
        columns = [name for source in sources for name in source.columns]
        self._known_columns = tuple(dict.fromkeys([*self._known_columns, *columns]))

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """Check each row with each reward that will score it (`Reward.check_row`).

        Raises:
            ValueError: Naming the rows that a reward cannot score, if its `on_error` is "raise".
        """
        check_rows(prompts, self.rewards)

    def check(self, max_completion_length: int) -> None:
        """Check the rewards' settings against the run's, before any weights load.

        Args:
            max_completion_length: The training run's limit, in tokens.

        Raises:
            ValueError: If a reward's settings are invalid for this run, naming the reward.
        """
        for reward in self.rewards:
            reward.check(max_completion_length)

    def connect(self, device: torch.device, sharding: Sharding | None = None, num_local_ranks: int = 1) -> None:
        """Start the workers and have the rewards load their models (`Reward.connect`).

        Args:
            device: The policy's device on this rank.
            sharding: The sharding of the policy; models of rewards are not sharded.
            num_local_ranks: Ranks on this machine.
        """
        self.pool.start(num_local_ranks)  # runs in the background while the others load
        with (sharding or Sharding()).beside():
            for reward in self.rewards:
                reward.connect(device)

    def score(self, groups: Sequence[Group], **settings: Any) -> Scores:
        """Run all rewards and wait for them. Args, Raises: as `begin` and `Scoring.finish`."""
        return self.begin(groups, **settings).finish()

    def begin(
        self,
        groups: Sequence[Group],
        max_completion_length: int | None = None,
        trainer_state: Any = None,
        num_generations: int | None = None,
    ) -> Scoring:
        """Start every reward on all completions of the prompts it applies to.

            total[n, g] = sum over rewards r that apply to group n of weight[r] * value[r, n, g]

        A reward applies to a group if the prompt does not exclude it (`Prompt.rewards`) and at least one completion has
        a value. Completions of such a group without a value are not scorable: their total is NaN. The totals of a group
        to which no reward applies are NaN. Rewards of weight 0 are ignored in all of this.

        Without groups (a rank without prompts) no reward is called.

        Args:
            groups: N groups of G completions each.
            max_completion_length: The training run's limit, in tokens; passed to the rewards.
            trainer_state: Passed to the rewards unchanged.
            num_generations: G, needed if there are no groups.

        Raises:
            ValueError: If groups differ in size, a column is missing, or prompts name an unknown reward.
            RuntimeError: If the workers fail to start.
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
        context = CallContext(columns, trainer_state, max_completion_length)
        return Scoring(groups, self._weights, (len(groups), sizes[0]), context, self.pool)

    @property
    def _weights(self) -> dict[str, float]:
        """The weights by name."""
        return {reward.name: weight for reward, weight in zip(self.rewards, self.weights, strict=True)}


def _check_weights(weights: Sequence[float], rewards: Sequence[WeightedReward]) -> list[float]:
    """Check weights and convert them to floats. Raises: ValueError if they do not match the rewards."""
    if len(weights) != len(rewards):
        raise ValueError(
            f"reward_weights has {len(weights)} entries and rewards has {len(rewards)}: give one weight per reward, "
            f"or remove reward_weights."
        )
    for weight, reward in zip(weights, rewards, strict=True):
        if reward.weight != 1:
            raise ValueError(
                f"Reward {reward.name!r} has weight {reward.weight} and reward_weights sets it to {weight}: keep one."
            )
        if not math.isfinite(weight):
            raise ValueError(f"reward_weights must be finite, got {weight} for {reward.name!r}.")
    return [float(weight) for weight in weights]
