"""Configs of published models by their hub names, so that `plan` works without a network. No weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = dict[str, Any]


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> Shape:
    """Qwen2.5; its larger models have a padded vocabulary and a head of their own."""
    return {
        "vocab_size": 151936 if tied else 152064,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }


def _head_dim_128(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int, *, tied: bool
) -> Shape:
    """Qwen3 and Llama 3: eight key-value heads of 128."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }


QWEN2_5: dict[str, Shape] = {
    "0.5B": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "1.5B": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "3B": _qwen2(2048, 11008, 36, 16, 2, tied=True),
    "7B": _qwen2(3584, 18944, 28, 28, 4, tied=False),
    "14B": _qwen2(5120, 13824, 48, 40, 8, tied=False),
    "32B": _qwen2(5120, 27648, 64, 40, 8, tied=False),
    "72B": _qwen2(8192, 29568, 80, 64, 8, tied=False),
}
QWEN3: dict[str, Shape] = {
    "0.6B": _head_dim_128(151936, 1024, 3072, 28, 16, 40960, tied=True),
    "1.7B": _head_dim_128(151936, 2048, 6144, 28, 16, 40960, tied=True),
    "4B": _head_dim_128(151936, 2560, 9728, 36, 32, 40960, tied=True),
    "8B": _head_dim_128(151936, 4096, 12288, 36, 32, 40960, tied=False),
    "14B": _head_dim_128(151936, 5120, 17408, 40, 40, 40960, tied=False),
    "32B": _head_dim_128(151936, 5120, 25600, 64, 64, 40960, tied=False),
}
LLAMA: dict[str, Shape] = {
    "3.2-1B": _head_dim_128(128256, 2048, 8192, 16, 32, 131072, tied=True) | {"head_dim": 64},
    "3.2-3B": _head_dim_128(128256, 3072, 8192, 28, 24, 131072, tied=True),
    "3.1-8B": _head_dim_128(128256, 4096, 14336, 32, 32, 131072, tied=False),
    "3.1-70B": _head_dim_128(128256, 8192, 28672, 80, 64, 131072, tied=False),
    "3.3-70B": _head_dim_128(128256, 8192, 28672, 80, 64, 131072, tied=False),
}
QWEN2_5_VISION: Shape = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
QWEN2_5_VL: dict[str, Shape] = {
    size: {
        "text_config": QWEN2_5[size] | {"max_position_embeddings": 128000, "rope_parameters": MROPE},
        "vision_config": QWEN2_5_VISION | {"out_hidden_size": QWEN2_5[size]["hidden_size"]},
        "tie_word_embeddings": QWEN2_5[size]["tie_word_embeddings"],
    }
    for size in ("3B", "7B")
}
INTERN_VIT_300M: Shape = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "attention_bias": True,
}
INTERNVL3_2B: Shape = {
    "text_config": QWEN2_5["1.5B"] | {"model_type": "qwen2", "vocab_size": 151674, "tie_word_embeddings": False},
    "vision_config": INTERN_VIT_300M,
    "image_seq_length": 256,
    "tie_word_embeddings": False,
}

REWARD_MODEL: Shape = {"num_labels": 1, "dtype": "bfloat16", "architectures": ["Qwen3ForSequenceClassification"]}

KNOWN: dict[str, tuple[str, Shape]] = {
    **{f"Qwen/Qwen2.5-{size}": ("qwen2", shape) for size, shape in QWEN2_5.items()},
    **{f"Qwen/Qwen2.5-{size}-Instruct": ("qwen2", shape) for size, shape in QWEN2_5.items()},
    **{f"Qwen/Qwen2.5-Math-{size}": ("qwen2", QWEN2_5[size]) for size in ("1.5B", "7B")},
    **{f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}": ("qwen2", QWEN2_5[size]) for size in ("14B", "32B")},
    **{f"Qwen/Qwen3-{size}": ("qwen3", shape) for size, shape in QWEN3.items()},
    **{f"meta-llama/Llama-{size}-Instruct": ("llama", shape) for size, shape in LLAMA.items()},
    **{f"meta-llama/Llama-{size}": ("llama", shape) for size, shape in LLAMA.items() if size != "3.3-70B"},
    **{f"Qwen/Qwen2.5-VL-{size}-Instruct": ("qwen2_5_vl", shape) for size, shape in QWEN2_5_VL.items()},
    "OpenGVLab/InternVL3-2B-hf": ("internvl", INTERNVL3_2B),
    **{
        f"Skywork/Skywork-Reward-V2-Qwen3-{size}": ("qwen3", QWEN3[size] | REWARD_MODEL)
        for size in ("0.6B", "1.7B", "4B", "8B")
    },
}
"""By hub name: the model type and what of its config decides about sizes."""


def known_config(name: str) -> PretrainedConfig | None:
    """The config of a published model; None if it is not one of `KNOWN`."""
    from transformers import AutoConfig

    if name not in KNOWN:
        return None
    model_type, shape = KNOWN[name]
    config: PretrainedConfig = AutoConfig.for_model(model_type, **shape)
    return config
