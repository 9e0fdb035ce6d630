"""Find the layers that get LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from grpo_lightning.policy.sharding import full_shape

NOT_LANGUAGE = ("visual", "vision", "image", "audio", "projector", "merger", "connector")
"""Substrings of the names of modules outside the language model, for models that do not declare their decoder."""


def language_modules(model: Any) -> dict[str, nn.Module]:
    """Every module of the decoder, except the output head. The keys of the result are the names of the modules."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module is not head
        and id(module) in inside
        and not (decoder is model and any(part in name for part in NOT_LANGUAGE))
    }


def expert_tensors(model: Any) -> list[str]:
    """Names, without module paths, of the parameters that hold all experts of a layer in one tensor."""
    return sorted({name.rpartition(".")[2] for name in all_experts(model)})


def all_experts(model: Any) -> dict[str, nn.Parameter]:
    """Parameters, by name, that each hold all experts of a layer in one tensor [experts, ..., ...]."""
    if not _has_experts(model.get_decoder().config.to_dict()):
        return {}
    return {
        f"{path}.{name}": weight
        for path, module in language_modules(model).items()
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for name, weight in module.named_parameters(recurse=False)
        if len(full_shape(weight)) == 3
    }


def expert_targets(model: Any, names: Iterable[str] | None, saved: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Select the expert tensors that get adapters, by name.

    Raises:
        ValueError: If a suffix matches no expert tensor.
    """
    prefixes = tuple(f"{name}." for name in saved)
    experts = {name: weight for name, weight in all_experts(model).items() if not name.startswith(prefixes)}
    names = list(names or ())
    for end in names:
        if not any(f".{name}".endswith(f".{end}") for name in experts):
            ends = sorted({".".join(name.split(".")[-2:]) for name in experts})
            available = f"Available: {', '.join(ends)}." if ends else "The policy has no tensors of experts: remove it."
            raise ValueError(f"policy.lora.target_parameters: no expert tensor ends in {end!r}. {available}")
    return {name: weight for name, weight in experts.items() if any(f".{name}".endswith(f".{end}") for end in names)}


def _has_experts(settings: Mapping[Any, Any]) -> bool:
    """True if a config has a field with "expert" in its name that is neither 0 nor empty.

    Fields of nested dicts count too. Their names can be numbers, as in `id2label`.
    """
    return any(
        _has_experts(value) if isinstance(value, Mapping) else "expert" in str(name) and bool(value)
        for name, value in settings.items()
    )


def names_mistaken_for_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of linear layers that peft mistakes for experts.

    To load old adapters, peft redirects the names of single experts to the tensor of all experts, even if dense layers
    or shared experts have these names.
    """
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # peft is too old for this conversion, or is missing (in `plan`)
        return set()
    taken = set()
    names = list(names)
    for end in {name.rpartition(".")[2] for name in names}:
        config = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
            is_taken = end not in (config.target_modules or ())
        except ValueError:  # peft refuses one of two fused projections without the other
            is_taken = True
        if is_taken:
            taken |= {name for name in names if name.rpartition(".")[2] == end}
    return taken


def missing_adapter_reason(model: Any, names: Iterable[str]) -> str | None:
    """Reason why parts of a mixture of experts get no adapter; None if the model has no fused expert tensors."""
    tensors = expert_tensors(model)
    if not tensors:
        return None
    text = f"experts get no adapter, because all experts of a layer are one tensor ({', '.join(tensors)})"
    if taken := names_mistaken_for_experts(model, names):
        parts = sorted({".".join(name.split(".")[-2:]) for name in taken})
        text += f"; {', '.join(parts)} get none either, because peft mistakes their names for experts"
    return text


MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types whose kernels read the weight of `out_proj` without calling this layer, so that peft refuses the
layer."""


def saved_modules(
    model: Any, names: Iterable[str] | None, setting: str = "policy.lora.modules_to_save"
) -> dict[str, nn.Module]:
    """Select the modules to train completely, by suffixes of their names.

    A suffix consists of whole components of a name.

    Raises:
        ValueError: If a suffix matches no module.
        ValueError: If a suffix matches a module without weights.
        ValueError: If a suffix matches a module with quantized weights.
        ValueError: If a suffix matches a module with weights that are tied to the weights of another module.
        ValueError: If peft would select more modules than this function selects. In peft, a suffix can start within a
            component, so `head` also matches `lm_head`.
        ValueError: If a selected module is part of another selected module.
    """
    found: dict[str, nn.Module] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for end in names or ():
        matched = {name: module for name, module in modules.items() if f".{name}".endswith(f".{end}")}
        if not matched:
            ends = sorted({name.rpartition(".")[2] for name, module in modules.items() if not any(module.children())})
            raise ValueError(f"{setting}: no module of the policy ends in {end!r}. Available: {', '.join(ends)}.")
        if more := [name for name in modules if name.endswith(end) and name not in matched]:
            raise ValueError(
                f"{setting}: peft takes {end!r} for {more[0]} as well. Give a longer name: {next(iter(matched))!r}."
            )
        for name, module in matched.items():
            check_saved(model, name, module, setting)
        found |= matched
    if inside := next((name for name in found for other in found if name.startswith(f"{other}.")), None):
        raise ValueError(f"{setting}: {inside} is part of another module of the list. Remove it.")
    return found


def check_saved(model: nn.Module, name: str, module: nn.Module, setting: str) -> None:
    """Raise ValueError if a module has no weights, or if any of its weights are tied or quantized."""
    own = {id(weight) for weight in module.parameters()}
    if any(not weight.is_floating_point() for weight in module.parameters()):
        raise ValueError(f"{setting}: the weights of {name} are quantized, which cannot be trained. Remove it.")
    if not own:
        raise ValueError(f"{setting}: {name} has no weights to train. Remove it.")
    parts = set(module.modules())
    inside = {key for key, part in model.named_modules(remove_duplicate=False) if part in parts}
    for key, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) in own and key.rpartition(".")[0] not in inside:
            raise ValueError(
                f"{setting}: {name} is tied to {key} (tie_word_embeddings). Only the copy would be trained, and the "
                "exported model would tie the two again. Remove the name; or untie the policy before training: give "
                "the head weights of its own, set tie_word_embeddings to false in the config, and save the model."
            )


def targets(model: Any, names: list[str] | None = None, saved: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Select the linear layers of the language model that get adapters, and also the head if a suffix matches it.

    Args:
        model: The base model.
        names: Suffixes of layer names. A layer is selected if its name ends in one of the suffixes. If `names` is None,
            the head is not selected, and every other layer that can have an adapter is selected.
        saved: Names of modules that are trained completely. Neither these modules nor the layers inside them get an
            adapter.

    Raises:
        ValueError: If a suffix matches no layer, or matches a layer that cannot have an adapter.
    """
    prefixes = tuple(f"{name}." for name in saved)
    layers = {name: layer for name, layer in language_layers(model).items() if not f"{name}.".startswith(prefixes)}
    taken = names_mistaken_for_experts(model, layers)
    if names is None:
        return {name: layer for name, layer in layers.items() if name not in taken}
    head = model.get_output_embeddings()
    layers |= {
        name: module
        for name, module in model.named_modules()
        if module is head and isinstance(module, nn.Linear) and not f"{name}.".startswith(prefixes)
    }
    known = sorted({name.rpartition(".")[2] for name in layers.keys() - taken})
    for end in names:
        matched = [name for name in layers if f".{name}".endswith(f".{end}")]
        if not matched:
            raise ValueError(
                f"policy.lora.target_modules: no linear layer of the language model ends in {end!r}. Available: "
                f"{', '.join(known)}."
            )
        if refused := [name for name in matched if name in taken]:
            raise ValueError(
                f"policy.lora.target_modules: {end!r} matches {refused[0]}. peft mistakes this name for experts, and "
                f"all experts of a layer are one tensor. Remove the suffix; available: {', '.join(known)}."
            )
    return {name: layer for name, layer in layers.items() if any(f".{name}".endswith(f".{end}") for end in names)}


def language_layers(model: Any) -> dict[str, nn.Module]:
    """Every linear layer of the language model, except the output head and the `out_proj` of Mamba.

    The keys of the result are the names of the layers.
    """
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in language_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D)
        and not (model.config.model_type in MAMBA and name.endswith(".out_proj"))
    }
