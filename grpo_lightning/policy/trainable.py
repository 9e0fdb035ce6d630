"""What of the policy is trained: all of it, all but the first layers, or adapters beside it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from grpo_lightning.core import ranks
from grpo_lightning.policy.families import freeze_unused, freeze_vision, known_family, unknown_reason
from grpo_lightning.policy.freezing import check_num_layers, freeze_first_layers
from grpo_lightning.policy.inputs import base_model
from grpo_lightning.policy.lora import add_adapters
from grpo_lightning.policy.quantization import check_quantization
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.tokenizers import check_image_family

if TYPE_CHECKING:
    from grpo_lightning.policy.settings import PolicySettings

log = logging.getLogger(__name__)


def check_loading(loader: PolicySettings, sharding: Sharding) -> None:
    """Say what stands against loading, before weights are.

    Raises:
        FileNotFoundError: If the adapter to start from is not there.
        ModuleNotFoundError: If a package is missing.
        RuntimeError: If there is no CUDA device where one is needed.
        ValueError: If the strategy shards what is quantised, or more layers are to be frozen than there are.
    """
    if loader.quantization != "none":
        if sharding.is_sharded:
            raise ValueError(
                f"policy.quantization is {loader.quantization!r}, and the strategy shards the weights, which "
                "bitsandbytes cannot: take ddp or zero2, or leave quantization out."
            )
        check_quantization(loader.quantization)
    if loader.lora is not None:
        loader.lora.check()
        if loader.lora.dropout:
            log.warning(
                "policy.lora.dropout is %g: log-probs of the update differ from those before it by the dropout alone, "
                "and importance ratios are not 1 before the first update.",
                loader.lora.dropout,
            )
    config = loader.load_config()
    check_image_family(loader, config)
    if loader.freeze_vision_modules:
        known_family(config, "policy.freeze_vision_modules")
    if loader.freeze_layers:
        check_num_layers(loader.freeze_layers, config.get_text_config(decoder=True).num_hidden_layers)


def check_in_step(model: Any, sharding: Sharding) -> None:
    """Check that ranks can keep step where one has no image.

    Raises:
        ValueError: If the family is not known, and its vision tower would need every rank.
    """
    reason = unknown_reason(base_model(model).config)
    is_trained = any(parameter.requires_grad for parameter in model.parameters()) and not hasattr(model, "peft_config")
    if reason is not None and ranks.world_size() > 1 and (sharding.is_sharded or is_trained):
        raise ValueError(
            f"On several ranks a rank without images could not keep step: {reason}. Train on one device, take "
            "policy.lora with ddp or zero2, or add a record to policy/families.py."
        )


def limit_training(model: Any, loader: PolicySettings, sharding: Sharding) -> Any:
    """The loaded model with what is not trained frozen, and with adapters where they are asked for."""
    if loader.freeze_vision_modules:
        freeze_vision(model)
    if loader.freeze_layers:
        freeze_first_layers(model, loader.freeze_layers)
    if loader.lora is None:
        freeze_unused(model)
        return model
    with sharding.building():
        return add_adapters(model, loader.lora)
