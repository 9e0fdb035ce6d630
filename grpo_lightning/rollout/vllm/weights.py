"""Convert the policy's full weights to the form that vLLM loads, with checkpoint names and merged LoRA adapters.

The functions convert one decoder layer at a time. Sharded weights of the layer are gathered. An adapter is merged into
a copy of the layer's weights. So the complete weights never exist twice.

The main function is `weight_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.policy.adapters import adapter_layers, is_adapter_layer, is_expert_adapter, trained_adapter
from grpo_lightning.policy.lora_targets import expert_tensors
from grpo_lightning.policy.reference import BITS
from grpo_lightning.policy.sharding import Sharding, full_shape, is_partitioned
from grpo_lightning.policy.transformers_internals import base_model, is_adapted, is_copied

Kind = Literal["merged", "base", "adapter"]
"""The kind of weights that is sent: "merged" for full weights W + s B A, "base" for W, "adapter" for A and B."""

PART = 2**22
"""How many numbers are hashed at once, with 16 bytes of memory each."""

LAYER = re.compile(r"\.(\d+)\.")
"""The number of a decoder layer in the name of a weight."""


@dataclass(frozen=True)
class Gathered:
    """One group of modules, with the full values of their weights."""

    modules: list[tuple[str, Any]]
    """(name, module) pairs."""

    values: dict[int, Tensor]
    """Full values by the id of the parameter."""

    kind: Kind


def gathered_groups(policy: nn.Module, sharding: Sharding, kind: Kind = "merged") -> Iterator[Gathered]:
    """Gather the policy's full weights, one decoder layer at a time, and the rest (embeddings, norm, head) last.

    Collective: all ranks must iterate to the end.
    """
    sharding.reshard(policy)
    adapter = trained_adapter(policy) if is_adapted(policy) else None
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, module in _holders(policy):
        number = LAYER.search(f"{name}.")
        groups.setdefault(number[1] if number else "", []).append((name, module))
    others = groups.pop("", [])
    for modules in [*groups.values(), others]:
        parameters = list(
            {id(each): each for _, module in modules for each in _weights_to_send(module, adapter, kind)}.values()
        )
        if parameters:
            with sharding.whole_group(parameters) as values:
                yield Gathered(modules, dict(zip(map(id, parameters), values, strict=True)), kind)


def weight_groups(policy: nn.Module, gathered: Iterable[Gathered] | None = None) -> Iterator[list[tuple[str, Tensor]]]:
    """Iterate over the policy's full weights in the form that vLLM loads, one group of modules at a time.

    If the policy is not sharded, `gathered` can be None. In this case, this function itself calls `gathered_groups`,
    with the kind "merged".

    Yields:
        The (name, weight) pairs of one group. Tied weights appear once.
    """
    seen: set[int] = set()
    adapter = trained_adapter(policy) if is_adapted(policy) else None
    for group in gathered_groups(policy, Sharding()) if gathered is None else gathered:
        merged = adapter if group.kind == "merged" else None
        yield [pair for name, module in group.modules for pair in _weights(name, module, merged, group.values, seen)]


@torch.no_grad()
def adapter_weights(policy: nn.Module, gathered: Iterable[Gathered]) -> dict[str, Tensor]:
    """The LoRA matrices A and s B of all adapted layers, as CPU tensors under the names that peft gives them.

    s is LoRA's scale. vLLM gets s B in place of B, and uses the scale 1.
    """
    adapter = trained_adapter(policy)
    weights = {}
    for group in gathered:
        for name, layer in group.modules:
            if is_adapter_layer(layer):
                A, B = (group.values[id(factor)] for factor in _factors(layer, adapter))
                weights[f"base_model.model.{name}.lora_A.weight"] = A.to("cpu", copy=True).contiguous()
                weights[f"base_model.model.{name}.lora_B.weight"] = (layer.scaling[adapter] * B).cpu().contiguous()
    return weights


def _holders(policy: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules of the base that hold weights; an adapted layer is one module."""
    inside: str | None = None
    for name, module in base_model(policy).named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if is_adapter_layer(module) or is_copied(module):
            inside = f"{name}."
            yield name, module
        elif next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _weights_to_send(module: Any, adapter: str | None, kind: Kind) -> Iterator[Tensor]:
    """Iterate over the parameters of one module that must be gathered."""
    if is_adapter_layer(module):
        if kind != "adapter":
            yield from module.get_base_layer().parameters()
        if kind != "base":
            yield from _factors(module, adapter)
    elif kind == "adapter":
        return
    elif is_copied(module):
        yield from module.modules_to_save[adapter].parameters()
    else:
        yield from module.parameters(recurse=False)


def _factors(layer: Any, adapter: str | None) -> tuple[Tensor, Tensor]:
    """A and B of a layer. They are read from iterators: ZeRO-3 would gather a weight that is read as an attribute."""
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
        for key, weight in module.get_base_layer().named_parameters():
            value = values[id(weight)]
            is_merged = key == "weight" and adapter is not None
            yield f"{name}.{key}", merged_weight(value, module, adapter, values) if is_merged else value
        return
    is_copy = is_copied(module)
    if is_copy:
        module = module.modules_to_save[adapter]
    for key, weight in module.named_parameters(recurse=is_copy):
        if id(weight) not in seen:
            seen.add(id(weight))
            yield f"{name}.{key}", values[id(weight)]


def merged_weight(weight: Tensor, layer: Any, adapter: str | None, values: dict[int, Tensor]) -> Tensor:
    """The merged weight W + s B A (s = alpha / rank), out of place, in float32, rounded once to the dtype of W."""
    A, B = (values[id(factor)] for factor in _factors(layer, adapter))
    with torch.autocast(weight.device.type, enabled=False):
        delta = layer.scaling[adapter] * (B.float() @ A.float())
    if adapter in layer.lora_embedding_A or layer.fan_in_fan_out:  # W is [in, out]
        delta = delta.T
    merged: Tensor = (weight.float() + delta).to(weight.dtype)
    return merged


def state_of(policy: nn.Module, sharding: Sharding, kind: Kind = "merged") -> dict[str, int]:
    """Compute one hash per dtype over this rank's shards of the policy's parameters.

    For `kind` "merged", the hashes cover all parameters. For "adapter", the hashes cover only the matrices A and B of
    the adapter. For "base", the hashes cover all other parameters. The function is not collective.
    """
    sharding.reshard(policy)
    own: set[int] = set()
    if kind != "merged":
        name = trained_adapter(policy)
        own = {id(factor) for layer in adapter_layers(policy) for factor in _factors(layer, name)}
    sent = [p for p in policy.parameters() if kind == "merged" or (id(p) in own) == (kind == "adapter")]
    return hashes(map(sharding.own_shard, sent))


def hashes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Compute one hash per dtype, over the bits of all tensors of this dtype.

    The bits of each number are read as one integer. This integer is multiplied by a factor for the number's position.
    The function then sums the products. Without factors, changes of several numbers could cancel each other in the sum.
    """
    found: dict[str, int] = {}
    by_device: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        if is_partitioned(tensor):
            continue
        name = str(tensor.dtype)
        for part in tensor.detach().view(BITS[tensor.element_size()]).flatten().split(PART):
            if part.device not in by_device or len(by_device[part.device]) < len(part):
                by_device[part.device] = factors(len(part), part.device)
            total = int((by_device[part.device][: len(part)] * part).sum())
            # The order of the parts matters, too.
            found[name] = (found.get(name, 0) * 6364136223846793005 + total) % 2**64
    return found


def factors(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, int64 [count], the same in every call. Products and sums wrap around at 2^64."""
    numbers = torch.arange(1, count + 1, device=device) * -7046029254386353131
    numbers ^= numbers >> 29
    numbers *= -4658895280553007687
    numbers ^= numbers >> 32
    return numbers | 1


def check_policy(policy: Any) -> None:
    """Check that vLLM can load the weights of a policy under the names that `weight_groups` gives them.

    Raises:
        ValueError: If one parameter holds all experts of a layer, if the weights are quantized, or if an adapter cannot
            be merged as W + s B A.
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
            "VLLMEngine does not sample quantized policies yet: set policy.quantization to none, or use LocalEngine."
        )
    if not is_adapted(policy):
        return
    name = trained_adapter(policy)
    for path, layer in model.named_modules():
        if is_adapter_layer(layer) and (reason := not_merged_reason(model, layer, name)):
            raise ValueError(f"VLLMEngine cannot merge the adapter of {path}: {reason}. Use LocalEngine.")


def rank_of(policy: Any) -> int:
    """The largest LoRA rank among the adapter's layers."""
    name = trained_adapter(policy)
    return max(full_shape(_factors(layer, name)[0])[0] for layer in adapter_layers(policy))


def check_adapter(policy: Any) -> None:
    """Check that vLLM can load the policy's adapter as an adapter, next to the base weights.

    Raises:
        ValueError: If there is no adapter, or it trains complete modules (`modules_to_save`), the embeddings or the
            head.
    """
    if not is_adapted(policy):
        raise ValueError("engine.enable_lora is true, and the policy has no adapters: set policy.lora, or remove it.")
    model = base_model(policy)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in model.named_modules():
        reason = None
        if is_copied(module):
            reason = "is trained completely (policy.lora.modules_to_save)"
        elif is_adapter_layer(module) and any(module is end for end in ends):
            reason = "is the embeddings or the head"
        if reason:
            raise ValueError(
                f"engine.enable_lora is true, and {path} {reason}, which vLLM does not take as an adapter: set "
                "engine.enable_lora to false."
            )


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
