"""Find and switch peft's adapters, and compare the policy with its base.

The trained adapter keeps the name with which it was created or loaded. A second adapter, `STARTING`, is a frozen copy
of the initial adapter.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.precision import NARROW, compute_like
from grpo_lightning.policy.transformers_internals import is_copied

STARTING = "reference"
"""peft's name of the frozen copy of the initial adapter. The reference runs with this copy."""

BASE_IS_COMPUTED = ("pissa", "olora", "loftq")
"""Initializations for which peft recomputes the base's weights when it loads an adapter."""


def trained_adapter(policy: Any) -> str:
    """Name of the trained adapter in peft."""
    names: Iterator[str] = iter(policy.peft_config)
    return next(name for name in names if name != STARTING)


def adapter_layers(model: nn.Module) -> Iterator[Any]:
    """Iterate over the layers with adapters."""
    return (module for module in model.modules() if is_adapter_layer(module))


def switched_modules(model: nn.Module) -> Iterator[Any]:
    """Iterate over the layers with adapters, and the layers that an adapter copies."""
    return (module for module in model.modules() if is_adapter_layer(module) or is_copied(module))


def is_adapter_layer(module: nn.Module) -> bool:
    """True for peft's wrapper of a layer. Only attributes are checked, because peft may not be installed."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def is_expert_adapter(layer: Any) -> bool:
    """True for peft's wrapper of an expert tensor."""
    return hasattr(layer, "parameter_name")


def layer_weights(layer: Any, adapter: str) -> Iterator[nn.Parameter]:
    """Iterate over all weights that an adapter has in a layer. The layer must be one of `switched_modules`."""
    for kind in layer.adapter_layer_names:
        yield from weights_of(layer, kind, adapter)


def weights_of(layer: Any, kind: str, adapter: str) -> Iterator[nn.Parameter]:
    """Iterate over the weights of one kind, for example "lora_A", that an adapter has in a layer."""
    parts = getattr(layer, kind)
    if adapter in parts:
        yield from parts[adapter].parameters() if isinstance(parts[adapter], nn.Module) else [parts[adapter]]


class UpdateDropout(nn.Dropout):
    """Dropout that is active only in forward passes with a gradient.

    A recompute (activation checkpointing) drops the same activations as the forward pass that it repeats.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set some inputs to 0 and scale up the others."""
        return nn.functional.dropout(input, self.p, self.training and torch.is_grad_enabled())


def set_dropout(policy: Any, rate: float, adapter: str | None = None) -> None:
    """Set the dropout rate of an adapter.

    None means the trained adapter.
    """
    adapter = adapter or trained_adapter(policy)
    for layer in adapter_layers(policy):
        layer.lora_dropout[adapter] = UpdateDropout(rate) if rate else nn.Identity()
    policy.peft_config[adapter].lora_dropout = rate


def narrow_copies(adapted: Any, adapter: str | None = None) -> list[tuple[nn.Module, nn.Module]]:
    """Pairs (copy, original) of the layers that an adapter copies (`modules_to_save`), if the original is in 16 bits.

    None means the trained adapter.
    """
    name = adapter or trained_adapter(adapted)
    return [
        (module.modules_to_save[name], module.original_module)
        for module in filter(is_copied, adapted.modules())
        if name in module.modules_to_save
        and any(weight.dtype in NARROW for weight in module.original_module.parameters())
    ]


def widen_copies(adapted: Any, adapter: str | None = None) -> bool:
    """Convert an adapter's copies of 16-bit layers (`modules_to_save`) to float32.

    The copies still compute in the dtype of their originals, so that the policy initially equals its base.

    Returns:
        True if there are such copies. If float32 values were loaded into the copies before this call, these values were
        rounded to 16 bits and must be loaded again.
    """
    copies = narrow_copies(adapted, adapter)
    for copied, original in copies:
        compute_like(copied.to(torch.float32), original)
    return bool(copies)


@contextlib.contextmanager
def using_adapter(policy: nn.Module, adapter: str | None) -> Iterator[nn.Module]:
    """Context in which the policy runs with the given adapter, or without adapters (None).

    peft's own methods for switching are not used. They also set `requires_grad` of the trained adapter to False, and a
    sharded strategy may then never train the adapter.
    """
    layers = list(switched_modules(policy))
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = [adapter]
    try:
        yield policy
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


@torch.no_grad()
def adds_nothing(policy: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """True if the trained adapter does not change the policy yet.

    In this case, B A is 0 in all layers, DoRA's magnitudes are the norms of the base's rows, and copied layers equal
    their originals. `dtype` is as in `set_magnitude`.
    """
    name = trained_adapter(policy)

    def is_zero(layer: Any, kind: str) -> bool:
        return not any(bool(weight.any()) for weight in weights_of(layer, kind, name))

    def has_base_norms(layer: Any) -> bool:
        if name not in layer.lora_magnitude_vector:
            return True
        own, norms = layer.lora_magnitude_vector[name].weight, copy.deepcopy(layer.lora_magnitude_vector[name])
        set_magnitude(layer, norms, name, dtype)
        return torch.equal(norms.weight.to(own.dtype), own)

    def is_original(module: Any) -> bool:
        trained, originals = layer_weights(module, name), module.original_module.parameters()
        return all(torch.equal(one, other.to(one.dtype)) for one, other in zip(trained, originals, strict=True))

    # A bias is part of `lora_B`. In an adapter of embeddings, A starts at 0.
    return all(
        is_zero(layer, "lora_B")
        and (is_zero(layer, "lora_embedding_A") or is_zero(layer, "lora_embedding_B"))
        and has_base_norms(layer)
        for layer in adapter_layers(policy)
    ) and all(map(is_original, filter(is_copied, policy.modules())))


def set_magnitude(layer: Any, magnitude: Any, adapter: str, dtype: torch.dtype | None = None) -> None:
    """Set one of peft's DoRA magnitudes to the norms of the rows of W + s B A, computed in the dtype of the run.

    In every forward pass, peft computes these norms and divides the magnitude by them. The policy equals its base only
    if the magnitude was rounded in the same way as the norms. `dtype` is the dtype that the strategy converts all
    weights to; None if it converts none.
    """
    from peft.utils.integrations import dequantize_module_weight

    is_embedding = adapter not in layer.lora_A
    A = layer.lora_embedding_A[adapter] if is_embedding else layer.lora_A[adapter].weight
    B = layer.lora_embedding_B[adapter] if is_embedding else layer.lora_B[adapter].weight
    base = layer.get_base_layer()
    if dtype is not None:
        weight = dequantize_module_weight(base).detach().to(dtype)
        base, A, B = nn.Module(), A.to(dtype), B.to(dtype)
        base.weight = nn.Parameter(weight, requires_grad=False)
    magnitude.update_layer(base_layer=base, lora_A=A, lora_B=B, scaling=layer.scaling[adapter])
    magnitude.to(torch.float32)


def add_starting_adapter(policy: Any) -> None:
    """Add a frozen copy of the trained adapter, for the reference.

    The layers of the trained adapter must not be sharded yet.
    """
    name = trained_adapter(policy)
    config = copy.deepcopy(policy.peft_config[name])
    # PiSSA, OLoRA and LoftQ subtract the initial adapter from the base. This was already done when the trained adapter
    # was made, and must not be repeated.
    config.init_lora_weights, config.inference_mode = False, True
    with torch.random.fork_rng():
        policy.add_adapter(STARTING, config)
    widen_copies(policy, STARTING)  # before copying, because the trained copies are float32
    with torch.no_grad():
        for module in switched_modules(policy):
            for new, given in zip(layer_weights(module, STARTING), layer_weights(module, name), strict=True):
                new.copy_(given).requires_grad_(False)
    set_dropout(policy, 0.0, STARTING)


def base_weights(policy: nn.Module) -> Iterator[Tensor]:
    """Iterate over the frozen weights of the base model.

    Quantized weights are skipped. Weights that PiSSA, OLoRA or LoftQ changed are skipped too. The last bits of the
    skipped weights depend on the device and the number of threads, so checksums of these weights cannot be compared
    between machines.
    """
    configs: Any = policy.peft_config
    computed: set[int] = set()
    if str(configs[trained_adapter(policy)].init_lora_weights).lower().startswith(BASE_IS_COMPUTED):
        computed = {id(weight) for layer in adapter_layers(policy) for weight in layer.base_layer.parameters()}
    for name, weight in policy.named_parameters():
        is_given = weight.is_floating_point() and id(weight) not in computed
        if is_given and not weight.requires_grad and f".{STARTING}." not in name:
            yield weight


def untie(policy: Any) -> None:
    """Untie the embeddings and the head if at least one of the two has an adapter.

    If the two stayed tied, merging an adapter into the head would also change the embeddings, and merging an adapter
    into the embeddings would also change the head.
    """
    base = policy.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if not any(map(is_adapter_layer, ends)):
        return
    embeddings, head = (end.base_layer if is_adapter_layer(end) else end for end in ends)
    if head.weight is not embeddings.weight:
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    base.config.tie_word_embeddings = base.config.get_text_config(decoder=True).tie_word_embeddings = False
    if hasattr(base, "all_tied_weights_keys"):  # transformers 5 saves only one weight of each pair in this dict
        base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)
