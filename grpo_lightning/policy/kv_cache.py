"""KV caches for scoring and for decoding, in which the completions of a prompt share the prompt's keys and values.

Scoring. `PrefixCache` is a write-once cache. The states of each prompt are stored once and only read afterwards.

    prefix = PrefixCache(model.config)                                   # the prompt pass fills it
    model(**prompts, cache=prefix, use_cache=True)
    model(**completions, cache=prefix.extend(rows), use_cache=True)      # the completion pass only reads

The two passes have separate cache objects because of activation checkpointing. Checkpointing recomputes the prompt pass
after the completion pass has run. The completion pass must therefore not change the cache of the prompt pass.

No state is written twice. Both passes can therefore be checkpointed. For the same reason, gradients can flow through
the states of linear-attention layers.

Decoding. After a prefill into a `SamplingCache`, decoding continues with one of two caches (`DecodingCache`):

- `SharedPrompts` stores the states of each prompt once. This cache needs a model whose attention can be replaced.
- `RepeatedPrompts` repeats the prompts' states for their completions, and grows with every token. This cache works with
  all states that transformers can repeat.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.policy.transformers_internals import base_model, text_config

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------------- scoring

Rows = int | Tensor
"""The prompt of each completion: the int G, if every prompt has G completions in order, or [B] prompt indices."""


class UnsupportedCacheError(NotImplementedError):
    """`PrefixCache` does not support the model's cache."""


class LostCacheError(RuntimeError):
    """The model did not store the prompt, so scoring would give wrong log-probs and gradients."""


def expand_to_rows(states: Tensor, rows: Rows) -> Tensor:
    """Repeat prompt states [N, ...] for their completions: [B, ...].

    The backward pass is deterministic if `rows` is an int.
    """
    return states.repeat_interleave(rows, 0) if isinstance(rows, int) else states.index_select(0, rows)


class StoredAttention(DynamicLayer):
    """Full-attention layer in the cache of the prompt pass. Only the first call of `update` stores keys and values."""

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
    """Sliding-window layer in the cache of the prompt pass. It stores only what the next token can attend to."""

    def visible(self, states: Tensor) -> Tensor:
        """The last `sliding_window - 1` positions, because the next token completes the window."""
        return states[:, :, -self.sliding_window + 1 :, :]


class ReadAttention(DynamicLayer):
    """Full-attention layer in the cache of the completion pass. It prepends the repeated prompt, and stores nothing."""

    def __init__(self, stored: StoredAttention, rows: Rows) -> None:
        super().__init__()
        self.attach(stored, rows)

    def attach(self, stored: StoredAttention, rows: Rows) -> None:
        """Refer to the stored prompt, and set `keys`.

        transformers reads lengths and mask sizes from `keys`.
        """
        self.stored, self.rows, self.is_initialized = stored, rows, True
        self.keys, self.values = stored.keys, stored.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Prepend the prompt's keys and values to the new keys and values."""
        return (
            torch.cat([expand_to_rows(self.stored.keys, self.rows), key_states], -2),
            torch.cat([expand_to_rows(self.stored.values, self.rows), value_states], -2),
        )


class ReadSlidingAttention(ReadAttention, DynamicSlidingWindowLayer):
    """Sliding-window layer in the cache of the completion pass."""

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
        """Linear-attention layer in the cache of the prompt pass."""

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
            """Store the state. `has_previous_state` stays False, because a recompute must start without a state."""
            if not self.is_recurrent_states_initialized[state_idx]:
                self.recurrent_states[state_idx] = recurrent_states
                self.is_recurrent_states_initialized[state_idx] = True
            return recurrent_states

        @property
        def is_filled(self) -> bool:
            """True once the prompt has been stored."""
            return any(self.is_conv_states_initialized.values()) or any(self.is_recurrent_states_initialized.values())

    class ReadLinear(cache_utils.LinearAttentionLayer):  # type: ignore[name-defined, misc]
        """Linear-attention layer in the cache of the completion pass."""

        def __init__(self, stored: StoredLinear, rows: Rows) -> None:
            super().__init__(number_of_states=stored.number_of_states)
            self.stored, self.rows = stored, rows
            # Prevents the in-place convolution that models use for single tokens.
            self.record_past = True
            self.has_previous_state = dict.fromkeys(range(stored.number_of_states), True)

        def state(self, kind: str, state_idx: int) -> Tensor | None:
            """The prompts' states of this kind, repeated for the completions."""
            value = getattr(self.stored, kind)[state_idx]
            return None if value is None else expand_to_rows(value, self.rows)

        def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Prepend the prompt's last columns to the new columns."""
            previous = self.state("conv_states", state_idx)
            return conv_states if previous is None else torch.cat([previous, conv_states], -1)

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            """Store nothing, because the next chunk of completions starts after the prompt again."""
            return recurrent_states

    class StoredHybrid(StoredLinear, StoredAttention):
        """Hybrid layer (attention and linear attention) in the cache of the prompt pass."""

        def __init__(self, number_of_states: int = 1) -> None:
            StoredAttention.__init__(self)
            StoredLinear.__init__(self, number_of_states=number_of_states)  # type: ignore[call-arg]

    class ReadHybrid(ReadLinear, ReadAttention):
        """Hybrid layer (attention and linear attention) in the cache of the completion pass."""

        def __init__(self, stored: StoredHybrid, rows: Rows) -> None:
            ReadAttention.__init__(self, stored, rows)
            ReadLinear.__init__(self, stored, rows)

    STORES[cache_utils.LinearAttentionLayer] = lambda layer: StoredLinear(number_of_states=layer.number_of_states)
    STORES[cache_utils.LinearAttentionAndFullAttentionLayer] = lambda layer: StoredHybrid(layer.number_of_states)
    READS |= {StoredLinear: ReadLinear, StoredHybrid: ReadHybrid}

if hasattr(cache_utils, "DummyLayer"):
    # The cache of a layer that shares the states of another layer.
    STORES[cache_utils.DummyLayer] = lambda layer: layer


def stores_keys(config: PretrainedConfig) -> bool:
    """True if at least one layer of the model's cache stores keys and values, or if the config lists no layers."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


class PrefixCache(Cache):
    """Cache of the prompt pass.

    Raises:
        UnsupportedCacheError: If a cache layer of the model is not in `STORES`, or the config does not contain the
            number of cache layers.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in STORES}):
            raise UnsupportedCacheError(f"no write-once version of the cache layer {', '.join(unknown)}")
        if not layers:
            raise UnsupportedCacheError("the config does not contain the number of cache layers")
        super().__init__(layers=[STORES[type(layer)](layer) for layer in layers])

    @property
    def is_full_attention(self) -> bool:
        """True if all layers have full attention."""
        return all(type(layer) is StoredAttention for layer in self.layers)

    def check_filled(self) -> None:
        """Raise LostCacheError if the prompt pass left a layer empty."""
        for i, layer in enumerate(self.layers):
            if type(layer) in READS and not layer.is_filled:
                raise LostCacheError(
                    f"Layer {i} did not store the prompt: the model ignored the cache that was passed to it. "
                    "transformers' own gradient checkpointing does that in train mode; use the policy's "
                    "`activation_checkpointing` instead."
                )

    def reorder(self, columns: Tensor) -> None:
        """Reorder the columns of the prompts' stored keys and values. All layers must have full attention.

        Reordering is not part of the prompt pass, which activation checkpointing can run again.

        Args:
            columns: [N, L] indices of old columns. In prompt n, column j gets the states of old column `columns[n, j]`.

        Raises:
            LostCacheError: If the prompt pass left a layer empty.
        """
        self.check_filled()
        for layer in self.layers:
            # keys and values may differ in size, as the latents of DeepSeek do
            layer.keys, layer.values = (
                x.gather(2, columns[:, None, :, None].expand_as(x)) for x in (layer.keys, layer.values)
            )

    def extend(self, rows: Rows) -> ExtendedCache:
        """Make the cache of the completion pass, with the prompts' states repeated for `rows`.

        Raises:
            LostCacheError: If the prompt pass left a layer empty.
        """
        self.check_filled()
        return ExtendedCache(
            layers=[READS[type(layer)](layer, rows) if type(layer) in READS else layer for layer in self.layers]
        )


class ExtendedCache(Cache):
    """Cache of the completion pass. It reads the prompt and stores nothing."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompts' convolution states, repeated for the completions."""
        return self.layers[layer_idx].state("conv_states", state_idx)  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The prompts' recurrent states, repeated for the completions."""
        return self.layers[layer_idx].state("recurrent_states", state_idx)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------ decoding

FIRST_CAPACITY = 64
"""Number of tokens per completion that `SharedPrompts` initially has room for."""

KEY_MULTIPLE = {"cuda": 8}
"""Number of keys whose bias an attention kernel reads at a time, by device type; 1 on other devices. Prompts are padded
to a multiple of this number."""

WINDOWS = (64, 128, 256, 512)
"""Window sizes of decoding steps with fixed shapes. A window of w covers the first w columns of completion tokens;
unfilled columns are masked. Larger windows are multiples of the last size."""

ATTENTION = "grpo_lightning_shared_prompts"
"""The name under which transformers finds `attend_to_current` among its attention functions. No mask function has this
name, so transformers makes no mask."""


class DecodingCache(Protocol):
    """KV cache of the open rows, which are the completions that are currently decoded together."""

    def next_token(self) -> dict[str, Any]:
        """Make room for one more token per row.

        Returns:
            Arguments for `known_arguments`, with the KV cache named `cache`.
        """

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model's forward reads this cache."""

    def select(self, rows: list[int]) -> None:
        """Keep only the given rows, in the given order."""


class SamplingCache(DynamicCache):
    """KV cache (`DynamicCache`) that stores keys and values in the dtype that attention uses.

    Under autocast the rotary embedding returns float32 keys, and the values become float32 too. With a `DynamicCache`,
    attention would then cast the entire cache at every token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer, and return all its keys and values."""
        if torch.is_autocast_enabled(key_states.device.type):
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states


class States(NamedTuple):
    """The stored keys and values of a layer."""

    keys: Tensor
    values: Tensor


class RepeatedPrompts:
    """A prefilled cache whose states are repeated for the completions.

    The arguments are those of `SharedPrompts`. This class does not use `policy` and `longest`.
    """

    def __init__(
        self, policy: nn.Module, prefilled: SamplingCache, mask: Tensor, prompt_of: Tensor, longest: int
    ) -> None:
        prefilled.reorder_cache(prompt_of)
        self.cache, self.mask = prefilled, mask[prompt_of]

    def next_token(self) -> dict[str, Any]:
        """See `DecodingCache.next_token`."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        return {"cache": self.cache, "attention_mask": self.mask.long()}

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """See `DecodingCache.decoding`."""
        return contextlib.nullcontext()

    def select(self, rows: list[int]) -> None:
        """See `DecodingCache.select`."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]


cache_ids = itertools.count()


class SharedPrompts(Cache):
    """Cache that stores the prompts' states once, and writes the states of completion tokens in place.

    Attention over [prompt | completion] is computed in two parts, which are then merged (Juravsky et al. 2024,
    "Hydragen", equations 4 and 5):

        o = o_c + sigmoid(s_p - s_c) (o_p - o_c)

    Here o_p and o_c are the outputs of attention to the prompt and to the completion. The log-sum-exps of the scores
    are s_p and s_c. In names, `own` stands for the completion tokens of a row.

    The k-th completion token of a row is always in column k, and a bias masks the columns that a row has not filled
    yet.

    Args:
        policy: The model.
        prefilled: The states of N prompts.
        mask: [N, L] bool, False at padding.
        prompt_of: [rows] index of each row's prompt.
        longest: Maximum number of completion tokens to store per row.
    """

    has_fixed_shapes = False
    """True if every step uses the same tensors, with the same shapes, until `layout` changes. A CUDA graph can then
    compute the steps."""

    merge: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """`merge_parts`, unless the local engine replaces it by a version that runs as one kernel."""

    def __init__(
        self, policy: nn.Module, prefilled: SamplingCache, mask: Tensor, prompt_of: Tensor, longest: int
    ) -> None:
        super().__init__(layers=[])
        self.policy, self.device, self.longest = policy, mask.device, longest
        self.merge = merge_parts
        self.cache_id, self.changes, self.window = next(cache_ids), 0, 0
        states = [States(layer.keys, layer.values) for layer in prefilled.layers]
        self.prompts = states
        """Per layer, [N, key heads, L, head size]."""
        self.mask = mask
        self.bias: Tensor | None = None
        """[N, 1, 1, L] added to the prompts' scores: -inf at padding, in the keys' dtype; None without padding."""
        if not bool(mask.all()):
            self.bias = masking_bias(mask, states[0].keys.dtype)
        self.num_steps = 0
        """Number of calls of `next_token`."""
        self.start = [0] * len(prompt_of)
        """[rows] `num_steps` when the row joined."""
        self.length = 0
        """Number of completion tokens of the oldest row."""
        self.ages: Tensor | None = None
        """[rows] number of completion tokens of each row; None means that all rows have `length`."""
        self.column: Tensor | None = None
        """[rows] column that each row's new token is written to; not used while `ages` is None."""
        self.own_bias: Tensor | None = None
        """[rows, 1, 1, length] added to the scores of completion tokens: -inf in unfilled columns, 0 elsewhere.

        Without fixed shapes (`has_fixed_shapes`), it is None if all columns are filled. With fixed shapes, the last
        dimension is the window (`WINDOWS`)."""
        self.stored: tuple[int, Tensor, Tensor] | None = None
        """The layer that has stored keys and values last, its keys and its values; None if there is none yet."""
        self.own = [States(*(x.new_empty(len(prompt_of), x.shape[1], 0, x.shape[3]) for x in pair)) for pair in states]
        """Per layer, [rows, key heads, capacity, head size]."""
        self.prompt_length = mask.shape[1]
        self.prompt_of: list[int] = []
        self.group(prompt_of.tolist())

    @property
    def capacity(self) -> int:
        """Tokens per row that `own` has room for."""
        return int(self.own[0].keys.shape[2])

    def next_token(self) -> dict[str, Any]:
        """See `DecodingCache.next_token`."""
        if self.length == self.capacity:
            room = min(max(FIRST_CAPACITY, self.capacity), self.longest - self.capacity)
            # one layer after the other, so that only one layer is stored twice at a time
            for i, pair in enumerate(self.own):
                self.own[i] = States(*(nn.functional.pad(x, (0, 0, 0, room)) for x in pair))
            self.changes += 1
        self.num_steps += 1
        self.length += 1
        if self.has_fixed_shapes:
            self.fill_in_place()
        elif self.ages is not None:
            self.column, self.ages = self.ages, self.ages + 1
            columns = torch.arange(round_up(self.length, self.device), device=self.device)
            bias = masking_bias(columns < self.ages[:, None], self.own[0].keys.dtype)
            self.own_bias = bias[..., : self.length]
        return {"cache": self}

    @property
    def layout(self) -> tuple[int, int, int]:
        """Identifier that changes when a step's tensors or their shapes change. No two caches share an identifier."""
        return self.cache_id, self.changes, self.window

    def fill_in_place(self) -> None:
        """Set the columns of new tokens and the bias of completion tokens, reusing the tensors of the previous step."""
        window = next((w for w in WINDOWS if w >= self.length), -(-self.length // WINDOWS[-1]) * WINDOWS[-1])
        window = min(window, self.capacity)
        if self.ages is None:
            self.ages = torch.full((len(self.prompt_of),), self.length - 1, device=self.device)
        if self.column is None or self.own_bias is None or window != self.window:
            self.window = window
            self.changes += 1
            self.column = torch.empty_like(self.ages)
            self.columns = torch.arange(round_up(window, self.device), device=self.device)
            shape = len(self.ages), 1, 1, len(self.columns)
            self.own_bias = torch.empty(shape, dtype=self.own[0].keys.dtype, device=self.device)[..., :window]
        self.column.copy_(self.ages)
        self.ages += 1
        self.own_bias.copy_(masking_bias(self.columns[:window] < self.ages[:, None], self.own_bias.dtype))

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """See `DecodingCache.decoding`."""
        config = text_config(self.policy)
        usual, token = config._attn_implementation, current.set(self)
        try:
            config._attn_implementation = ATTENTION
            yield
        finally:
            config._attn_implementation = usual
            current.reset(token)

    def select(self, rows: list[int]) -> None:
        """See `DecodingCache.select`. Only rows that change their place are copied."""
        moves = moves_to(rows, self.device)
        self.own = [States(*(move_rows(x, moves, len(rows), self.length) for x in pair)) for pair in self.own]
        prompt_of = [self.prompt_of[row] for row in rows]
        open_prompts = pack_rows(sorted(set(prompt_of)))
        if len(open_prompts) < len(self.prompts[0].keys):
            size, length = len(open_prompts), self.prompt_length
            moves = moves_to(open_prompts, self.device)
            self.prompts = [States(*(move_rows(x, moves, size, length) for x in pair)) for pair in self.prompts]
            kept = torch.tensor(open_prompts, device=self.device)
            self.mask = self.mask[kept]
            self.bias = self.bias if self.bias is None else self.bias[kept]
            place = {prompt: i for i, prompt in enumerate(open_prompts)}
            prompt_of = [place[prompt] for prompt in prompt_of]
        self.group(prompt_of)
        self.count_ages([self.start[row] for row in rows])

    def states_of(self, row: int, num_prompt: int, num_own: int) -> list[States]:
        """Copy the states of a row's prompt, and of the row's first `num_own` completion tokens.

        Returns:
            Per layer, keys and values [key heads, num_prompt + num_own, head size].
        """
        prompt = self.prompt_of[row]
        both = zip(self.prompts, self.own, strict=True)
        return [
            States(
                *(
                    torch.cat([p[prompt, :, self.prompt_length - num_prompt :], o[row, :, :num_own]], 1)
                    for p, o in zip(of_prompts, own, strict=True)
                )
            )
            for of_prompts, own in both
        ]

    def join(self, other: SharedPrompts) -> None:
        """Append the prompts and rows of another cache.

        The rows of the other cache must not have completion tokens yet. The other cache must not be used afterwards.
        """
        assert not other.num_steps, "the rows of the other cache have own tokens already"
        lengths = torch.cat([self.mask.sum(1), other.mask.sum(1)]).tolist()
        num_prompts, width = len(self.mask), round_up(max(lengths), self.device)
        self.mask = torch.cat([fit_left(x.mask[..., None], width)[..., 0] for x in (self, other)])
        for i, ours in enumerate(self.prompts):
            both = zip(ours, other.prompts.pop(0), strict=True)  # frees the other cache layer by layer
            self.prompts[i] = States(*(torch.cat([fit_left(x, width) for x in pair]) for pair in both))
        self.bias = masking_bias(self.mask, self.prompts[0].keys.dtype) if min(lengths) < width else None
        new_rows = len(other.prompt_of)
        for i, pair in enumerate(self.own):
            self.own[i] = States(*(nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, new_rows)) for x in pair))
        self.prompt_length = width
        self.group([*self.prompt_of, *(num_prompts + prompt for prompt in other.prompt_of)])
        self.count_ages([*self.start, *[self.num_steps] * new_rows])

    def count_ages(self, start: list[int]) -> None:
        """Set the number of completion tokens of each row."""
        ages = [self.num_steps - step for step in start]
        self.start, self.length = start, max(ages)
        self.ages = None if len(set(ages)) == 1 else torch.tensor(ages, device=self.device)
        self.own_bias = None
        self.changes += 1

    def group(self, prompt_of: list[int]) -> None:
        """Group the rows by prompt, and give each row a place.

        `row_at` holds the row at each place of each group. `place_of` holds the group and the place of each row. All
        groups have equally many places. An unused place refers to row 0, and the attention of this place is
        dropped.
        """
        members: list[list[int]] = [[] for _ in self.prompts[0].keys]
        places = []
        for row, prompt in enumerate(prompt_of):
            places.append(len(members[prompt]))
            members[prompt].append(row)
        size = max(map(len, members))
        self.prompt_of = prompt_of
        rows = [[*group, *[0] * (size - len(group))] for group in members]
        self.every_row = torch.arange(len(prompt_of), device=self.device)
        self.is_in_order = [row for group in rows for row in group] == list(range(len(prompt_of)))
        """True if the groups are equally large and the rows are in group order."""
        self.row_at = torch.tensor(rows, device=self.device)  # [N, size]
        self.place_of = torch.tensor([prompt_of, places], device=self.device)  # [2, rows]

    # ------------------------------------------------------------------------------------ what transformers' code calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens in one layer.

        Returns:
            The arguments `key_states` and `value_states`, each [rows, key heads, 1, head size].
        """
        for own, states in zip(self.own[layer_idx], (key_states, value_states), strict=True):
            if self.ages is None:
                own[:, :, self.length - 1] = states[:, :, 0]
            else:
                own[self.every_row, :, self.column] = states[:, :, 0].to(own.dtype)
        self.stored = layer_idx, key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns before the new token, padding of the prompts included."""
        return self.prompt_length + self.length - 1

    def layer_of(self, key: Tensor, value: Tensor) -> int:
        """The layer that has just stored these keys and values.

        Raises:
            NotImplementedError: If the model attends to keys or values other than those it stored.
        """
        if self.stored is None or self.stored[1] is not key or self.stored[2] is not value:
            raise NotImplementedError("the model attends to other keys or values than it stores in its cache")
        return self.stored[0]

    def attend(self, layer_idx: int, query: Tensor, scaling: float | None) -> Tensor:
        """Attend from the newest token of each row to the row's prompt and completion tokens.

        Args:
            layer_idx: The layer.
            query: [rows, heads, 1, head size].
            scaling: Factor of the scores; None for 1 / sqrt(head size).

        Returns:
            [rows, 1, heads, head size].
        """
        rows, heads, _, size = query.shape
        keys, values = self.prompts[layer_idx]
        length = self.window if self.has_fixed_shapes else self.length
        own_keys, own_values = (x[:, :, :length] for x in self.own[layer_idx])
        groups, places = self.row_at.shape
        key_heads = keys.shape[1]
        # transformers' query head h reads key head h // (heads / key heads)
        query = query.to(keys.dtype).view(rows, key_heads, heads // key_heads, size)
        grouped = query.unflatten(0, (groups, places)) if self.is_in_order else query[self.row_at]
        grouped = grouped.transpose(1, 2).flatten(2, 3)  # [N, key heads, places x query heads, head size]
        bias = self.bias
        if bias is not None:
            bias = bias.expand(groups, key_heads, grouped.shape[2], -1)
        own_bias = self.own_bias
        if own_bias is not None:
            own_bias = own_bias.expand(rows, key_heads, query.shape[2], -1)
        of_prompt, prompt_sum = attention(grouped, keys, values, bias, scaling)
        of_own, own_sum = attention(query, own_keys, own_values, own_bias, scaling)
        # [N, places, key heads, query heads, head size], and the same without the last dimension
        of_prompt, prompt_sum = (x.unflatten(2, (places, -1)).transpose(1, 2) for x in (of_prompt, prompt_sum))
        if self.is_in_order:
            of_own, own_sum = (x.unflatten(0, (groups, places)) for x in (of_own, own_sum))
        else:
            prompt, place = self.place_of
            of_prompt, prompt_sum = of_prompt[prompt, place], prompt_sum[prompt, place]
        return self.merge(of_own, own_sum, of_prompt, prompt_sum).view(rows, 1, heads, -1)


def merge_parts(of_own: Tensor, own_sum: Tensor, of_prompt: Tensor, prompt_sum: Tensor) -> Tensor:
    """Merge the attention outputs for the prompt and for the completion by the formula in `SharedPrompts`.

    Args:
        of_own: [..., head size], o_c.
        own_sum: [...], s_c.
        of_prompt: [..., head size], o_p.
        prompt_sum: [...], s_p.

    Returns:
        [..., head size], contiguous.
    """
    # The results are written to contiguous tensors: the prompts' part is transposed, and some kernels return a
    # transposed view. `torch.compile` ignores the strides of `out`, and makes a contiguous result in the same kernel.
    share = torch.sub(prompt_sum, own_sum, out=own_sum.new_empty(own_sum.shape)).sigmoid_()[..., None]
    wide = torch.promote_types(of_own.dtype, torch.float32)
    parts = of_own.to(wide), of_prompt.to(wide), share.to(wide)
    if torch.compiler.is_compiling():
        return torch.lerp(*parts).to(of_own.dtype).contiguous()
    return torch.lerp(*parts, out=of_own.new_empty(of_own.shape, dtype=wide)).to(of_own.dtype)


NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias", "sliding_window", "indices", "block_indices")
"""Arguments of transformers' attention functions that change the result and that `SharedPrompts` does not support."""

current: ContextVar[SharedPrompts] = ContextVar("the cache that `attend_to_current` reads")


def attend_to_current(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """`SharedPrompts.attend` with the arguments of transformers' attention functions.

    Raises:
        NotImplementedError: If the model uses attention that `SharedPrompts` does not compute.
        RuntimeError: If the policy is called in one thread while completions are sampled in another thread.
    """
    cache = current.get(None)
    if cache is None:
        raise RuntimeError(
            "The policy was called while it is sampled in another thread, for example by an asynchronous reward. Give "
            "the reward a model of its own."
        )
    if asked := [name for name in NOT_COMPUTED if arguments.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(asked)} is not computed from shared prompts")
    if attention_mask is not None:
        raise NotImplementedError("the model makes an attention mask of its own")
    return cache.attend(cache.layer_of(key, value), query, scaling), None


AttentionInterface.register(ATTENTION, attend_to_current)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    Args:
        query: [B, heads, q, head size].
        keys: [B, heads, k, head size].
        values: [B, heads, k, head size].
        bias: [B, heads, q, k] added to the scores.
        scaling: Factor of the scores; None for 1 / sqrt(head size).

    Returns:
        The output [B, heads, q, head size], and the log-sum-exp [B, heads, q] in at least float32.
    """
    kernel = attention_kernel(query.device.type, query.dtype, query.shape[-1])
    return kernel(query, keys, values, bias, query.shape[-1] ** -0.5 if scaling is None else scaling)


AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


@functools.cache
def attention_kernel(device_type: str, dtype: torch.dtype, head_size: int) -> AttentionKernel:
    """Choose torch's fused kernel, or `matrix_products` if no fused kernel supports the arguments."""
    kernel = {"cpu": flash_of_cpu, "cuda": efficient_of_cuda}.get(device_type, matrix_products)
    sample = torch.zeros(1, 1, 8, head_size, dtype=dtype, device=device_type)
    try:
        kernel(sample, sample, sample, sample.new_zeros(1, 1, 8, 8), 1.0)
    except RuntimeError as error:
        log.warning("Sampling without a fused attention kernel (%s, head size %d): %s", dtype, head_size, error)
        return matrix_products
    return kernel


def flash_of_cpu(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `attention`."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, keys, values, attn_mask=bias, scale=scaling)  # type: ignore[no-any-return]


def efficient_of_cuda(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `attention`."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    returns_sums = True  # the operator takes it by position
    output, sums, *_ = operator(query, keys, values, bias, returns_sums, scale=scaling)
    return output, sums[:, :, : query.shape[2]]  # the kernel pads the queries to a multiple of 32


def matrix_products(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `attention`. Computes in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = scaling * query.to(wide) @ keys.to(wide).transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ values.to(wide)).to(query.dtype), scores.logsumexp(-1)


def round_up(length: int, device: torch.device) -> int:
    """Round a length up to a multiple of the device type's `KEY_MULTIPLE`."""
    multiple = KEY_MULTIPLE.get(device.type, 1)
    return -(-length // multiple) * multiple


def masking_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias [B, 1, 1, k] of scores: 0 where the mask [B, k] is True, else -inf."""
    return torch.where(mask, 0.0, -torch.inf)[:, None, None].to(dtype)


def fit_left(states: Tensor, length: int) -> Tensor:
    """Bring left-padded states [..., L, size] to `length` tokens by adding zeros or dropping padding on the left."""
    return nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))


Moves = tuple[Tensor, Tensor] | None
"""Places, and the rows that move there; None if no row moves."""


def moves_to(rows: list[int], device: torch.device) -> Moves:
    """The moves after which each place has the given row."""
    changed = [(place, row) for place, row in enumerate(rows) if place != row]
    if not changed:
        return None
    places, sources = torch.tensor(changed, device=device).T
    return places, sources


def move_rows(states: Tensor, moves: Moves, count: int, length: int) -> Tensor:
    """Move rows of states [rows, heads, capacity, head size] in place.

    Args:
        states: Changed in place.
        moves: A row may move only to a place whose row is not needed any more.
        count: Number of rows that remain.
        length: Tokens to copy.

    Returns:
        The first `count` rows, a view.
    """
    if moves is not None:
        places, sources = moves
        states[places, :, :length] = states[sources, :, :length]
    return states[:count]


def pack_rows(kept: list[int]) -> list[int]:
    """Assign the kept rows to the first len(kept) places, so that as few rows as possible move.

    Args:
        kept: Rows to keep, ascending.
    """
    stay = {row for row in kept if row < len(kept)}
    moving = iter([row for row in kept if row >= len(kept)])
    return [place if place in stay else next(moving) for place in range(len(kept))]


def unshared_reason(policy: nn.Module) -> str | None:
    """Reason, from the model's class or config, why completions cannot share a prompt's states; None if they can."""
    base = base_model(policy)
    if not getattr(base, "_supports_attention_backend", False):
        return f"the attention of {type(base).__name__} cannot be replaced"
    layers = {type(layer) for layer in DynamicCache(config=text_config(policy)).layers}
    if others := sorted(layer.__name__ for layer in layers if layer is not DynamicLayer):
        return f"the cache layer {', '.join(others)} is not of full attention"
    return None if layers else "the config does not contain the number of cache layers"
