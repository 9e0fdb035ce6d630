"""The sliced head equals the model's own logits, in value and gradient; no tensor holds the logits of all tokens."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.policy.completion_logprobs import Scorer, SlicedHead, head_replaced
from grpo_lightning.policy.loading import checkpoint_layers, disable_dropout
from grpo_lightning.policy.probe import choose_head
from tests.helpers.tiny_models import BASE, READS_LINEAR_STATES, VOCAB, tiny_model
from tests.marks import few
from tests.policy.scored import (
    loss_and_gradients,
    ragged_batch,
    row_weights,
    whole_difference,
    worst_difference,
)

WHOLE = Scorer(head_chunk_size=None)
CAPPED = {"final_logit_softcapping": 3.0}
MORE_KINDS = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, **CAPPED},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
}


def model_of(kind):
    """A tiny model; its scale or cap bends the logits by far more than rounding."""
    if kind in MORE_KINDS:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **(BASE | MORE_KINDS[kind]))
        return AutoModelForCausalLM.from_config(config).eval()
    family, _, variant = kind.partition(" ")
    changes = {"": {}, "tied": {"tie_word_embeddings": True}, "capped": CAPPED}[variant]
    model = tiny_model(family, **changes)
    disable_dropout(model)
    return model


def holed(batch):
    """With tokens that are not trained on, as tool output is: they are scored all the same."""
    mask = batch.attention_mask.clone()
    mask[::2, 1::3] = False
    return dataclasses.replace(batch, completion_mask=mask)


@few(7, slow=True)
@pytest.mark.parametrize("path", ["extended", "dense"])
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "qwen2 tied", "qwen3", "llama", "gpt2", "gpt_oss", "qwen3_moe", "qwen3.5"),
        *("gemma3", "gemma3 capped", *MORE_KINDS),
    ],
)
def test_slices_equal_whole_logits(kind, path):
    if (kind, path) == ("qwen3.5", "extended") and not READS_LINEAR_STATES:
        pytest.skip("such models score densely with this release of transformers")
    model, batch = model_of(kind), holed(ragged_batch(seed=1))
    weights = row_weights(batch)
    scorer, reason = choose_head(Scorer(path, head_chunk_size=4), model)
    assert scorer.head_chunk_size == 4, reason
    whole = dataclasses.replace(scorer, head_chunk_size=None)
    want = whole(model, batch, temperature=0.7)
    _, gradients = loss_and_gradients(model, batch, whole, weights)
    for changes in ({}, {"head_chunk_size": 1024}, {"chunk_size": 4, "checkpoint_chunks": True}):
        changed = dataclasses.replace(scorer, **changes)
        if "chunk_size" not in changes:  # other rows side by side, other rounding
            got = changed(model, batch, temperature=0.7)
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
        _, found = loss_and_gradients(model, batch, changed, weights)
        assert whole_difference(found, gradients) < 4e-6, changed  # prompts are padded in front for whole logits
        assert worst_difference(found, gradients) < 1e-5, changed


@few(2)
@pytest.mark.parametrize("path", ["extended", "dense"])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3 capped", "qwen3_moe"])
def test_entropies_are_trained_on_if_asked(kind, path):
    """The gradient of slices, chunks and whole logits is that of a plain forward pass; without asking there is none."""
    model, batch = model_of(kind), ragged_batch(seed=1)
    weights = row_weights(batch)

    def gradients(scorer):
        model.zero_grad()
        scores = scorer(model, batch, temperature=0.7, trains_entropy=True)
        (scores.entropy * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def by_hand():
        model.zero_grad()
        total = torch.zeros(())
        for row, prompt in enumerate(batch.prompt_index.tolist()):
            start, length = batch.prompt_ids[prompt][batch.prompt_mask[prompt]], int(batch.attention_mask[row].sum())
            if length:
                ids = torch.cat([start, batch.completion_ids[row, :length]])
                logprobs = torch.log_softmax(model(ids[None]).logits[0, len(start) - 1 : -1].float() / 0.7, -1)
                total = total - ((logprobs.exp() * logprobs).sum(-1) * weights[row, :length]).sum()
        total.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = by_hand()
    sliced, _ = choose_head(Scorer(path, head_chunk_size=4), model)
    for changes in ({}, {"head_chunk_size": None}, {"chunk_size": 4, "checkpoint_chunks": True}):
        scorer = dataclasses.replace(sliced, **changes)
        assert whole_difference(gradients(scorer), want) < 1e-5, changes
    assert not sliced(model, batch, temperature=0.7).entropy.requires_grad


@settings(max_examples=15)
@given(
    head_chunk_size=st.integers(1, 60),
    generations=st.integers(1, 3),
    width=st.integers(1, 9),
    path=st.sampled_from(["extended", "dense"]),
    temperature=st.sampled_from([0.5, 1.0]),
)
def test_any_slice_size_gives_the_same_scores(head_chunk_size, generations, width, path, temperature):
    model, batch = tiny_model(num_hidden_layers=1), ragged_batch((5, 3), generations, width)
    with torch.no_grad():
        sliced = Scorer(path, head_chunk_size=head_chunk_size)(model, batch, temperature=temperature)
        whole = Scorer(path, head_chunk_size=None)(model, batch, temperature=temperature)
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_scale_or_cap_that_is_left_out_is_seen(scale):
    """The equality above can fail."""
    model, batch = model_of("granite"), ragged_batch()
    want = WHOLE(model, batch, temperature=1.0).logprobs
    got = Scorer(head_chunk_size=4, logit_scale=scale)(model, batch, temperature=1.0).logprobs
    assert (got - want).abs().max() > 0.1


def test_the_head_reads_the_prompt_at_its_scale_in_16_bits():
    """A scale that comes on and off again in bfloat16 would move the prompt's hidden state."""
    model, batch = model_of("granite").bfloat16(), ragged_batch()
    scorer, _ = choose_head(Scorer(head_chunk_size=4), model)
    states = {}
    for name, head in ("sliced", scorer.head(1.0)), ("unscaled", SlicedHead(1.0, 4)):
        model.config.logits_scaling = 3.0 if name == "sliced" else 1.0
        states[name] = head.prompt_states(model, {"input_ids": batch.prompt_ids, "use_cache": False})
    assert torch.equal(states["sliced"], states["unscaled"])


# ------------------------------------------------------------------------------------------------------------- memory


class WidestLogits(TorchDispatchMode):
    """How many tokens' numbers, V for each, the largest tensor holds that is V wide."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.tokens = vocab_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocab_size:
                self.tokens = max(self.tokens, tensor.numel() // self.vocab_size)
        return made


@few(2)
@pytest.mark.parametrize("path", ["extended", "dense"])
@pytest.mark.parametrize("checkpointing", ["none", "chunks", "layers"])
def test_no_tensor_holds_the_logits_of_all_tokens(path, checkpointing):
    model = tiny_model(vocab_size=500, hidden_size=16, num_attention_heads=2)  # its weight is 16 tokens wide
    batch = ragged_batch(generations=4, seed=1)
    num_tokens = int(batch.attention_mask.sum())
    if checkpointing == "layers":
        checkpoint_layers(model)
    widest = {}
    for size in (None, 20):
        scorer = Scorer(path, None, checkpointing == "chunks", size)
        with WidestLogits(500) as logits:
            scorer(model, batch, temperature=0.7).logprobs.sum().backward()
            with torch.no_grad():
                scorer(model, batch, temperature=0.7)
        widest[size] = logits.tokens
    assert widest[20] == 20 < num_tokens
    assert widest[None] >= batch.attention_mask.numel()


def counted_slices(monkeypatch):
    """The number of tokens of every slice that the head is run on."""
    sizes = []
    score_slice = SlicedHead.score_slice

    def count(self, logits, hidden, ids):
        sizes.append(len(ids))
        return score_slice(self, logits, hidden, ids)

    monkeypatch.setattr(SlicedHead, "score_slice", count)
    return sizes


@pytest.mark.parametrize("path", ["extended", "dense"])
def test_padding_costs_no_head_and_a_single_slice_is_run_once(monkeypatch, path):
    model, batch, sizes = tiny_model(), ragged_batch(seed=1), counted_slices(monkeypatch)
    num_tokens = int(batch.attention_mask.sum())
    assert num_tokens < batch.attention_mask.numel()
    for size, slices in ((num_tokens, [num_tokens]), (num_tokens - 1, [num_tokens - 1, 1])):
        sizes.clear()
        loss = Scorer(path, head_chunk_size=size)(model, batch, temperature=1.0).logprobs.sum()
        assert sizes == slices
        loss.backward()
        recomputed = sizes[len(slices) :]
        assert sorted(recomputed) == (sorted(slices) if len(slices) > 1 else [])
    sizes.clear()
    with torch.no_grad():
        Scorer(path, head_chunk_size=num_tokens - 1)(model, batch, temperature=1.0)
    assert sizes == [num_tokens - 1, 1]


def test_rows_without_a_token_are_scored_as_zeros():
    model, batch = tiny_model(), ragged_batch()
    nothing = dataclasses.replace(batch, attention_mask=torch.zeros_like(batch.attention_mask))
    scores = Scorer(head_chunk_size=4)(model, nothing, temperature=1.0)
    assert not scores.logprobs.any()
    scores.logprobs.sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


# --------------------------------------------------------------------------------------------------- around the head


@few(1)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpoint_chunks", [False, True])
def test_16_bits(precision, checkpoint_chunks):
    """The pass without gradients and the one with them round alike, and whole logits are a rounding away."""
    model = tiny_model("qwen2", dtype=torch.bfloat16 if precision == "bf16-true" else torch.float32)
    batch, scorer = ragged_batch(), Scorer(chunk_size=4, checkpoint_chunks=checkpoint_chunks, head_chunk_size=5)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
    with autocast:
        with torch.no_grad():
            old = scorer(model, batch, temperature=0.7).logprobs
            whole = dataclasses.replace(scorer, head_chunk_size=None)(model, batch, temperature=0.7).logprobs
        new = scorer(model, batch, temperature=0.7).logprobs
    assert torch.equal(new, old)
    assert new.dtype == torch.float32
    assert (new - whole).abs().mean() < 0.01
    new.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_lora():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model, batch = peft.get_peft_model(tiny_model(), settings), ragged_batch(seed=1)
    scorer, reason = choose_head(Scorer(head_chunk_size=4), model)
    assert scorer.head_chunk_size == 4, reason
    _, want = loss_and_gradients(model, batch, WHOLE, row_weights(batch))
    _, got = loss_and_gradients(model, batch, scorer, row_weights(batch))
    assert want
    assert all("lora_" in name for name in want)
    assert worst_difference(got, want) < 4e-6  # prompts are padded in front for whole logits


def test_lora_on_the_head_takes_whole_logits_where_each_module_is_gathered_alone():
    """As ZeRO-3 does."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    scorer, reason = choose_head(Scorer(), model)
    assert scorer.head_chunk_size == 512, reason
    for weight in model.parameters():
        weight.ds_id = 0
    scorer, reason = choose_head(Scorer(), model)
    assert scorer.head_chunk_size is None
    assert "several modules" in reason


def test_the_hooks_of_the_head_run_once_per_forward_however_many_slices():
    """Hooks gather sharded weights: their number may not follow from a rank's tokens."""
    model, calls = tiny_model(), []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("after"))
    Scorer(chunk_size=3, head_chunk_size=2)(model, ragged_batch(), temperature=1.0)
    assert calls == ["before", "after"] * (1 + 3)


def test_head_and_config_are_put_back():
    model = model_of("gemma3 capped")
    own = model.lm_head.forward
    with pytest.raises(ZeroDivisionError), head_replaced(model, lambda logits, hidden: 1 / 0):
        model(torch.ones(1, 3, dtype=torch.long))
    assert "forward" not in vars(model.lm_head)
    assert model.lm_head.forward == own
    assert model.config.final_logit_softcapping == 3.0
    model.lm_head.forward = own  # as a wrapper would leave it
    with head_replaced(model, lambda logits, hidden: logits(hidden)):
        assert model.lm_head.forward != own
        assert model.config.final_logit_softcapping is None
    assert vars(model.lm_head)["forward"] == own


@pytest.mark.parametrize("head_chunk_size", [None, 4])
@torch.no_grad()
def test_tokens_that_are_never_drawn_have_no_share(head_chunk_size):
    """Among them one that the head does not know: some families embed a token for images beyond its vocabulary."""
    model, batch = model_of("qwen2"), ragged_batch(seed=1)
    unknown, known = (VOCAB, VOCAB + 7), (2, VOCAB - 1)
    batch.completion_ids[batch.attention_mask] = batch.completion_ids[batch.attention_mask].clamp(3, VOCAB - 2)
    plain, beyond, without = (
        Scorer("dense", head_chunk_size=head_chunk_size, never=never)(model, batch, temperature=0.7)
        for never in ((), unknown, known + unknown)
    )
    for got, want in zip(beyond[:2], plain[:2], strict=True):
        assert torch.equal(got, want)
    # The first completion by hand: the distribution over all other tokens.
    prompt, mask = batch.prompt_ids[0][batch.prompt_mask[0]], batch.attention_mask[0]
    ids = batch.completion_ids[0][mask]
    logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
    logits[:, list(known)] = -torch.inf
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(without.logprobs[0][mask], logprobs.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=0)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0).sum(-1)
    torch.testing.assert_close(without.entropy[0][mask], entropy, atol=1e-5, rtol=0)
    assert (without.logprobs[0][mask] > plain.logprobs[0][mask]).all()


def test_latents_of_another_size_are_sliced():
    """DeepSeek caches latents of different sizes instead of keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    latents = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=64, first_k_dense_replace=1, num_key_value_heads=4, **sizes, **latents
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    scorer, reason = choose_head(Scorer("extended"), model)
    assert scorer.logit_scale is not None, reason
