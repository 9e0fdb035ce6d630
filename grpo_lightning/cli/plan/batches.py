"""Batch arithmetic: prompts, completions and optimizer steps of a recipe, or of another trainer's script."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple

from grpo_lightning.core.ranks import part_of_group
from grpo_lightning.core.types import Completion
from grpo_lightning.training.micro_batches import CompletionRow, Share, padded_cost, split_update, split_updates


class MicroBatchShape(NamedTuple):
    """The size of one forward and backward pass."""

    num_prompts: int
    num_completions: int


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic of a cycle, that is, of one rollout and the optimizer steps on this rollout.

    Args:
        batch_size: Prompts per rank and rollout. If ranks share groups, prompts per team of `ranks_per_group` ranks.
        num_generations: Completions per prompt.
        accumulate_grad_batches: Micro-batches per optimizer step.
        updates_per_rollout: Optimizer steps per epoch over a rollout.
        num_iterations: Epochs over each rollout.
        world_size: Number of ranks.
        ranks_per_group: Ranks that share the completions of a prompt.
        num_prompts: Prompts in the training data; None if unknown.
    """

    batch_size: int
    num_generations: int
    accumulate_grad_batches: int = 1
    updates_per_rollout: int = 1
    num_iterations: int = 1
    world_size: int = 1
    ranks_per_group: int = 1
    num_prompts: int | None = None

    @property
    def num_teams(self) -> int:
        """Number of teams. A team is a set of ranks that share groups, or a single rank."""
        return self.world_size // self.ranks_per_group

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts per rollout over all ranks."""
        full = self.batch_size * self.num_teams
        return full if self.num_prompts is None else min(full, self.num_prompts)

    @property
    def prompts_per_team(self) -> list[int]:
        """Prompts per rollout, for each team."""
        return [len(range(team, self.prompts_per_rollout, self.num_teams)) for team in range(self.num_teams)]

    @property
    def completions_per_rank(self) -> int:
        """Completions per rollout of the rank with the most completions."""
        return self.prompts_per_team[0] * -(-self.num_generations // self.ranks_per_group)

    @property
    def completions_per_rollout(self) -> int:
        """Completions per rollout over all ranks."""
        return self.prompts_per_rollout * self.num_generations

    @property
    def completions_per_update(self) -> float:
        """Completions per optimizer step, over all ranks (mean over the steps)."""
        return self.completions_per_rollout / self.updates_per_rollout

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a rank's rollout is split into."""
        return self.accumulate_grad_batches * self.updates_per_rollout

    @property
    def cycle(self) -> int:
        """Micro-steps per rollout: micro-batches x epochs."""
        return self.micro_batches * self.num_iterations

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.updates_per_rollout * self.num_iterations

    def shapes(self, prompt_length: int, completion_length: int) -> list[MicroBatchShape]:
        """Shapes of the micro-batches of one rank, most expensive first.

        This rank is the rank that has the most completions in a single optimizer step. The function assumes
        `prompt_length` tokens for every prompt, and `completion_length` tokens for every completion. Micro-batches
        without completions are left out.
        """
        prompt, completion = [0] * prompt_length, Completion([0] * completion_length, [], "length")
        plans, counts = [], self.prompts_per_team
        for member in range(self.ranks_per_group):
            part = part_of_group(self.num_generations, member, self.ranks_per_group)
            for team, num_prompts in enumerate(counts):
                rows = [[CompletionRow(index, prompt, completion, 1.0)] * len(part) for index in range(num_prompts)]
                share = Share(counts, team, member, self.ranks_per_group, self.num_generations)
                plans.append(split_updates(rows, self.updates_per_rollout, share))
        updates = max(plans, key=lambda updates: max(map(len, updates)))
        parts = [part for update in updates for part in split_update(update, self.accumulate_grad_batches) if part]
        parts.sort(key=padded_cost, reverse=True)
        return [MicroBatchShape(len({row.group for row in part}), len(part)) for part in parts]


@dataclass(frozen=True)
class RunPlan:
    """The length of a run, in optimizer steps."""

    steps_per_epoch: int | None
    """None if the number of prompts is unknown."""

    total_steps: int | None
    """None if the number of steps depends on a time limit, or on a number of prompts that is unknown."""

    requested_steps: int | None
    """`max_steps` as configured, if it was rounded up to the end of a cycle; else None."""

    num_prompts: int | None
    """Number of prompts in all rollouts of the run. A prompt counts once for each epoch."""

    epochs: float | None


def plan_run(
    batches: BatchPlan,
    num_prompts: int | None,
    *,
    max_steps: int = -1,
    max_epochs: int | None = None,
    limit_train_batches: float | None = None,
) -> RunPlan:
    """Compute the length of a run.

        rollouts per epoch = ceil(prompts / prompts per rollout)
        steps per epoch = rollouts per epoch x updates_per_rollout x num_iterations

    `max_steps` of -1, and `max_epochs` of -1 or None, are no limits. `limit_train_batches` is a number (int) of
    micro-steps, or a fraction (float) of an epoch. `max_steps` and `limit_train_batches` are rounded up to full cycles.

    Raises:
        ValueError: If there are no prompts, or `limit_train_batches` leaves no prompts.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"A run needs at least one prompt, got {num_prompts}.")
    per_rollout = batches.steps_per_rollout
    steps = requested = None
    if max_steps >= 0:
        steps = math.ceil(max_steps / per_rollout) * per_rollout
        requested = max_steps if steps != max_steps else None
    per_epoch = prompts_per_epoch = None
    if num_prompts is not None:
        rollouts = math.ceil(num_prompts / batches.prompts_per_rollout)
        rollouts = limited_rollouts(rollouts, batches.cycle, limit_train_batches)
        if not rollouts:
            raise ValueError(f"trainer.limit_train_batches {limit_train_batches} leaves nothing to train on: raise it.")
        per_epoch = rollouts * per_rollout
        prompts_per_epoch = min(num_prompts, rollouts * batches.prompts_per_rollout)
    if max_epochs is not None and max_epochs >= 0:
        if per_epoch is None:
            # An epoch may be shorter than max_steps.
            return RunPlan(None, None, requested, None, None)
        steps = per_epoch * max_epochs if steps is None else min(steps, per_epoch * max_epochs)
    if steps is None or per_epoch is None or prompts_per_epoch is None:
        sampled = None if steps is None else steps // per_rollout * batches.prompts_per_rollout
        return RunPlan(per_epoch, steps, requested, sampled, None)
    epochs, rest = divmod(steps, per_epoch)
    sampled = epochs * prompts_per_epoch + rest // per_rollout * batches.prompts_per_rollout
    return RunPlan(per_epoch, steps, requested, sampled, steps / per_epoch)


def limited_rollouts(rollouts: int, cycle: int, limit: float | None) -> int:
    """Rollouts per epoch under `limit_train_batches`, rounded up to full cycles."""
    if limit is None:
        return rollouts
    batches = int(rollouts * cycle * limit) if isinstance(limit, float) else min(limit, rollouts * cycle)
    return math.ceil(batches / cycle)


# ------------------------------------------------------------------------------------------- scripts of other trainers

FIRST_WITH_ACCUMULATION = {"trl": (0, 17), "ms-swift": (3, 4)}
"""For each trainer, the first version that can train on the completions of one group in different micro-steps of an
update. VLM-R1 cannot."""


def translate(script: Namespace) -> tuple[BatchPlan, list[str]]:
    """Translate the batch flags of another trainer's script. Returns: (closest settings, differences).

        P = b W S / G,   batch_size = P / T,   ranks_per_group = W / T,   T = gcd(P / updates_per_rollout, W)
        updates_per_rollout = S / A,   accumulate_grad_batches = A

    - b: completions per device and micro-step
    - W: ranks
    - G: completions per prompt
    - A: micro-steps per update (1 in ms-swift before 3.4 if vLLM sleeps)
    - S: number of micro-steps for which the script samples the completions together. If S is below A, A replaces S,
      because in this package, the completions of an update form one rollout.
    - P: prompts of a rollout
    - T: number of teams. A team is a set of ranks that share a group.

    If W does not divide the number of prompts of an update, ranks share groups, so that every rank trains in every
    update. If W / T is above G, or if updates_per_rollout does not divide P, another T is used: T = gcd(P, W). If W / T
    is still above G, no rank shares groups, and `batch_size` is P / W, rounded, but at least 1.

    Raises:
        ValueError: If the script's batch flags are not valid for its `trainer` and `version`.
    """
    b, A, W = script.per_device_train_batch_size, script.gradient_accumulation_steps, script.world_size
    G, S, differences = script.num_generations, micro_steps_per_generation(script), []
    if script.sleep_level and A > 1 and script.trainer == "ms-swift" and not spreads_groups(script):
        differences.append(
            "This version of ms-swift sets gradient_accumulation_steps to 1 if vLLM sleeps (--sleep_level without "
            f"--async_generate), so the settings above are those of 1 micro-step per update, not {A}. To train on {A} "
            "micro-steps per update, leave out --sleep_level here."
        )
        A = S = 1
    if S % A and (A % S or script.num_iterations > 1):
        differences.append(
            f"In the script, a generation covers {S} micro-steps and an update {A}, so some updates start inside one "
            "generation and end in the next. In this package, a rollout is divided into complete updates."
        )
    updates = max(1, round(S / A))
    prompts = b * W * A * updates // G
    of_update = [prompts // updates] if prompts % updates == 0 else []
    possible = [math.gcd(number, W) for number in (*of_update, prompts)]
    teams = next((number for number in possible if W // number <= G), possible[-1])
    batches = BatchPlan(prompts // teams, G, A, updates, script.num_iterations, W, W // teams)
    if batches.ranks_per_group > G:
        batches = BatchPlan(max(1, round(prompts / W)), G, A, updates, script.num_iterations, W)
        differences.append(
            f"A rollout of the script has {prompts} prompt(s) for {W} ranks, so {W // teams} ranks would share the {G} "
            f"completions of a prompt, and some would have none. batch_size {batches.batch_size} with all completions "
            f"of a prompt on one rank gives {batches.prompts_per_rollout} prompts per rollout."
        )
    return batches, differences


def spreads_groups(script: Namespace) -> bool:
    """True if the completions of a group can be in different micro-steps."""
    first = FIRST_WITH_ACCUMULATION.get(script.trainer)
    return first is not None and (script.version is None or script.version >= first)


def micro_steps_per_generation(script: Namespace) -> int:
    """Return S of `translate`.

    Raises:
        ValueError: If the script's batch flags are not valid for its `trainer` and `version`.
    """
    spreads = spreads_groups(script)
    given = [name for name in ("steps_per_generation", "generation_batch_size") if getattr(script, name) is not None]
    if len(given) == 2:
        raise ValueError("Set --steps_per_generation or --generation_batch_size, not both.")
    if given and not spreads:
        raise ValueError(f"This version of {script.trainer} has no --{given[0]}: remove it.")
    per_step, words = script.per_device_train_batch_size * script.world_size, "per_device_train_batch_size x world_size"
    S, rest = script.steps_per_generation or script.gradient_accumulation_steps, 0
    if script.generation_batch_size is not None:
        S, rest = divmod(script.generation_batch_size, per_step)
    if rest:
        raise ValueError(f"--generation_batch_size must be a multiple of {words} ({per_step}).")
    size, G = per_step * (S if spreads else 1), script.num_generations
    if size % G:
        valid = ", ".join(str(number) for number in range(2, size + 1) if size % number == 0)
        raise ValueError(
            f"The script would not start: {words}{' x micro-steps' * spreads} = {size} must be a multiple of "
            f"num_generations ({G}). Valid values of --num_generations: {valid or 'none'}."
        )
    return S
