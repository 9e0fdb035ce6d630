"""Frozen layers: the first ones of the policy are not trained, and checkpoints hold what is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import nn

from grpo_lightning.policy.inputs import text_config


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

    Under adapters nothing but trained weights stays: quantised layers write scales and codes beside their weights.
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
    """What the keys of modules with this attribute begin with."""
    return tuple(f"{path}." if path else "" for path, part in owner.named_modules() if hasattr(part, mark))


def all_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters by name, tied ones by all their names."""
    return module.named_parameters(remove_duplicate=False)
