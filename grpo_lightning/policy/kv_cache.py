"""A write-once cache for scoring: a prompt's states are stored once per prompt, and only read afterwards.

    prefix = PrefixCache(model.config)                                   # phase 1 fills it
    model(**prompts, past_key_values=prefix, use_cache=True)
    model(**completions, past_key_values=prefix.extend(rows), use_cache=True)   # phase 2 only reads

There are two objects because a recompute of phase 1 (activation checkpointing) runs during backward, long after phase
2 began: it must find phase 1's cache as phase 1 left it. As nothing is written twice, both phases can be checkpointed,
and linear-attention layers, whose stock cache overwrites its states in place, become differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

Rows = int | Tensor
"""How prompts fan out to completions: G (every prompt has G, in order), or [B] the prompt index of every completion."""


class UnsupportedCacheError(NotImplementedError):
    """The model keeps a kind of state for which there is no write-once layer."""


class LostCacheError(RuntimeError):
    """The model ran without storing the prompt: scoring on would give wrong log-probs and gradients."""


def fan_out(states: Tensor, rows: Rows) -> Tensor:
    """[N, ...] prompt states to [B, ...] completion states. The integer form's backward is a deterministic sum."""
    return states.repeat_interleave(rows, 0) if isinstance(rows, int) else states.index_select(0, rows)


class StoredAttention(DynamicLayer):
    """Phase 1 of a full-attention layer: keeps the keys and values of its first update."""

    dtype: torch.dtype
    device: torch.device
    is_initialized: bool

    def visible(self, states: Tensor) -> Tensor:
        """The part of the prompt that later tokens can still attend to."""
        return states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the states unless this is a recompute, and attend to them as they are."""
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
    """Phase 1 of a sliding-window layer: keeps the last window."""

    def visible(self, states: Tensor) -> Tensor:
        """The last `sliding_window - 1` positions: the next token's own position fills the window."""
        return states[:, :, -self.sliding_window + 1 :, :]


class ReadAttention(DynamicLayer):
    """Phase 2 of a full-attention layer: [prompt fanned out | new], nothing kept."""

    def __init__(self, stored: StoredAttention, rows: Rows) -> None:
        super().__init__()
        self.attach(stored, rows)

    def attach(self, stored: StoredAttention, rows: Rows) -> None:
        """Point at the stored prompt; sequence lengths and mask sizes are read off `keys`."""
        self.stored, self.rows, self.is_initialized = stored, rows, True
        self.keys, self.values = stored.keys, stored.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The prompt's states in front of the new ones."""
        return (
            torch.cat([fan_out(self.stored.keys, self.rows), key_states], -2),
            torch.cat([fan_out(self.stored.values, self.rows), value_states], -2),
        )


class ReadSlidingAttention(ReadAttention, DynamicSlidingWindowLayer):
    """Phase 2 of a sliding-window layer."""

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

# Older releases of transformers do not read linear-attention states through the cache object: with them, those models
# score densely.
if hasattr(cache_utils, "LinearAttentionLayer") and hasattr(Cache, "get_conv_state"):

    class StoredLinear(cache_utils.LinearAttentionLayer):  # type: ignore[name-defined, misc]
        """Phase 1 of a linear-attention layer: convolution and recurrent states, stored by reference."""

        def update_conv_state(
            self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
        ) -> Tensor:
            """Store the last `conv_kernel_size` columns; the convolution sees what it was given."""
            if not self.is_conv_states_initialized[state_idx]:
                width = conv_kernel_size or conv_states.shape[-1]
                self.device, self.dtype = conv_states.device, conv_states.dtype
                self.conv_kernel_size[state_idx] = width
                missing = max(0, width - conv_states.shape[-1])
                self.conv_states[state_idx] = torch.nn.functional.pad(conv_states, (missing, 0))[..., -width:]
                self.is_conv_states_initialized[state_idx] = True
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Store the state. `has_previous_state` stays False: a recompute must start from nothing again."""
            if not self.is_recurrent_states_initialized[state_idx]:
                self.recurrent_states[state_idx] = recurrent_states
                self.is_recurrent_states_initialized[state_idx] = True
            return recurrent_states

        @property
        def is_filled(self) -> bool:
            """True once the prompt has been stored."""
            return any(self.is_conv_states_initialized.values()) or any(self.is_recurrent_states_initialized.values())

    class ReadLinear(cache_utils.LinearAttentionLayer):  # type: ignore[name-defined, misc]
        """Phase 2 of a linear-attention layer."""

        def __init__(self, stored: StoredLinear, rows: Rows) -> None:
            super().__init__(number_of_states=stored.number_of_states)
            self.stored, self.rows = stored, rows
            # Keeps models off their in-place convolution for single tokens.
            self.record_past = True
            self.has_previous_state = dict.fromkeys(range(stored.number_of_states), True)

        def state(self, kind: str, state_idx: int) -> Tensor | None:
            """The prompt's state of this kind, fanned out."""
            value = getattr(self.stored, kind)[state_idx]
            return None if value is None else fan_out(value, self.rows)

        def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """The prompt's last columns in front of the new ones."""
            previous = self.state("conv_states", state_idx)
            return conv_states if previous is None else torch.cat([previous, conv_states], -1)

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Nothing is kept: the next chunk starts from the prompt again."""
            return recurrent_states

    class StoredHybrid(StoredLinear, StoredAttention):
        """Phase 1 of a layer with attention and linear attention side by side."""

        def __init__(self, number_of_states: int = 1) -> None:
            StoredAttention.__init__(self)
            StoredLinear.__init__(self, number_of_states=number_of_states)  # type: ignore[call-arg]

    class ReadHybrid(ReadLinear, ReadAttention):
        """Phase 2 of such a layer."""

        def __init__(self, stored: StoredHybrid, rows: Rows) -> None:
            ReadAttention.__init__(self, stored, rows)
            ReadLinear.__init__(self, stored, rows)

    STORES[cache_utils.LinearAttentionLayer] = lambda layer: StoredLinear(number_of_states=layer.number_of_states)
    STORES[cache_utils.LinearAttentionAndFullAttentionLayer] = lambda layer: StoredHybrid(layer.number_of_states)
    READS |= {StoredLinear: ReadLinear, StoredHybrid: ReadHybrid}

if hasattr(cache_utils, "DummyLayer"):
    # A layer without states of its own: it attends to another layer's.
    STORES[cache_utils.DummyLayer] = lambda layer: layer


class PrefixCache(Cache):
    """Phase 1's cache: filled by one forward over the prompts.

    Raises:
        UnsupportedCacheError: If a layer has no write-once version; such models are scored densely.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in STORES}):
            raise UnsupportedCacheError(f"no write-once version of the cache layer {', '.join(unknown)}")
        if not layers:
            raise UnsupportedCacheError("the config does not say how many layers the cache has")
        super().__init__(layers=[STORES[type(layer)](layer) for layer in layers])

    def extend(self, rows: Rows) -> ExtendedCache:
        """Phase 2's cache: the prompts fanned out to `rows`.

        Raises:
            LostCacheError: If phase 1 left a layer empty.
        """
        for i, layer in enumerate(self.layers):
            if type(layer) in READS and not layer.is_filled:
                raise LostCacheError(
                    f"Layer {i} stored nothing of the prompt: the model ignored the cache it was given. transformers' "
                    "own gradient checkpointing does that in train mode; use the policy's `activation_checkpointing` "
                    "instead."
                )
        return ExtendedCache(
            layers=[READS[type(layer)](layer, rows) if type(layer) in READS else layer for layer in self.layers]
        )


class ExtendedCache(Cache):
    """Phase 2's cache: reads the prompt, keeps nothing."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompt's convolution state, fanned out."""
        return self.layers[layer_idx].state("conv_states", state_idx)  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompt's recurrent state, fanned out."""
        return self.layers[layer_idx].state("recurrent_states", state_idx)  # type: ignore[no-any-return]
