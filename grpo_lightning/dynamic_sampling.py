"""Further prompts in place of those that teach nothing: DAPO's dynamic sampling (arXiv:2503.14476, sec. 3.2).

A group whose rewards are all equal has no gradient, and neither has one whose completions the overlong filter leaves
out. Its prompt is replaced by the next one in the data, which is checked in turn, up to `max_resample_times` times. A
group that has a gradient is never thrown away: as many prompts are sampled as groups are missing. If some are still
missing in the end, their first groups stay.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning import overlong, ranks
from grpo_lightning.data.source import PromptSource
from grpo_lightning.functional import equal_groups
from grpo_lightning.rewards.scores import Scores, joined_scores
from grpo_lightning.types import Group

if TYPE_CHECKING:
    import lightning as L

    from grpo_lightning.module import GRPOLightningModule

log = logging.getLogger(__name__)


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
        if type(self.max_resample_times) is not int or self.max_resample_times < 1:
            raise ValueError(
                f"dynamic_sampling.max_resample_times must be at least 1, got {self.max_resample_times!r}; leave "
                "dynamic_sampling out to draw no further prompts."
            )

    def teaches_nothing(self, groups: Sequence[Group], rewards: Tensor, scores: Scores) -> Tensor:
        """[N] bool, True for groups without a gradient. Args: groups: N; rewards: [N, G]."""
        is_idle = equal_groups(rewards) | overlong.is_emptied(groups)
        if self.reward is None:
            return is_idle
        named = scores.by_reward[self.reward]
        applies = ~named.isnan().all(dim=1)  # where it does not, the others decide
        return is_idle | (applies & equal_groups(named.masked_fill(rewards.isnan(), torch.nan)))


def resample(module: GRPOLightningModule, groups: list[Group], rewards: Tensor) -> tuple[list[Group], Tensor]:
    """Replace groups that teach nothing by others, as long as there are rounds and prompts.

    Every rank takes part in every round, also one that needs nothing: sharded weights are gathered by all. Prompts and
    seeds go by the numbers of the groups among all ranks, so that what is drawn does not depend on how many there are.

    Args:
        module: Draws and scores; its `dynamic_sampling` says when and how often.
        groups: N of this rank.
        rewards: [N, G] what they are compared by.

    Returns:
        N groups, in the places of those replaced, and their rewards [N, G].
    """
    settings = module.dynamic_sampling
    assert settings is not None
    source, scores = source_of(module.trainer), [_scores(module)]
    is_idle = settings.teaches_nothing(groups, rewards, scores[0]).tolist()
    places = ranks.own_numbers(len(groups))
    numbers, rows = list(places), list(range(len(groups)))  # of the group in each place: in the cycle, in `drawn`
    used, drawn, compared = sum(ranks.gather_objects(len(groups))), list(groups), [rewards]
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
        further = module.sample(prompts, their_numbers)
        compared.append(module.score_rewards(further))
        scores.append(_scores(module))
        still_idle = settings.teaches_nothing(further, compared[-1], scores[-1]).tolist()
        for row, (i, number, idle) in enumerate(zip(taken, their_numbers, still_idle, strict=True), len(drawn)):
            if not idle:
                is_idle[i], numbers[i], rows[i] = False, number, row
        drawn += further
        used += num_prompts
    is_over = rounds < settings.max_resample_times  # for want of prompts, or of groups to replace
    _report(module, rounds=rounds, num_skipped=len(drawn) - len(groups), num_idle=sum(is_idle), is_over=is_over)
    chosen = [drawn[row] for row in rows]
    if rounds:
        source.settle(ranks.gather_objects(numbers), [group.prompt for group in chosen])
    joined = joined_scores(scores).select(rows)
    module.samples = (chosen, joined, torch.full_like(joined.total, torch.nan))
    return chosen, torch.cat(compared)[rows]


def source_of(trainer: L.Trainer) -> PromptSource:
    """The loader. Raises: ValueError if it has no further prompts to give."""
    loader = trainer.train_dataloader
    if not isinstance(loader, PromptSource) or not loader.draws_more:
        raise ValueError(wrong_loader(is_on=True))
    return loader


def wrong_loader(*, is_on: bool) -> str:
    """What is wrong with a loader that was made for a module with dynamic sampling on or off, and this is the other."""
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


def _scores(module: GRPOLightningModule) -> Scores:
    """Of the groups that were scored last."""
    assert module.samples is not None
    return module.samples[1]


def _report(module: GRPOLightningModule, *, rounds: int, num_skipped: int, num_idle: int, is_over: bool) -> None:
    """Log what was drawn for nothing, and say once when all rounds left a rollout with groups that teach nothing."""
    module.metrics.add("rollout/resample_rounds", rounds)
    module.metrics.add_sum("rollout/skipped_prompts", num_skipped)
    module.metrics.add_sum("rollout/filled_groups", num_idle)
    of_all = sum(ranks.gather_objects(num_idle))
    if of_all and not is_over and not module.has_said_filled:
        module.has_said_filled = True
        log.warning(
            "Dynamic sampling: after %d rounds of further prompts, %d groups of the rollout still have equal rewards, "
            "or completions that the overlong filter all leaves out. They keep their places and teach nothing; "
            "rollout/filled_groups counts them in every rollout. Raise dynamic_sampling.max_resample_times, or leave "
            "out prompts that are always or never solved.",
            rounds,
            of_all,
        )
