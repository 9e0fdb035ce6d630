"""LoRA injection: put float32 adapters into a model, new ones or saved ones, the same on every rank."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch

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
from grpo_lightning.policy.hf import is_copied
from grpo_lightning.policy.lora import LoRA, adapter_config
from grpo_lightning.policy.lora_targets import (
    expert_targets,
    language_layers,
    missing_adapter_reason,
    saved_modules,
    targets,
)

log = logging.getLogger(__name__)


def add_adapters(model: Any, lora: LoRA) -> Any:
    """Freeze a model and add float32 adapters to its layers, the same on every rank.

    Args:
        model: The unsharded base, whose layers are replaced in place. The result wraps it.
        lora: Settings of the adapters.

    Raises:
        ValueError: If the model already has adapters, or a name in `target_modules` or `modules_to_save` matches no
            layer, or a layer that cannot be trained.
    """
    from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers.pytorch_utils import Conv1D

    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "The policy already has adapters: give the PeftModel without policy.lora, or its base and the folder of "
            "the adapter as lora.adapter. If it got them from an earlier run in this process, load it again."
        )
    # Seeded, because every rank must make the same A (of which sharded strategies keep a different shard on each rank),
    # and a resumed run must start with this A again.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)  # peft sets it by layer
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # see `untie`
        torch.manual_seed(derived_seed(run_seed(None), "adapters"))
        if lora.adapter is not None:
            config = adapter_config(lora.adapter)
            saved_modules(model, config.modules_to_save, f"The adapter {lora.adapter!r}: modules_to_save")
            adapted = PeftModel.from_pretrained(model, lora.adapter, config=config, is_trainable=True)
            if widen_copies(adapted):  # peft has loaded their weights into 16 bits
                keys = getattr(model, "_checkpoint_conversion_mapping", {})  # as in `from_pretrained`
                weights = load_peft_weights(lora.adapter, device="cpu", key_mapping=keys)
                set_peft_model_state_dict(adapted, weights, trained_adapter(adapted))
        else:
            saved = saved_modules(model, lora.modules_to_save)
            layers = targets(model, lora.target_modules, saved)
            experts = expert_targets(model, lora.target_parameters, saved)
            if not layers and not experts:
                raise ValueError(
                    f"policy.lora.modules_to_save ({lora.modules_to_save}) leaves no layer for an adapter: remove it "
                    "and policy.lora to train all weights, or name fewer modules."
                )
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
            reset_magnitudes(adapted)
    return finish_adapters(adapted, lora.dropout)


def reset_magnitudes(adapted: Any) -> None:
    """Set DoRA's magnitudes to the norms of the base's rows, in float32, so that the policy equals its base.

    peft computes the norms in the dtype of the base: rounded to 16 bits, they would change every layer's output.

    Raises:
        ValueError: If a row of a weight is 0, because DoRA divides by its norm.
    """
    name = trained_adapter(adapted)
    for key, layer in adapted.named_modules():
        if is_adapter_layer(layer) and name in layer.lora_magnitude_vector:
            set_magnitude(layer, layer.lora_magnitude_vector[name], name)
            if not layer.lora_magnitude_vector[name].weight.all():
                raise ValueError(
                    f"policy.lora.use_dora: the weight of {key} has rows of zeros, and DoRA divides by the norms of "
                    "rows. Leave this layer out (policy.lora.target_modules), or set use_dora to false."
                )


def finish_adapters(adapted: Any, dropout: float) -> Any:
    """Set the dropout of the trained adapter, log what is trained, and return the model in eval mode.

    Raises:
        ValueError: If adapters of experts are to have dropout.
    """
    if dropout and any(map(is_expert_adapter, adapter_layers(adapted))):
        raise ValueError(
            f"policy.lora.dropout is {dropout}, and adapters of experts have none: they change the experts' weights, "
            "not their outputs. Set it to 0, or leave the experts out (policy.lora.target_parameters)."
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
    """Name and peft config of the trained adapter as plain values, from which `rebuild_adapter` makes its layers."""
    name = trained_adapter(policy)
    config = policy.peft_config[name].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {"name": name, "config": json.loads(json.dumps(plain))}


def rebuild_adapter(model: Any, description: Mapping[str, Any]) -> Any:
    """Add the layers of an adapter to a model; the adapter's weights are not those of the run yet.

    Args:
        model: The unsharded base, whose layers are replaced in place. The result wraps it.
        description: Result of `describe_adapter`.
    """
    from peft import PeftConfig, get_peft_model

    # A config that came from a saved adapter says `inference_mode`, with which peft would freeze the adapter.
    settings = description["config"] | {"inference_mode": False}
    config: Any = PeftConfig.from_peft_type(**settings)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng():
        adapted: Any = get_peft_model(model, config, adapter_name=description["name"])
    return finish_adapters(adapted, 0.0)
