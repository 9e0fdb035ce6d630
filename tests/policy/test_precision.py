"""Steps that would be lost in rounding are refused."""

import pytest
import torch

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.trainable import check_masters
from tests.tiny_models import tiny_model, tiny_tokenizer


def in_memory(dtype):
    return PolicyLoader(model=tiny_model("qwen2", dtype=dtype), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", None, 32])
def test_narrow_weights_need_masters(dtype, precision):
    for loader in (PolicyLoader("a", dtype=dtype), in_memory(getattr(torch, dtype))):
        with pytest.raises(ValueError, match=rf"trained weights are {dtype} .* trainer\.precision 'bf16-mixed'"):
            check_masters(loader, precision, has_masters=False)
        check_masters(loader, precision, has_masters=True)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_narrow_precision_needs_masters(precision):
    loader = PolicyLoader("a")
    with pytest.raises(ValueError, match=rf"trainer\.precision '{precision}' gives the trained weights 16 bits"):
        check_masters(loader, precision, has_masters=False)
    check_masters(loader, precision, has_masters=True)


def test_adapters_are_wide_under_a_narrow_base():
    loader = PolicyLoader("a", dtype="bfloat16", lora={})
    for precision in ("32-true", "bf16-mixed"):
        check_masters(loader, precision, has_masters=False)
    with pytest.raises(ValueError, match=r"makes float32 adapters narrow as well\. Set it to 'bf16-mixed'"):
        check_masters(loader, "bf16-true", has_masters=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "64-true", 32, 64, None])
def test_wide_weights_pass(precision):
    check_masters(PolicyLoader("a"), precision, has_masters=False)
    check_masters(in_memory(torch.float32), precision, has_masters=False)


def test_the_reason_is_true():
    """A step of 1e-5 moves a weight of 0.02 in float32 and not in bfloat16; one of 1e-3 moves both."""
    for step, moves in ((1e-5, False), (1e-3, True)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.tensor(0.02, dtype=dtype)
            assert bool(weight - step != weight) == (moves or dtype == torch.float32)
