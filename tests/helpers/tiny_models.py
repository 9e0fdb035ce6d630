"""Tiny real models and tokenizers of many families, built from configs: no download, milliseconds each."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache

READS_LINEAR_STATES = hasattr(Cache, "get_conv_state")
"""Older releases of transformers do not read linear-attention states through the cache: there such models score
densely."""

VOCAB = 120
PAD, EOS = 0, 1
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
# Sliding windows (8) are shorter than the prompts of the tests (up to 20 tokens).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", BASE),
    "qwen3": ("qwen3", BASE | {"head_dim": 16}),
    "llama": ("llama", BASE),
    "mistral": ("mistral", BASE | {"sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        BASE | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "initializer_range": 0.15,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        BASE
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3_moe": ("qwen3_moe", BASE | MOE | {"head_dim": 16, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "mixtral": ("mixtral", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3.5": ("qwen3_5_text", BASE | LINEAR | {"head_dim": 16}),
}
MAMBA = (
    "mamba2",
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "initializer_range": 0.15,
    },
)


def tiny_model(family: str = "qwen2", *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of this family with random weights, always the same ones."""
    kind, settings = MAMBA if family == "mamba2" else FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases, sinks and norms at their initial values hide mistakes
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, `<pad>` and `<eos>`; ids below `VOCAB`."""
    vocab = {"<pad>": PAD, "<eos>": EOS} | {chr(c): c - 30 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|<pad>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def tiny_classifier(family: str = "qwen2", *, num_labels: int = 1, **changes: Any) -> PreTrainedModel:
    """A sequence classifier of this family with random weights; its config names no pad token."""
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **(settings | {"pad_token_id": None, "num_labels": num_labels} | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForSequenceClassification.from_config(config).eval()
