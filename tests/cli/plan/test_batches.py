"""The arithmetic of a cycle and of a run, against the planner and the prompt source themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.cli.plan.batches import BatchPlan, MicroBatchShape, plan_run
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.source import PromptSource
from grpo_lightning.training.micro_batches import plan_micro_batches


def test_a_cycle_by_hand():
    """4 prompts x 2 ranks x 8 = 64 completions; a rank's 32 in 2 x 2 micro-batches of 8; 2 updates x 3 passes."""
    plan = BatchPlan(4, 8, accumulate_grad_batches=2, updates_per_rollout=2, num_iterations=3, world_size=2)
    assert (plan.prompts_per_rollout, plan.completions_per_rollout, plan.completions_per_update) == (8, 64, 32)
    assert (plan.micro_batches, plan.cycle, plan.steps_per_rollout) == (4, 12, 6)
    assert plan.shapes(10, 20) == [MicroBatchShape(1, 8)] * 4


@pytest.mark.parametrize("sizes", [(1, 4, 4, 1), (3, 4, 2, 1), (2, 8, 1, 4), (5, 2, 3, 2), (1, 2, 4, 1)])
def test_micro_batches_are_those_of_the_planner(sizes):
    batch_size, num_generations, accumulate, updates = sizes
    groups = [
        Group(Prompt("p"), [1] * 7, [Completion([2] * 5, [0.0] * 5, "length") for _ in range(num_generations)])
        for _ in range(batch_size)
    ]
    real, _ = plan_micro_batches(
        groups,
        torch.ones(batch_size, num_generations),
        updates=updates,
        accumulate=accumulate,
        pad_id=0,
        skip_zero_advantages=True,
    )
    trained = [batch for batch in real if batch.completion_mask.any()]  # the others idle
    shapes = BatchPlan(batch_size, num_generations, accumulate, updates).shapes(7, 5)
    assert sorted(shapes) == sorted((len(batch.prompt_ids), len(batch.completion_ids)) for batch in trained)
    assert shapes[0].num_completions == max(len(batch.completion_ids) for batch in trained)


def test_a_run_by_hand():
    """10 prompts at 4 per rollout are 3 rollouts, each 2 x 2 = 4 steps: 12 per epoch."""
    plan = BatchPlan(2, 8, updates_per_rollout=2, num_iterations=2, world_size=2)
    run = plan_run(plan, 10, max_epochs=2)
    assert (run.steps_per_epoch, run.total_steps, run.num_prompts, run.epochs) == (12, 24, 20, 2.0)
    run = plan_run(plan, 10, max_steps=18)  # rounded up to 20: an epoch and 2 rollouts of 4
    assert (run.total_steps, run.asked_steps, run.num_prompts) == (20, 18, 18)
    assert plan_run(plan, 10, max_steps=4, max_epochs=2).total_steps == 4
    assert plan_run(plan, 10, max_steps=400, max_epochs=2).total_steps == 24


def test_without_the_number_of_prompts():
    plan = BatchPlan(2, 8, world_size=2)
    run = plan_run(plan, None, max_steps=5)
    assert (run.steps_per_epoch, run.total_steps, run.num_prompts, run.epochs) == (None, 5, 20, None)
    run = plan_run(plan, None, max_steps=5, max_epochs=1)  # the epoch may end first
    assert run.total_steps is None
    assert plan_run(plan, 10).total_steps is None


@pytest.mark.parametrize(("limit", "rollouts"), [(None, 5), (1.0, 5), (0.5, 3), (4, 2), (100, 5)])
def test_limit_train_batches_is_rounded_up_to_cycles(limit, rollouts):
    plan = BatchPlan(2, 4, accumulate_grad_batches=3)  # a cycle of 3 micro-steps
    assert plan_run(plan, 10, max_epochs=1, limit_train_batches=limit).steps_per_epoch == rollouts


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        plan_run(BatchPlan(2, 4), 0)
    with pytest.raises(ValueError, match=r"limit_train_batches 0\.01 leaves nothing"):
        plan_run(BatchPlan(2, 4), 10, limit_train_batches=0.01)


sizes = st.integers(1, 4)


@given(st.integers(1, 30), sizes, sizes, sizes, sizes, sizes)
def test_an_epoch_is_as_long_as_the_prompt_source(num_prompts, batch_size, accumulate, updates, passes, world_size):
    plan = BatchPlan(batch_size, 2, accumulate, updates, passes, world_size)
    source = PromptSource(["p"] * num_prompts, batch_size, cycle=plan.cycle, world_size=world_size)
    run = plan_run(plan, num_prompts, max_epochs=1)
    assert run.steps_per_epoch == len(source) // accumulate
    assert run.num_prompts == num_prompts


@given(sizes, st.integers(2, 5), sizes, sizes)
def test_micro_batches_hold_every_completion_once(batch_size, num_generations, accumulate, updates):
    plan = BatchPlan(batch_size, num_generations, accumulate, updates)
    shapes = plan.shapes(6, 9)
    assert sum(shape.num_completions for shape in shapes) == batch_size * num_generations
    assert len(shapes) <= plan.micro_batches
