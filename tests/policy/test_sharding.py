"""Transformers learns that ZeRO-3 partitions the weights."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import core_model_loading

from grpo_lightning.policy.sharding import (
    FullyShard,
    Partitioned,
    PartitionedGradients,
    Sharding,
    computes_in_32_bits,
    using_full_shapes,
)
from tests.helpers.tiny_models import tiny_model

Transpose = getattr(core_model_loading, "Transpose", None)


@pytest.mark.skipif(Transpose is None, reason="this release of transformers turns no tensors")
def test_tensors_are_turned_by_their_whole_shape():
    """A checkpoint has experts as the model has them, or the other way round: both load as [experts, 4, 3]."""
    model = nn.Module()
    own = torch.arange(24.0).view(2, 4, 3)
    model.whole = nn.Parameter(own)
    model.elsewhere = nn.Parameter(torch.empty(0))
    model.elsewhere.ds_shape = own.shape

    def loaded(name, tensor):
        turn = Transpose(1, 2, check_dims=True)
        return turn.convert({name: tensor}, [name], [name], model=model, full_layer_name=name)[name]

    with using_full_shapes():
        for name in ("whole", "elsewhere"):
            for tensor in (own, own.transpose(1, 2)):
                assert torch.equal(loaded(name, tensor), own)
    assert loaded("elsewhere", own).shape == (2, 3, 4)  # as transformers does it by itself


@pytest.mark.parametrize(("param_dtype", "converts"), [(torch.bfloat16, True), (None, False)])
def test_it_is_known_who_converts_weights(param_dtype, converts):
    """DeepSpeed always, FSDP2 if its policy of mixed precision says so, one device and DDP never."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    assert FullyShard(None, {"mp_policy": policy}).converts_weights == converts
    assert not FullyShard(None).converts_weights
    assert not Sharding().converts_weights
    assert PartitionedGradients(None).converts_weights
    assert Partitioned(None).converts_weights


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, True), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)],
)
def test_a_policy_computes_in_32_bits_if_no_weight_has_fewer(dtype, expected):
    """With `trainer.precision: 64-true` weights have 64 bits, which are no reason for the tolerance of 16 bits."""
    model = tiny_model("qwen2", num_hidden_layers=1).to(dtype)
    assert computes_in_32_bits(model) is expected
    model.lm_head.to(torch.bfloat16)
    assert not computes_in_32_bits(model)
