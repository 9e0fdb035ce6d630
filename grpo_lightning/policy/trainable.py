"""Trainable parameters: all weights, all but the first layers, or adapters.

Also keeps frozen weights out of checkpoints, and refuses dtypes in which updates are lost to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_lightning.policy.adapters import trained_adapter
from grpo_lightning.policy.families import freeze_unused, freeze_vision
from grpo_lightning.policy.hf import is_adapted, text_config
from grpo_lightning.policy.lora_injection import add_adapters, finish_adapters
from grpo_lightning.policy.sharding import Sharding

if TYPE_CHECKING:
    from grpo_lightning.policy.settings import PolicySettings


def limit_training(model: Any, loader: PolicySettings, sharding: Sharding) -> Any:
    """Freeze the weights of a loaded model that are not trained, and add adapters if requested.

    A model that was given with adapters keeps them, with their own dropout.
    """
    if is_adapted(model) and loader.has_adapters_in_memory:
        return finish_adapters(model, model.peft_config[trained_adapter(model)].lora_dropout)
    if loader.freeze_vision_modules:
        freeze_vision(model)
    if loader.freeze_layers:
        freeze_first_layers(model, loader.freeze_layers)
    if loader.lora is None:
        freeze_unused(model)
        return model
    with sharding.building():
        return add_adapters(model, loader.lora)


def freeze_first_layers(model: Any, number: int) -> None:
    """Freeze the embeddings and the first `number` decoder layers.

    A head that is tied to the embeddings is frozen with them.

    Raises:
        ValueError: If the model has fewer than `number` layers, or its layers cannot be found.
    """
    decoder, layers = decoder_layers(model)
    check_num_layers(number, len(layers))
    embeddings = [module for module in decoder.children() if isinstance(module, nn.Embedding)]
    for module in (model.get_input_embeddings(), *embeddings, *layers[:number]):
        module.requires_grad_(False)


def check_num_layers(number: int, available: int) -> None:
    """Raise ValueError if more layers are to be frozen than the model has."""
    if number > available:
        raise ValueError(f"policy.freeze_layers is {number}, and the policy has {available} layers.")


def decoder_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The language model's decoder and its list of layers.

    Raises:
        ValueError: If the layers cannot be found.
    """
    decoder, count = model.get_decoder(), text_config(model).num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return decoder, module
    raise ValueError(
        f"policy.freeze_layers: the layers of {type(model).__name__} cannot be found: its decoder has no list of "
        f"{count} modules. Freeze them yourself (`requires_grad_(False)`) and give the model."
    )


def frozen_names(owner: nn.Module) -> set[str]:
    """Names of frozen weights, including all names of tied weights."""
    return {name for name, weight in all_parameters(owner) if not weight.requires_grad}


def keep_frozen_out_of_checkpoints(owner: nn.Module) -> None:
    """Drop frozen weights and the reference from a module's state dict; resumed runs load or make them again.

    In a policy with adapters, only the trained weights stay in the state dict, because quantised layers write scales
    and codes next to their weights. In a policy without adapters, buffers stay as well.

    A weight is dropped only if it is frozen both when this function is called and when the state dict is taken. A
    weight that is frozen or unfrozen in between is trained in a part of the run, so the state dict keeps it. Loading
    does not report dropped keys as missing.

    The weights are dropped by a state-dict hook, because filtering in `on_save_checkpoint` breaks sharded strategies.
    The hook belongs to the owner, the Lightning module, because the policy may be a user's model.
    """
    at_start = frozen_names(owner)

    def drop(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        is_dropped = dropped_keys_filter(module, at_start)
        for key in [key for key in state_dict if key.startswith(prefix) and is_dropped(key.removeprefix(prefix))]:
            del state_dict[key]

    loaded = ""  # prefix of the owner's keys: the owner, or a copy of it, may be a submodule of the loaded module

    def remember(module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        nonlocal loaded
        loaded = prefix

    def forgive(module: nn.Module, keys: Any) -> None:
        is_dropped = dropped_keys_filter(module, at_start)
        keys.missing_keys[:] = [
            key for key in keys.missing_keys if not (key.startswith(loaded) and is_dropped(key.removeprefix(loaded)))
        ]

    owner.register_state_dict_post_hook(drop)
    owner.register_load_state_dict_pre_hook(remember)
    owner.register_load_state_dict_post_hook(forgive)


def dropped_keys_filter(owner: nn.Module, at_start: set[str]) -> Callable[[str], bool]:
    """Make the predicate that is True for state-dict keys that checkpoints do not contain.

    Args:
        owner: The Lightning module.
        at_start: Names of weights that were frozen when the run began.
    """
    frozen = at_start & frozen_names(owner)
    trained = {name for name, _ in all_parameters(owner)} - frozen
    # A reference that was updated is saved separately, unsharded.
    references = key_prefixes(owner, "has_moved")
    adapted = key_prefixes(owner, "peft_config")
    return lambda key: key in frozen or key.startswith(references) or (key.startswith(adapted) and key not in trained)


def key_prefixes(owner: nn.Module, mark: str) -> tuple[str, ...]:
    """State-dict key prefixes of submodules that have the attribute `mark`."""
    return tuple(f"{path}." if path else "" for path, part in owner.named_modules() if hasattr(part, mark))


def all_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by name; tied ones under each of their names."""
    return module.named_parameters(remove_duplicate=False)


NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff by dtype: the largest update, as a fraction of the weight, that can be lost to rounding."""


def check_masters(settings: PolicySettings, precision: str | int | None, *, has_masters: bool) -> None:
    """Refuse to train 16-bit weights without float32 master copies: their updates would be lost to rounding.

    The check runs before weights are loaded. AdamW changes a weight by about the learning rate per step, but a bfloat16
    weight of 0.02 changes by at least 1.2e-4 or not at all.

    Args:
        settings: The policy's settings, which give the dtype of the weights and the adapters.
        precision: `trainer.precision`.
        has_masters: True if the strategy updates 32-bit master copies of the trained weights, as DeepSpeed does.

    Raises:
        ValueError: If trained weights have 16 bits and no 32-bit master copies.
    """
    if has_masters:
        return
    name = str(precision)
    adapters = " It converts float32 adapters as well." if settings.trains_adapters else ""
    if name in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision {name!r} converts the trained weights to 16 bits, in which updates of usual learning "
            f"rates are lost to rounding, and this strategy keeps no 32-bit masters.{adapters} Set it to "
            f"{'bf16-mixed' if name == 'bf16-true' else '16-mixed'!r}, or use DeepSpeed (trainer.strategy: zero2)."
        )
    if settings.has_adapters_in_memory:
        narrow = {weight.dtype for weight in settings.model.parameters() if weight.requires_grad} - {torch.float32}
        if narrow:
            dtype = str(narrow.pop()).removeprefix("torch.")
            raise ValueError(
                f"The adapter of the policy is {dtype}, in which updates of usual learning rates are lost to rounding, "
                "and this strategy keeps no 32-bit masters. Leave get_peft_model's autocast_adapter_dtype at True, or "
                "use DeepSpeed (trainer.strategy: zero2)."
            )
    dtype = dtype_name(settings)
    if dtype in NARROW and not settings.trains_adapters:
        raise ValueError(
            f"The trained weights are {dtype} (policy.dtype, or the dtype of the given model): updates below "
            f"{NARROW[dtype]:.1g} of a weight are lost to rounding, which at usual learning rates is all of them, and "
            "this strategy keeps no 32-bit masters. Set policy.dtype to float32 with trainer.precision 'bf16-mixed', "
            "train adapters (policy.lora), or use DeepSpeed (trainer.strategy: zero2)."
        )


def compute_dtype(
    settings: PolicySettings, precision: str | int | None, deepspeed: Mapping[str, Any] | None = None
) -> str:
    """The dtype in which a run computes matrix products.

    This is the 16-bit dtype of `trainer.precision` or of DeepSpeed's configuration, or else the dtype of the weights.

    Args:
        settings: The policy's settings, which give the dtype of the weights.
        precision: `trainer.precision`.
        deepspeed: DeepSpeed's configuration, which may also set the precision; None without DeepSpeed.
    """
    for dtype, name, key in (("bfloat16", "bf16", "bf16"), ("float16", "16", "fp16")):
        if str(precision).startswith(name) or (deepspeed or {}).get(key, {}).get("enabled") is True:
            return dtype
    return dtype_name(settings)


def dtype_name(settings: PolicySettings) -> str:
    """The dtype of the policy's weights: that of a model in memory, else `policy.dtype`."""
    own = getattr(settings.model, "dtype", None) if hasattr(settings.model, "parameters") else None
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else settings.dtype
