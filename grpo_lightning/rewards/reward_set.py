"""All rewards of a run, with their weights: checked against the data, and called on rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_lightning.core.types import Group, Prompt
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards.base import RESERVED_NAMES, RewardLike, WeightedReward
from grpo_lightning.rewards.scoring import Circumstances, Scores, Scoring
from grpo_lightning.rewards.validation import Source, check_rows, check_sources, sources_of
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool


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
            self.weights = _check_weights(weights, self.rewards)
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
        self.pool = WorkerPool(self.rewards, workers)

    @property
    def names(self) -> list[str]:
        """The rewards' names, in their order."""
        return [reward.name for reward in self.rewards]

    @property
    def success(self) -> str:
        """The name of the reward that decides what is solved: the first with `says_solved`, else the first."""
        return next((reward.name for reward in self.rewards if reward.says_solved), self.rewards[0].name)

    def validate_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Check that prompts have what the rewards need, source by source, and remember which columns there are.

        A reward is checked against the sources it applies to (`Prompt.rewards`).

        Raises:
            ValueError: Naming the sources, if a column is missing, or has the name of an argument that every reward
                gets; if prompts name a reward that is unknown, or only rewards without a weight, or a method in
                `accu_reward_method` that none of the rewards that apply to them reads.
        """
        sources = sources_of(prompts)
        check_sources(sources, self.rewards, self._weights)
        columns = [name for source in sources for name in source.columns]
        self._known_columns = tuple(dict.fromkeys([*self._known_columns, *columns]))

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
        self.pool.start(num_local_ranks)  # which goes on while the others load
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
        return Scoring(groups, self._weights, (len(groups), sizes[0]), circumstances, self.pool)

    @property
    def _weights(self) -> dict[str, float]:
        """The weights by name."""
        return {reward.name: weight for reward, weight in zip(self.rewards, self.weights, strict=True)}


def _check_weights(weights: Sequence[float], rewards: Sequence[WeightedReward]) -> list[float]:
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
