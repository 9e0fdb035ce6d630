"""The arithmetic of a cycle and of a run, against what a run does, and other trainers' batches in our words."""

import math
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_lightning.cli.plan.batches import BatchPlan, MicroBatchShape, plan_run, translate
from grpo_lightning.cli.plan.command import parse_script
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.prompt_source import PromptSource
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
    assert (run.total_steps, run.requested_steps, run.num_prompts) == (20, 18, 18)
    assert plan_run(plan, 10, max_steps=4, max_epochs=2).total_steps == 4
    assert plan_run(plan, 10, max_steps=400, max_epochs=2).total_steps == 24


def test_data_smaller_than_a_rollout_by_hand():
    """3 prompts on 2 ranks: rank 0 gets 2 and rank 1 gets 1, although each rank has room for 4."""
    plan = BatchPlan(4, 8, world_size=2, num_prompts=3)
    assert (plan.prompts_per_rollout, plan.prompts_per_team) == (3, [2, 1])
    assert (plan.completions_per_rollout, plan.completions_per_rank) == (24, 16)
    assert plan.shapes(10, 20) == [MicroBatchShape(2, 16)]
    run = plan_run(plan, 3, max_steps=5)
    assert (run.steps_per_epoch, run.num_prompts, run.epochs) == (1, 15, 5.0)
    assert BatchPlan(4, 8, world_size=2, num_prompts=1).shapes(10, 20) == [MicroBatchShape(1, 8)]
    full = BatchPlan(2, 8, world_size=2, num_prompts=10)
    assert (full.prompts_per_rollout, full.prompts_per_team, full.completions_per_rank) == (4, [2, 2], 16)


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


# ------------------------------------------------------------------------------------------- scripts of other trainers

LETTERS = {
    **{"b": "per_device_train_batch_size", "A": "gradient_accumulation_steps", "G": "num_generations"},
    **{"W": "world_size", "S": "steps_per_generation", "mu": "num_iterations"},
}


def script(trainer="trl", **flags):
    return parse_script(["--from", trainer, *(f"--{LETTERS.get(name, name)}={value}" for name, value in flags.items())])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # A GSM8K recipe on one device: an update is one prompt's four completions.
        ({"b": 1, "A": 4, "G": 4}, BatchPlan(1, 4, accumulate_grad_batches=4)),
        # GSPO's recipe, S = 4 A: 8 x 4 x 8 = 256 completions, 32 prompts, 8 per rank, 4 updates.
        ({"b": 8, "A": 2, "W": 4, "S": 8}, BatchPlan(8, 8, 2, 4, world_size=4)),
        ({"b": 8, "A": 2, "W": 4, "generation_batch_size": 256}, BatchPlan(8, 8, 2, 4, world_size=4)),
        # Several generations per update, sampled from the same weights, are one rollout.
        ({"b": 8, "A": 4, "S": 1}, BatchPlan(4, 8, accumulate_grad_batches=4)),
    ],
)
def test_translations_that_are_exact(flags, expected):
    assert translate(script(**flags)) == (expected, [])


def test_the_version_decides_whether_groups_may_spread():
    for old in ({"trainer": "vlm-r1"}, {"version": "0.16.1"}, {"trainer": "ms-swift", "version": "3.3.1"}):
        with pytest.raises(ValueError, match=r"x world_size = 1 must be a multiple .* \(4\).*--num_generations: none"):
            translate(script(b=1, A=4, G=4, **old))
    for new in ({"version": "0.17"}, {"trainer": "ms-swift", "version": "3.4.0"}):
        translate(script(b=1, A=4, G=4, **new))


def test_a_vllm_that_sleeps_has_no_accumulation_in_old_versions_of_ms_swift():
    flags = {"trainer": "ms-swift", "b": 1, "A": 2, "W": 8, "G": 8, "sleep_level": 1}
    batches, (difference,) = translate(script(**flags, version="3.3.1"))
    assert batches == BatchPlan(1, 8, world_size=8, ranks_per_group=8)
    assert "sets gradient_accumulation_steps to 1" in difference
    for other in ({"version": "3.4"}, {}, {"version": "3.3.1", "sleep_level": 0}):
        assert translate(script(**flags | other)) == (BatchPlan(1, 8, 2, world_size=8, ranks_per_group=4), [])
    assert script(**flags).ignored == ["--sleep_level"]


@pytest.mark.parametrize("flags", [{"A": 4, "S": 6}, {"A": 4, "S": 3}, {"A": 4, "S": 2, "mu": 2}])
def test_updates_across_generations_have_no_equal(flags):
    (difference,) = translate(script(b=8, G=8, **flags))[1]
    assert "start inside one generation" in difference


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # 8 devices with one completion each: one prompt.
        ({"W": 8, "G": 8}, BatchPlan(1, 8, world_size=8, ranks_per_group=8)),
        ({"W": 8, "G": 8, "A": 2}, BatchPlan(1, 8, 2, world_size=8, ranks_per_group=4)),
        ({"W": 7, "G": 7, "A": 2}, BatchPlan(2, 7, 2, world_size=7, ranks_per_group=7)),
        ({"b": 4, "W": 8, "G": 8}, BatchPlan(1, 8, world_size=8, ranks_per_group=2)),
        ({"b": 3, "W": 8, "G": 6}, BatchPlan(1, 6, world_size=8, ranks_per_group=2)),
        # More prompts than ranks, but no multiple.
        ({"b": 12, "W": 8, "G": 8}, BatchPlan(3, 8, world_size=8, ranks_per_group=2)),
        # As many prompts as ranks, but an update has fewer: half of the ranks would wait in each update.
        ({"b": 4, "W": 8, "G": 8, "S": 2}, BatchPlan(2, 8, updates_per_rollout=2, world_size=8, ranks_per_group=2)),
        ({"W": 8, "G": 8, "S": 2}, BatchPlan(2, 8, updates_per_rollout=2, world_size=8, ranks_per_group=8)),
        ({"W": 6, "G": 6, "S": 3}, BatchPlan(3, 6, updates_per_rollout=3, world_size=6, ranks_per_group=6)),
    ],
)
def test_ranks_share_groups_where_they_do_not_divide_the_prompts(flags, expected):
    assert translate(script(**{"b": 1} | flags)) == (expected, [])


def test_a_rank_without_a_completion_has_no_equal():
    """Two updates of half a generation more each: 9 prompts of 3 completions, which 7 ranks cannot share."""
    batches, (_, difference) = translate(script(b=1, W=7, G=3, A=2, S=3))
    assert batches == BatchPlan(1, 3, 2, 2, world_size=7)
    assert "9 prompt(s) for 7 ranks, so 7 ranks would share the 3 completions" in difference


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"S": 2, "generation_batch_size": 8}, "not both"),
        ({"b": 6, "G": 4}, "Valid values of --num_generations: 2, 3, 6"),
        ({"b": 6, "W": 2, "A": 3, "G": 5}, "x micro-steps = 36"),
        ({"generation_batch_size": 12}, "must be a multiple of per_device_train_batch_size x world_size (8)"),
        ({"trainer": "vlm-r1", "S": 2}, "This version of vlm-r1 has no --steps_per_generation"),
    ],
)
def test_scripts_that_would_not_start(flags, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        translate(script(**flags))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"trainer": "verl"}, "invalid choice: 'verl'"),
        ({"G": 1}, "--num_generations must be at least 2, got 1"),
        ({"b": 0}, "--per_device_train_batch_size must be at least 1, got 0"),
        ({"version": "new"}, "must look like 0.17 or 3.3.1, got 'new'"),
        ({"trainer": "ms-swift", "A": 1}, "set --per_device_train_batch_size: ms-swift has its own defaults"),
    ],
)
def test_flags_out_of_range(flags, error, capsys):
    with pytest.raises(SystemExit):
        script(**flags)
    assert error in " ".join(capsys.readouterr().err.split())


small = st.integers(1, 6)


@given(small, st.integers(1, 4), st.integers(2, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_an_exact_translation_trains_on_as_much(b, accumulate, group, ranks, updates, passes):
    assume(b * ranks * accumulate * updates % group == 0)
    plan, differences = translate(script(b=b, A=accumulate, G=group, W=ranks, S=accumulate * updates, mu=passes))
    if differences:
        assert ranks // math.gcd(b * ranks * accumulate * updates // group, ranks) > group
        assert plan.batch_size >= 1
    else:
        assert plan.completions_per_rollout == b * ranks * accumulate * updates
        assert plan.completions_per_update == b * ranks * accumulate
        assert (
            plan.batch_size * group == b * plan.micro_batches * plan.ranks_per_group
        )  # micro-batches of b completions
        assert plan.steps_per_rollout == updates * passes
