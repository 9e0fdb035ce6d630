"""Sizes read from configs and from parameters without memory."""

import pytest
import torch
from transformers import AutoConfig

from grpo_lightning.cli.plan.shape import ModelShape, count_matrix_weights, meta_model, shape_of
from tests.cli.plan.real_shapes import llama_1b, qwen_1_5b
from tests.tiny_models import FAMILIES, MAMBA, tiny_model
from tests.tiny_vlms import build


def test_llama_3_2_1b_by_hand():
    """Embedding 128256 x 2048; per layer q and o 2048 x 2048, k and v 2048 x 512, 3 x 2048 x 8192, 2 norms; a norm."""
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    assert shape_of(meta_model(llama_1b())) == ModelShape(
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        vocab_size=128256,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        windows=(None,) * 16,
        num_weights=128256 * 2048 + 16 * layer + 2048,  # 1,235,814,400, as published
        num_matrix_weights=128256 * 2048 + 16 * (layer - 2 * 2048),
        num_end_weights=128256 * 2048 + 2048,
    )
    assert shape_of(meta_model(llama_1b())).num_layer_weights == layer


def test_qwen2_5_1_5b_by_hand():
    """As Llama, and biases for q (1536), k and v (256 each): 1,543,714,304 weights, as published."""
    layer = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 2 * 1536 + 1536 + 2 * 256
    shape = shape_of(meta_model(qwen_1_5b()))
    assert shape.num_weights == 151936 * 1536 + 28 * layer + 1536 == 1_543_714_304
    assert (shape.head_dim, shape.num_kv_heads, len(shape.windows)) == (128, 2, 28)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_as_in_the_real_model(family, tied):
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **(settings | {"tie_word_embeddings": tied}))
    model = meta_model(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    real = tiny_model(family, tie_word_embeddings=tied)
    shape = shape_of(model)
    assert shape.num_weights == sum(parameter.numel() for parameter in real.parameters())
    assert shape == shape_of(real)
    head = real.get_output_embeddings().weight.numel()
    looked_up = sum(m.weight.numel() for m in real.modules() if isinstance(m, torch.nn.Embedding))
    matrices = sum(parameter.numel() for parameter in real.parameters() if parameter.ndim > 1)
    assert shape.num_matrix_weights == matrices - looked_up + (head if tied else 0)


def test_windows_experts_and_recurrent_layers():
    assert shape_of(tiny_model("gemma3")).windows == (8, None, 8, None)
    assert shape_of(tiny_model("gemma3")).extra_norm_channels == 2 * 64 + 4 * 16 + 2 * 16  # behind blocks, q and k
    assert shape_of(tiny_model("qwen3")).extra_norm_channels == 4 * 16 + 2 * 16
    moe = shape_of(tiny_model("qwen3_moe"))
    assert (moe.experts_per_token, moe.intermediate_size) == (2, 2 * 64)
    assert shape_of(build("glm4v_moe").model).intermediate_size == (2 + 1) * 64  # one more is every token's
    hybrid = shape_of(tiny_model("qwen3.5"))
    assert (len(hybrid.windows), hybrid.num_linear_layers) == (1, 3)
    assert not shape_of(tiny_model("gpt2")).has_gated_mlp


def test_activation_functions_and_norms():
    """gelu_new is written out in operations that keep four numbers; silu is one kernel and keeps its input."""
    gpt2, llama = (shape_of(meta_model(tiny_model(family).config)) for family in ("gpt2", "llama"))
    assert (gpt2.activation_numbers, gpt2.has_fused_norms) == (4, True)
    assert (llama.activation_numbers, llama.has_fused_norms) == (1, False)
    assert shape_of(tiny_model("gemma3")).activation_numbers == 1  # the fused gelu


def test_matrices_can_be_counted_without_some():
    model = tiny_model("qwen2")
    frozen = {id(parameter) for parameter in model.model.layers[0].parameters()}
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim > 1)
    assert count_matrix_weights(model) - count_matrix_weights(model, frozen) == layer


def test_a_config_without_the_usual_sizes_is_named():
    kind, settings = MAMBA
    with pytest.raises(ValueError, match="Mamba2Config does not name its sizes"):
        shape_of(meta_model(AutoConfig.for_model(kind, **settings)))
