"""Weights, gradients and optimizer states by part: where they are, and how many."""

import dataclasses

import pytest

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.parts import peak
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.state_parts import state_parts
from grpo_lightning.cli.plan.states import division_of
from grpo_lightning.cli.plan.trained_weights import TrainedWeights

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    vocab_size=50,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    windows=(None, None),
    num_weights=1000,
    num_matrix_weights=900,
    num_end_weights=400,
)
BF16 = Precision(2, 2)


def parts_of(strategy="auto", world_size=1, **changes):
    """Parts that have bytes, by name."""
    settings = MemorySettings(ScoredBatch(2, 8, 10, 6), 8, 2, Precision(4, 4), 8, division_of(strategy, world_size))
    parts = state_parts(SHAPE, dataclasses.replace(settings, **changes))
    return {part.name: part for part in parts if part.num_bytes}


def sizes(*args, **changes):
    return {name: part.num_bytes for name, part in parts_of(*args, **changes).items()}


def test_zero3_by_hand():
    """1000 weights on 4 ranks: 2, 2, 4, 8 and 4 bytes each, and 32-bit gradients of what it steps."""
    parts = parts_of("zero3", 4, precision=BF16)
    found = {name: part.num_bytes for name, part in parts.items()}
    assert found == {
        "weights": 500,
        "reference": 500,
        "gradients": 1000,
        "reduce buckets": 400_000_000,
        "optimizer states": 2000,
        "master weights": 1000,
        "32-bit gradients": 1000,
        "optimizer's work": 1000,
        # Layers have 300 each, the head 50 x 4: two layers are more than a layer and the head.
        "gathered layers": 600 * 2,
    }
    assert parts["gradients"].moments == {"sampling", "update", "step"}
    assert parts["32-bit gradients"].moments == {"step"}


def test_zero2_steps_on_the_sums_themselves():
    """In 16 bits; in 32 they are the weights' own width, and copied for the step."""
    found = parts_of("zero2", 4, precision=BF16, accumulates=True)
    assert found["gradients"].num_bytes == 1000
    assert found["gradients"].moments == {"update", "step"}
    assert "32-bit gradients" not in found
    assert sizes("zero2", 4)["32-bit gradients"] == sizes("zero2", 4)["gradients"] == 1000
    assert sizes("zero1", 4, precision=BF16)["gradients"] == 2000
    assert sizes("zero1", 4, precision=BF16)["32-bit gradients"] == 1000


def test_offloading_moves_parts_to_the_cpu():
    """None of them is gone, and none of them counts on the device any more."""
    kept, moved = parts_of("zero3", 4, precision=BF16), parts_of("zero3_offload", 4, precision=BF16)
    on_host = {"weights", "reference", "gradients", "optimizer states", "master weights", "32-bit gradients"}
    assert {name for name, part in moved.items() if part.place == "host"} == on_host
    assert all(moved[name].num_bytes == kept[name].num_bytes for name in on_host)
    assert set(moved) == set(kept) - {"optimizer's work"}
    parts = list(moved.values())
    assert peak(parts, "step") == 400_000_000
    for moment in ("sampling", "update", "step"):
        assert peak(parts, moment, "host") == 500 + 500 + 1000 + 2000 + 1000 + 1000


def test_gradients_on_the_cpu_are_all_there_whatever_is_stepped():
    offloaded = dataclasses.replace(division_of("zero3_offload", 4), stepped_numbers=100)
    assert sizes(precision=BF16, division=offloaded)["32-bit gradients"] == 1000


def test_stage_3_steps_its_share_in_groups():
    division = dataclasses.replace(division_of("zero3", 4), stepped_numbers=100)
    found = sizes(precision=BF16, division=division)
    assert (found["32-bit gradients"], found["optimizer's work"]) == (400, 400)
    assert found["optimizer states"] == 2000


def test_only_the_optimizer_offloaded():
    moved = parts_of("deepspeed_stage_2_offload", 4, precision=BF16)
    assert moved["weights"].place == moved["reference"].place == "device"
    assert moved["32-bit gradients"].place == moved["optimizer states"].place == "host"
    assert moved["32-bit gradients"].num_bytes == moved["gradients"].num_bytes == 1000
    assert moved["gradients"].place == "device"  # the sums; from there they are copied at the step
    narrow = dataclasses.replace(division_of("deepspeed_stage_2_offload", 4), sums_in_float32=False)
    assert parts_of(precision=BF16, division=narrow)["gradients"].place == "host"


def test_offloading_during_rollouts_parks_parts():
    """`model.offload`: the device holds them from the update on, the CPU while completions are drawn."""
    parked = parts_of(offloaded=frozenset({"reference", "optimizer"}))
    assert parked["reference"].moments == parked["optimizer states"].moments == {"update", "step"}
    assert parked["reference, parked"].moments == parked["optimizer, parked"].moments == {"sampling"}
    assert parked["optimizer, parked"].place == "host"
    assert parked["optimizer, parked"].num_bytes == parked["optimizer states"].num_bytes == 8000
    device, whole = list(parked.values()), list(parts_of().values())
    assert peak(whole, "sampling") - peak(device, "sampling") == 4000 + 8000
    assert peak(whole, "step") == peak(device, "step")


def test_weights_gathered_for_sampling_take_the_place_of_layers():
    found = parts_of("zero3", 4, precision=BF16, gathers_for_sampling=True)
    assert found["gathered weights"].num_bytes == 2000
    assert found["gathered weights"].moments == {"sampling"}
    assert found["gathered layers"].moments == {"update"}
    assert parts_of("zero3", 4, precision=BF16)["gathered layers"].moments == {"update", "sampling"}
    assert "gathered weights" not in parts_of("zero2", 4, precision=BF16, gathers_for_sampling=True)


def test_fsdp2_gathers_embeddings_and_head_with_the_layers():
    assert sizes("fsdp2", 2)["gathered layers"] == (2 * 300 + 400) * 4


ADAPTERS = TrainedWeights(0, 0, adapters=50)


def test_lora_by_hand():
    """The base in 16 bits, 50 adapter weights in 32; gradients and states of these alone, and no reference."""
    assert sizes(precision=BF16, trained=ADAPTERS) == {
        "weights": 2000,
        "adapters": 200,
        "gradients": 200,
        "optimizer states": 400,
        "optimizer's work": 200,
    }
    starting = dataclasses.replace(ADAPTERS, has_starting_adapter=True)
    assert sizes(precision=BF16, trained=starting)["reference"] == 200


@pytest.mark.parametrize(("strategy", "weights"), [("zero2", 2000), ("zero3", 500)])
def test_lora_under_deepspeed(strategy, weights):
    """DeepSpeed runs adapters in the model's width, and keeps masters of them alone."""
    found = sizes(strategy, 4, precision=BF16, trained=ADAPTERS)
    assert found["weights"] == weights
    assert found["master weights"] == 13 * 4
    assert found["optimizer states"] == 13 * 8
    assert found["adapters"] == (13 if strategy == "zero3" else 50) * 2


def test_quantized_weights_are_narrower():
    """600 of 1000 in half a byte: 300, and 400 in 2 bytes."""
    quantized = dataclasses.replace(ADAPTERS, quantized=600, quantized_bytes=0.5)
    weights = parts_of(precision=BF16, trained=quantized)["weights"]
    assert weights.num_bytes == 300 + 800
    assert not weights.is_exact


def test_frozen_layers_are_shared_with_the_reference():
    found = sizes(trained=TrainedWeights(700, 600, shares_frozen=True))
    assert (found["weights"], found["reference"]) == (4000, 2800)
    assert (found["gradients"], found["optimizer states"]) == (2800, 5600)


def test_eight_bit_states():
    assert sizes(optimizer_bytes=2.03125)["optimizer states"] == 2032
