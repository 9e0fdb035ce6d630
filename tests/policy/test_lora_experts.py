"""Adapters of experts, which are stored as one tensor per layer."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_lightning.policy.adapters import adapter_layers, is_expert_adapter
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_targets import expert_targets
from grpo_lightning.policy.reference import make_reference
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.training.checkpoint_export import export
from tests.helpers.exports import difference
from tests.helpers.module_runs import are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, only
from tests.module.test_resume import KillAt, KilledError
from tests.module.test_resume import train as run
from tests.policy.adapters import loader_of, logits, train
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = ["qwen3_moe", "gpt_oss"]  # [experts, out, in] and [experts, in, out]


def lora(**settings):
    return LoRA(**{"rank": 2, "alpha": 6.0, "target_parameters": EXPERTS} | settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_has_its_own_matrices(family):
    """W_e + alpha / rank B_e A_e, with the same logits as a model that has these weights."""
    policy = loader_of(family, lora(target_modules=["q_proj"])).load().model
    want = tiny_model(family)
    assert torch.equal(logits(policy), logits(want))
    train(policy, steps=2, lr=1.0)
    with torch.no_grad():
        for layer in adapter_layers(policy):
            A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            assert B.any()
            if is_expert_adapter(layer):
                experts = layer.get_base_layer()
                (weight,) = [
                    getattr(own.mlp.experts, layer.parameter_name)
                    for own, adapted in zip(want.model.layers, policy.get_base_model().model.layers, strict=True)
                    if adapted.mlp.experts.get_base_layer() is experts
                ]
                for e in range(4):
                    delta = 3 * B.view(B.shape[0], 2, 4)[..., e] @ A.view(4, 2, -1)[e]
                    weight[e] += delta.T if family == "gpt_oss" else delta
            else:
                place = next(n for n, m in policy.named_modules() if m is layer).removeprefix("base_model.model.")
                want.get_submodule(place).weight += 3 * B @ A
        torch.testing.assert_close(logits(policy), logits(want), rtol=1e-4, atol=1e-4)


@SLOW
@pytest.mark.parametrize("family", only(["qwen3_moe"], FAMILIES))
def test_both_scoring_paths_give_the_same_gradients(family):
    model = loader_of(family, lora()).load().model
    train(model)
    batch = ragged_batch()
    weights = row_weights(batch)
    _, want = loss_and_gradients(model, batch, Scorer("dense", head_chunk_size=None), weights)
    _, found = loss_and_gradients(model, batch, Scorer(chunk_size=2, head_chunk_size=5), weights)
    assert worst_difference(found, want) < 1e-5
    assert sum("experts" in name for name in want) == 4 * 2 * 2


@SLOW
@pytest.mark.parametrize("start", only(["trained"], ["new", "trained"]))
def test_the_reference_is_what_the_run_began_with(start, tmp_path):
    settings = loader_of("qwen3_moe", lora())
    if start == "trained":
        policy = settings.load().model
        train(policy)
        policy.save_pretrained(tmp_path, save_embedding_layers=False)
        began = logits(policy)
        settings = loader_of("qwen3_moe", LoRA(adapter=str(tmp_path)))
    policy = settings.load().model
    if start == "trained":
        assert torch.equal(logits(policy), began)
    began = logits(policy)
    reference = make_reference(policy, settings)
    train(policy)
    assert not torch.equal(logits(policy), began)
    with reference.scoring(policy) as model:
        assert torch.equal(logits(model), began)


@pytest.mark.slow
def test_a_run_resumes_and_is_exported(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    tiny_model("qwen3_moe", **sizes).save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")

    def module():
        policy = PolicyLoader(str(tmp_path / "policy"), lora=lora(use_rslora=True), activation_checkpointing="layers")
        return make_module(policy=policy, lr=1e-2, updates_per_rollout=2, num_generations=3, length=5)

    whole = weights_of(run(tmp_path / "whole", module=module(), max_steps=4))
    with pytest.raises(KilledError):
        run(tmp_path / "killed", KillAt(3), module=module(), max_steps=4)
    assert are_equal(weights_of(run(tmp_path / "killed", module=module(), resume=True, max_steps=4)), whole)
    trained = module()
    fit(trained, max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    export(tmp_path / "a.ckpt", tmp_path / "model")
    export(tmp_path / "a.ckpt", tmp_path / "adapter", adapter=True)
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), trained.policy) <= 1e-6
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert difference(PeftModel.from_pretrained(base, tmp_path / "adapter"), trained.policy) == 0


# --------------------------------------------------------------------------------------------------------------- errors


def test_names_that_match_nothing():
    with pytest.raises(ValueError, match=r"no expert tensor ends in 'experts.up'. Available: experts.down_proj, exper"):
        expert_targets(tiny_model("qwen3_moe"), ["experts.up"])
    with pytest.raises(ValueError, match="The policy has no tensors of experts: remove it"):
        expert_targets(tiny_model("qwen2"), EXPERTS)


def test_what_experts_cannot_have():
    with pytest.raises(
        ValueError, match=r"use_dora is true, and policy.lora.target_parameters .* Remove one of the two"
    ):
        lora(use_dora=True)
    with pytest.raises(ValueError, match=r"policy.lora.dropout is 0.1, but adapters of experts have no dropout"):
        loader_of("qwen3_moe", lora(dropout=0.1)).load()

    class ZeRO3(Sharding):
        is_sharded = gathers_by_module = True

    with pytest.raises(ValueError, match=r"tensors of experts .*, and the strategy is ZeRO-3.* Use fsdp2 or zero2"):
        loader_of("qwen3_moe", lora()).load(ZeRO3())
