"""Layers that compute in another dtype than that of their weights: copies of layers, and the output head."""

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.precision import compute_like, linear_copies, use_float32_head
from grpo_lightning.policy.reference import frozen_copy, make_reference
from grpo_lightning.rollout import token_sampler
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import only
from tests.policy.adapters import IDS, logits, train
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

BF16 = torch.bfloat16


def loader(model=None, head_dtype="float32", **settings):
    return PolicyLoader(
        model=model or tiny_model("qwen2"), tokenizer=tiny_tokenizer(), head_dtype=head_dtype, **settings
    )


def hidden_states(policy):
    """Return the hidden states that reach the head, [1, 12, H]."""
    seen = []
    hook = policy.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        policy(IDS)
    hook.remove()
    return seen[0]


def in_bf16():
    return torch.autocast("cpu", BF16)


# --------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Embedding(9, 4), nn.RMSNorm(6), nn.Sequential(nn.Linear(6, 6))])
def test_a_wide_layer_computes_as_the_narrow_one(layer):
    narrow = copy.deepcopy(layer).to(BF16)
    wide = copy.deepcopy(narrow).to(torch.float32)
    compute_like(wide, narrow)
    x = torch.arange(6) if isinstance(layer, nn.Embedding) else torch.randn(3, 6, dtype=BF16)
    assert torch.equal(wide(x), narrow(x))
    assert wide(x).dtype == BF16
    wide(x).float().pow(2).sum().backward()
    assert {(weight.dtype, weight.grad.dtype) for weight in wide.parameters()} == {(torch.float32, torch.float32)}
    narrow.to(torch.float32)  # as a strategy may do later
    x = x if isinstance(layer, nn.Embedding) else x.float()
    assert torch.equal(wide(x), narrow(x))


def test_a_copy_of_such_a_layer_has_its_own_weights():
    wide = nn.Linear(2, 2)
    compute_like(wide, nn.Linear(2, 2).to(BF16))
    other = copy.deepcopy(wide)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    x = torch.ones(1, 2, dtype=BF16)
    assert not other(x).any()
    assert wide(x).any()


# --------------------------------------------------------------------------------------------------------- float32 head


@pytest.mark.parametrize("family", only(["gemma3"], ["qwen2", "gemma3", "gpt2"]))
@pytest.mark.parametrize("is_tied", [True, False])
def test_in_float32_nothing_changes(family, is_tied):
    want = logits(tiny_model(family, tie_word_embeddings=is_tied))
    assert torch.equal(logits(loader(tiny_model(family, tie_word_embeddings=is_tied)).load().model), want)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_logits_are_float32_products_of_the_hidden_states(dtype, is_tied):
    """The states have 16 bits; everything below the head is unchanged."""
    model = tiny_model("qwen2", dtype=dtype, tie_word_embeddings=is_tied)
    with in_bf16():
        states = hidden_states(model)
        policy = loader(model).load().model
        assert torch.equal(hidden_states(policy), states)
        found = logits(policy)
    assert found.dtype == torch.float32
    weight = model.get_output_embeddings().weight
    assert weight.dtype == dtype
    assert torch.equal(found, states.float() @ weight.float().T)


def test_log_probs_under_autocast_are_closer_to_those_of_float32():
    """All logits share a large part, which the softmax takes out again, but not its rounding in 16 bits."""
    batch = ragged_batch()
    errors = {}
    for kind in ("auto", "float32"):
        model = tiny_model("qwen2")
        with torch.no_grad():
            model.lm_head.weight.add_(3)
        policy = loader(model, kind).load()
        scorer = dataclasses.replace(policy.scorer, never=())  # the batch has tokens that are never sampled
        exact = scorer(policy.model, batch, temperature=1.0).logprobs
        with in_bf16():
            found = scorer(policy.model, batch, temperature=1.0).logprobs
        errors[kind] = (found - exact)[batch.attention_mask].abs().mean().item()
        assert found.dtype == torch.float32
    assert errors["float32"] < 0.5 * errors["auto"] < 0.1, errors


@pytest.mark.slow
def test_sampled_log_probs_are_those_of_a_float32_head(monkeypatch):
    dtypes = set()
    run = token_sampler.log_distribution

    def look(processors, history, logits):
        dtypes.add(logits.dtype)
        return run(processors, history, logits)

    monkeypatch.setattr(token_sampler, "log_distribution", look)
    fit(make_module(policy=loader()), max_steps=1, precision="bf16-mixed")
    assert dtypes == {torch.float32}
    dtypes.clear()
    fit(make_module(policy=loader(head_dtype="auto")), max_steps=1, precision="bf16-mixed")
    assert BF16 in dtypes


@pytest.mark.parametrize("kind", only(["whole"], ["whole", "lora", "copies"]))
def test_the_reference_has_such_a_head_too(kind):
    lora = {"lora": LoRA(rank=2), "copies": LoRA(rank=2, modules_to_save=["lm_head"])}.get(kind)
    settings = loader(tiny_model("qwen2", dtype=BF16), lora=lora)
    policy = settings.load().model
    reference = make_reference(policy, settings)
    began = logits(policy)
    assert began.dtype == torch.float32
    train(policy, lr=1.0)
    assert not torch.equal(logits(policy), began)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), began)


def test_a_frozen_copy_reads_its_own_weights():
    policy = loader().load().model
    reference = frozen_copy(policy, shares_frozen=False)
    with torch.no_grad():
        policy.lm_head.weight.zero_()
    assert not logits(policy).any()
    assert logits(reference).any()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2, modules_to_save=["lm_head"])])
def test_both_scoring_paths_give_the_same_gradients(lora):
    model = loader(lora=lora).load().model
    batch = ragged_batch()
    weights = row_weights(batch)
    _, want = loss_and_gradients(model, batch, Scorer("dense", head_chunk_size=None), weights)
    _, found = loss_and_gradients(model, batch, Scorer(chunk_size=2, head_chunk_size=5), weights)
    assert worst_difference(found, want) < 1e-5
    plain = loader(head_dtype="auto", lora=lora).load().model
    _, wanted = loss_and_gradients(plain, batch, Scorer("dense", head_chunk_size=None), weights)
    assert worst_difference(want, wanted) == 0


def test_models_without_such_a_head_are_refused(monkeypatch):
    model = tiny_model("qwen2")
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    with pytest.raises(ValueError, match=r"policy.head_dtype is 'float32', but Qwen2ForCausalLM does not declare"):
        use_float32_head(model)
    monkeypatch.undo()
    model.lm_head.weight = nn.Parameter(torch.zeros(120, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="the head's weights are quantized"):
        use_float32_head(model)


def test_a_head_that_the_model_does_not_call_is_refused():
    class ReadsWeight(type(tiny_model("qwen2"))):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            outputs = self.model(*args, **kwargs)
            logits = outputs[0][:, -logits_to_keep:] @ self.lm_head.weight.T
            return CausalLMOutputWithPast(logits=logits)

    model = tiny_model("qwen2", dtype=BF16)
    model.__class__ = ReadsWeight
    with pytest.raises(ValueError, match=r"'float32', but the forward of ReadsWeight .* without calling its"):
        loader(model).load()
    assert logits(loader(model, "auto").load().model).dtype == BF16


@pytest.mark.parametrize("kind", only(["copies"], ["whole", "copies"]))
def test_a_model_that_is_used_again_has_its_own_head(kind):
    """A run with float32 logits, then another with the same model in memory."""
    model = tiny_model("qwen2", dtype=BF16)
    if kind == "copies":
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    want = logits(model)
    assert logits(loader(model).load().model).dtype == torch.float32
    found = logits(loader(model, "auto").load().model)
    assert found.dtype == BF16
    assert torch.equal(found, want)


def test_the_initial_adapter_of_a_head_is_computed_as_the_trained_one():
    """The reference's copy of the adapter is made after the head was set to float32."""
    torch.manual_seed(0)
    model = tiny_model("qwen2", tie_word_embeddings=False)
    given = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"]))
    with torch.no_grad():
        for weight in given.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    settings = loader(given)
    policy = settings.load().model
    reference = make_reference(policy, settings)
    with torch.no_grad(), in_bf16():
        own = logits(policy)
        with reference.scoring(policy) as other:
            assert torch.equal(own, logits(other))


def test_a_head_with_dora_is_computed_in_float32():
    adapted = LoRA(rank=2, use_dora=True, target_modules=["lm_head", "q_proj"])
    policy = loader(tiny_model("qwen2", tie_word_embeddings=False), lora=adapted).load()
    with torch.no_grad(), in_bf16():
        assert logits(policy.model).dtype == torch.float32


# ------------------------------------------------------------------------------------------ copies of linear layers


def test_copies_are_of_linear_layers_in_float32_alone():
    model = tiny_model("qwen2")
    copies = linear_copies(model, torch.bfloat16)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.rpartition(".")[0] for name in copies} == linear
    assert any(name.endswith("bias") for name in copies)
    for name, cast in copies.items():
        torch.testing.assert_close(cast, model.get_parameter(name).to(torch.bfloat16), atol=0, rtol=0)
    assert linear_copies(model.to(torch.bfloat16), torch.bfloat16) == {}


def test_a_head_in_float32_is_not_copied():
    model = tiny_model("qwen2")
    use_float32_head(model)
    copies = linear_copies(model, torch.bfloat16)
    assert copies
    assert "lm_head.weight" not in copies


def test_weights_with_dora_are_not_copied():
    pytest.importorskip("peft")
    for use_dora in (False, True):
        model = add_adapters(tiny_model("qwen2"), LoRA(rank=2, use_dora=use_dora))
        assert bool(linear_copies(model, torch.bfloat16)) == (not use_dora)
