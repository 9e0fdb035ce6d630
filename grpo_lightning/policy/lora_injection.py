"""Add new or saved float32 LoRA adapters to a model. The adapters are equal on every rank."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.policy.adapters import (
    adapter_layers,
    is_adapter_layer,
    is_expert_adapter,
    set_dropout,
    set_magnitude,
    trained_adapter,
    widen_copies,
)
from grpo_lightning.policy.families import family_of, vision_parts
from grpo_lightning.policy.lora import LoRA, adapter_config
from grpo_lightning.policy.lora_targets import (
    expert_targets,
    expert_tensors,
    language_layers,
    missing_adapter_reason,
    saved_modules,
    targets,
)
from grpo_lightning.policy.transformers_internals import is_copied

log = logging.getLogger(__name__)


def add_adapters(model: Any, lora: LoRA, dtype: torch.dtype | None = None) -> Any:
    """Freeze a model, and add float32 adapters to its layers.

    Args:
        model: The unsharded base model. Its layers are replaced in place.
        lora: Settings of the adapters.
        dtype: Dtype that the strategy converts all weights to; None for no conversion.

    Raises:
        ValueError: If the model already has adapters.
        ValueError: If a name in `target_modules`, `target_parameters` or `modules_to_save` matches nothing, or matches
            a layer that cannot be trained.
    """
    from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers.pytorch_utils import Conv1D

    check_names(model, lora)
    # Seeded, because a resumed run and every rank must make the same A.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)  # peft sets it by layer
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # see `untie`
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        if lora.adapter is not None:
            config = adapter_config(lora.adapter)
            adapted = PeftModel.from_pretrained(model, lora.adapter, config=config, is_trainable=True)
            if widen_copies(adapted):  # peft has loaded the copies into 16 bits
                keys = getattr(model, "_checkpoint_conversion_mapping", {})  # as in `from_pretrained`
                weights = load_peft_weights(lora.adapter, device="cpu", key_mapping=keys)
                set_peft_model_state_dict(adapted, weights, trained_adapter(adapted))
        else:
            layers, experts, _ = select(model, lora)
            if not experts and (reason := missing_adapter_reason(model, language_layers(model))):
                log.info("LoRA: %s.", reason)
            config = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=list(layers),
                target_parameters=list(experts) or None,
                use_rslora=lora.use_rslora,
                use_dora=lora.use_dora,
                modules_to_save=lora.modules_to_save,
                fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
                task_type="CAUSAL_LM",
            )
            adapted = get_peft_model(model, config)
            reset_magnitudes(adapted, dtype)
    return finish_adapters(adapted, lora.dropout)


class Selection(NamedTuple):
    """The layers and parameters that new adapters change, by name."""

    layers: dict[str, nn.Module]
    """Linear layers that get an adapter."""

    experts: dict[str, nn.Parameter]
    """Expert tensors that get an adapter."""

    saved: dict[str, nn.Module]
    """Modules that are trained completely."""


def select(model: Any, lora: LoRA) -> Selection:
    """Select the layers and parameters that new adapters change.

    Raises:
        ValueError: If a name matches nothing, or matches a layer that cannot be trained.
        ValueError: If no layer is left for an adapter.
    """
    saved = saved_modules(model, lora.modules_to_save)
    layers = targets(model, lora.target_modules, saved)
    experts = expert_targets(model, lora.target_parameters, saved)
    if not layers and not experts:
        raise ValueError(
            f"policy.lora.modules_to_save ({lora.modules_to_save}) leaves no layer for an adapter: remove it "
            "and policy.lora to train all weights, or name fewer modules."
        )
    return Selection(layers, experts, saved)


def check_names(model: Any, lora: LoRA, *, freezes_vision: bool = False) -> None:
    """Check that all names in the adapters' settings match modules that may be trained.

    Args:
        model: The base model; its weights are not read, so it may be on the meta device.
        lora: Settings of the adapters.
        freezes_vision: `policy.freeze_vision_modules`.

    Raises:
        ValueError: If a name matches nothing, or matches a layer that cannot be trained.
        ValueError: If a part of the vision tower would be trained although the tower is to be frozen.
    """
    refuse_adapted(model)
    found = adapted_modules(model, lora)
    family = family_of(model.config) if freezes_vision else None
    if family is None:
        return
    tower = {id(module) for part in vision_parts(model, family) for module in part.modules()}
    for name, module in found.items():
        if any(id(part) in tower for part in module.modules()):
            source, instead = f"policy.lora.modules_to_save ({lora.modules_to_save})", "remove the module"
            if lora.adapter is not None:
                source, instead = f"policy.lora.adapter ({lora.adapter})", "give another adapter"
            raise ValueError(
                f"policy.freeze_vision_modules is true, and {source} trains {name}, which is part of the vision tower "
                f"or its projector. Set freeze_vision_modules to false, or {instead}."
            )


def refuse_adapted(model: nn.Module) -> None:
    """Raise ValueError if a model already has adapters."""
    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "The policy already has adapters: give the PeftModel without policy.lora, or give its base and set "
            "policy.lora.adapter to the folder of the adapter. If an earlier run in this process added the adapters to "
            "the policy, load it again."
        )


def adapted_modules(model: Any, lora: LoRA) -> dict[str, nn.Module]:
    """The modules, by name, that get an adapter or are trained completely. Expert tensors are left out.

    Raises:
        ValueError: If a name matches nothing, or matches a layer that cannot be trained.
    """
    if lora.adapter is None:
        chosen = select(model, lora)
        return chosen.layers | chosen.saved
    from peft.tuners.tuners_utils import check_target_module_exists

    config, subject = adapter_config(lora.adapter), f"The adapter {lora.adapter!r}"
    if config.target_modules in (None, "all-linear"):
        # peft finds the names itself when it loads the adapter.
        return saved_modules(model, config.modules_to_save, f"{subject}: modules_to_save")
    found = {name: module for name, module in model.named_modules() if check_target_module_exists(config, name)}
    # peft redirects the names of single experts to tensors of all experts (see `names_mistaken_for_experts`).
    if not found and not config.target_parameters and not expert_tensors(model):
        names = config.target_modules
        shown = names if isinstance(names, str) else ", ".join(sorted(names or ()))
        raise ValueError(
            f"{subject} has weights for {shown}, and no layer of the policy has such a name. Give an adapter that was "
            "trained on this policy, or the policy that it was trained on."
        )
    return found | saved_modules(model, config.modules_to_save, f"{subject}: modules_to_save")


def reset_magnitudes(adapted: Any, dtype: torch.dtype | None = None) -> None:
    """Set DoRA's magnitudes to the norms of the base's rows, so that the policy equals its base.

    For new adapters, peft computes these norms in the dtype of the loaded base. If the strategy later converts the
    weights to 16 bits, the norms of the rounded rows are different.

    Raises:
        ValueError: If all values in a row of a weight are 0.
    """
    name = trained_adapter(adapted)
    for key, layer in adapted.named_modules():
        if is_adapter_layer(layer) and name in layer.lora_magnitude_vector:
            set_magnitude(layer, layer.lora_magnitude_vector[name], name, dtype)
            if not layer.lora_magnitude_vector[name].weight.all():
                raise ValueError(
                    f"policy.lora.use_dora: the weight of {key} has rows of zeros, and DoRA divides by the norms of "
                    "rows. Leave this layer out (policy.lora.target_modules), or set use_dora to false."
                )


def finish_adapters(adapted: Any, dropout: float) -> Any:
    """Set the dropout of the trained adapter, log what is trained, and return the model in eval mode.

    Raises:
        ValueError: If `dropout` is above 0, and experts have adapters.
    """
    if dropout and any(map(is_expert_adapter, adapter_layers(adapted))):
        raise ValueError(
            f"policy.lora.dropout is {dropout}, but adapters of experts have no dropout, because they change the "
            "experts' weights and not their outputs. Set it to 0, or leave the experts out "
            "(policy.lora.target_parameters)."
        )
    set_dropout(adapted, dropout)
    widen_copies(adapted)
    sizes = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    names, copied = (
        sorted({name.rpartition(".")[2] for name, module in adapted.named_modules() if is_kind(module)})
        for is_kind in (is_adapter_layer, is_copied)
    )
    copies = f", and copies of {', '.join(copied)}" if copied else ""
    log.info("LoRA: %s trainable parameters, next to %s%s.", f"{sum(sizes):,}", ", ".join(names), copies)
    return adapted.eval()


def describe_adapter(policy: Any) -> dict[str, Any]:
    """Name and peft config of the trained adapter as plain values."""
    name = trained_adapter(policy)
    config = policy.peft_config[name].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {"name": name, "config": json.loads(json.dumps(plain))}


def rebuild_adapter(model: Any, description: Mapping[str, Any]) -> Any:
    """Add the layers of an adapter to a model. The trained weights of these layers are not loaded.

    `description` is the result of `describe_adapter`.
    """
    from peft import PeftConfig, get_peft_model

    # The config of a saved adapter has `inference_mode: true`, with which peft would freeze the adapter.
    settings = description["config"] | {"inference_mode": False}
    config: Any = PeftConfig.from_peft_type(**settings)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng():
        adapted: Any = get_peft_model(model, config, adapter_name=description["name"])
    return finish_adapters(adapted, 0.0)
