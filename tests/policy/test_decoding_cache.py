"""The next token attends to each prompt, stored once, and to the completion's own tokens, written in place."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import kv_cache
from grpo_lightning.policy.kv_cache import (
    ATTENTION,
    SamplingCache,
    SharedPrompts,
    attend_to_current,
    attention,
    attention_kernel,
    current,
    matrix_products,
    pack_rows,
    unshared_reason,
)
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import text_config
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers.families import families
from tests.helpers.tiny_models import FAMILIES, tiny_model, tiny_tokenizer
from tests.marks import SLOW

SHARING = {"qwen2", "qwen3", "llama", "gpt2", "qwen3_moe", "mixtral"}
"""Families of which every layer has full attention that transformers can replace."""


def connected(model):
    engine = LocalEngine()
    engine.connect(model, tiny_tokenizer(), Sharding())
    return engine


def sampled(model, way, **settings):
    engine = connected(model)
    engine.path = way
    prompts = [[5, 6, 7] * 4, [8, 9], [11, 12, 13, 14]]
    groups = engine.generate(prompts, 4, SamplingParams(max_completion_length=90, **settings), seeds=[0, 1, 2])
    return [completion for group in groups for completion in group]


# --------------------------------------------------------------------------------------------------------- every family


@pytest.mark.parametrize("family", families(FAMILIES))
def test_a_prompt_is_kept_once_or_repeated_with_the_same_completions(family):
    """Rows end at many steps, prompts are ragged, and the completions outgrow the first room."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = list(range(2, 5))
    reason = unshared_reason(model)
    if reason is not None:
        assert connected(model).path == "repeated" or connected(model).path == "generate"
        return
    once, repeated = sampled(model, "shared"), sampled(model, "repeated")
    assert len({len(row.token_ids) for row in once}) > 3
    assert max(len(row.token_ids) for row in once) > 64
    assert [row.token_ids for row in once] == [row.token_ids for row in repeated]
    for one, other in zip(once, repeated, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


def test_which_families_keep_a_prompt_once():
    assert {family for family in FAMILIES if unshared_reason(tiny_model(family)) is None} == SHARING
    assert unshared_reason(tiny_model("gemma3")) == "the cache layer DynamicSlidingWindowLayer is not of full attention"


@SLOW
def test_weights_of_64_bits():
    model = tiny_model("qwen2", dtype=torch.float64)
    once, repeated = sampled(model, "shared"), sampled(model, "repeated")
    for one, other in zip(once, repeated, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-6, rtol=0)


@SLOW
def test_the_attention_of_training_is_back_after_sampling():
    model = tiny_model("qwen2")
    usual = text_config(model)._attn_implementation
    sampled(model, "shared")
    assert text_config(model)._attn_implementation == usual != ATTENTION


@pytest.fixture
def cache():
    """Two prompts of three tokens with two rows each, one layer, and room for a token."""
    prefilled = SamplingCache()
    prefilled.update(torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8), 0)
    model = tiny_model("qwen2")
    cache = SharedPrompts(model, prefilled, torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 8)
    cache.next_token()
    return cache


def test_attention_that_is_not_computed_is_refused(cache):
    query, key, value = torch.randn(3, 4, 1, 1, 8)
    cache.update(key, value, 0)
    with cache.decoding():
        assert attend_to_current(nn.Identity(), query, key, value, None)[0].shape == (4, 1, 1, 8)
        with pytest.raises(NotImplementedError, match="attention with softcap is not computed"):
            attend_to_current(nn.Identity(), query, key, value, None, softcap=50.0)
        with pytest.raises(NotImplementedError, match="mask of its own"):
            attend_to_current(nn.Identity(), query, key, value, torch.zeros(1, 1, 1, 1))
        with pytest.raises(NotImplementedError, match="attends to other keys or values than it stores"):
            attend_to_current(nn.Identity(), query, key, value.clone(), None)


def test_another_thread_cannot_call_the_policy_meanwhile(cache):
    with cache.decoding(), ThreadPoolExecutor(1) as pool:
        called = pool.submit(cache.policy, input_ids=torch.tensor([[5, 6]]))
        with pytest.raises(RuntimeError, match="called while it is sampled in another thread"):
            called.result()


def test_a_forward_that_fails_leaves_the_attention_as_it_was(cache):
    usual = text_config(cache.policy)._attn_implementation
    with pytest.raises(ZeroDivisionError), cache.decoding():
        raise ZeroDivisionError
    assert text_config(cache.policy)._attn_implementation == usual
    assert current.get(None) is None


@SLOW
@pytest.mark.parametrize("stop_strings", [[], ["w7", "w9"]])
def test_a_host_that_looks_seldom_gets_the_same_completions(monkeypatch, stop_strings):
    """Tokens sampled after an end are dropped, and ended rows stay until a quarter of the rows has ended."""
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = list(range(2, 9))
    every_step = sampled(model, "shared", stop_strings=stop_strings)
    monkeypatch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": 7})
    monkeypatch.setattr(local_engine, "LEAST_ENDED", {"cpu": 0.25})
    seldom = sampled(model, "shared", stop_strings=stop_strings)
    assert [row.token_ids for row in seldom] == [row.token_ids for row in every_step]
    assert [row.finish_reason for row in seldom] == [row.finish_reason for row in every_step]
    for one, other in zip(seldom, every_step, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.entropies, other.entropies, atol=1e-5, rtol=0)


def test_nan_is_refused_at_the_next_look(monkeypatch):
    monkeypatch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": 7})
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are NaN"):
        sampled(model, "shared")


# ------------------------------------------------------------------------------------------------------ attention alone


def dense(query, keys, values):
    """Softmax attention of one row: query [heads, size], keys and values [key heads, tokens, size]."""
    repeats = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    scores = torch.einsum("hd,htd->ht", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("kernel", [attention, matrix_products])
@pytest.mark.parametrize("is_padded", [True, False])
def test_attention_and_its_log_sum_exp_by_hand(kernel, is_padded):
    query, keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    bias = torch.zeros(2, 1, 1, 5)
    bias[0, ..., :2] = -torch.inf
    output, sums = kernel(query, keys, values, bias.expand(2, 3, 4, 5) if is_padded else None, 0.3)
    scores = query @ keys.transpose(-1, -2) * 0.3 + (bias if is_padded else 0)
    torch.testing.assert_close(output, scores.softmax(-1) @ values)
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def test_a_device_without_the_kernel_multiplies_matrices(monkeypatch, caplog):
    """As an older GPU, whose kernels do not know bfloat16."""

    def missing(*arguments):
        raise RuntimeError("cutlassF: no kernel found to launch!")

    monkeypatch.setattr(kv_cache, "flash_of_cpu", missing)
    attention_kernel.cache_clear()
    try:
        assert attention_kernel("cpu", torch.bfloat16, 12) is matrix_products
    finally:
        attention_kernel.cache_clear()
    assert "without a fused attention kernel (torch.bfloat16, head size 12): cutlassF" in caplog.text


@SLOW
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.integers(1, 4),
    key_heads=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_any_rows_may_leave_and_join_at_any_step(lengths, size, key_heads, data):
    """Held against dense attention of each row over its prompt and its own tokens."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    def prefilled(lengths):
        """A cache of prompts, and the keys and values that each row sees."""
        longest = max(lengths)
        mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
        prefilled = SamplingCache()
        states = random(2, len(lengths), key_heads, longest, 8)
        prefilled.update(states[0], states[1], 0)
        prompt_of = torch.arange(len(lengths)).repeat_interleave(size)
        cache = SharedPrompts(nn.Identity(), prefilled, mask, prompt_of, 70)
        return cache, [states[:, prompt, :, longest - lengths[prompt] :] for prompt in prompt_of.tolist()]

    cache, seen = prefilled(lengths)
    for _ in range(data.draw(st.integers(1, 70), label="steps")):
        cache.next_token()
        query, new = random(len(seen), 4, 1, 8), random(2, len(seen), key_heads, 1, 8)
        cache.update(new[0], new[1], 0)
        seen = [torch.cat([old, new[:, row]], 2) for row, old in enumerate(seen)]
        got = cache.attend(0, query, None)
        for row, (keys, values) in enumerate(seen):
            torch.testing.assert_close(got[row, 0], dense(query[row, :, 0], keys, values), atol=1e-5, rtol=1e-4)
        if data.draw(st.integers(0, 3)) == 0:
            kept = sorted(data.draw(st.sets(st.integers(0, len(seen) - 1), min_size=1)))
            keep = pack_rows(kept)
            cache.select(keep)
            seen = [seen[row] for row in keep]
        if data.draw(st.integers(0, 5)) == 0:
            new, seen_by_new = prefilled(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
            cache.join(new)
            seen += seen_by_new
            assert cache.prompts[0].keys.shape[2] == max(len(mask[mask]) for mask in cache.mask)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_the_fewest_rows_move(kept):
    places = pack_rows(sorted(kept))
    assert sorted(places) == sorted(kept)
    assert all(row == place or row >= len(kept) for place, row in enumerate(places))


def test_the_prompts_are_not_copied(cache):
    """Rows that stay, and their prompts, are not moved."""
    prompts, own = cache.prompts[0].keys.data_ptr(), cache.own[0].keys.data_ptr()
    cache.select(pack_rows([0, 1, 3]))
    assert (cache.prompts[0].keys.data_ptr(), cache.own[0].keys.data_ptr()) == (prompts, own)
    assert cache.own[0].keys.shape == (3, 1, 8, 8)
    cache.select(pack_rows([2]))
    assert cache.prompts[0].keys.shape[0] == 1
