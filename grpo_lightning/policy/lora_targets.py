"""Find the layers that get LoRA adapters: the linear layers of the language model, except those that cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from grpo_lightning.policy.sharding import full_shape

NOT_LANGUAGE = ("visual", "vision", "image", "audio", "projector", "merger", "connector")
"""Name parts of modules outside the language model, for models that do not declare their decoder."""


def language_modules(model: Any) -> dict[str, nn.Module]:
    """Every module of the decoder by name, except the output head.

    Vision tower and projector of multimodal models are not part of the decoder.
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
    """Names of parameters that hold all experts of a layer in one tensor: no linear layer, so no adapter."""
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
    """True if a config has experts, under any field name; dense models may have the field, empty.

    Keys need not be strings: those of `id2label` are numbers.
    """
    return any(
        _has_experts(value) if isinstance(value, Mapping) else "expert" in str(name) and bool(value)
        for name, value in settings.items()
    )


def names_mistaken_for_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of linear layers that peft mistakes for experts, so that they would get no adapter.

    Adapters older than the fused expert tensors name each expert's own `gate_proj`, `up_proj` and `down_proj`. To load
    them, peft adds adapters of these names to the fused tensor instead, and a dense layer or shared expert of the same
    name would get none.

    Args:
        model: The base.
        names: Names of its linear layers.
    """
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a release without this conversion, or a plan without peft
        return set()
    taken = set()
    names = list(names)
    for end in {name.rpartition(".")[2] for name in names}:
        config = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
            is_taken = end not in (config.target_modules or ())
        except ValueError:  # one of two fused projections without the other
            is_taken = True
        if is_taken:
            taken |= {name for name in names if name.rpartition(".")[2] == end}
    return taken


def missing_adapter_reason(model: Any, names: Iterable[str]) -> str | None:
    """Why parts of a mixture of experts get no adapter; None if all linear layers do.

    Args:
        model: The base.
        names: Names of its linear layers.
    """
    tensors = expert_tensors(model)
    if not tensors:
        return None
    text = f"experts get no adapter, because all experts of a layer are one tensor ({', '.join(tensors)})"
    if taken := names_mistaken_for_experts(model, names):
        parts = sorted({".".join(name.split(".")[-2:]) for name in taken})
        text += f"; {', '.join(parts)} get none either, because peft mistakes their names for experts"
    return text


MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types whose kernels read the weight of `out_proj` without calling the layer: peft refuses it."""


def targets(model: Any, names: list[str] | None = None) -> dict[str, nn.Module]:
    """Select the layers that get adapters, by name: linear layers of the language model, except its output head.

    Args:
        model: The base.
        names: Suffixes of layer names to select; None selects all.

    Raises:
        ValueError: If a suffix matches no layer, or one that cannot have an adapter, such as the output head.
    """
    layers = language_layers(model)
    taken = names_mistaken_for_experts(model, layers)
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
                "tied to the embeddings, which merging would also change, and scoring runs it in slices. Remove it, "
                f"or train all weights (without policy.lora). Available: {', '.join(known)}."
            )
        if not matched:
            raise ValueError(
                f"policy.lora.target_modules: no linear layer of the language model ends in {end!r}. Available: "
                f"{', '.join(known)}."
            )
        if refused := [name for name in matched if name in taken]:
            raise ValueError(
                f"policy.lora.target_modules: {end!r} matches {refused[0]}, whose name peft mistakes for the experts, "
                f"which are one tensor. Remove it; available: {', '.join(known)}."
            )
    return {name: layer for name, layer in layers.items() if any(f".{name}".endswith(f".{end}") for end in names)}


def language_layers(model: Any) -> dict[str, nn.Module]:
    """Every linear layer of the language model by name, except the output head."""
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in language_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D)
        and not (model.config.model_type in MAMBA and name.endswith(".out_proj"))
    }
