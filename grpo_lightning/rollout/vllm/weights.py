"""The policy's weights as vLLM loads them: full weights by their checkpoint names, with LoRA adapters merged.

Sharded weights are gathered, and adapters merged out of place, one decoder layer at a time: the policy itself never
changes, and no second copy of all weights exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.adapters import is_adapter_layer, is_expert_adapter, trained_adapter
from grpo_lightning.policy.hf import base_model, is_adapted, is_copied
from grpo_lightning.policy.lora_targets import expert_tensors
from grpo_lightning.policy.reference import checksums
from grpo_lightning.policy.sharding import Sharding, full_shape

LAYER = re.compile(r"\.(\d+)\.")
"""The number of a decoder layer in the name of a weight."""


@dataclass(frozen=True)
class Gathered:
    """One group of modules, with the full values of their weights."""

    modules: list[tuple[str, Any]]
    """(name, module) pairs."""

    values: dict[int, Tensor]
    """Full values by the id of the parameter."""


def gathered_groups(policy: nn.Module, sharding: Sharding) -> Iterator[Gathered]:
    """Gather the policy's full weights, one decoder layer at a time; the others (embeddings, norm, head) last.

    Collective: all ranks must iterate to the end.

    Args:
        policy: The policy.
        sharding: How its weights are sharded over the ranks.
    """
    sharding.reshard(policy)
    adapter = trained_adapter(policy) if is_adapted(policy) else None
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, module in _holders(policy):
        number = LAYER.search(f"{name}.")
        groups.setdefault(number[1] if number else "", []).append((name, module))
    others = groups.pop("", [])
    for modules in [*groups.values(), others]:
        parameters = list({id(each): each for _, module in modules for each in _sent(module, adapter)}.values())
        if parameters:
            with sharding.whole_group(parameters) as values:
                yield Gathered(modules, dict(zip(map(id, parameters), values, strict=True)))


def weight_groups(policy: nn.Module, gathered: Iterable[Gathered] | None = None) -> Iterator[list[tuple[str, Tensor]]]:
    """Iterate over the policy's full weights as vLLM loads them, group by group.

    Args:
        policy: The policy; a model with adapters yields W + s B A for each adapted layer.
        gathered: Result of `gathered_groups`; None: the policy is not sharded.

    Yields:
        The (name, weight) pairs of one group. Tied weights appear once.
    """
    seen: set[int] = set()
    adapter = trained_adapter(policy) if is_adapted(policy) else None
    for group in gathered_groups(policy, Sharding()) if gathered is None else gathered:
        yield [pair for name, module in group.modules for pair in _weights(name, module, adapter, group.values, seen)]


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


def _sent(module: Any, adapter: str | None) -> Iterator[Tensor]:
    """Iterate over the parameters of one module that vLLM's weights are computed from."""
    if is_adapter_layer(module):
        yield from module.get_base_layer().parameters()
        yield from _factors(module, adapter)
    elif is_copied(module):
        yield from module.modules_to_save[adapter].parameters()
    else:
        yield from module.parameters(recurse=False)


def _factors(layer: Any, adapter: str | None) -> tuple[Tensor, Tensor]:
    """A and B of a layer, taken from iterators: ZeRO-3 would gather a weight that is read as an attribute."""
    if adapter in layer.lora_embedding_A:
        both = layer.lora_embedding_A, layer.lora_embedding_B
        A, B = (dict(factors.named_parameters())[adapter] for factors in both)
        return A, B
    return next(layer.lora_A[adapter].parameters()), next(layer.lora_B[adapter].parameters())


@torch.no_grad()
def _weights(
    name: str, module: Any, adapter: str | None, values: dict[int, Tensor], seen: set[int]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of one module, by their names in the base model."""
    if is_adapter_layer(module):
        assert adapter is not None
        for key, weight in module.get_base_layer().named_parameters():
            value = values[id(weight)]
            yield f"{name}.{key}", merged_weight(value, module, adapter, values) if key == "weight" else value
        return
    is_copy = is_copied(module)
    if is_copy:
        module = module.modules_to_save[adapter]
    for key, weight in module.named_parameters(recurse=is_copy):
        if id(weight) not in seen:
            seen.add(id(weight))
            yield f"{name}.{key}", values[id(weight)]


def merged_weight(weight: Tensor, layer: Any, adapter: str, values: dict[int, Tensor]) -> Tensor:
    """The merged weight of an adapted layer, out of place: W + s B A in float32, rounded once to the dtype of W.

    Args:
        weight: W, the full weight of the base.
        layer: peft's layer, whose adapter has the weights A, B and the scale s (alpha / rank).
        adapter: Name of the adapter.
        values: Full values of A and B, by the id of the parameter.
    """
    A, B = (values[id(factor)] for factor in _factors(layer, adapter))
    with torch.autocast(weight.device.type, enabled=False):
        delta = layer.scaling[adapter] * (B.float() @ A.float())
    if adapter in layer.lora_embedding_A or layer.fan_in_fan_out:  # W is [in, out]
        delta = delta.T
    merged: Tensor = (weight.float() + delta).to(weight.dtype)
    return merged


def state_of(policy: nn.Module, sharding: Sharding) -> dict[str, int]:
    """Checksums of this rank's shards of all weights.

    If no weight has changed, every rank has the checksums of its earlier call. Not collective.
    """
    sharding.reshard(policy)
    return checksums(map(sharding.own_shard, policy.parameters()))


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
    if len(full_shape(layer.get_base_layer().weight)) != 2:
        return "its weight is not a matrix"
    if layer.lora_bias.get(adapter):
        return "it has a bias (lora_bias)"
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if is_tied and any(layer is end for end in ends):
        return "the layer is tied to the embeddings, and vLLM would change both"
    return None
