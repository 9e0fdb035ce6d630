"""Strategies as configurations name them."""

import dataclasses
import json

import pytest

from grpo_lightning.cli.plan.states import Division, division_of
from grpo_lightning.cli.plan.strategy import strategy_division
from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy

OURS = "grpo_lightning.training.strategies."


def division(class_path, **arguments):
    return strategy_division({"class_path": class_path, "init_args": arguments}, 4)


def by_default(name):
    """What a name divides; stage 3 steps as many numbers at a time as our strategy does where nothing is said."""
    zero = GRPODeepSpeedStrategy().config["zero_optimization"]
    return dataclasses.replace(
        division_of(name, 4), stepped_numbers=zero["sub_group_size"] if name.startswith("zero3") else None
    )


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"])
def test_names(name):
    assert strategy_division(name, 4) == by_default(name)


def test_classes_mean_what_their_names_do():
    deepspeed = OURS + GRPODeepSpeedStrategy.__name__
    assert division(deepspeed) == by_default("zero3")  # the class's default
    assert division(deepspeed, stage=2) == division_of("zero2", 4)
    assert division(deepspeed, offload_optimizer=True, offload_parameters=True) == by_default("zero3_offload")
    assert division(OURS + FSDP2Strategy.__name__) == division_of("fsdp2", 4)
    assert division("lightning.pytorch.strategies.DDPStrategy", broadcast_buffers=False) == division_of("ddp", 4)


def test_offloading_by_arguments():
    found = division(OURS + "GRPODeepSpeedStrategy", stage=2, offload_optimizer=True)
    assert (found.is_optimizer_offloaded, found.are_weights_offloaded) == (True, False)
    found = division(OURS + "GRPODeepSpeedStrategy", stage=3, offload_optimizer=True, offload_parameters=True)
    assert (found.is_optimizer_offloaded, found.are_weights_offloaded) == (True, True)


def test_the_buckets_of_deepspeed():
    assert division(OURS + "GRPODeepSpeedStrategy", reduce_bucket_size=1000).bucket_numbers == 1000
    both = division(OURS + "GRPODeepSpeedStrategy", stage=2, reduce_bucket_size=1000, overlap_comm=True)
    assert both.bucket_numbers == 2000
    assert division(OURS + "GRPODeepSpeedStrategy", stage=2, overlap_comm=False).bucket_numbers == 200_000_000


def test_the_groups_stage_3_steps():
    assert division(OURS + "GRPODeepSpeedStrategy", sub_group_size=1000).stepped_numbers == 1000
    assert division(OURS + "GRPODeepSpeedStrategy", stage=2, sub_group_size=1000).stepped_numbers is None


def test_deepspeeds_own_configuration(tmp_path):
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "nvme"}}}
    found = division(OURS + "GRPODeepSpeedStrategy", config=config)
    assert found == Division(
        4,
        4,
        4,
        has_masters=True,
        gathers_layers=True,
        are_weights_offloaded=True,
        sums_in_float32=True,
        stepped_numbers=1_000_000_000,
        bucket_numbers=200_000_000,
    )
    (tmp_path / "zero.json").write_text(json.dumps(config))
    assert division(OURS + "GRPODeepSpeedStrategy", config=str(tmp_path / "zero.json")) == found
    with pytest.raises(ValueError, match=r"strategy\.stage must be 1, 2 or 3, got 0"):
        division(OURS + "GRPODeepSpeedStrategy", config={"optimizer": {}})


def test_the_width_of_the_sums_is_the_configurations():
    config = {"zero_optimization": {"stage": 2}}
    assert division(OURS + "GRPODeepSpeedStrategy", config=config).sums_in_float32
    config["data_types"] = {"grad_accum_dtype": "bf16"}
    assert not division(OURS + "GRPODeepSpeedStrategy", config=config).sums_in_float32
    assert not division(OURS + "GRPODeepSpeedStrategy", config={"zero_optimization": {"stage": 1}}).sums_in_float32


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_3_offload", "fsdp", "fsdp_cpu_offload"])
def test_what_fit_refuses_is_refused_with_ours(name):
    with pytest.raises(ValueError, match=f"trainer.strategy {name} is not supported.*(zero3|fsdp2)"):
        strategy_division(name, 4)
    kind = "DeepSpeedStrategy" if "deepspeed" in name else "FSDPStrategy"
    with pytest.raises(ValueError, match=f"trainer.strategy {kind} is not supported"):
        division(f"lightning.pytorch.strategies.{kind}")
