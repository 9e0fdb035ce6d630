"""The layers that get adapters: those of the language model, without what peft or a mixture of experts cannot adapt."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.policy.adapters import adapter_layers, is_expert_adapter
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.lora_targets import (
    expert_targets,
    expert_tensors,
    language_layers,
    language_modules,
    missing_adapter_reason,
    names_mistaken_for_experts,
    targets,
)
from tests.helpers import tiny_vlms
from tests.helpers.families import families
from tests.helpers.tiny_models import BASE, MOE, tiny_model

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def with_shared_expert():
    """A text model with a dense layer first, and experts that are shared."""
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    config = AutoConfig.for_model("glm4_moe", **(BASE | MOE | sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def models():
    return {
        "shared": with_shared_expert(),
        "glm4v_moe": tiny_vlms.build("glm4v_moe").model,
        "qwen3_vl_moe": tiny_vlms.build("qwen3_vl_moe").model,
    }


@pytest.mark.parametrize("kind", models())
def test_what_is_planned_is_what_peft_adapts(kind):
    """Without it, peft adapts the experts in the place of what is called the same."""
    model = models()[kind]
    planned = set(targets(model))
    before = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = {id(layer.base_layer) for layer in adapter_layers(add_adapters(model, LoRA(rank=2)))}
    assert {name for name, module in before.items() if id(module) in adapted} == planned
    assert len(adapted) == len(planned)
    assert {name.rpartition(".")[2] for name in planned} >= ATTENTION


@pytest.mark.parametrize("kind", models())
def test_the_experts_that_are_planned_are_those_that_peft_adapts(kind):
    model = models()[kind]
    ends = ["experts.gate_up_proj", "experts.down_proj"]
    planned, layers = expert_targets(model, ends), targets(model)
    ids = {id(weight) for weight in planned.values()}
    adapted = add_adapters(model, LoRA(rank=2, target_parameters=ends))
    found = list(filter(is_expert_adapter, adapter_layers(adapted)))
    assert {id(layer.get_param()) for layer in found} == ids
    assert len(found) == len(planned) > 0
    assert len(list(adapter_layers(adapted))) == len(planned) + len(layers)


def test_names_that_peft_takes():
    model = with_shared_expert()
    taken = names_mistaken_for_experts(model, language_layers(model))
    ends = {".".join(name.split(".")[-2:]) for name in taken}
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert ends == {f"{part}.{end}" for part in ("mlp", "shared_experts") for end in mlp}
    for family in ("qwen2", "qwen3_moe", "gpt_oss"):
        assert names_mistaken_for_experts(tiny_model(family), language_layers(tiny_model(family))) == set()
    assert names_mistaken_for_experts(tiny_model("qwen2"), ["layers.0.mlp.down_proj"]) == set()


@pytest.mark.parametrize("end", ["gate_proj", "shared_experts.down_proj"])
def test_asked_for_by_name_they_are_refused(end):
    with pytest.raises(ValueError, match=rf"target_modules: '{end}' matches .*{end}\. peft mistakes .*q_proj"):
        targets(with_shared_expert(), ["q_proj", end])


def test_what_has_none_is_said(caplog):
    with caplog.at_level(logging.INFO):
        add_adapters(with_shared_expert(), LoRA(rank=2))
    assert (
        "experts get no adapter, because all experts of a layer are one tensor (down_proj, gate_up_proj); "
        in caplog.text
    )
    assert "shared_experts.up_proj get none either, because peft mistakes their names for experts." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        add_adapters(tiny_model("qwen2"), LoRA(rank=2))
    assert "experts" not in caplog.text


def test_convolutions_are_no_experts():
    assert expert_tensors(tiny_model("qwen3.5")) == []
    assert expert_tensors(tiny_model("gpt_oss")) == ["down_proj", "gate_up_proj"]
    assert missing_adapter_reason(tiny_model("qwen3_moe"), []) == (
        "experts get no adapter, because all experts of a layer are one tensor (down_proj, gate_up_proj)"
    )


@pytest.mark.parametrize("family", families([name for name in tiny_vlms.FAMILIES if not name.endswith("_moe")]))
def test_dense_families_have_no_experts(family):
    """Vision towers have tensors of three dimensions too, for the places of an image."""
    model = tiny_vlms.build(family).model
    assert missing_adapter_reason(model, language_layers(model)) is None


def test_a_model_without_experts_may_have_such_a_tensor():
    model = tiny_model("qwen2")
    model.get_decoder().register_parameter("mixing", nn.Parameter(torch.zeros(1, 2, 3)))
    assert expert_tensors(model) == []


def test_tensors_that_zero3_holds_elsewhere_count():
    model = tiny_model("qwen3_moe")
    for weight in model.parameters():
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    assert expert_tensors(model) == ["down_proj", "gate_up_proj"]


def test_of_a_text_model_all_but_the_head():
    model = tiny_model("qwen2")
    names = set(language_modules(model))
    assert names == {name for name, _ in model.named_modules() if name == "model" or name.startswith("model.")}


@pytest.mark.parametrize("is_told", [True, False])
def test_no_vision_tower_and_no_projector(monkeypatch, is_told):
    model = tiny_vlms.build("internvl").model
    if not is_told:
        monkeypatch.setattr(type(model), "get_decoder", lambda self: self)
    names = set(language_modules(model))
    assert "model.language_model.layers.0.self_attn.q_proj" in names
    assert not [name for name in names if "vision" in name or "projector" in name or "lm_head" in name]
