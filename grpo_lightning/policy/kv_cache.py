"""Write-once KV cache for computing log-probs: the states of each prompt are stored once and only read afterwards.

    prefix = PrefixCache(model.config)                                   # the prompt pass fills it
    model(**prompts, past_key_values=prefix, use_cache=True)
    model(**completions, past_key_values=prefix.extend(rows), use_cache=True)   # the completion pass only reads

The prompt pass runs the prompts, and the completion pass runs the completions with the cache. The passes have separate
cache objects, because activation checkpointing recomputes the prompt pass in the backward pass, after the completion
pass has run: the recompute must find the prompt pass's cache unchanged. Because no state is written twice, both passes
can be checkpointed. Linear-attention layers, whose states are overwritten in place in the cache of transformers, also
become differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

Rows = int | Tensor
"""Which prompt each completion belongs to: G, if every prompt has G completions in order; or [B] prompt indices."""


class UnsupportedCacheError(NotImplementedError):
    """The model has a cache layer without a write-once version."""


class LostCacheError(RuntimeError):
    """The model did not store the prompt: scoring would give wrong log-probs and gradients."""


def fan_out(states: Tensor, rows: Rows) -> Tensor:
    """Repeat prompt states [N, ...] for their completions, [B, ...]; deterministic in backward if `rows` is an int."""
    return states.repeat_interleave(rows, 0) if isinstance(rows, int) else states.index_select(0, rows)


class StoredAttention(DynamicLayer):
    """Prompt pass of a full-attention layer: keeps the keys and values of its first update."""

    dtype: torch.dtype
    device: torch.device
    is_initialized: bool

    def visible(self, states: Tensor) -> Tensor:
        """The part of the prompt that later tokens can still attend to."""
        return states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the states, unless this is a recompute, and return them unchanged."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = self.visible(key_states), self.visible(value_states)
            self.cumulative_length = key_states.shape[-2]
        return key_states, value_states

    @property
    def is_filled(self) -> bool:
        """True once the prompt has been stored."""
        return bool(self.is_initialized)


class StoredSlidingAttention(StoredAttention, DynamicSlidingWindowLayer):
    """Prompt pass of a sliding-window layer: stores the last window."""

    def visible(self, states: Tensor) -> Tensor:
        """The last `sliding_window - 1` positions: the next token completes the window."""
        return states[:, :, -self.sliding_window + 1 :, :]


class ReadAttention(DynamicLayer):
    """Completion pass of a full-attention layer: attends to [repeated prompt | new tokens] and stores nothing."""

    def __init__(self, stored: StoredAttention, rows: Rows) -> None:
        super().__init__()
        self.attach(stored, rows)

    def attach(self, stored: StoredAttention, rows: Rows) -> None:
        """Refer to the stored prompt; transformers reads sequence lengths and mask sizes from `keys`."""
        self.stored, self.rows, self.is_initialized = stored, rows, True
        self.keys, self.values = stored.keys, stored.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Prepend the prompt's keys and values to the new keys and values."""
        return (
            torch.cat([fan_out(self.stored.keys, self.rows), key_states], -2),
            torch.cat([fan_out(self.stored.values, self.rows), value_states], -2),
        )


class ReadSlidingAttention(ReadAttention, DynamicSlidingWindowLayer):
    """Completion pass of a sliding-window layer."""

    def __init__(self, stored: StoredSlidingAttention, rows: Rows) -> None:
        DynamicSlidingWindowLayer.__init__(self, stored.sliding_window)
        self.attach(stored, rows)
        self.cumulative_length = stored.cumulative_length


StoreMaker = Callable[[Any], Any]
STORES: dict[type, StoreMaker] = {
    DynamicLayer: lambda layer: StoredAttention(),
    DynamicSlidingWindowLayer: lambda layer: StoredSlidingAttention(layer.sliding_window),
}
READS: dict[type, type] = {StoredAttention: ReadAttention, StoredSlidingAttention: ReadSlidingAttention}

# In older releases of transformers, models do not read linear-attention states through the cache object. With such
# releases, models with linear attention use the dense path.
if hasattr(cache_utils, "LinearAttentionLayer") and hasattr(Cache, "get_conv_state"):

    class StoredLinear(cache_utils.LinearAttentionLayer):  # type: ignore[name-defined, misc]
        """Prompt pass of a linear-attention layer: convolution and recurrent states, stored by reference."""

        def update_conv_state(
            self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
        ) -> Tensor:
            """Store the last `conv_kernel_size` columns and return the input unchanged."""
            if not self.is_conv_states_initialized[state_idx]:
                width = conv_kernel_size or conv_states.shape[-1]
                self.device, self.dtype = conv_states.device, conv_states.dtype
                self.conv_kernel_size[state_idx] = width
                missing = max(0, width - conv_states.shape[-1])
                self.conv_states[state_idx] = torch.nn.functional.pad(conv_states, (missing, 0))[..., -width:]
                self.is_conv_states_initialized[state_idx] = True
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Store the state. `has_previous_state` stays False: a recompute must start without a state."""
            if not self.is_recurrent_states_initialized[state_idx]:
                self.recurrent_states[state_idx] = recurrent_states
                self.is_recurrent_states_initialized[state_idx] = True
            return recurrent_states

        @property
        def is_filled(self) -> bool:
            """True once the prompt has been stored."""
            return any(self.is_conv_states_initialized.values()) or any(self.is_recurrent_states_initialized.values())

    class ReadLinear(cache_utils.LinearAttentionLayer):  # type: ignore[name-defined, misc]
        """Completion pass of a linear-attention layer."""

        def __init__(self, stored: StoredLinear, rows: Rows) -> None:
            super().__init__(number_of_states=stored.number_of_states)
            self.stored, self.rows = stored, rows
            # Prevents the in-place convolution that models use for single tokens.
            self.record_past = True
            self.has_previous_state = dict.fromkeys(range(stored.number_of_states), True)

        def state(self, kind: str, state_idx: int) -> Tensor | None:
            """The prompts' states of this kind, repeated for the completions."""
            value = getattr(self.stored, kind)[state_idx]
            return None if value is None else fan_out(value, self.rows)

        def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Prepend the prompt's last columns to the new columns."""
            previous = self.state("conv_states", state_idx)
            return conv_states if previous is None else torch.cat([previous, conv_states], -1)

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Store nothing: the next chunk starts again after the prompt."""
            return recurrent_states

    class StoredHybrid(StoredLinear, StoredAttention):
        """Prompt pass of a hybrid layer with attention and linear attention."""

        def __init__(self, number_of_states: int = 1) -> None:
            StoredAttention.__init__(self)
            StoredLinear.__init__(self, number_of_states=number_of_states)  # type: ignore[call-arg]

    class ReadHybrid(ReadLinear, ReadAttention):
        """Completion pass of a hybrid layer."""

        def __init__(self, stored: StoredHybrid, rows: Rows) -> None:
            ReadAttention.__init__(self, stored, rows)
            ReadLinear.__init__(self, stored, rows)

    STORES[cache_utils.LinearAttentionLayer] = lambda layer: StoredLinear(number_of_states=layer.number_of_states)
    STORES[cache_utils.LinearAttentionAndFullAttentionLayer] = lambda layer: StoredHybrid(layer.number_of_states)
    READS |= {StoredLinear: ReadLinear, StoredHybrid: ReadHybrid}

if hasattr(cache_utils, "DummyLayer"):
    # The cache of a layer that shares the states of another layer.
    STORES[cache_utils.DummyLayer] = lambda layer: layer


class PrefixCache(Cache):
    """Cache of the prompt pass: filled by one forward pass over the prompts.

    Raises:
        UnsupportedCacheError: If a layer has no write-once version; such models run each prompt once per completion.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in STORES}):
            raise UnsupportedCacheError(f"no write-once version of the cache layer {', '.join(unknown)}")
        if not layers:
            raise UnsupportedCacheError("the config does not contain the number of cache layers")
        super().__init__(layers=[STORES[type(layer)](layer) for layer in layers])

    def extend(self, rows: Rows) -> ExtendedCache:
        """Cache of the completion pass: the prompts' states, repeated for `rows`.

        Raises:
            LostCacheError: If the prompt pass left a layer empty.
        """
        for i, layer in enumerate(self.layers):
            if type(layer) in READS and not layer.is_filled:
                raise LostCacheError(
                    f"Layer {i} did not store the prompt: the model ignored the cache that was passed to it. "
                    "transformers' own gradient checkpointing does that in train mode; use the policy's "
                    "`activation_checkpointing` instead."
                )
        return ExtendedCache(
            layers=[READS[type(layer)](layer, rows) if type(layer) in READS else layer for layer in self.layers]
        )


class ExtendedCache(Cache):
    """Cache of the completion pass: reads the prompt and stores nothing."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompts' convolution states, repeated for the completions."""
        return self.layers[layer_idx].state("conv_states", state_idx)  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompts' recurrent states, repeated for the completions."""
        return self.layers[layer_idx].state("recurrent_states", state_idx)  # type: ignore[no-any-return]
