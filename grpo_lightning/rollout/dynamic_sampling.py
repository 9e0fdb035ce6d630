"""DAPO dynamic sampling replaces prompts if their groups have zero reward variance (arXiv:2503.14476, sec. 3.2).

A group without a gradient is idle (`functional.groups_without_gradient`). A group is also idle if the reward with the
name `DynamicSampling.reward` applies to the group, but does not vary within the group. There are up to
`max_resample_times` rounds. A round takes one new prompt for each idle group, and samples a new group for each new
prompt. A new group that is not idle replaces the idle group. The other new groups are discarded. After the last round,
the remaining idle groups stay in the rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, Prompt, check_ranges
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.groups import Rollout, concatenate, trained_lengths


@dataclass
class DynamicSampling:
    """When prompts are replaced, and how many times."""

    max_resample_times: int = 3
    """Maximum number of rounds of new prompts per rollout."""

    reward: str | None = None
    """Name of a reward that must vary within a group, in addition to the combined rewards from which advantages are
    computed. If this is null, or the reward does not apply to a group, only the combined rewards must vary. DAPO tests
    the accuracy reward, because combined rewards that include a length reward vary in almost every group. With the
    baseline `pass_at_k`, "vary" means that the reward gives at least one completion an advantage above 0."""

    def __post_init__(self) -> None:
        """Check the number of rounds. Raises: ValueError if it is below 1."""
        is_count = type(self.max_resample_times) is int and self.max_resample_times >= 1
        allowed = "at least 1 (remove dynamic_sampling to turn resampling off)"
        check_ranges("dynamic_sampling", self, [("max_resample_times", is_count, allowed)])

    def is_idle(self, rollout: Rollout, objective: Objective) -> Tensor:
        """Find the groups that should be replaced in a scored rollout.

        If the credit of one of a group's turns is not 0, the group has a gradient.

        Returns:
            [N] bool.

        Raises:
            ValueError: If `reward` has no scores.
        """
        assert rollout.rewards is not None
        assert rollout.scores is not None
        lengths = trained_lengths(rollout.groups).view_as(rollout.rewards)
        has_credit = [any(map(has_trained_credit, group.completions)) for group in rollout.groups]
        is_idle = objective.groups_without_gradient(rollout.rewards, lengths)
        is_idle &= ~torch.tensor(has_credit, dtype=torch.bool)
        if self.reward is None:
            return is_idle
        named = rollout.scores.by_reward.get(self.reward)
        if named is None:
            raise ValueError(
                f"model.dynamic_sampling.reward is {self.reward!r}, but `score_rewards` returned no values of that "
                "name in `scores.by_reward`: return them, or remove dynamic_sampling.reward."
            )
        applies = ~named.isnan().all(dim=1)  # elsewhere the combined rewards decide
        named = named.masked_fill(rollout.rewards.isnan(), torch.nan)
        return is_idle | (applies & objective.groups_without_gradient(named, lengths))


def has_trained_credit(completion: Completion) -> bool:
    """True if the turn credit of at least one trained token is not 0."""
    credits = completion.turn_advantages or []
    return any(credits if completion.mask is None else itertools.compress(credits, completion.mask))


class Resampling(NamedTuple):
    """Counts of dynamic sampling for one rollout, on this rank."""

    rounds: int
    """Rounds of new prompts."""

    num_skipped: int
    """Groups that were sampled but are not trained on."""

    num_kept: int
    """Idle groups that could not be replaced."""

    is_exhausted: bool
    """True if all rounds were used."""


def resample(
    rollout: Rollout,
    settings: DynamicSampling,
    objective: Objective,
    sample_and_score: Callable[[Sequence[Prompt], Sequence[int]], Rollout],
    source: PromptSource,
    teams: Teams | None = None,
) -> tuple[Rollout, Resampling]:
    """Replace idle groups (`DynamicSampling.is_idle`) by groups of new prompts, until rounds or prompts run out.

    Collective: every rank takes part in every round, even if the rank has no group to replace. `sample_and_score` gets
    prompts and the global indices of their groups. The global index of a group is its position among all groups that
    all ranks sample for this rollout. This index determines the prompt and the seed, so that completions do not depend
    on the number of ranks. If ranks share groups (`teams`), only the first member of a team holds the groups.

    Returns:
        The rollout of N groups, with each new group in the row of the group that it replaces; and the counts.
    """
    teams = teams or Teams()
    is_idle = teams.broadcast(settings.is_idle(rollout, objective).tolist())
    num_groups = len(is_idle)
    places = teams.indices(num_groups)
    # For each of the N rows of the result: the global index of its group, and the group's position among all groups
    # that its team sampled.
    indices, rows = list(places), list(range(num_groups))
    used, parts, num_sampled = sum(teams.gather_from_firsts(num_groups)), [rollout], num_groups
    rounds = 0
    for _ in range(settings.max_resample_times):
        own = [i for i, idle in enumerate(is_idle) if idle]
        missing = sorted(itertools.chain.from_iterable(teams.gather_from_firsts([places[i] for i in own])))
        if not missing:
            break
        order = {place: k for k, place in enumerate(missing)}  # the k-th new prompt goes to this place
        num_prompts, prompts = source.more(len(missing), [order[places[i]] for i in own])
        if not num_prompts:  # end of the epoch
            break
        rounds += 1
        replaced = [i for i in own if order[places[i]] < num_prompts]
        new_indices = [used + order[places[i]] for i in replaced]
        parts.append(sample_and_score(prompts, new_indices))
        still_idle = teams.broadcast(settings.is_idle(parts[-1], objective).tolist())
        for row, (i, index, idle) in enumerate(zip(replaced, new_indices, still_idle, strict=True), num_sampled):
            if not idle:
                is_idle[i], indices[i], rows[i] = False, index, row
        num_sampled += len(still_idle)
        used += num_prompts
    chosen = concatenate(parts).select(rows if teams.is_first else [])
    if rounds:
        source.settle(teams.gather_from_firsts(indices), teams.broadcast([group.prompt for group in chosen.groups]))
    is_exhausted = rounds == settings.max_resample_times
    num_skipped, num_kept = (num_sampled - num_groups, sum(is_idle)) if teams.is_first else (0, 0)  # once per team
    return chosen, Resampling(rounds, num_skipped, num_kept, is_exhausted)


def source_of(loader: Any) -> PromptSource:
    """The training loader as a `PromptSource`. Raises: ValueError if it cannot provide additional prompts."""
    if not isinstance(loader, PromptSource) or not loader.takes_more:
        raise ValueError(wrong_loader(is_on=True))
    return loader


def wrong_loader(*, is_on: bool) -> str:
    """Error message if only the module (`is_on`) or only the training loader is set up for dynamic sampling."""
    if is_on:
        return (
            "model.dynamic_sampling needs additional prompts within a cycle, which the training loader does not "
            "provide: wrap the data in grpo_lightning.PromptSource(data, ..., takes_more=True)."
        )
    return (
        "The PromptSource is set up for dynamic sampling (takes_more=True), but the module does not use it: set "
        "model.dynamic_sampling, or remove takes_more."
    )


def check(settings: DynamicSampling | None, reward_names: list[str], *, is_kl_in_reward: bool) -> None:
    """Check the settings.

    Raises:
        ValueError: If `settings.reward` is unknown, or if it is None and `is_kl_in_reward` is true. With the KL in the
            reward, the combined rewards vary in every group.
    """
    if settings is not None and settings.reward is None and is_kl_in_reward:
        raise ValueError(
            "model.objective.kl_in is 'reward', so rewards differ in every group, and model.dynamic_sampling would "
            "find no zero-variance group: name the reward that must vary in model.dynamic_sampling.reward."
        )
    if settings is not None and settings.reward is not None and settings.reward not in reward_names:
        raise ValueError(
            f"model.dynamic_sampling.reward must name one of the rewards {', '.join(reward_names)}, got "
            f"{settings.reward!r}."
        )
