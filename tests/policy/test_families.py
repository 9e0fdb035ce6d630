"""Facts about vision-language families: each holds for the models of transformers, at their real sizes."""

import logging
import re

import peft
import pytest
import torch
import transformers
from torch import nn

from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.families import (
    FAMILIES,
    family_of,
    freeze_unused,
    freeze_vision,
    inner_model,
    is_multimodal,
    is_tower_trained,
    refuse_remote_code,
    unknown_reason,
    vision_parts,
)
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_targets import expert_tensors, language_layers
from tests.helpers import tiny_models, tiny_vlms
from tests.helpers.families import families
from tests.helpers.paths import PACKAGE
from tests.helpers.vision_prompts import SCENARIOS, encoder_of, vision_batch
from tests.marks import SLOW
from tests.policy.scored import loss_and_gradients, row_weights

CONFIGS = {
    "qwen2_vl": transformers.Qwen2VLConfig,
    "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
    "qwen3_vl": transformers.Qwen3VLConfig,
    "qwen3_vl_moe": transformers.Qwen3VLMoeConfig,
    "internvl": transformers.InternVLConfig,
    "glm4v": transformers.Glm4vConfig,
    "glm4v_moe": transformers.Glm4vMoeConfig,
}


def test_every_record_has_a_tiny_model():
    assert set(tiny_vlms.FAMILIES) == set(FAMILIES)


def test_no_other_file_names_a_model_type():
    own = {PACKAGE / "policy" / "families.py", PACKAGE / "cli" / "plan" / "model.py"}  # the latter: published configs
    for path in PACKAGE.rglob("*.py"):
        found = [name for name in FAMILIES if re.search(rf"['\"]{name}['\"]", path.read_text(encoding="utf-8"))]
        assert path in own or not found, f"{path} names {found}: what differs between families is a fact of its record"


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_get_every_language_layer_and_no_other(family):
    """At the sizes of the configs' defaults, without memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(CONFIGS[family]())
    language = {
        name
        for name, module in inner_model(model).language_model.named_modules(prefix="model.language_model")
        if isinstance(module, nn.Linear)
    }
    found = language_layers(model)
    assert set(found) == language
    per_layer = 4 if expert_tensors(model) else 6  # experts are no linear layers: attention is left
    assert len(found) >= per_layer * model.config.get_text_config().num_hidden_layers - 1
    assert not [name for name in found if "lm_head" in name or "visual" in name or "vision" in name]
    vision = {module for part in vision_parts(model, FAMILIES[family]) for module in part.modules()}
    assert not vision & set(found.values())
    assert sum(isinstance(module, nn.Linear) for module in vision) > 20


@SLOW
def test_adapters_leave_a_frozen_tower_frozen(tmp_path):
    """By copies of its modules and by saved adapters: both are refused before weights are loaded."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.model.save_pretrained(tmp_path / "policy")
    peft.get_peft_model(vlm.model, peft.LoraConfig(r=2, target_modules=["attn.qkv", "q_proj"])).save_pretrained(
        tmp_path / "adapter", save_embedding_layers=False
    )

    def loader(**lora):
        return PolicyLoader(
            str(tmp_path / "policy"), tokenizer=vlm.processor, freeze_vision_modules=True, lora=LoRA(rank=2, **lora)
        )

    for names in (["visual.merger"], ["visual"], ["lm_head", "visual.merger.mlp.0"]):
        settings = loader(modules_to_save=names)
        settings.load_model = None  # it fails before weights are loaded
        said = rf"freeze_vision_modules is true, and policy.lora.modules_to_save .* trains model.{names[-1]}, which is"
        with pytest.raises(ValueError, match=said):
            settings.load()
    settings = PolicyLoader(
        str(tmp_path / "policy"),
        tokenizer=vlm.processor,
        freeze_vision_modules=True,
        lora=LoRA(adapter=str(tmp_path / "adapter")),
    )
    settings.load_model = None
    with pytest.raises(ValueError, match=r"true, and policy.lora.adapter .* trains model.visual.blocks.0.attn.qkv, wh"):
        settings.load()
    policy = loader(modules_to_save=["lm_head"]).load().model
    assert not is_tower_trained(policy)
    settings.freeze_vision_modules = False
    del settings.load_model
    assert is_tower_trained(settings.load().model)


@pytest.mark.parametrize("family", families(FAMILIES))
def test_frozen_vision_leaves_the_language_model_trained(family):
    model = tiny_vlms.build(family).model
    assert is_tower_trained(model)
    freeze_vision(model)
    assert not is_tower_trained(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    language = {name for name, _ in model.named_parameters() if "language_model" in name or "lm_head" in name}
    assert frozen == {name for name, _ in model.named_parameters()} - language


@pytest.mark.parametrize("family", families(FAMILIES))
def test_every_weight_that_stays_trained_gets_a_gradient(family, caplog):
    """As DDP asks for; what nothing reads is frozen, and said to be."""
    vlm = tiny_vlms.build(family)
    with caplog.at_level(logging.INFO):
        freeze_unused(vlm.model)
    trained = {name for name, weight in vlm.model.named_parameters() if weight.requires_grad}
    batch = vision_batch(encoder_of(vlm), SCENARIOS["mixed"])
    scorer = Scorer() if family in tiny_vlms.EXTENDED else Scorer("dense")
    _, gradients = loss_and_gradients(vlm.model, batch, scorer, row_weights(batch))
    assert gradients.keys() == trained
    frozen = {name for name, _ in vlm.model.named_parameters()} - trained
    assert all(name.startswith("model.vision_tower.head.") for name in frozen)
    assert bool(frozen) == (family == "gemma3") == ("Froze the vision tower's head" in caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        freeze_unused(vlm.model)
    assert caplog.text == ""


def test_a_tower_without_the_unused_part_is_trained_whole():
    """As the published Gemma 3 are."""
    config, _ = tiny_vlms.gemma3()
    config.vision_config.vision_use_head = False
    model = transformers.AutoModelForImageTextToText.from_config(config)
    freeze_unused(model)
    assert all(weight.requires_grad for weight in model.parameters())


def test_of_a_text_model_nothing_is_unused():
    model = tiny_models.tiny_model("qwen2")
    freeze_unused(model)
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("family", families(FAMILIES))
def test_media_tokens_are_those_of_the_config(family):
    vlm = tiny_vlms.build(family)
    ids = vlm.processor.tokenizer.convert_tokens_to_ids(list(FAMILIES[family].media_tokens))
    assert vlm.model.config.image_token_id in ids


def test_text_models_have_no_family():
    config = tiny_models.tiny_model("qwen2").config
    assert not is_multimodal(config)
    assert family_of(config) is None
    assert unknown_reason(config) is None
    with pytest.raises(ValueError, match=r"policy\.freeze_vision_modules is set, but the policy .* is text-only"):
        freeze_vision(tiny_models.tiny_model("qwen2"))


def test_a_family_without_a_record_says_which_there_are(monkeypatch):
    model = tiny_vlms.build("qwen2_vl").model
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {"internvl": FAMILIES["internvl"]})
    assert "type qwen2_vl are not known (known types: internvl)" in unknown_reason(model.config)
    with pytest.raises(ValueError, match=r"models of type qwen2_vl are not known \(known types: internvl\)"):
        freeze_vision(model)


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("OpenGVLab/InternVL3-2B", "'OpenGVLab/InternVL3-2B-hf'"),
        (
            "OpenGVLab/InternVL3_5-4B",
            "'OpenGVLab/InternVL3_5-4B-HF'",
        ),  # the hub's own spelling: names are case-sensitive
        ("/models/InternVL3-2B/", "'OpenGVLab/InternVL3-2B-hf'"),
        ("OpenGVLab/InternVL2_5-4B-MPO", "'OpenGVLab/InternVL3-2B-hf' or 'OpenGVLab/InternVL3_5-4B-HF'"),
        ("/models/ours", "'OpenGVLab/InternVL3-2B-hf' or 'OpenGVLab/InternVL3_5-4B-HF'"),
    ],
)
def test_remote_code_is_refused_with_a_native_checkpoint_that_exists(name, native):
    with pytest.raises(ValueError, match=re.escape(f"{native}, or convert it: docs/vision.md#native-checkpoints")):
        refuse_remote_code(name, "internvl_chat")


def test_a_native_checkpoint_is_not_refused():
    refuse_remote_code("OpenGVLab/InternVL3-2B-hf", "internvl")
