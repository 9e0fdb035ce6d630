"""Parameter counts and sizes of a policy, from a model on the meta device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from grpo_lightning.policy.adapters import adapter_layers, is_expert_adapter
from grpo_lightning.policy.families import freeze_unused, freeze_vision, is_multimodal, is_tower_trained
from grpo_lightning.policy.lora import LoRA, adapter_config
from grpo_lightning.policy.lora_injection import check_names, select
from grpo_lightning.policy.trainable import freeze_first_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_lightning.policy.settings import PolicySettings

QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
"""Bytes per quantized weight. "4bit" is nf4: each block of 64 weights has an 8-bit scale, and each block of 256
such scales has a 32-bit scale (QLoRA, arXiv:2305.14314, section 3). For "8bit", the scale of each row is ignored."""

NUMBERED = re.compile(r"(^|\.)\d+\.")
"""Matches names of parameters in numbered layers."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a policy's decoder, and counts of the policy's weights. Tied weights count once."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward block. With experts, this is the sum of the widths of the experts that process one
    token, including shared experts."""

    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """For each layer with a KV cache, its sliding window in tokens; None if the layer has no window."""

    shares_prompts: bool = False
    """True if the local engine keeps the KV cache of each prompt once, not once per completion."""

    num_linear_layers: int = 0
    """Number of layers with a recurrent state instead of a KV cache. The memory of this state is not counted."""

    has_gated_mlp: bool = True
    num_weights: int = 0
    num_layer_weights: int = 0
    """Weights of one decoder layer, averaged over layers."""

    num_end_weights: int = 0
    """Weights of embeddings, last norm and head."""

    num_vision_weights: int = 0
    """Weights of the vision tower and its projector."""

    has_trained_tower: bool = False
    num_trained: int = 0
    """Trained weights, not counting adapters."""

    num_trained_matrices: int = 0
    """Trained weights in matrices: autocast keeps a 16-bit copy of each."""

    num_frozen_matrices: int = 0
    """Frozen weights in unquantized matrices: autocast makes a 16-bit copy of each in every forward pass."""

    num_adapters: int = 0
    """LoRA weights, all trained: matrices, DoRA's magnitudes, and copies of layers (`modules_to_save`)."""

    num_adapted_experts: int = 0
    """Number of weights (not of experts) in the expert tensors that have adapters."""

    num_dora_outputs: int = 0
    """Number of outputs per token, summed over all layers with DoRA."""

    largest_dora: tuple[int, int] = (0, 0)
    """(inputs, outputs) of the layer whose DoRA needs the most memory."""

    has_trained_head: bool = False
    """True if the head's own weights are trained."""

    has_starting_adapter: bool = False
    """True if the reference is a copy of the initial adapter."""

    num_quantized: int = 0
    quantized_bytes: float = 0.0
    """Bytes per quantized weight."""

    @property
    def num_stepped(self) -> int:
        """Weights that the optimizer updates."""
        return self.num_trained + self.num_adapters


def sizes_of(model: Any, settings: PolicySettings) -> ModelSizes:
    """Compute the sizes of a transformers model under the policy's settings.

    The function changes `model` in place. It freezes the parameters that the run freezes, and inserts the initial
    adapter (`lora.adapter`) if there is one.

    Raises:
        FileNotFoundError: If the initial adapter does not exist.
        ValueError: If the config does not use transformers' names for its sizes, or if layers to freeze or to adapt do
            not exist.
    """
    from transformers import DynamicCache

    from grpo_lightning.policy.kv_cache import unshared_reason

    config = model.config.get_text_config(decoder=True)
    try:
        num_heads, hidden_size = int(config.num_attention_heads), int(config.hidden_size)
        num_layers, vocab_size = int(config.num_hidden_layers), int(config.vocab_size)
    except AttributeError as error:
        raise ValueError(f"{type(config).__name__} does not use transformers' names of sizes: {error}.") from error
    cached = DynamicCache(config=config).layers
    attention = [layer for layer in cached if hasattr(layer, "keys")]
    limit_training(model, settings)
    head, weights, multiplied = model.get_output_embeddings(), list(model.parameters()), matrices(model)
    decoder = model.get_decoder() if is_multimodal(model.config) else model
    in_layers = {id(weight) for name, weight in decoder.named_parameters() if NUMBERED.search(name)}
    in_text = {id(weight) for module in (decoder, head) if module is not None for weight in module.parameters()}
    num_layer_weights = count(weight for weight in weights if id(weight) in in_layers)
    num_text_weights = count(weight for weight in weights if id(weight) in in_text)
    quantized = linear_weights(model) if settings.quantization != "none" else []
    has_trained_tower = is_multimodal(model.config) and is_tower_trained(model)
    adapters = adapter_sizes(model, settings.lora)
    return ModelSizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size(config),
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        windows=tuple(getattr(layer, "sliding_window", None) for layer in attention),
        shares_prompts=unshared_reason(model) is None,
        num_linear_layers=len(cached) - len(attention),
        has_gated_mlp=any("gate" in name for name, _ in decoder.named_parameters()),
        num_weights=count(weights),
        num_layer_weights=num_layer_weights // num_layers,
        num_end_weights=num_text_weights - num_layer_weights,
        num_vision_weights=count(weights) - num_text_weights,
        has_trained_tower=has_trained_tower,
        num_trained=count(weight for weight in weights if weight.requires_grad),
        num_trained_matrices=count(weight for weight in multiplied if weight.requires_grad),
        num_frozen_matrices=count(weight for weight in multiplied if not weight.requires_grad) - count(quantized),
        num_adapters=adapters.num_weights,
        num_adapted_experts=adapters.num_experts,
        num_dora_outputs=sum(outputs for _, outputs in adapters.dora),
        largest_dora=max(adapters.dora, key=lambda shape: shape[0] * (shape[0] + 3 * shape[1]), default=(0, 0)),
        has_trained_head=head is not None and any(weight.requires_grad for weight in head.parameters()),
        has_starting_adapter=settings.lora is not None and settings.lora.adapter is not None,
        num_quantized=count(quantized),
        quantized_bytes=QUANTIZED_BYTES.get(settings.quantization, 0.0),
    )


def limit_training(model: Any, settings: PolicySettings) -> None:
    """Freeze the parameters that a run with these settings freezes."""
    if settings.lora is not None:
        check_names(model, settings.lora, freezes_vision=settings.freeze_vision_modules)
        model.requires_grad_(False)
        return
    if settings.freeze_vision_modules:
        freeze_vision(model)
    if settings.freeze_layers:
        freeze_first_layers(model, settings.freeze_layers)
    freeze_unused(model)


def count(weights: Iterable[torch.Tensor]) -> int:
    """Count the elements of parameters."""
    return sum(weight.numel() for weight in weights)


def matrices(model: Any) -> list[nn.Parameter]:
    """Matrices that are used in matrix products. An embedding is included only if it is tied to the head."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    looked_up -= set() if head is None else {id(head.weight)}
    return [weight for weight in model.parameters() if weight.ndim >= 2 and id(weight) not in looked_up]


def linear_weights(model: Any) -> list[torch.Tensor]:
    """Weights that are quantized, that is, those of all linear layers except the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]


def intermediate_size(config: Any) -> int:
    """Width of the feed-forward block.

    With experts, it is the sum over the experts that process one token.
    """
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(dense)
    routed = int(getattr(config, "moe_intermediate_size", None) or dense)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is None:  # some configs instead have a number of shared experts, each as wide as a routed expert
        shared = int(getattr(config, "n_shared_experts", None) or 0) * routed
    return int(experts) * routed + int(shared)


class AdapterSizes(NamedTuple):
    """Sizes of LoRA adapters."""

    num_weights: int = 0
    """Weights of matrices and magnitudes, and of copies of modules."""

    num_experts: int = 0
    """Number of weights (not of experts) in the expert tensors that have adapters."""

    dora: tuple[tuple[int, int], ...] = ()
    """(inputs, outputs) of each linear layer with DoRA."""


def adapter_sizes(model: Any, lora: LoRA | None) -> AdapterSizes:
    """Compute the sizes of LoRA adapters. An initial adapter is inserted in `model`."""
    if lora is None:
        return AdapterSizes()
    if lora.adapter is None:
        chosen = select(model, lora)
        shapes = [linear_shape(layer) for layer in chosen.layers.values()]
        copies = sum(count(module.parameters()) for module in chosen.saved.values())
        numbers = sum(map(sum, shapes)) + sum(len(w) * sum(w.shape[1:]) for w in chosen.experts.values())
        rows = sum(rows for _, rows in shapes) * lora.use_dora
        num_weights = lora.rank * numbers + rows + copies
        return AdapterSizes(num_weights, count(chosen.experts.values()), tuple(shapes) * lora.use_dora)
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = adapter_config(lora.adapter)
    config.inference_mode = False
    config.init_lora_weights = True  # PiSSA would compute adapters from the weights, which are not loaded
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run warns
        adapted = get_peft_model(model, config)
    layers = list(adapter_layers(adapted))
    return AdapterSizes(
        count(weight for weight in adapted.parameters() if weight.requires_grad),
        count(layer.get_param() for layer in layers if is_expert_adapter(layer)),
        tuple(
            linear_shape(layer.base_layer)
            for layer in layers
            if layer.lora_magnitude_vector and isinstance(layer.base_layer, nn.Linear | Conv1D)
        ),
    )


def linear_shape(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


# -------------------------------------------------------------------------------------------------- published models

_COLUMNS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
)
_SIZES: dict[str, tuple[int | bool, ...]] = {
    # vocabulary, hidden, feed-forward, layers, heads, key-value heads, head size, positions, tied
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, 64, 32768, True),
    "Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, 128, 32768, True),
    "Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, 128, 32768, True),
    "Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, 128, 32768, False),
    "Qwen2.5-14B": (152064, 5120, 13824, 48, 40, 8, 128, 32768, False),
    "Qwen2.5-32B": (152064, 5120, 27648, 64, 40, 8, 128, 32768, False),
    "Qwen2.5-72B": (152064, 8192, 29568, 80, 64, 8, 128, 32768, False),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, 40960, True),
    "Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128, 40960, True),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128, 40960, True),
    "Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128, 40960, False),
    "Qwen3-14B": (151936, 5120, 17408, 40, 40, 8, 128, 40960, False),
    "Qwen3-32B": (151936, 5120, 25600, 64, 64, 8, 128, 40960, False),
    "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, 64, 131072, True),
    "Llama-3.2-3B": (128256, 3072, 8192, 28, 24, 8, 128, 131072, True),
    "Llama-3.1-8B": (128256, 4096, 14336, 32, 32, 8, 128, 131072, False),
    "Llama-3.1-70B": (128256, 8192, 28672, 80, 64, 8, 128, 131072, False),
    "Llama-3.3-70B": (128256, 8192, 28672, 80, 64, 8, 128, 131072, False),
}
"""Sizes of published models, so that `plan` works without a network."""

_QWEN2_5_TOWER = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_INTERN_VIT_300M = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True},
}


def _published_models() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield hub name, model type and config of each published model."""
    configs = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _SIZES.items()}
    for name, config in configs.items():
        owner, kind = ("Qwen", name[:5].lower()) if name.startswith("Qwen") else ("meta-llama", "llama")
        yield from ((f"{owner}/{name}{ending}", kind, config) for ending in ("", "-Instruct"))
    for size in ("1.5B", "7B"):
        yield f"Qwen/Qwen2.5-Math-{size}", "qwen2", configs[f"Qwen2.5-{size}"]
    for size in ("14B", "32B"):
        yield f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}", "qwen2", configs[f"Qwen2.5-{size}"]
    for size in ("0.6B", "1.7B", "4B", "8B"):
        head = {"num_labels": 1, "dtype": "bfloat16", "architectures": ["Qwen3ForSequenceClassification"]}
        yield f"Skywork/Skywork-Reward-V2-Qwen3-{size}", "qwen3", configs[f"Qwen3-{size}"] | head
    for size in ("3B", "7B"):
        text = configs[f"Qwen2.5-{size}"] | {"max_position_embeddings": 128000, "rope_parameters": _MROPE}
        vision = _QWEN2_5_TOWER | {"out_hidden_size": text["hidden_size"]}
        parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": text["tie_word_embeddings"]}
        yield f"Qwen/Qwen2.5-VL-{size}-Instruct", "qwen2_5_vl", parts
    text = configs["Qwen2.5-1.5B"] | {"model_type": "qwen2", "vocab_size": 151674, "tie_word_embeddings": False}
    parts = {"text_config": text, "vision_config": _INTERN_VIT_300M, "image_seq_length": 256}
    yield "OpenGVLab/InternVL3-2B-hf", "internvl", parts | {"tie_word_embeddings": False}


def known_config(name: str) -> PretrainedConfig | None:
    """The config of a published model by its hub name; None if unknown."""
    from transformers import AutoConfig

    return next(
        (AutoConfig.for_model(kind, **config) for known, kind, config in _published_models() if known == name), None
    )
