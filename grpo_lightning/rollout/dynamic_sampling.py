"""DAPO's dynamic sampling: replace prompts whose groups have zero reward variance (arXiv:2503.14476, sec. 3.2).

A group whose rewards are all equal has no gradient, and neither has one whose completions the overlong filter leaves
out. Its prompt is replaced by the next one in the data, which is checked in turn, up to `max_resample_times` times. A
group that has a gradient is never thrown away: as many prompts are sampled as groups are missing. If some are still
missing in the end, their first groups stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Prompt, check_ranges
from grpo_lightning.data.source import PromptSource
from grpo_lightning.functional import zero_variance_groups
from grpo_lightning.rollout.groups import Rollout, is_emptied, joined


@dataclass
class DynamicSampling:
    """When a prompt is replaced, and how often."""

    max_resample_times: int = 3
    """Rounds of further prompts in a rollout, at most."""

    reward: str | None = None
    """The reward, by name, whose values must differ within a group, where it applies; null is what advantages are made
    of. DAPO looks at the accuracy alone: lengths differ in almost every group."""

    def __post_init__(self) -> None:
        """Check the number of rounds. Raises: ValueError if it is below 1."""
        is_count = type(self.max_resample_times) is int and self.max_resample_times >= 1
        allowed = "at least 1 (leave dynamic_sampling out to sample no further prompts)"
        check_ranges("dynamic_sampling", self, [("max_resample_times", is_count, allowed)])

    def is_idle(self, rollout: Rollout) -> Tensor:
        """[N] bool, True for groups of a scored rollout without a gradient."""
        assert rollout.rewards is not None
        assert rollout.scores is not None
        is_idle = zero_variance_groups(rollout.rewards) | is_emptied(rollout.groups)
        if self.reward is None:
            return is_idle
        named = rollout.scores.by_reward.get(self.reward)
        if named is None:
            raise ValueError(
                f"model.dynamic_sampling.reward is {self.reward!r}, and `score_rewards` gave no values of that name in "
                "`scores.by_reward`: return them, or leave dynamic_sampling.reward out."
            )
        applies = ~named.isnan().all(dim=1)  # where it does not, the others decide
        return is_idle | (applies & zero_variance_groups(named.masked_fill(rollout.rewards.isnan(), torch.nan)))


class Resampling(NamedTuple):
    """The counts of dynamic sampling in a rollout, on this rank."""

    rounds: int
    """Rounds of further prompts."""

    num_skipped: int
    """Groups that were sampled and are not trained on."""

    num_kept: int
    """Groups without a gradient that stay, for want of others."""

    is_exhausted: bool
    """True if all rounds were needed."""


def resample(
    rollout: Rollout,
    settings: DynamicSampling,
    sample_and_score: Callable[[Sequence[Prompt], Sequence[int]], Rollout],
    source: PromptSource,
) -> tuple[Rollout, Resampling]:
    """Replace groups without a gradient by others, as long as there are rounds and prompts.

    Every rank takes part in every round, also one that needs nothing: sharded weights are gathered by all. Prompts and
    seeds go by the numbers of the groups among all ranks, so that what is sampled does not depend on how many there
    are.

    Args:
        rollout: N groups of this rank, with their rewards.
        settings: When and how often.
        sample_and_score: Gives a rollout of further prompts, by prompts and their numbers in the cycle.
        source: Where these come from.

    Returns:
        N groups, in the places of those replaced, with their scores and rewards; and what was done.
    """
    is_idle = settings.is_idle(rollout).tolist()
    places = ranks.own_numbers(len(rollout.groups))
    numbers, rows = list(places), list(range(len(rollout.groups)))  # of the group in each place: in the cycle, in `all`
    used, parts, num_sampled = sum(ranks.gather_objects(len(rollout.groups))), [rollout], len(rollout.groups)
    rounds = 0
    for _ in range(settings.max_resample_times):
        own = [i for i, idle in enumerate(is_idle) if idle]
        missing = sorted(itertools.chain.from_iterable(ranks.gather_objects([places[i] for i in own])))
        if not missing:
            break
        num_prompts, prompts = source.more(len(missing), [missing.index(places[i]) for i in own])
        if not num_prompts:  # the epoch ends
            break
        rounds += 1
        taken = [i for i in own if missing.index(places[i]) < num_prompts]
        their_numbers = [used + missing.index(places[i]) for i in taken]
        parts.append(sample_and_score(prompts, their_numbers))
        still_idle = settings.is_idle(parts[-1]).tolist()
        for row, (i, number, idle) in enumerate(zip(taken, their_numbers, still_idle, strict=True), num_sampled):
            if not idle:
                is_idle[i], numbers[i], rows[i] = False, number, row
        num_sampled += len(parts[-1].groups)
        used += num_prompts
    chosen = joined(parts).select(rows)
    if rounds:
        source.settle(ranks.gather_objects(numbers), [group.prompt for group in chosen.groups])
    is_exhausted = rounds == settings.max_resample_times  # and not for want of prompts, or of groups to replace
    return chosen, Resampling(rounds, num_sampled - len(rows), sum(is_idle), is_exhausted)


def source_of(loader: Any) -> PromptSource:
    """The training loader. Raises: ValueError if it has no further prompts to give."""
    if not isinstance(loader, PromptSource) or not loader.draws_more:
        raise ValueError(wrong_loader(is_on=True))
    return loader


def wrong_loader(*, is_on: bool) -> str:
    """The error for a loader made for dynamic sampling in a module without it, or the other way round."""
    if is_on:
        return (
            "model.dynamic_sampling draws further prompts in a cycle, and the training loader has none to give: wrap "
            "the data in grpo_lightning.PromptSource(data, ..., draws_more=True)."
        )
    return (
        "The PromptSource is there for cycles that draw further prompts (draws_more=True), and the module draws none: "
        "set model.dynamic_sampling, or leave draws_more out."
    )


def check(settings: DynamicSampling | None, reward_names: list[str], *, is_kl_in_reward: bool) -> None:
    """Raises: ValueError if the reward that must differ is none of the run's, or rewards always differ."""
    if settings is not None and settings.reward is None and is_kl_in_reward:
        raise ValueError(
            "model.objective.kl_in is 'reward', so that rewards differ in every group, and model.dynamic_sampling "
            "would find none that teaches nothing: name the reward that must differ in model.dynamic_sampling.reward."
        )
    if settings is not None and settings.reward is not None and settings.reward not in reward_names:
        raise ValueError(
            f"model.dynamic_sampling.reward names the reward whose values must differ within a group, got "
            f"{settings.reward!r}; there are: {', '.join(reward_names)}."
        )
