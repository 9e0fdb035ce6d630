"""Configs of published models, their numbers written out; no weights."""

from transformers import AutoConfig, PretrainedConfig

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""meta-llama/Llama-3.2-1B."""

QWEN_1_5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Qwen/Qwen2.5-1.5B."""

QWEN_0_5B = QWEN_1_5B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
"""Qwen/Qwen2.5-0.5B."""

QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""Qwen/Qwen2.5-7B."""

QWEN_32B = QWEN_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
"""deepseek-ai/DeepSeek-R1-Distill-Qwen-32B."""

LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
"""meta-llama/Llama-3.3-70B-Instruct."""


def llama_1b() -> PretrainedConfig:
    """The config of Llama-3.2-1B."""
    return AutoConfig.for_model("llama", **LLAMA_1B)


def qwen_1_5b() -> PretrainedConfig:
    """The config of Qwen2.5-1.5B."""
    return AutoConfig.for_model("qwen2", **QWEN_1_5B)


def llama_70b() -> PretrainedConfig:
    """The config of Llama-3.3-70B."""
    return AutoConfig.for_model("llama", **LLAMA_70B)


QWEN2_5_VL_3B_TEXT = QWEN_1_5B | {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""Qwen/Qwen2.5-VL-3B-Instruct."""

QWEN2_5_VL_7B_TEXT = QWEN_7B | {
    name: QWEN2_5_VL_3B_TEXT[name] for name in ("max_position_embeddings", "rope_parameters")
}
"""Qwen/Qwen2.5-VL-7B-Instruct."""


def qwen2_5_vl_3b() -> PretrainedConfig:
    """The config of Qwen2.5-VL-3B."""
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config=QWEN2_5_VL_3B_TEXT, vision_config=QWEN2_5_VISION, tie_word_embeddings=True
    )


def qwen2_5_vl_7b() -> PretrainedConfig:
    """The config of Qwen2.5-VL-7B."""
    vision = QWEN2_5_VISION | {"out_hidden_size": 3584}
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config=QWEN2_5_VL_7B_TEXT, vision_config=vision, tie_word_embeddings=False
    )


INTERNVL3_2B_TEXT = QWEN_1_5B | {"model_type": "qwen2", "vocab_size": 151674, "tie_word_embeddings": False}
INTERN_VIT_300M = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "attention_bias": True,
}
"""OpenGVLab/InternVL3-2B-hf."""


def internvl3_2b() -> PretrainedConfig:
    """The config of InternVL3-2B in transformers' own form."""
    return AutoConfig.for_model(
        "internvl",
        text_config=INTERNVL3_2B_TEXT,
        vision_config=INTERN_VIT_300M,
        image_seq_length=256,
        tie_word_embeddings=False,
    )


QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "num_labels": 1,
    "dtype": "bfloat16",
    "architectures": ["Qwen3ForSequenceClassification"],
}
"""Skywork/Skywork-Reward-V2-Qwen3-0.6B."""


def reward_model_0_6b() -> PretrainedConfig:
    """The config of a reward model of 0.6 billion weights."""
    return AutoConfig.for_model("qwen3", **QWEN3_0_6B)


PUBLISHED: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.2-1B-Instruct": llama_1b(),
    "meta-llama/Llama-3.3-70B-Instruct": llama_70b(),
    "Qwen/Qwen2.5-0.5B-Instruct": AutoConfig.for_model("qwen2", **QWEN_0_5B),
    "Qwen/Qwen2.5-1.5B": qwen_1_5b(),
    "Qwen/Qwen2.5-Math-1.5B": qwen_1_5b(),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen_1_5b(),
    "Qwen/Qwen2.5-7B": AutoConfig.for_model("qwen2", **QWEN_7B),
    "Qwen/Qwen2.5-7B-Instruct": AutoConfig.for_model("qwen2", **QWEN_7B),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": AutoConfig.for_model("qwen2", **QWEN_32B),
    "Qwen/Qwen2.5-VL-3B-Instruct": qwen2_5_vl_3b(),
    "Qwen/Qwen2.5-VL-7B-Instruct": qwen2_5_vl_7b(),
    "OpenGVLab/InternVL3-2B-hf": internvl3_2b(),
}
"""The policies of the recipes, by their names on the hub."""
