"""How many prompts, completions and optimizer steps a configuration comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from grpo_lightning.core.types import Completion
from grpo_lightning.training.micro_batches import Row, Share, padded_cost, split_update, split_updates


class MicroBatchShape(NamedTuple):
    """The size of one forward and backward."""

    num_prompts: int
    num_completions: int


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of a cycle: one rollout and everything trained on it.

    Args:
        batch_size: Prompts per rank and rollout.
        num_generations: G.
        accumulate_grad_batches: Micro-batches per optimizer step.
        updates_per_rollout: Optimizer steps a rollout is divided over, per pass.
        num_iterations: Passes over a rollout.
        world_size: Ranks.
    """

    batch_size: int
    num_generations: int
    accumulate_grad_batches: int = 1
    updates_per_rollout: int = 1
    num_iterations: int = 1
    world_size: int = 1

    @property
    def prompts_per_rollout(self) -> int:
        """Over all ranks."""
        return self.batch_size * self.world_size

    @property
    def completions_per_rollout(self) -> int:
        """Over all ranks."""
        return self.prompts_per_rollout * self.num_generations

    @property
    def completions_per_update(self) -> float:
        """Completions an optimizer step trains on, over all ranks; a mean where they do not divide evenly."""
        return self.completions_per_rollout / self.updates_per_rollout

    @property
    def micro_batches(self) -> int:
        """Micro-batches a rank's rollout is cut into."""
        return self.accumulate_grad_batches * self.updates_per_rollout

    @property
    def cycle(self) -> int:
        """Micro-steps trained on one rollout: micro-batches x passes."""
        return self.micro_batches * self.num_iterations

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps trained on one rollout."""
        return self.updates_per_rollout * self.num_iterations

    def shapes(self, prompt_length: int, completion_length: int) -> list[MicroBatchShape]:
        """The micro-batches of one pass, the costliest first, as the planner cuts them when all lengths are equal.

        That is the worst case: every completion is at its longest, nothing is left out, and of several ranks it is the
        one with the largest update. Micro-batches of a rank with fewer completions than micro-batches stay idle and are
        not among them.

        Args:
            prompt_length: L, tokens.
            completion_length: T, tokens.
        """
        prompt, completion = [0] * prompt_length, Completion([0] * completion_length, [], "length")
        rows = [[Row(index, prompt, completion, 1.0)] * self.num_generations for index in range(self.batch_size)]
        shares = [Share(self.prompts_per_rollout, rank, self.world_size) for rank in range(self.world_size)]
        updates = max(
            (split_updates(rows, self.updates_per_rollout, share) for share in shares),
            key=lambda updates: max(map(len, updates)),
        )
        parts = [part for update in updates for part in split_update(update, self.accumulate_grad_batches) if part]
        parts.sort(key=padded_cost, reverse=True)
        return [MicroBatchShape(len({row.group for row in part}), len(part)) for part in parts]


@dataclass(frozen=True)
class RunPlan:
    """The length of a run, in optimizer steps."""

    steps_per_epoch: int | None
    """None where the number of prompts is not known."""

    total_steps: int | None
    """None where it depends on the number of prompts, or on a limit in time."""

    asked_steps: int | None
    """`max_steps` as given, where it ends inside a cycle and is rounded up."""

    num_prompts: int | None
    """Prompts the run samples for, each time it meets them counted."""

    epochs: float | None


def plan_run(
    batches: BatchPlan,
    num_prompts: int | None,
    *,
    max_steps: int = -1,
    max_epochs: int | None = None,
    limit_train_batches: float | None = None,
) -> RunPlan:
    """The length of a run.

        rollouts per epoch = ceil(prompts / (batch_size x ranks)),   steps = rollouts x updates x passes

    Args:
        batches: The cycle.
        num_prompts: In the training data; None if it is not known.
        max_steps: Optimizer steps; -1 for no limit. Rounded up to whole cycles, as the run does.
        max_epochs: Passes over the data; None or -1 for no limit.
        limit_train_batches: As the Trainer takes it: a share of an epoch's micro-steps, or a number of them.

    Raises:
        ValueError: If there is no prompt, or the limit leaves none.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"A run needs at least one prompt, got {num_prompts}.")
    per_rollout = batches.steps_per_rollout
    steps = asked = None
    if max_steps >= 0:
        steps = math.ceil(max_steps / per_rollout) * per_rollout
        asked = max_steps if steps != max_steps else None
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
            # An epoch may be shorter than max_steps: how long the run is cannot be said.
            return RunPlan(None, None, asked, None, None)
        steps = per_epoch * max_epochs if steps is None else min(steps, per_epoch * max_epochs)
    if steps is None or per_epoch is None or prompts_per_epoch is None:
        sampled = None if steps is None else steps // per_rollout * batches.prompts_per_rollout
        return RunPlan(per_epoch, steps, asked, sampled, None)
    whole, rest = divmod(steps, per_epoch)
    sampled = whole * prompts_per_epoch + rest // per_rollout * batches.prompts_per_rollout
    return RunPlan(per_epoch, steps, asked, sampled, steps / per_epoch)


def limited_rollouts(rollouts: int, cycle: int, limit: float | None) -> int:
    """Rollouts per epoch under `limit_train_batches`, which is rounded up to whole cycles."""
    if limit is None:
        return rollouts
    batches = int(rollouts * cycle * limit) if isinstance(limit, float) else min(limit, rollouts * cycle)
    return math.ceil(batches / cycle)
