"""Keys and values in the type that attention reads."""

import pytest
import torch
from transformers import DynamicCache

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.kv_cache import SamplingCache
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import known_arguments, text_config
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.local_engine import LocalEngine, no_fan_out_reason
from tests.helpers.families import families
from tests.helpers.tiny_models import FAMILIES, tiny_model, tiny_tokenizer


def drawn(monkeypatch, model, cache_class):
    """(completions, the bytes of the cache, its types) under autocast."""
    caches = []

    class Kept(cache_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(local_engine, "SamplingCache", Kept)
    engine = LocalEngine()
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.path = "repeated"
    with torch.autocast("cpu", torch.bfloat16):
        groups = engine.generate([[5, 6, 7] * 4, [8, 9]], 3, SamplingParams(max_completion_length=8), seeds=[0, 1])
    states = [x for layer in caches[-1].layers if hasattr(layer, "keys") for x in (layer.keys, layer.values)]
    states = [x for x in states if x is not None]
    return groups, sum(x.nbytes for x in states), {x.dtype for x in states}


@pytest.mark.parametrize("family", families(FAMILIES))
def test_under_autocast_the_same_numbers_take_half_the_memory(monkeypatch, family):
    model = tiny_model(family)
    groups, size, dtypes = drawn(monkeypatch, model, SamplingCache)
    wide_groups, wide_size, _ = drawn(monkeypatch, model, DynamicCache)
    assert groups == wide_groups
    assert dtypes == {torch.bfloat16}
    assert size <= wide_size
    if family != "gpt2":  # it rotates nothing: its keys are narrow already
        assert size in (wide_size // 2, wide_size * 2 // 3)  # values are float32 only before transformers 5.24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_autocast_the_states_keep_their_type(dtype):
    model = tiny_model("qwen2", dtype=dtype)
    cache = SamplingCache(config=text_config(model))
    model(torch.tensor([[5, 6, 7]]), use_cache=True, **known_arguments(model, cache=cache))
    assert {layer.keys.dtype for layer in cache.layers} == {dtype}


def test_models_that_cannot_fan_out_say_why():
    assert no_fan_out_reason(tiny_model("qwen2", num_hidden_layers=1)) is None
    assert no_fan_out_reason(tiny_model("mamba2")) == "Mamba2ForCausalLM has no KV cache"
