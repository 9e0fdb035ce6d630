"""A model's sizes, read from its config and its parameters on the meta device: no weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_lightning.cli.plan.tower import Tower, tower_of
from grpo_lightning.policy.families import sees_images

NUMBERED = re.compile(r"(^|\.)\d+\.")
"""In the names of what belongs to one of several layers."""


@dataclass(frozen=True)
class ModelShape:
    """What the memory of a decoder depends on, and of the tower that encodes images for it."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward block a token runs through; with experts, of all those it is sent to."""

    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    windows: tuple[int | None, ...]
    """For every layer that keeps keys and values: its sliding window in tokens, or None."""

    num_linear_layers: int = 0
    """Layers with a recurrent state instead of keys and values; the state is not counted."""

    has_gated_mlp: bool = True
    experts_per_token: int = 0
    """0 without experts."""

    extra_norm_channels: int = 0
    """Numbers per token that a layer normalises beyond its two usual norms: of queries and keys, or behind a block."""

    num_weights: int = 0
    """Parameters, a tied one counted once."""

    num_matrix_weights: int = 0
    """In matrices that are multiplied by, a tied head among them too: what autocast copies to 16 bits."""

    num_end_weights: int = 0
    """Outside the layers: embeddings, head and last norm, a tied one counted once."""

    activation_numbers: int = 1
    """Numbers that the activation function keeps per number of the feed-forward block: more than its input, where it is
    written out in several operations."""

    adapted_channels: int = 0
    """Numbers per token that the linear layers with a LoRA adapter read, of one layer."""

    has_fused_norms: bool = False
    """LayerNorms in one kernel, which keep their input alone; RMS norms are written out and keep their result too."""

    tower: Tower | None = None
    """What encodes images, whose weights are among the model's; None of a model that takes text only."""

    @property
    def num_vision_weights(self) -> int:
        """Parameters of the vision tower and its projector."""
        return 0 if self.tower is None else self.tower.num_weights

    @property
    def num_layer_weights(self) -> int:
        """Parameters of one decoder layer, all layers being alike."""
        return (self.num_weights - self.num_vision_weights - self.num_end_weights) // self.num_layers


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a language model from transformers, with a vision tower or without, on any device.

    Raises:
        ValueError: If its config does not name its sizes as transformers does.
    """
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    tower = tower_of(model) if sees_images(model.config) else None
    # A tower has numbered layers of its own: what the decoder's are like is asked of the decoder alone.
    decoder: nn.Module = model if tower is None else model.get_decoder()  # type: ignore[operator]
    try:
        num_heads = int(config.num_attention_heads)
        hidden_size = int(config.hidden_size)
        num_layers = int(config.num_hidden_layers)
        vocab_size = int(config.vocab_size)
    except AttributeError as error:
        raise ValueError(f"{type(config).__name__} does not name its sizes as other models do: {error}.") from error
    layers = DynamicCache(config=config).layers
    attention = [layer for layer in layers if hasattr(layer, "keys")]
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden_size // num_heads)
    channels = norm_channels(decoder, head_dim, {"q": num_heads, "k": num_kv_heads})
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size(config),
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=tuple(getattr(layer, "sliding_window", None) for layer in attention),
        num_linear_layers=len(layers) - len(attention),
        has_gated_mlp=any("gate" in name for name, _ in decoder.named_parameters()),
        experts_per_token=int(getattr(config, "num_experts_per_tok", None) or 0),
        extra_norm_channels=max(0, channels // num_layers - 2 * hidden_size),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        num_matrix_weights=count_matrix_weights(model),
        num_end_weights=count_end_weights(model, decoder),
        activation_numbers=activation_numbers(decoder),
        has_fused_norms=any(isinstance(module, nn.LayerNorm) for module in decoder.modules()),
        tower=tower,
    )


def count_end_weights(model: nn.Module, decoder: nn.Module) -> int:
    """Parameters outside the decoder's layers, a tied head counted once: embeddings, last norm and head."""
    ends = {id(weight): weight for name, weight in decoder.named_parameters() if not NUMBERED.search(name)}
    head = model.get_output_embeddings()  # type: ignore[operator]
    ends |= {id(weight): weight for weight in (() if head is None else head.parameters())}
    return sum(weight.numel() for weight in ends.values())


def count_matrix_weights(model: nn.Module, without: Collection[int] = ()) -> int:
    """Weights in matrices that tokens are multiplied by: all but the embeddings, which are looked up.

    Args:
        model: On any device.
        without: Identities of parameters that are not counted.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {id(p): p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in looked_up}
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        found[id(head.weight)] = head.weight.numel()
    return sum(count for place, count in found.items() if place not in without)


def activation_numbers(model: nn.Module) -> int:
    """Numbers that autograd keeps per number the activation function is given: counted on a small tensor.

    One for silu and the fused gelu; four for gelu_new, which is a chain of operations.
    """
    names = ("act_fn", "act", "activation_fn", "activation_function")
    for module in model.modules():
        if function := next((found for name in names if callable(found := getattr(module, name, None))), None):
            break
    else:
        return 1
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    probe = torch.ones(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(probe)
    return max(1, sum(saved.values()) // len(probe))


def norm_channels(model: nn.Module, head_dim: int, heads: dict[str, int]) -> int:
    """Numbers per token that the layers normalise, all layers together."""
    total = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_norm = type(module).__name__.endswith("Norm") and isinstance(weight, torch.Tensor) and weight.ndim == 1
        if is_norm and NUMBERED.search(name):
            size = weight.numel()  # type: ignore[union-attr]
            # The norm of queries or keys is one head's, used on all.
            total += size * (heads.get(name.rpartition(".")[2][0], 1) if size == head_dim else 1)
    return total


def intermediate_size(config: Any) -> int:
    """The width of the feed-forward block one token runs through."""
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(dense)
    routed = int(getattr(config, "moe_intermediate_size", None) or dense)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is None:  # as many as it says, each as wide as the others
        shared = int(getattr(config, "n_shared_experts", None) or 0) * routed
    return int(experts) * routed + int(shared)


def meta_model(config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """The architecture of a config with parameters that have shapes and no memory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=trust_remote_code)  # type: ignore[no-any-return]
