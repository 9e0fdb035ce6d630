"""Weights, gradients and optimizer states: against real tensors, and the ZeRO paper's own numbers."""

import functools

import pytest
import torch

from grpo_lightning.cli.plan.states import Division, division_of, optimizer_bytes_per_weight, shard_bytes
from grpo_lightning.optimizers import AdamW
from tests.tiny_models import tiny_model

DEEPSPEED = {"has_masters": True, "bucket_numbers": 400_000_000}
STAGE_2 = DEEPSPEED | {"sums_in_float32": True}
STAGE_3 = {"gathers_layers": True, "has_masters": True, "sums_in_float32": True, "bucket_numbers": 200_000_000}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_bytes_are_those_of_real_tensors(family, dtype):
    model = tiny_model(family, dtype=dtype, tie_word_embeddings=True)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    states = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert shard_bytes(count, dtype.itemsize, 1) == weights == gradients
    assert shard_bytes(count, optimizer_bytes_per_weight(AdamW, dtype), 1) == states


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (AdamW, 8),
        (functools.partial(torch.optim.SGD, lr=1.0), 0),
        (functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), 4),
        (functools.partial(torch.optim.AdamW, amsgrad=True), 12),
    ],
)
def test_optimizer_states_by_hand(factory, expected):
    assert optimizer_bytes_per_weight(factory, torch.float32) == expected


def test_adamw_in_16_bits_keeps_16_bit_states():
    assert optimizer_bytes_per_weight(AdamW, torch.bfloat16) == 4


@pytest.mark.parametrize(
    ("strategy", "world_size", "expected"),
    [
        ("auto", 1, Division()),
        ("auto", 4, Division(has_buckets=True)),
        ("ddp_find_unused_parameters_true", 4, Division(has_buckets=True)),
        ("DDPStrategy", 1, Division()),
        ("deepspeed_stage_1", 4, Division(1, 1, 4, **DEEPSPEED)),
        ("zero2", 4, Division(1, 4, 4, **STAGE_2)),
        ("deepspeed_stage_2_offload", 4, Division(1, 4, 4, is_optimizer_offloaded=True, **STAGE_2)),
        ("zero3", 4, Division(4, 4, 4, **STAGE_3)),
        (
            "zero3_offload",
            4,
            Division(4, 4, 4, is_optimizer_offloaded=True, are_weights_offloaded=True, **STAGE_3),
        ),
        ("fsdp2", 4, Division(4, 4, 4, gathers_layers=True, gathers_ends=True)),
        ("FSDP2Strategy", 4, Division(4, 4, 4, gathers_layers=True, gathers_ends=True)),
        ("ModelParallelStrategy", 2, Division(2, 2, 2, gathers_layers=True, gathers_ends=True)),
        ("SingleDeviceStrategy", 1, Division()),
    ],
)
def test_strategies(strategy, world_size, expected):
    assert division_of(strategy, world_size) == expected


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match=r"'xla' divides memory is not known here; auto, .* zero3_offload are"):
        division_of("xla", 2)


def test_a_share_is_rounded_up():
    assert shard_bytes(10, 4, 4) == 3 * 4
