"""Sizes of policies, against real models and published numbers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from grpo_lightning.cli.plan.model import known_config, sizes_of
from grpo_lightning.policy.families import FAMILIES as VISION_FAMILIES
from grpo_lightning.policy.families import vision_parts
from grpo_lightning.policy.loading import PolicyLoader, meta_model
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.lora_injection import add_adapters
from grpo_lightning.policy.trainable import decoder_layers, freeze_first_layers
from tests.cli.plan.real_shapes import llama_1b, published
from tests.helpers import tiny_vlms
from tests.helpers.tiny_models import FAMILIES, MAMBA, tiny_model


def sizes(config, **settings):
    return sizes_of(meta_model(config), PolicyLoader("policy", **settings))


def count(weights):
    return sum(weight.numel() for weight in weights)


def test_llama_3_2_1b_by_hand():
    """Embedding 128256 x 2048; per layer q and o 2048 x 2048, k and v 2048 x 512, 3 x 2048 x 8192, 2 norms; a norm."""
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    found = sizes(llama_1b())
    assert found.num_weights == found.num_trained == 128256 * 2048 + 16 * layer + 2048 == 1_235_814_400  # as published
    assert found.num_trained_matrices == 128256 * 2048 + 16 * (layer - 2 * 2048)
    assert (found.num_layer_weights, found.num_end_weights) == (layer, 128256 * 2048 + 2048)
    assert (found.num_kv_heads, found.head_dim, found.windows) == (8, 64, (None,) * 16)
    assert (found.num_frozen_matrices, found.num_adapters, found.num_vision_weights) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("OpenGVLab/InternVL3-2B-hf", 2_088_957_440),
    ],
)
def test_published_models_have_as_many_weights_as_published(name, num_weights):
    assert count(meta_model(published(name)).parameters()) == num_weights


def test_unknown_models_are_none():
    assert known_config("nobody/knows-7B") is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_real_model(family, tied):
    kind, settings = FAMILIES[family]
    model = tiny_model(family, tie_word_embeddings=tied)
    found = sizes(AutoConfig.for_model(kind, **(settings | {"tie_word_embeddings": tied})))
    assert found.num_weights == count(model.parameters())
    looked_up = count(m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding))
    matrices = count(weight for weight in model.parameters() if weight.ndim > 1)
    assert found.num_trained_matrices == matrices - looked_up + model.get_output_embeddings().weight.numel() * tied
    layers = decoder_layers(model)[1]
    assert found.num_layer_weights == count(layers.parameters()) // len(layers)
    assert found.num_end_weights == found.num_weights - count(layers.parameters())


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_vision_weights_are_those_of_the_real_model(family):
    model = tiny_vlms.build(family).model
    parts = vision_parts(model, VISION_FAMILIES[family])
    tower = count(weight for part in parts for weight in part.parameters())
    found = sizes(model.config)
    assert (found.num_vision_weights, found.has_trained_tower) == (tower, True)
    frozen = sizes(model.config, freeze_vision_modules=True)
    assert (frozen.num_trained, frozen.has_trained_tower) == (frozen.num_weights - tower, False)


def test_windows_experts_and_recurrent_layers():
    assert sizes(tiny_model("gemma3").config).windows == (8, None, 8, None)
    assert sizes(tiny_model("qwen3_moe").config).intermediate_size == 2 * 64
    shared = tiny_vlms.build("glm4v_moe").model.config
    assert sizes(shared).intermediate_size == (2 + 1) * 64  # one more expert is every token's
    hybrid = sizes(tiny_model("qwen3.5").config)
    assert (len(hybrid.windows), hybrid.num_linear_layers) == (1, 3)
    assert not sizes(tiny_model("gpt2").config).has_gated_mlp


def test_a_config_without_the_usual_sizes_is_named():
    kind, settings = MAMBA
    with pytest.raises(ValueError, match="Mamba2Config does not use transformers' names of sizes"):
        sizes(AutoConfig.for_model(kind, **settings))


# ------------------------------------------------------------------------------------------------- what is trained


def test_adapters_of_llama_by_hand():
    """Rank 16 on q, o 2048 + 2048, k, v 2048 + 512, gate, up, down 2048 + 8192, of 16 layers: 11,272,192."""
    found = sizes(llama_1b(), lora=LoRA(rank=16))
    assert found.num_adapters == 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10240) == 11_272_192
    assert (found.num_trained, found.num_stepped, found.num_trained_matrices) == (0, 11_272_192, 0)


@pytest.mark.parametrize(
    ("family", "names"), [("qwen2", None), ("gpt2", ["c_attn"]), ("gemma3", ["q_proj"]), ("qwen3_moe", None)]
)
def test_adapters_are_those_of_the_run(family, names):
    model = tiny_model(family)
    found = sizes(model.config, lora=LoRA(rank=3, target_modules=names))
    real = add_adapters(model, LoRA(rank=3, target_modules=names))
    assert found.num_adapters == count(weight for weight in real.parameters() if weight.requires_grad)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_those_of_the_run(family):
    lora = LoRA(rank=3, target_parameters=["experts.down_proj", "experts.gate_up_proj"])
    real = add_adapters(tiny_model(family), lora)
    found = sizes(tiny_model(family).config, lora=lora)
    assert found.num_adapters == count(weight for weight in real.parameters() if weight.requires_grad)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_magnitudes_and_copies_are_those_of_the_run(family):
    model = tiny_model(family, tie_word_embeddings=False)
    lora = LoRA(rank=3, use_dora=True, modules_to_save=["lm_head", "h.1.mlp" if family == "gpt2" else "k_proj"])
    found, plain = (sizes(model.config, lora=each) for each in (lora, LoRA(rank=3)))
    real = add_adapters(tiny_model(family, tie_word_embeddings=False), lora)
    assert found.num_adapters == count(weight for weight in real.parameters() if weight.requires_grad)
    assert found.num_weights == plain.num_weights == count(model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["k_proj"], "layers_to_transform": [0], "use_dora": True},
        {"target_modules": ["k_proj"], "init_lora_weights": "pissa"},
    ],
    ids=["head", "copies", "ranks", "dora", "pissa"],
)
def test_adapters_saved_by_peft_are_counted_as_they_are(tmp_path, settings):
    base = tiny_model("qwen2", tie_word_embeddings=False)
    real = get_peft_model(base, LoraConfig(r=5, task_type="CAUSAL_LM", **settings))
    real.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    lora = LoRA(adapter=str(tmp_path / "adapter"))
    taken = add_adapters(tiny_model("qwen2", tie_word_embeddings=False), lora)
    found = sizes(tiny_model("qwen2", tie_word_embeddings=False).config, lora=lora)
    assert found.num_adapters == count(weight for weight in taken.parameters() if weight.requires_grad)
    assert found.has_starting_adapter
    assert found.num_weights == count(tiny_model("qwen2", tie_word_embeddings=False).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_layers_are_those_of_the_run(tied):
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    found = sizes(model.config, freeze_layers=2)
    freeze_first_layers(model, 2)
    assert found.num_trained == count(weight for weight in model.parameters() if weight.requires_grad)
    with pytest.raises(ValueError, match=r"policy\.freeze_layers is 9, and the policy has 4 layers"):
        sizes(model.config, freeze_layers=9)


@pytest.mark.parametrize(("kind", "per_weight"), [("4bit", 0.5159), ("8bit", 1.0)])
def test_quantized_weights_are_the_linear_ones_but_the_head(kind, per_weight):
    """QLoRA's 4 bits and 0.127 bits of scales a weight (arXiv:2305.14314, section 3)."""
    model = tiny_model("qwen2")
    found = sizes(model.config, lora=LoRA(), quantization=kind)
    linear = count(m.weight for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert found.num_quantized == linear - model.get_output_embeddings().weight.numel()
    assert found.quantized_bytes == pytest.approx(per_weight, rel=1e-3)
