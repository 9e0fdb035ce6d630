"""What is trained, counted on models without memory and compared with the run's own."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_lightning.cli.plan.shape import count_matrix_weights, meta_model, shape_of
from grpo_lightning.cli.plan.trained_weights import TrainedWeights, trained_weights
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA, adapter_layers, add_adapters
from grpo_lightning.policy.trainable import freeze_first_layers
from tests.cli.plan.real_shapes import llama_1b
from tests.tiny_models import tiny_model, tiny_tokenizer


def planned(config, **settings):
    model = meta_model(config)
    # A quantized policy has a name; the config is what is planned for.
    loader = PolicyLoader("policy", **settings)
    return trained_weights(model, shape_of(model), loader)


def test_adapters_of_llama_by_hand():
    """Rank 16 on q, o 2048 + 2048, k, v 2048 + 512, gate, up, down 2048 + 8192, of 16 layers: 11,272,192."""
    trained, shape = planned(llama_1b(), lora=LoRA(rank=16))
    assert trained.adapters == 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10240) == 11_272_192
    assert (trained.own, trained.own_matrices, trained.count) == (0, 0, trained.adapters)
    assert shape.adapted_channels == 6 * 2048 + 8192
    assert trained.model_bytes(shape, 2) == 2 * shape.num_weights
    assert trained.reference_bytes(shape, 2) == 0


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("names", [None, "some"])
def test_adapters_are_those_of_the_run(family, names):
    model = tiny_model(family)
    names = names and [next(n for n in ("q_proj", "c_attn") if any(n in name for name, _ in model.named_modules()))]
    trained, _ = planned(model.config, lora=LoRA(rank=3, target_modules=names))
    real = add_adapters(model, LoRA(rank=3, target_modules=names))
    assert trained.adapters == sum(p.numel() for p in real.parameters() if p.requires_grad)


@pytest.mark.parametrize("names", [None, ["q_proj", "v_proj"]])
def test_an_adapter_to_start_from_is_read(tmp_path, names):
    """Its own rank and layers, and a copy of it is the reference."""
    real = add_adapters(tiny_model("qwen2"), LoRA(rank=5, target_modules=names))
    real.save_pretrained(tmp_path / "adapter")
    trained, shape = planned(tiny_model("qwen2").config, lora=LoRA(adapter=str(tmp_path / "adapter")))
    assert trained.adapters == sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert trained.reference_bytes(shape, 2) == 4 * trained.adapters


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["k_proj"], "layers_to_transform": [0], "use_dora": True},
        {"target_modules": ["k_proj"], "init_lora_weights": "pissa"},
    ],
    ids=["regex", "head", "embedding", "ranks", "dora", "pissa"],
)
def test_adapters_saved_by_peft_are_counted_as_they_are(tmp_path, settings):
    base = tiny_model("qwen2", tie_word_embeddings=False)
    real = get_peft_model(base, LoraConfig(r=5, task_type="CAUSAL_LM", **settings))
    real.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    lora = LoRA(adapter=str(tmp_path / "adapter"))
    taken = add_adapters(tiny_model("qwen2", tie_word_embeddings=False), lora)
    config = tiny_model("qwen2", tie_word_embeddings=False).config
    trained, shape = planned(config, lora=lora)
    assert trained.adapters == sum(p.numel() for p in taken.parameters() if p.requires_grad)
    reads = sum(
        layer.in_features for layer in adapter_layers(taken) if isinstance(layer.get_base_layer(), torch.nn.Linear)
    )
    assert shape.adapted_channels == reads // shape.num_layers


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_frozen_layers_are_those_of_the_run(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    trained, shape = planned(model.config, freeze_layers=2)
    freeze_first_layers(model, 2)
    real = [p for p in model.parameters() if p.requires_grad]
    assert trained.own == sum(p.numel() for p in real)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert trained.own_matrices == count_matrix_weights(model, frozen)
    assert trained.reference_bytes(shape, 4) == 4 * trained.own


def test_more_frozen_layers_than_there_are():
    with pytest.raises(ValueError, match=r"policy\.freeze_layers is 9, and the policy has 4 layers"):
        planned(tiny_model("qwen2").config, freeze_layers=9)


@pytest.mark.parametrize(("kind", "per_weight"), [("4bit", 0.5159), ("8bit", 1.0)])
def test_quantized_weights_are_the_linear_ones_but_the_head(kind, per_weight):
    """QLoRA's 4 bits and 0.127 bits of scales a weight (arXiv:2305.14314, section 3)."""
    model = tiny_model("qwen2")
    trained, shape = planned(model.config, lora=LoRA(), quantization=kind)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert trained.quantized == linear - model.get_output_embeddings().weight.numel()
    assert trained.quantized_bytes == pytest.approx(per_weight, rel=1e-3)
    rest = shape.num_weights - trained.quantized
    assert trained.model_bytes(shape, 2) == pytest.approx(2 * rest + per_weight * trained.quantized, rel=1e-3)


def test_everything_is_trained_by_default():
    model = tiny_model("llama")
    loader = PolicyLoader(model=model, tokenizer=tiny_tokenizer())
    trained, shape = trained_weights(model, shape_of(model), loader)
    assert trained == TrainedWeights(shape.num_weights, shape.num_matrix_weights)
    assert trained.reference_bytes(shape, 4) == 4 * shape.num_weights
