"""The class `RewardSet` checks the rewards of a run against the data, and calls the rewards on rollouts."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lightning.core.log_messages import bullet_list, did_you_mean
from grpo_lightning.core.types import Group, Prompt
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rewards.base import (
    ALIASES,
    CONTRACT,
    METHOD_COLUMN,
    ORM_ALIASES,
    RESERVED_NAMES,
    ROW_ALIASES,
    RewardLike,
    WeightedReward,
)
from grpo_lightning.rewards.scoring import CallContext, EarlyCalls, Scores, Scoring, applies
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool

log = logging.getLogger(__name__)


class RewardSet:
    """The rewards of a run.

    With `workers`, sync rewards run in worker processes with time and memory limits (`RewardWorkers`), except for
    rewards that cannot be pickled or must run in the training process (`Reward.in_process`). Sync rewards that do not
    run in workers run in the calling thread, one after the other. Async rewards run concurrently with each other and
    with the sync rewards, in an event loop in another thread of this process.

    Args:
        rewards: Functions, callable objects, `Reward`s or `WeightedReward`s. Names must be unique.
        weights: One weight per reward, instead of the weights in `WeightedReward`s.
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
        self._warned_of: set[tuple[str, str]] = set()
        self.pool = WorkerPool(self.rewards, workers)
        self.early: EarlyCalls | None = None
        """Starts calls on single groups of a batch that is still being sampled; None outside of `early_calls`."""
        self.starts_early = True
        """False after a batch that used none of its early calls."""

    @property
    def names(self) -> list[str]:
        """The rewards' names, in order."""
        return [reward.name for reward in self.rewards]

    @property
    def success(self) -> str:
        """The name of the reward that decides which completions are solved.

        It is the first reward with `says_solved` or, if there is none, the first reward.
        """
        return next((reward.name for reward in self.rewards if reward.says_solved), self.rewards[0].name)

    def validate_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Check that the prompts have the columns that the rewards need.

        A reward is checked against the datasets to which it applies (`Prompt.rewards`). A column that is missing in
        only some of these datasets causes a warning.

        The method also stores the names of all columns of the prompts.

        Raises:
            ValueError: If a reward needs a column that none of its datasets has.
            ValueError: If a data column has the name of an argument in `rewards.base.CONTRACT`, such as `completions`.
            ValueError: If prompts name an unknown reward, or only rewards of weight 0.
            ValueError: If prompts name a method in the column `accu_reward_method`, but none of their rewards reads
                this column.
        """
        sources = sources_of(prompts)
        check_sources(sources, self.rewards, self._weights)
        self._warn_of_replaced(sources)
        columns = [name for source in sources for name in source.columns]
        self._known_columns = tuple(dict.fromkeys([*self._known_columns, *columns]))

    def _warn_of_replaced(self, sources: Sequence[Source]) -> None:
        """Warn once if a reward gets a data column in place of an argument about the completions."""
        for reward in self.rewards:
            columns = {column for source in sources if source.uses(reward.name) for column in source.columns}
            for name in ALIASES:
                is_first = reward.is_orm and name in ORM_ALIASES
                is_replaced = name in columns and reward.names(name) and name not in ROW_ALIASES and not is_first
                if is_replaced and (reward.name, name) not in self._warned_of:
                    self._warned_of.add((reward.name, name))
                    log.warning(
                        "Reward %r: its argument %r is the data column of this name, and does not describe the "
                        "completions. To score the completions, drop the column (columns: {%s: null}) or rename it.",
                        *(reward.name, name, name),
                    )

    def check_rows(self, prompts: Iterable[Prompt], observation_role: str | None = None) -> None:
        """Check each row with each reward that will score it (`Reward.check_row`).

        Raises:
            ValueError: If a reward with `on_error: raise` cannot score a row.
        """
        check_rows(prompts, self.rewards, observation_role)

    def check(self, max_completion_length: int) -> None:
        """Check the settings of the rewards, before any weights load.

        Raises:
            ValueError: If a reward's settings are invalid for this run.
        """
        for reward in self.rewards:
            reward.check(max_completion_length)

    def connect(self, device: torch.device, sharding: Sharding | None = None, num_local_ranks: int = 1) -> None:
        """Start the workers, and let the rewards load their models unsharded (`Reward.connect`)."""
        self.pool.start(num_local_ranks)  # the workers start in the background while models load
        with (sharding or Sharding()).unsharded():
            for reward in self.rewards:
                reward.connect(device)

    def score(self, groups: Sequence[Group], **settings: Any) -> Scores:
        """Run all rewards and wait for them. The `settings` are the other arguments of `begin`.

        Raises:
            ValueError: As `begin` and `Scoring.finish`.
            RuntimeError: As `begin` and `Scoring.finish`.
        """
        return self.begin(groups, **settings).finish()

    def begin(
        self,
        groups: Sequence[Group],
        max_completion_length: int | None = None,
        trainer_state: Any = None,
        num_generations: int | None = None,
    ) -> Scoring:
        """Start each reward on the prompts to which it applies (`Prompt.rewards`).

            total[n, g] = sum of weight[r] * value[r, n, g] over all rewards r that apply to group n

        A reward applies to a group if (a) the reward is called for the group's prompt and (b) the reward gives a value
        to at least one completion of the group. If a reward that applies to a group gives no value to a completion of
        the group, this completion is not scorable, and its total is NaN. If no reward applies to a group, all totals of
        the group are NaN. Rewards of weight 0 are ignored in these rules.

        Args:
            groups: N groups of G completions each.
            max_completion_length: The run's limit on the length of a completion, in tokens.
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
        columns = self._columns(batch)
        check_sources(
            [Source(source.name, tuple(columns), source.rewards) for source in batch], self.rewards, self._weights
        )
        if self.early is not None:
            self.early.is_scored = True
        context = CallContext(columns, trainer_state, max_completion_length)
        return Scoring(groups, self._weights, (len(groups), sizes[0]), context, self.pool)

    @contextlib.contextmanager
    def early_calls(
        self, prompts: Sequence[Prompt], max_completion_length: int | None = None, trainer_state: Any = None
    ) -> Iterator[None]:
        """Context in which a batch is sampled and scored, and in which reward calls can start early.

        `early.start` starts the calls on a sampled group. `begin` uses their results if it gets the same groups and
        arguments. Unused calls are cancelled at the end of the context. If a batch uses none of the early calls, later
        batches start none.
        """
        if not self.starts_early:
            yield
            return
        context = CallContext(self._columns(sources_of(prompts)), trainer_state, max_completion_length)
        early = self.early = EarlyCalls(context, self.pool)
        try:
            yield
        finally:
            self.early, is_of_use = None, early.cancel()
        if not is_of_use:
            self.starts_early = False
            log.info(
                "The rewards start after sampling from now on: the calls on groups that were sampled early are not the "
                "calls of `score_rewards`."
            )

    def _columns(self, batch: Sequence[Source]) -> list[str]:
        """The known data columns and those of a batch."""
        return list(dict.fromkeys([*self._known_columns, *(name for source in batch for name in source.columns)]))

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


def check_rows(
    prompts: Iterable[Prompt], rewards: Sequence[WeightedReward], observation_role: str | None = None
) -> None:
    """Run `check_row` of every reward on the rows to which the reward applies.

    If the `on_error` of a reward is not "raise", a row that the reward cannot score causes only a warning.

    Raises:
        ValueError: If a reward with `on_error` "raise" cannot score a row; the message names file, line and reward.
    """
    refused: dict[tuple[str | int, str], str] = {}
    """Problems by row and reward. A row can be in both training and validation data."""
    accepted: dict[tuple[str | int, str], str] = {}
    have: Counter[tuple[str, str, str]] = Counter()
    lack: Counter[tuple[str, str, str]] = Counter()
    role = {} if observation_role is None else {"observation_role": observation_role}
    for prompt in prompts:
        sizes = [image.known_size for image in prompt.images]
        for reward in rewards:
            if not applies(prompt, reward.name):
                continue
            for column in reward.required_columns:
                (have if column in prompt.columns else lack)[prompt.source, reward.name, column] += 1
            try:
                reward.check_row({**prompt.columns, **role, "prompts": prompt.content}, sizes)
            except Exception as error:  # noqa: BLE001 - a user's check may raise anything; it is reported with the row
                kind = "" if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: "
                line = f"{prompt.label}: reward {reward.name!r}: {kind}{error}"
                found = refused if reward.on_error == "raise" else accepted
                found.setdefault((prompt.where or id(prompt), reward.name), line)
    for (source, name, column), count in lack.items():
        # An explicit null is intended; a missing column may be a mistake.
        if others := have[source, name, column]:
            log.warning(
                "%d of %d rows%s have no column %r. In these rows, the reward %r gets None for this column, and "
                "most rewards then give no value.",
                count,
                count + others,
                f" of {source!r}" if source else "",
                column,
                name,
            )
    if accepted:
        text = _format_problems(accepted)
        log.warning("%s\nEach call of the reward with one of these rows fails, and is handled by its on_error.", text)
    if refused:
        raise ValueError(
            f"{_format_problems(refused)}\nFix these rows, or set the answer to null to skip this reward for them. To "
            "score them with another reward, name it in the entry of their dataset (rewards: [...]), or use ByMethod, "
            "which selects the method per row."
        )


def _format_problems(found: Mapping[tuple[str | int, str], str]) -> str:
    """Format the number of refused rows, and the first problems."""
    counts = ", ".join(f"{count} by {name!r}" for name, count in Counter(name for _, name in found).items())
    return f"{len({row for row, _ in found})} rows cannot be scored ({counts}):\n{bullet_list(list(found.values()))}"


@dataclass(frozen=True)
class Source:
    """The prompts of one dataset to which the same rewards apply."""

    name: str
    """Name of the dataset; may be empty."""

    columns: tuple[str, ...]
    """Union of the prompts' columns."""

    rewards: tuple[str, ...] | None = None
    """Names of the rewards that apply; None for all."""

    method: str = ""
    """The first method in the column `accu_reward_method` of the prompts; may be empty."""

    def uses(self, reward: str) -> bool:
        """Whether a reward applies to these prompts."""
        return self.rewards is None or reward in self.rewards


def sources_of(prompts: Iterable[Prompt]) -> list[Source]:
    """Group prompts into sources. Prompts with the same dataset and the same list of rewards form one source.

    Raises:
        ValueError: If the rewards of a prompt are a string instead of a list of names.
    """
    columns: dict[tuple[str, tuple[str, ...] | None], dict[str, None]] = {}
    methods: dict[tuple[str, tuple[str, ...] | None], str] = {}
    for prompt in prompts:
        if isinstance(prompt.rewards, str):
            raise ValueError(
                f"The rewards of a prompt must be a list of names, got {prompt.rewards!r} for "
                f"{prompt.label}: write [{prompt.rewards!r}]."
            )
        key = (prompt.source, None if prompt.rewards is None else tuple(prompt.rewards))
        columns.setdefault(key, {}).update(dict.fromkeys(prompt.columns))
        if (method := prompt.columns.get(METHOD_COLUMN)) not in (None, ""):
            methods.setdefault(key, str(method))
    return [Source(key[0], tuple(columns[key]), key[1], methods.get(key, "")) for key in columns]


def check_sources(sources: Sequence[Source], rewards: Sequence[WeightedReward], weights: Mapping[str, float]) -> None:
    """Check that rewards and data match, as `RewardSet.validate_prompts` describes.

    Raises:
        ValueError: As in `RewardSet.validate_prompts`.
    """
    for source in sources:
        _check_names(source, weights)
        _check_method(source, rewards)
    for reward in rewards:
        used = [source for source in sources if source.uses(reward.name)]
        for column in reward.required_columns if used else ():
            _check_column(reward.name, column, used)


def _check_names(source: Source, weights: Mapping[str, float]) -> None:
    """Check the column names of a source and the rewards that the source names."""
    of = f" of {source.name!r}" if source.name else ""
    if taken := [column for column in source.columns if column in CONTRACT]:
        raise ValueError(f"Data columns {taken}{of} have the names of reward arguments: rename them.")
    for name in source.rewards or ():
        if name not in weights:
            raise ValueError(
                f"The prompts{of} name an unknown reward {name!r}; available: {', '.join(weights)}."
                f"{did_you_mean(str(name), weights)}"
            )
    if not any(weight for name, weight in weights.items() if source.uses(name)):
        raise ValueError(
            f"No reward of nonzero weight applies to the prompts{of} (rewards: {list(source.rewards or ())}), so they "
            f"have no gradient. Available: {', '.join(weights)}."
        )


def _check_method(source: Source, rewards: Sequence[WeightedReward]) -> None:
    """Check that a reward reads the method that the data names."""
    if source.method and not any(reward.may_read(METHOD_COLUMN) for reward in rewards if source.uses(reward.name)):
        of = f" of {source.name!r}" if source.name else ""
        raise ValueError(
            f"The prompts{of} name the method {source.method!r} in {METHOD_COLUMN!r}, but none of the rewards that "
            f"apply to them reads this column: add the reward ByMethod, or remove {METHOD_COLUMN}."
        )


def _check_column(reward: str, column: str, used: Sequence[Source]) -> None:
    """Check that a source of a reward has a column; warn about the others."""
    lacking = [source for source in used if column not in source.columns]
    names = ", ".join(repr(source.name) for source in lacking if source.name)
    if len(lacking) < len(used):
        if lacking:
            log.warning("Reward %r gets None for the column %r, which the prompts of %s lack.", reward, column, names)
        return
    have = list(dict.fromkeys(name for source in used for name in source.columns))
    raise ValueError(
        f"Reward {reward!r} needs the data column {column!r}, but the data{' of ' + names if names else ''} have only: "
        f"{', '.join(have) or 'none'}.{did_you_mean(column, [*have, *CONTRACT])} Set the reward's column argument "
        "(answer_column, if it has one), rename a column (columns in the dataset's entry), or give the parameter a "
        "default."
    )
