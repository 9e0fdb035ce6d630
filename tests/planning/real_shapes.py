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


def llama_1b() -> PretrainedConfig:
    """The config of Llama-3.2-1B."""
    return AutoConfig.for_model("llama", **LLAMA_1B)


def qwen_1_5b() -> PretrainedConfig:
    """The config of Qwen2.5-1.5B."""
    return AutoConfig.for_model("qwen2", **QWEN_1_5B)
