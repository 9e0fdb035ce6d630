"""Times by hand, from assumed speeds."""

import dataclasses

import pytest

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.states import division_of
from grpo_lightning.cli.plan.times import MAX_ROLLOUT_HOURS, Speeds, StepTimes, sampling_refusal, step_times
from grpo_lightning.cli.plan.trained_weights import TrainedWeights

SPEEDS = Speeds(products_per_second=1e12, memory_bytes=1e10, node_bytes=1e9, far_bytes=1e8, layer_seconds=0.01)
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=50,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    windows=(None, None),
    num_weights=1_000_000,
    num_matrix_weights=1_000_000,
)
BATCHES = BatchPlan(2, 4)
SETTINGS = MemorySettings(ScoredBatch(2, 8, 10, 6), 8, 2, Precision(2, 2), 8, has_reference=False)


def times_of(strategy="auto", world_size=1, *, num_nodes=1, batches=BATCHES, speeds=SPEEDS, shape=SHAPE, **changes):
    settings = dataclasses.replace(SETTINGS, division=division_of(strategy, world_size), **changes)
    return step_times(shape, settings, batches, num_nodes=num_nodes, speeds=speeds)


def test_one_device_by_hand():
    """6 tokens of 2 layers x 10 ms. Scoring: 2 x 10 + 8 x 6 = 68 tokens x 6 x 10^6 operations at 10^12 a second."""
    times = times_of()
    assert times.rollout == pytest.approx(6 * 0.02)
    assert times.gathering == 0
    assert times.scoring == pytest.approx(68 * 6e6 / 1e12)
    assert times.cycle == times.rollout + times.scoring


def test_decoding_is_bound_by_memory_where_that_takes_longer():
    """2 x 10^6 bytes of weights, and of the cache 8 rows x 2 layers x (10 + 3) tokens x 5 x 2 x 2 bytes."""
    slow = dataclasses.replace(SPEEDS, layer_seconds=0.0)
    assert times_of(speeds=slow).rollout == pytest.approx(6 * (2e6 + 8 * 2 * 13 * 20) / 1e10)


def test_waves_multiply_the_rollout():
    assert times_of(batches=BatchPlan(8, 4)).rollout == pytest.approx(4 * times_of().rollout)


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "seconds"),
    [("zero3", 1, 2e6 / 1e9), ("zero3", 2, 2e6 / 1e8), ("zero3_offload", 1, 2e6 / 1e8)],
)
def test_weights_are_collected_at_every_token_unless_they_are_gathered(strategy, num_nodes, seconds):
    every = times_of(strategy, 4, num_nodes=num_nodes)
    once = times_of(strategy, 4, num_nodes=num_nodes, gathers_for_sampling=True)
    assert every.gathering == pytest.approx(6 * seconds)
    assert once.gathering == pytest.approx(seconds)
    assert every.rollout - once.rollout == pytest.approx(5 * seconds)


def test_scoring_counts_its_passes():
    """A forward is 2, a backward 4 (2 beside frozen weights), a recompute 2, the reference 2, old log-probs 2."""
    unit = 68 * 1e6 / 1e12
    assert times_of().scoring == pytest.approx(6 * unit)
    assert times_of(checkpointing="layers").scoring == pytest.approx(8 * unit)
    assert times_of(has_reference=True).scoring == pytest.approx(8 * unit)
    assert times_of(trained=TrainedWeights(0, 0, adapters=9)).scoring == pytest.approx(4 * unit)
    twice = BatchPlan(2, 4, num_iterations=2)
    assert times_of(batches=twice).scoring == pytest.approx((6 + 6 + 2) * unit)


def test_scoring_collects_weights_for_every_forward_and_backward():
    """2 micro-batches x (prompts, completions) x (forward, backward) of 2 ms."""
    batches = BatchPlan(2, 4, accumulate_grad_batches=2)
    more = times_of("zero3", 4, batches=batches).scoring - times_of(batches=batches).scoring
    assert more == pytest.approx(2 * 2 * 2 * 2e6 / 1e9)


def test_quantized_weights_move_fewer_bytes():
    narrow = TrainedWeights(0, 0, adapters=9, quantized=1_000_000, quantized_bytes=0.5)
    slow = dataclasses.replace(SPEEDS, layer_seconds=0.0)
    assert times_of(speeds=slow, trained=narrow).rollout < times_of(speeds=slow).rollout / 3


def test_other_engines_sample_in_their_own_time():
    assert times_of(sampling_rows=0).rollout == 0


def refusal(strategy="zero3_offload", hours=3.0, **changes):
    settings = dataclasses.replace(SETTINGS, division=division_of(strategy, 8), **changes)
    return sampling_refusal(StepTimes(hours * 3600, (hours - 0.5) * 3600, 60), SHAPE, settings, 1)


def test_a_rollout_beyond_reason_is_refused_with_its_time():
    said = refusal()
    assert "would take 3.0 hours (2.5 of them collecting weights)" in said
    assert "layer by layer from the CPU" in said
    assert "gather_for_generation" in said
    assert "from other devices" in refusal("zero3")


def test_what_is_not_refused():
    assert refusal(hours=MAX_ROLLOUT_HOURS) is None
    assert refusal(gathers_for_sampling=True) is None
    assert refusal("zero2") is None
