"""Adapters of the output head: alone, tied, in slices, with dropout."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lightning.policy.adapters import adapter_layers
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.reference import make_reference
from grpo_lightning.training.actor import seeded_dropout
from grpo_lightning.training.checkpoint_export import export
from tests.helpers.exports import difference, save_policy
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW, only
from tests.policy.adapters import loader_of, logits, train
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

ENDS = ["lm_head", "q_proj"]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", only(["gemma3"], ["qwen2", "gemma3"]))
def test_what_it_adds_by_hand(family, is_tied):
    """alpha / rank B A h to the logits; the embeddings stay as they are, tied or not."""
    model = tiny_model(family, tie_word_embeddings=is_tied)
    before = logits(model)
    policy = loader_of(model=model, lora=LoRA(rank=2, alpha=6.0, target_modules=["lm_head"])).load().model
    assert torch.equal(logits(policy), before)
    (layer,) = adapter_layers(policy)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        B.normal_(generator=torch.Generator().manual_seed(0))
        assert not torch.equal(logits(policy), before)
        torch.testing.assert_close(logits(policy), before + 3 * seen[0] @ A.T @ B.T, rtol=1e-4, atol=1e-4)
    hook.remove()


@pytest.mark.parametrize(
    ("is_tied", "settings"),
    [(True, {}), pytest.param(False, {}, marks=SLOW), pytest.param(False, {"use_dora": True}, marks=SLOW)],
)
def test_slices_are_exact_against_the_full_head_on_both_paths(is_tied, settings):
    lora = LoRA(rank=2, target_modules=ENDS, **settings)
    loader = loader_of(model=tiny_model("qwen2", tie_word_embeddings=is_tied), lora=lora)
    loaded = loader.load()
    assert loaded.scorer.head_chunk_size == 512, "the head does not run in slices"
    train(loaded.model, lr=0.05)
    batch = ragged_batch()
    weights = row_weights(batch)
    want_loss, want = loss_and_gradients(loaded.model, batch, Scorer("dense", head_chunk_size=None), weights)
    assert any("lm_head.lora_A" in name for name in want)
    for path in ("dense", "extended"):
        loss, found = loss_and_gradients(loaded.model, batch, Scorer(path, head_chunk_size=5), weights)
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert worst_difference(found, want) < 1e-5
    reference = make_reference(loaded.model, loader)
    with reference.scoring(loaded.model) as model:
        assert torch.equal(logits(model), logits(tiny_model("qwen2", tie_word_embeddings=is_tied)))


def test_a_model_whose_other_layers_are_transposed():
    """GPT-2 has Conv1D layers, and a head that is a linear layer."""
    model = tiny_model("gpt2", tie_word_embeddings=False)
    began = logits(model)
    policy = loader_of(model=model, lora=LoRA(rank=2, target_modules=["c_attn", "lm_head"])).load().model
    assert torch.equal(logits(policy), began)
    train(policy, lr=0.05)
    trained = logits(policy)
    assert (trained - logits(policy.merge_and_unload())).abs().max() < 1e-4


def test_dora_of_rows_of_zeros_is_refused():
    """As that of the padding, in tied embeddings: their norm is 0."""
    model = tiny_model("qwen2", tie_word_embeddings=True)
    assert not model.lm_head.weight[0].any()
    with pytest.raises(ValueError, match=r"use_dora: the weight of .*lm_head has rows of zeros.* Leave this layer out"):
        loader_of(model=model, lora=LoRA(target_modules=ENDS, use_dora=True)).load()


def test_recomputed_slices_drop_the_same():
    """With dropout in the head's adapter, the gradient is that of the loss: a step along it changes the loss by it."""
    model = loader_of(lora=LoRA(rank=2, target_modules=["lm_head"], dropout=0.5)).load().model
    train(model, lr=0.05)
    model.train()
    batch = ragged_batch()
    weights, scorer = row_weights(batch), Scorer("dense", head_chunk_size=5)

    def loss_of():
        with seeded_dropout(model, 7):
            return -(scorer(model, batch, temperature=0.7).logprobs * weights).sum()

    loss = loss_of()
    torch.rand(5)
    loss.backward()
    weight = next(weight for name, weight in model.named_parameters() if "lora_B" in name)
    gradient = weight.grad.clone()
    direction = gradient / gradient.norm()
    step = 1e-2
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
        values.append(loss_of().item())
        with torch.no_grad():
            weight.sub_(sign * step * direction)
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient.norm().item(), rel=1e-2)


@SLOW
@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=SLOW)])
def test_a_merged_export_has_the_log_probs_of_the_run(is_tied, tmp_path):
    """Merged into the head alone: the embeddings of the export are those of the base."""
    folder = save_policy(tmp_path / "policy", tie_word_embeddings=is_tied)
    module = make_module(policy=PolicyLoader(str(folder), lora=LoRA(rank=2, target_modules=ENDS)), lr=1e-1)
    fit(module, max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    export(tmp_path / "a.ckpt", tmp_path / "model")
    loaded, base = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "policy"))
    assert torch.equal(loaded.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert not torch.equal(loaded.lm_head.weight, base.lm_head.weight)
    assert not loaded.config.tie_word_embeddings
    assert difference(loaded, module.policy) <= 1e-6
    export(tmp_path / "a.ckpt", tmp_path / "adapter", adapter=True)
    again = loader_of(model=base, lora=LoRA(adapter=str(tmp_path / "adapter"))).load().model
    assert difference(again, module.policy) == 0
