"""The layers that get LoRA adapters: the linear ones of the language model, and which of them cannot have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from grpo_lightning.policy.sharding import full_shape

NOT_LANGUAGE = ("visual", "vision", "image", "audio", "projector", "merger", "connector")
"""Parts of the names of what is no language model, where a model does not say which of its parts the decoder is."""


def language_modules(model: Any) -> dict[str, nn.Module]:
    """Every module of the decoder but the output head, by name.

    Of models with several parts, the vision tower and its projector are none: they are outside of the decoder.
    """
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
    """The names of parameters that hold all experts of a layer in one tensor: no linear layer, no adapter."""
    if not _has_experts(model.get_decoder().config.to_dict()):
        return []
    return sorted(
        {
            name.rpartition(".")[2]
            for module in language_modules(model).values()
            if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            for name, weight in module.named_parameters(recurse=False)
            if len(full_shape(weight)) == 3
        }
    )


def _has_experts(settings: Mapping[Any, Any]) -> bool:
    """True if a config counts experts, whatever it calls their number; dense models may have the field, empty.

    Keys are not all text: `id2label` has numbers.
    """
    return any(
        _has_experts(value) if isinstance(value, Mapping) else "expert" in str(name) and bool(value)
        for name, value in settings.items()
    )


def taken_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of linear layers that peft takes for the experts'.

    Adapters that are older than these tensors name every expert's own `gate_proj`, `up_proj` and `down_proj`. So that
    they can still be loaded, peft puts what has such a name next to the tensor of the experts, and a dense layer or a
    shared expert that is called the same would go without.

    Args:
        model: The base.
        names: Of its linear layers.
    """
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a release that takes none, or a plan without peft
        return set()
    taken = set()
    names = list(names)
    for end in {name.rpartition(".")[2] for name in names}:
        config = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
            is_taken = end not in (config.target_modules or ())
        except ValueError:  # one of two that are fused, without the other
            is_taken = True
        if is_taken:
            taken |= {name for name in names if name.rpartition(".")[2] == end}
    return taken


def why_without(model: Any, names: Iterable[str]) -> str | None:
    """The parts of a mixture of experts without an adapter, and why; None if there are none.

    Args:
        model: The base.
        names: Of its linear layers.
    """
    tensors = expert_tensors(model)
    if not tensors:
        return None
    text = f"the experts have none, as all of a layer are one tensor ({', '.join(tensors)})"
    if taken := taken_names(model, names):
        parts = sorted({".".join(name.split(".")[-2:]) for name in taken})
        text += f"; nor have {', '.join(parts)}, whose names peft takes for the experts'"
    return text


MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Models whose kernels read the weight of `out_proj` and never call the layer: peft refuses it."""


def targets(model: Any, names: list[str] | None = None) -> dict[str, nn.Module]:
    """The layers that get adapters, by their names: the linear ones of the language model without its output head.

    Args:
        model: The base.
        names: Ends of names to choose by; None takes all.

    Raises:
        ValueError: If one of the ends matches no layer, or one that cannot have an adapter, the output head among them.
    """
    layers = language_layers(model)
    taken = taken_names(model, layers)
    if names is None:
        return {name: layer for name, layer in layers.items() if name not in taken}
    known = sorted({name.rpartition(".")[2] for name in layers.keys() - taken})
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    for end in names:
        matched = [name for name in layers if f".{name}".endswith(f".{end}")]
        if not matched and any(f".{name}".endswith(f".{end}") for name in heads):
            raise ValueError(
                f"policy.lora.target_modules: {end!r} is the output head, which gets no adapter: in many models it is "
                "tied to the embeddings, which merging would change too, and scoring runs it in slices. Leave it out, "
                f"or train all weights (without policy.lora). There are: {', '.join(known)}."
            )
        if not matched:
            raise ValueError(
                f"policy.lora.target_modules: no linear layer of the language model ends in {end!r}. There are: "
                f"{', '.join(known)}."
            )
        if refused := [name for name in matched if name in taken]:
            raise ValueError(
                f"policy.lora.target_modules: {end!r} matches {refused[0]}, whose name peft takes for that of the "
                f"experts, which are one tensor. Leave it out; there are: {', '.join(known)}."
            )
    return {name: layer for name, layer in layers.items() if any(f".{name}".endswith(f".{end}") for end in names)}


def language_layers(model: Any) -> dict[str, nn.Module]:
    """Every linear layer of the language model but the output head, by name."""
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in language_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D)
        and not (model.config.model_type in MAMBA and name.endswith(".out_proj"))
    }
