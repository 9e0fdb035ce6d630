"""The policy's weights as vLLM loads them: full weights by their checkpoint names, with LoRA adapters merged.

Adapters are merged out of place, layer by layer: the policy itself never changes, and no second copy of all weights
exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.adapters import is_adapter_layer, is_expert_adapter, trained_adapter
from grpo_lightning.policy.hf import base_model, is_adapted, is_copied
from grpo_lightning.policy.lora_targets import expert_tensors
from grpo_lightning.policy.reference import checksums

LAYER = re.compile(r"\.(\d+)\.")
"""The number of a decoder layer in the name of a weight."""


def weight_groups(policy: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Iterate over the policy's full weights, one decoder layer at a time; the others (embeddings, norm, head) last.

    Args:
        policy: The unsharded policy; a model with adapters yields W + s B A for each adapted layer.

    Yields:
        The (name, weight) pairs of one group. Tied weights appear once.
    """
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, module in _holders(policy):
        number = LAYER.search(f"{name}.")
        groups.setdefault(number[1] if number else "", []).append((name, module))
    others = groups.pop("", [])
    seen: set[int] = set()
    for group in [*groups.values(), others]:
        if group:
            yield [pair for name, module in group for pair in _weights(name, module, policy, seen)]


def _holders(policy: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over (name, module) for all modules of the base that hold weights; an adapted layer is one module."""
    inside: str | None = None
    for name, module in base_model(policy).named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if is_adapter_layer(module) or is_copied(module):
            inside = f"{name}."
            yield name, module
        elif next(module.parameters(recurse=False), None) is not None:
            yield name, module


@torch.no_grad()
def _weights(name: str, module: Any, policy: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of one module, by their names in the base model."""
    if is_adapter_layer(module):
        base = module.get_base_layer()
        merged = merged_weight(module, trained_adapter(policy))
        for key, value in base.named_parameters():
            yield f"{name}.{key}", merged if key == "weight" else value.detach()
        return
    is_copy = is_copied(module)
    if is_copy:
        module = module.modules_to_save[trained_adapter(policy)]
    for key, weight in module.named_parameters(recurse=is_copy):
        if id(weight) not in seen:
            seen.add(id(weight))
            yield f"{name}.{key}", weight.detach()


def merged_weight(layer: Any, adapter: str) -> Tensor:
    """The merged weight of an adapted layer, out of place: W + s B A in float32, rounded once to the dtype of W.

    Args:
        layer: peft's layer, with base weight W and an adapter A, B with the scale s (alpha / rank).
        adapter: Name of the adapter.
    """
    weight = layer.get_base_layer().weight.detach()
    is_embedding = adapter in layer.lora_embedding_A
    A = layer.lora_embedding_A[adapter] if is_embedding else layer.lora_A[adapter].weight
    B = layer.lora_embedding_B[adapter] if is_embedding else layer.lora_B[adapter].weight
    with torch.autocast(weight.device.type, enabled=False):
        delta = layer.scaling[adapter] * (B.detach().float() @ A.detach().float())
    if is_embedding or layer.fan_in_fan_out:  # W is [in, out]
        delta = delta.T
    merged: Tensor = (weight.float() + delta).to(weight.dtype)
    return merged


def state_of(policy: nn.Module) -> dict[str, int]:
    """Checksums of all weights: equal if no weight has changed."""
    return checksums(policy.parameters())


def check_policy(policy: Any) -> None:
    """Check that vLLM can load the weights of a policy under the names that `weight_groups` gives them.

    Raises:
        ValueError: For mixtures of experts, whose experts have other names in checkpoints than in transformers; for
            quantised weights; and for adapters that are not W + s B A.
    """
    model = base_model(policy)
    kind = model.config.model_type
    if experts := expert_tensors(model):
        raise ValueError(
            f"VLLMEngine does not sample mixtures of experts yet, and the policy ({kind}) has expert tensors "
            f"({', '.join(experts)}): use LocalEngine."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            "VLLMEngine does not sample quantised policies yet: set policy.quantization to none, or use LocalEngine."
        )
    if not is_adapted(policy):
        return
    name = trained_adapter(policy)
    for path, layer in model.named_modules():
        if is_adapter_layer(layer) and (reason := not_merged_reason(model, layer, name)):
            raise ValueError(f"VLLMEngine cannot merge the adapter of {path}: {reason}. Use LocalEngine.")


def not_merged_reason(model: Any, layer: Any, adapter: str) -> str | None:
    """Reason why the adapter of a layer cannot be merged as W + s B A; None if it can."""
    if is_expert_adapter(layer):
        return "it adapts a tensor of experts"
    if adapter in layer.lora_magnitude_vector:
        return "it is DoRA (policy.lora.use_dora), which is not supported yet"
    if layer.get_base_layer().weight.dim() != 2:
        return "its weight is not a matrix"
    if layer.lora_bias.get(adapter):
        return "it has a bias (lora_bias)"
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if is_tied and any(layer is end for end in ends):
        return "the layer is tied to the embeddings, and vLLM would change both"
    return None
