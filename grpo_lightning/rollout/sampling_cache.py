"""The key-value cache of sampling: filled by the prompts, fanned out to their completions, grown token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_lightning.policy.families import unknown_reason
from grpo_lightning.policy.inputs import accepts, base_model, text_config


class SamplingCache(DynamicCache):
    """A `DynamicCache` that keeps keys and values in the type that attention reads.

    Under autocast keys come in 32 bits, rotated by 32-bit cosines, and make the values 32 bits too; attention then
    casts the whole cache at every token. Cast when stored, it gives the same numbers from half the memory.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new states of one layer; gives all of its states."""
        if torch.is_autocast_enabled(key_states.device.type):
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states


def no_fan_out_reason(policy: nn.Module) -> str | None:
    """Why this model's cache cannot be fanned out; None if it can."""
    base = base_model(policy)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not accepts(policy, "past_key_values"):
        return f"{type(base).__name__}.forward takes no past_key_values"
    if reason := unknown_reason(base.config):
        return reason
    layers = DynamicCache(config=text_config(policy)).layers
    if missing := sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "reorder_cache")}):
        return f"the cache layer {', '.join(missing)} cannot be reordered"
    return None
