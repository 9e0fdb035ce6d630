"""Trainable parameters: all weights, all weights except those of the first layers, or adapters.

This file also keeps frozen weights out of checkpoints, and refuses dtypes in which updates are lost to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_lightning.policy.adapters import narrow_copies, trained_adapter
from grpo_lightning.policy.families import family_of, freeze_unused, freeze_vision, unused_parts, vision_parts
from grpo_lightning.policy.lora_injection import add_adapters, finish_adapters
from grpo_lightning.policy.precision import NARROW
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import base_model, is_adapted, text_config

if TYPE_CHECKING:
    from grpo_lightning.policy.settings import PolicySettings


def limit_training(
    model: Any, loader: PolicySettings, sharding: Sharding, converted_dtype: torch.dtype | None = None
) -> Any:
    """Freeze the weights that a run does not train, and add adapters if the settings request them.

    A model that already has adapters keeps them, with their own dropout.
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
        return add_adapters(model, loader.lora, converted_dtype)


def freeze_first_layers(model: Any, number: int) -> None:
    """Freeze the embeddings and the first `number` decoder layers.

    A head that is tied to the embeddings is frozen with them.

    Raises:
        ValueError: If the model has fewer than `number` layers, or its layers cannot be found.
    """
    for module in first_layers(model, number):
        module.requires_grad_(False)


def first_layers(model: Any, number: int) -> list[nn.Module]:
    """The embeddings and the first `number` decoder layers. Raises: see `freeze_first_layers`."""
    decoder, layers = decoder_layers(model)
    check_num_layers(number, len(layers))
    embeddings = [module for module in decoder.children() if isinstance(module, nn.Embedding)]
    return [model.get_input_embeddings(), *embeddings, *layers[:number]]


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


@dataclass
class FrozenWeights:
    """Names of the weights that were frozen when the run began, and which of them were trained since.

    A deep copy of the Lightning module shares this record. Only the original module updates the record.
    """

    at_start: set[str]
    """Names of the weights that were frozen when the policy was loaded."""

    unfrozen: set[str] = field(default_factory=set)
    """Names in `at_start` that were trained since, in this run or in the run that it resumes."""

    loaded: str = ""
    """Prefix of the owner's keys while a state dict is loaded: the owner, or a copy of it, may be a submodule of the
    loaded module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeights:
        """The record itself."""
        return self

    def record_trained(self, owner: nn.Module) -> None:
        """Record which weights are trained now. Must be called before every optimizer step."""
        self.unfrozen |= self.at_start - frozen_names(owner)

    def recall_trained(self, state: Mapping[str, Any] | None) -> None:
        """Add the names that a checkpoint's run recorded. Must be called before the checkpoint's weights are loaded.

        Args:
            state: The entry "grpo" of the checkpoint; None for a checkpoint of another module.
        """
        self.unfrozen |= set((state or {}).get("unfrozen", ()))

    def never_trained(self, owner: nn.Module) -> set[str]:
        """Names of the weights that were frozen at the start, are frozen now, and were not trained in between."""
        return (self.at_start & frozen_names(owner)) - self.unfrozen


def keep_frozen_out_of_checkpoints(owner: nn.Module) -> FrozenWeights:
    """Drop frozen weights and the reference from a module's state dict. Resumed runs load or make them again.

    If the policy has adapters, only the trained weights stay in the state dict. If the policy has no adapters, trained
    weights and buffers stay.

    A weight is dropped only if it was never trained. Loading does not report dropped keys as missing.

    The weights are dropped by a state-dict hook, because filtering in `on_save_checkpoint` breaks sharded strategies.
    The hook belongs to the owner, the Lightning module, because the policy may be a user's model.
    """
    frozen = FrozenWeights(frozen_names(owner))
    # Partial functions can be pickled with the owner.
    owner.register_state_dict_post_hook(functools.partial(_drop_frozen, frozen))
    owner.register_load_state_dict_pre_hook(functools.partial(_remember_prefix, frozen))
    owner.register_load_state_dict_post_hook(functools.partial(_forgive_frozen, frozen))
    return frozen


def _drop_frozen(
    frozen: FrozenWeights, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: drop the keys that are left out of checkpoints."""
    is_dropped = dropped_keys_filter(module, frozen)
    for key in [key for key in state_dict if key.startswith(prefix) and is_dropped(key.removeprefix(prefix))]:
        del state_dict[key]


def _remember_prefix(frozen: FrozenWeights, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
    """Hook before loading: remember the prefix, which `_forgive_frozen` does not get."""
    frozen.loaded = prefix


def _forgive_frozen(frozen: FrozenWeights, module: nn.Module, keys: Any) -> None:
    """Hook after loading: do not report dropped keys as missing."""
    is_dropped, prefix = dropped_keys_filter(module, frozen), frozen.loaded
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if not (key.startswith(prefix) and is_dropped(key.removeprefix(prefix)))
    ]


def dropped_keys_filter(owner: nn.Module, frozen: FrozenWeights) -> Callable[[str], bool]:
    """Make the predicate that is True for a key of the state dict if checkpoints leave this key out."""
    never_trained = frozen.never_trained(owner)
    trained = {name for name, _ in all_parameters(owner)} - never_trained
    # A reference that was updated is saved separately, unsharded.
    references = key_prefixes(owner, "has_moved")
    adapted = key_prefixes(owner, "peft_config")
    return lambda key: (
        key in never_trained or key.startswith(references) or (key.startswith(adapted) and key not in trained)
    )


def key_prefixes(owner: nn.Module, mark: str) -> tuple[str, ...]:
    """State-dict key prefixes of submodules that have the attribute `mark`."""
    return tuple(f"{path}." if path else "" for path, part in owner.named_modules() if hasattr(part, mark))


def all_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by name. Tied parameters occur under each of their names."""
    return module.named_parameters(remove_duplicate=False)


def check_masters(settings: PolicySettings, precision: str | int | None, *, has_masters: bool) -> None:
    """Refuse to train 16-bit weights without float32 master copies.

    Small updates would be lost to rounding. A bfloat16 weight of 0.02 changes by at least 1.2e-4 or not at all.

    Raises:
        ValueError: If the run trains 16-bit weights without 32-bit master copies.
    """
    name = str(precision)
    if has_masters or name in ("64-true", "64"):  # with precision 64, all weights have 64 bits
        return
    adapters = ", also float32 adapters," if settings.trains_adapters else ""
    if name in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision {name!r} converts the trained weights{adapters} to 16 bits, and this strategy keeps no "
            "32-bit master copies: updates at usual learning rates would be lost to rounding. Set it to "
            f"{'bf16-mixed' if name == 'bf16-true' else '16-mixed'!r}, or use DeepSpeed (trainer.strategy: zero2)."
        )
    if settings.lora is not None:  # new adapters are float32, and so are copies of layers
        return
    if isinstance(settings.model, nn.Module):
        trained = trained_dtypes(settings)
    else:
        trained = {"all of them": getattr(torch, settings.dtype)}
    narrow = [(weight, dtype) for weight, dtype in trained.items() if dtype in NARROW]
    if not narrow:
        return
    (weight, dtype), share = narrow[0], f"{len(narrow)} of {len(trained)}" if len(trained) > 1 else "all of them"
    shown = str(dtype).removeprefix("torch.")
    if settings.has_adapters_in_memory:
        raise ValueError(
            f"The adapter of the policy is {shown} ({share} weights, for example {weight}), and this strategy keeps no "
            "32-bit master copies: updates at usual learning rates would be lost to rounding. Leave get_peft_model's "
            "autocast_adapter_dtype at True, or use DeepSpeed (trainer.strategy: zero2)."
        )
    given = f"{share}, for example {weight}" if len(trained) > 1 else "policy.dtype"
    raise ValueError(
        f"The trained weights are {shown} ({given}), and this strategy keeps no 32-bit master copies. Updates below "
        f"{NARROW[dtype]:.1g} of a weight would be lost to rounding, which at usual learning rates is all of them. Set "
        "policy.dtype to float32, or load the given model in float32, with trainer.precision 'bf16-mixed'; train "
        "adapters (policy.lora); or use DeepSpeed (trainer.strategy: zero2)."
    )


def trained_dtypes(settings: PolicySettings) -> dict[str, torch.dtype]:
    """Name and dtype of each weight that a run trains.

    The policy must be given as a model (`settings.model`).

    An adapter's copies of 16-bit layers (`modules_to_save`) are left out. They become float32 (`widen_copies`).
    """
    model = settings.model
    frozen = {id(weight) for module in frozen_modules(model, settings) for weight in module.parameters()}
    if settings.has_adapters_in_memory:
        frozen |= {id(weight) for copied, _ in narrow_copies(model) for weight in copied.parameters()}
    return {
        name: weight.dtype
        for name, weight in model.named_parameters()
        if weight.requires_grad and id(weight) not in frozen
    }


def frozen_modules(model: Any, settings: PolicySettings) -> Iterator[nn.Module]:
    """Iterate over the modules that `limit_training` freezes in a model without adapters."""
    if settings.trains_adapters:
        return
    family = family_of(base_model(model).config)
    if family is not None:
        yield from unused_parts(model).values()
        yield from vision_parts(model, family) if settings.freeze_vision_modules else ()
    if settings.freeze_layers:
        yield from first_layers(model, settings.freeze_layers)


def compute_dtype(
    settings: PolicySettings, precision: str | int | None, deepspeed: Mapping[str, Any] | None = None
) -> str:
    """The dtype in which a run computes matrix products.

    This is the 16-bit dtype of `trainer.precision` or of DeepSpeed's configuration. If neither sets one, a run with
    DeepSpeed computes in float32, and other runs compute in the dtype of the weights.
    """
    for dtype, name, key in (("bfloat16", "bf16", "bf16"), ("float16", "16", "fp16")):
        if str(precision).startswith(name) or (deepspeed or {}).get(key, {}).get("enabled") is True:
            return dtype
    return dtype_name(settings) if deepspeed is None else "float32"


def dtype_name(settings: PolicySettings) -> str:
    """The name of the dtype of the policy's weights."""
    own = getattr(settings.model, "dtype", None) if hasattr(settings.model, "parameters") else None
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else settings.dtype
