"""Mixtures of experts under LoRA: which layers cannot have an adapter, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from grpo_lightning.policy.decoder import language_modules


def expert_tensors(model: Any) -> list[str]:
    """What the parameters are called that hold all experts of a layer in one tensor: no linear layer, no adapter."""
    if not _has_experts(model.get_decoder().config.to_dict()):
        return []
    return sorted(
        {
            name.rpartition(".")[2]
            for module in language_modules(model).values()
            if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            for name, weight in module.named_parameters(recurse=False)
            if len(getattr(weight, "ds_shape", weight.shape)) == 3  # ZeRO-3 leaves an empty vector in its place
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
    they can still be loaded, peft puts what has such a name beside the tensor of the experts, and a dense layer or a
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
    """Which parts of a mixture of experts have no adapter, and why; None if there are none.

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
