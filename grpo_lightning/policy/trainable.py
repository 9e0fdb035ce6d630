"""Trainable weights: all of the policy, all but the first layers, or adapters next to it.

Frozen weights stay out of checkpoints, and trained ones must be wide enough to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_lightning.policy.families import freeze_unused, freeze_vision
from grpo_lightning.policy.hf import text_config
from grpo_lightning.policy.lora import add_adapters
from grpo_lightning.policy.sharding import Sharding

if TYPE_CHECKING:
    from grpo_lightning.policy.settings import PolicySettings


def limit_training(model: Any, loader: PolicySettings, sharding: Sharding) -> Any:
    """The loaded model with what is not trained frozen, and with adapters where they are requested."""
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
    """Freeze the embeddings and the first decoder layers.

    A head that is tied to the embeddings is the same weight, and frozen with them.

    Raises:
        ValueError: If there are not as many layers, or they cannot be found.
    """
    decoder, layers = decoder_layers(model)
    check_num_layers(number, len(layers))
    embeddings = [module for module in decoder.children() if isinstance(module, nn.Embedding)]
    for module in (model.get_input_embeddings(), *embeddings, *layers[:number]):
        module.requires_grad_(False)


def check_num_layers(number: int, available: int) -> None:
    """Raise ValueError if more layers are to be frozen than there are."""
    if number > available:
        raise ValueError(f"policy.freeze_layers is {number}, and the policy has {available} layers.")


def decoder_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The language model's decoder and the layers it is a stack of.

    Raises:
        ValueError: If they cannot be found.
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
    """The names of weights that are not trained; of tied ones, all their names."""
    return {name for name, weight in all_parameters(owner) if not weight.requires_grad}


def keep_frozen_out_of_checkpoints(owner: nn.Module) -> None:
    """Drop what is not trained from a module's state dict: frozen weights are loaded anew, the reference made anew.

    Under adapters nothing but trained weights stays: quantised layers write scales and codes next to their weights.
    Without adapters buffers stay.

    Only weights that are frozen now and when it is taken: those that are frozen later have been trained, those that are
    freed later will be. Loading misses nothing of what is dropped.

    A state-dict hook, because filtering in `on_save_checkpoint` breaks sharded strategies; of the owner, because the
    policy may be a user's model.
    """
    at_start = frozen_names(owner)

    def drop(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        is_left_out = left_out(module, at_start)
        for key in [key for key in state_dict if key.startswith(prefix) and is_left_out(key.removeprefix(prefix))]:
            del state_dict[key]

    loaded = ""  # what the keys begin with: the owner, or a copy of it, may be a part of what is loaded

    def remember(module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        nonlocal loaded
        loaded = prefix

    def forgive(module: nn.Module, keys: Any) -> None:
        is_left_out = left_out(module, at_start)
        keys.missing_keys[:] = [
            key for key in keys.missing_keys if not (key.startswith(loaded) and is_left_out(key.removeprefix(loaded)))
        ]

    owner.register_state_dict_post_hook(drop)
    owner.register_load_state_dict_pre_hook(remember)
    owner.register_load_state_dict_post_hook(forgive)


def left_out(owner: nn.Module, at_start: set[str]) -> Callable[[str], bool]:
    """Says of a key of the state dict whether checkpoints do without it.

    Args:
        owner: The module that trains.
        at_start: Names of weights that were frozen when the run began.
    """
    frozen = at_start & frozen_names(owner)
    trained = {name for name, _ in all_parameters(owner)} - frozen
    # The reference: one that has moved is saved apart, whole.
    references = paths(owner, "has_moved")
    adapted = paths(owner, "peft_config")
    return lambda key: key in frozen or key.startswith(references) or (key.startswith(adapted) and key not in trained)


def paths(owner: nn.Module, mark: str) -> tuple[str, ...]:
    """The prefixes of the keys of modules with this attribute."""
    return tuple(f"{path}." if path else "" for path, part in owner.named_modules() if hasattr(part, mark))


def all_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by name, tied ones by all their names."""
    return module.named_parameters(remove_duplicate=False)


NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance of neighbours, as a share of the weight: a smaller step is rounded away."""


def check_masters(settings: PolicySettings, precision: str | int | None, *, has_masters: bool) -> None:
    """Refuse a run whose steps are lost in rounding, before weights are loaded.

    AdamW moves a weight by about the learning rate in a step. A weight of 0.02 in bfloat16 moves by 8e-5 or not at all.

    Args:
        settings: What is trained, and how wide its weights are.
        precision: `trainer.precision`.
        has_masters: The strategy keeps 32-bit copies of the trained weights, which take the steps (DeepSpeed does).

    Raises:
        ValueError: If trained weights have 16 bits and no copy of 32.
    """
    if has_masters:
        return
    name = str(precision)
    adapters = " It makes float32 adapters narrow as well." if settings.lora is not None else ""
    if name in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision {name!r} gives the trained weights 16 bits, in which steps of usual learning rates are "
            f"rounded away, and this strategy keeps no copy of 32 bits.{adapters} Set it to "
            f"{'bf16-mixed' if name == 'bf16-true' else '16-mixed'!r}, or take DeepSpeed (trainer.strategy: zero2)."
        )
    dtype = dtype_name(settings)
    if dtype in NARROW and settings.lora is None:
        raise ValueError(
            f"The trained weights are {dtype} (policy.dtype, or as the model was given): a step below "
            f"{NARROW[dtype]:.1g} of a weight is rounded away, which at usual learning rates is all of them, and this "
            "strategy keeps no copy of 32 bits. Set policy.dtype to float32 with trainer.precision 'bf16-mixed', train "
            "adapters (policy.lora), or take DeepSpeed (trainer.strategy: zero2)."
        )


def compute_dtype(
    settings: PolicySettings, precision: str | int | None, deepspeed: Mapping[str, Any] | None = None
) -> str:
    """The dtype of a run's matrix products: mixed precision computes in fewer bits than the weights have.

    Args:
        settings: How wide the weights are.
        precision: `trainer.precision`.
        deepspeed: DeepSpeed's configuration, which may say so as well; None without it.
    """
    for dtype, name, key in (("bfloat16", "bf16", "bf16"), ("float16", "16", "fp16")):
        if str(precision).startswith(name) or (deepspeed or {}).get(key, {}).get("enabled") is True:
            return dtype
    return dtype_name(settings)


def dtype_name(settings: PolicySettings) -> str:
    """The dtype of the policy's weights: a loaded model's own, else the one it will have."""
    own = getattr(settings.model, "dtype", None) if hasattr(settings.model, "parameters") else None
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else settings.dtype
