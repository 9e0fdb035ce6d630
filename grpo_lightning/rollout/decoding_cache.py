"""KV caches of decoding: what the next token of every unfinished completion attends to.

A prefill stores the prompts' keys and values in a `SamplingCache`. One of two caches then continues it, with the same
methods:

- `SharedPrompts` keeps each prompt once. The completions of a prompt read its keys and values together, and each
  completion's own keys and values are written in place. It needs a model whose attention can be replaced.
- `RepeatedPrompts` repeats the prompts' states for their completions, and grows with every token. It works with all
  states that transformers can repeat: sliding windows, linear attention, and attention that cannot be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from grpo_lightning.policy.hf import base_model, text_config

FIRST_CAPACITY = 64
"""Tokens per completion that `SharedPrompts` has room for at first. The room doubles when it is full."""

ATTENTION = "grpo_lightning_shared_prompts"
"""The name of `SharedPrompts.attend` among transformers' attention functions. It has no mask function there, so
transformers makes no mask."""


class DecodingCache(Protocol):
    """States of the open rows, which are the completions that are decoded together."""

    def next_token(self) -> dict[str, Any]:
        """Make room for a token per row. Returns: the arguments of the model's forward for that token."""

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model's forward reads this cache."""

    def select(self, rows: list[int]) -> None:
        """Keep these of the present rows, in this order."""


class SamplingCache(DynamicCache):
    """KV cache (`DynamicCache`) that stores keys and values in the dtype that attention uses.

    Under autocast the rotary embedding multiplies by float32 cosines and returns float32 keys, and the values become
    float32 too. Attention then casts the entire cache at every token. Casting keys and values once, when they are
    stored, gives the same results with half the memory.
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


class RepeatedPrompts:
    """A prefilled cache whose states are repeated for the completions.

    Args:
        policy: The model.
        prefilled: The states of N prompts.
        mask: [N, L] bool, False at padding.
        prompt_of: [rows] index of each row's prompt.
        longest: Not needed here.
    """

    def __init__(
        self, policy: nn.Module, prefilled: SamplingCache, mask: Tensor, prompt_of: Tensor, longest: int
    ) -> None:
        prefilled.reorder_cache(prompt_of)
        self.cache, self.mask = prefilled, mask[prompt_of]

    def next_token(self) -> dict[str, Any]:
        """See `DecodingCache.next_token`."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        return {"past_key_values": self.cache, "attention_mask": self.mask.long()}

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """See `DecodingCache.decoding`."""
        return contextlib.nullcontext()

    def select(self, rows: list[int]) -> None:
        """See `DecodingCache.select`."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]


class SharedPrompts(Cache):
    """Prompts' states, stored once, and the completions' own states, written in place.

    Attention over [prompt | own tokens] is computed in two parts and merged (Juravsky et al. 2024, "Hydragen",
    equations 4 and 5): with outputs o_p and o_c and log-sum-exps s_p and s_c of the scores of the two parts,

        o = o_c + sigmoid(s_p - s_c) (o_p - o_c)

    The queries of all completions of a prompt attend to its keys in one matrix product, without a copy of the keys per
    completion or per query head.

    Args:
        policy: The model.
        prefilled: The states of N prompts.
        mask: [N, L] bool, False at padding.
        prompt_of: [rows] index of each row's prompt.
        longest: Most tokens per row that will be stored.
    """

    def __init__(
        self, policy: nn.Module, prefilled: SamplingCache, mask: Tensor, prompt_of: Tensor, longest: int
    ) -> None:
        super().__init__(layers=[])
        self.policy, self.device, self.longest = policy, mask.device, longest
        states = [(layer.keys, layer.values) for layer in prefilled.layers]
        # The kernels of GPUs read biases in vectors of 8 numbers.
        padding = -mask.shape[1] % 8 if mask.device.type == "cuda" else 0
        if padding:
            states = [tuple(nn.functional.pad(x, (0, 0, padding, 0)) for x in pair) for pair in states]  # type: ignore[misc]
            mask = nn.functional.pad(mask, (padding, 0))
        self.prompts: list[tuple[Tensor, Tensor]] = states
        """Keys and values of each layer, [N, key heads, L, head size]."""
        self.bias: Tensor | None = None
        """[N, 1, 1, L] added to the scores: -inf at padding, in the keys' dtype; None without padding."""
        if padding or not bool(mask.all()):
            self.bias = torch.where(mask, 0.0, -torch.inf)[:, None, None].to(states[0][0].dtype)
        self.length = 0
        """Tokens per row in `own`."""
        self.own = [tuple(x.new_empty(len(prompt_of), x.shape[1], 0, x.shape[3]) for x in pair) for pair in states]
        """Keys and values of each layer, [rows, key heads, capacity, head size]."""
        self.prompt_length = mask.shape[1]
        self.prompt_of: list[int] = []
        self.group(prompt_of.tolist())

    @property
    def capacity(self) -> int:
        """Tokens per row that `own` has room for."""
        return int(self.own[0][0].shape[2])

    def next_token(self) -> dict[str, Any]:
        """See `DecodingCache.next_token`."""
        if self.length == self.capacity:
            room = min(max(FIRST_CAPACITY, self.capacity), self.longest - self.capacity)
            # one layer after the other, so that only one layer is stored twice at a time
            for i, pair in enumerate(self.own):
                self.own[i] = tuple(nn.functional.pad(x, (0, 0, 0, room)) for x in pair)
        self.length += 1
        return {"past_key_values": self}

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """See `DecodingCache.decoding`."""
        config = text_config(self.policy)
        usual, token = config._attn_implementation, current.set(self)
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = usual
            current.reset(token)

    def select(self, rows: list[int]) -> None:
        """See `DecodingCache.select`. Only rows that change their place are copied."""
        self.own = [tuple(moved(x, rows, self.length) for x in pair) for pair in self.own]
        prompt_of = [self.prompt_of[row] for row in rows]
        open_prompts = packed(sorted(set(prompt_of)))
        if len(open_prompts) < len(self.prompts[0][0]):
            length = self.prompt_length
            self.prompts = [tuple(moved(x, open_prompts, length) for x in pair) for pair in self.prompts]  # type: ignore[misc]
            self.bias = self.bias if self.bias is None else self.bias[open_prompts]
            place = {prompt: i for i, prompt in enumerate(open_prompts)}
            prompt_of = [place[prompt] for prompt in prompt_of]
        self.group(prompt_of)

    def group(self, prompt_of: list[int]) -> None:
        """Arrange the rows in groups: of each row its prompt and its place, of each place its row.

        The N groups have as many places as the largest group has rows. Free places hold some row, and what is computed
        there is dropped.
        """
        members: list[list[int]] = [[] for _ in self.prompts[0][0]]
        places = []
        for row, prompt in enumerate(prompt_of):
            places.append(len(members[prompt]))
            members[prompt].append(row)
        size = max(map(len, members))
        self.prompt_of = prompt_of
        rows = [[*group, *[0] * (size - len(group))] for group in members]
        self.row_at = torch.tensor(rows, device=self.device)  # [N, size]
        self.place_of = torch.tensor([prompt_of, places], device=self.device)  # [2, rows]

    # ------------------------------------------------------------------------------------ what transformers' code calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a token's keys and values of a layer, [rows, key heads, 1, head size], and return them."""
        for own, states in zip(self.own[layer_idx], (key_states, value_states), strict=True):
            own[:, :, self.length - 1] = states[:, :, 0]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new one."""
        return self.prompt_length + self.length - 1

    def attend(self, layer_idx: int, query: Tensor, scaling: float | None) -> Tensor:
        """Attend to the prompts and to the completions' own tokens.

        Args:
            layer_idx: The layer.
            query: [rows, heads, 1, head size].
            scaling: Factor of the scores; None for 1 / sqrt(head size).

        Returns:
            [rows, 1, heads, head size].
        """
        rows, heads, _, size = query.shape
        keys, values = self.prompts[layer_idx]
        own_keys, own_values = (x[:, :, : self.length] for x in self.own[layer_idx])
        groups, places = self.row_at.shape
        key_heads = keys.shape[1]
        # transformers' query head h reads key head h // (heads / key heads)
        query = query.to(keys.dtype).view(rows, key_heads, heads // key_heads, size)
        grouped = query[self.row_at].transpose(1, 2).flatten(2, 3)  # [N, key heads, places x query heads, head size]
        bias = self.bias
        if bias is not None:
            bias = bias.expand(groups, key_heads, grouped.shape[2], -1)
        of_prompt, prompt_sum = attention(grouped, keys, values, bias, scaling)
        of_own, own_sum = attention(query, own_keys, own_values, None, scaling)
        prompt, place = self.place_of
        of_prompt = of_prompt.unflatten(2, (places, -1)).transpose(1, 2)[prompt, place]
        prompt_sum = prompt_sum.unflatten(2, (places, -1)).transpose(1, 2)[prompt, place]
        share = torch.sigmoid(prompt_sum - own_sum)[..., None]
        merged = torch.lerp(of_own.float(), of_prompt.float(), share)
        return merged.to(query.dtype).view(rows, 1, heads, -1)


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
        NotImplementedError: If the model asks for attention that `SharedPrompts` does not compute.
    """
    asked = {name: arguments.get(name) for name in ("softcap", "s_aux", "sinks", "position_bias", "sliding_window")}
    if unknown := [name for name, value in asked.items() if value is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)} is not computed from shared prompts")
    if attention_mask is not None:
        raise NotImplementedError("the model makes an attention mask of its own")
    return current.get().attend(module.layer_idx, query, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, attend_to_current)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores, with the kernels behind torch's `scaled_dot_product_attention`.

    Args:
        query: [B, heads, q, head size].
        keys: [B, heads, k, head size].
        values: [B, heads, k, head size].
        bias: [B, heads, q, k] added to the scores.
        scaling: Factor of the scores; None for 1 / sqrt(head size).

    Returns:
        [B, heads, q, head size], and [B, heads, q] float32.
    """
    if query.device.type == "cuda":
        output, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query,
            keys,
            values,
            bias,
            True,
            scale=scaling,
        )
        return output, sums[:, :, : query.shape[2]]  # the kernel pads the queries to a multiple of 32
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scaling
    )
    return output, sums


def moved(states: Tensor, rows: list[int], length: int) -> Tensor:
    """Move the rows of states [rows, heads, capacity, head size] in place, copying `length` tokens of those that move.

    Args:
        states: Changed in place.
        rows: The row that each place gets. A row may move only to a place whose row is not needed any more.
        length: Tokens to copy.

    Returns:
        The first len(rows) rows, a view.
    """
    changed = [(place, row) for place, row in enumerate(rows) if place != row]
    if changed:
        places, sources = torch.tensor(changed, device=states.device).T
        states[places, :, :length] = states[sources, :, :length]
    return states[: len(rows)]


def packed(kept: list[int]) -> list[int]:
    """The row that each of the first len(kept) places gets: its own if that is kept, else one from behind them.

    So the fewest rows move.

    Args:
        kept: Rows to keep, ascending.
    """
    stay = {row for row in kept if row < len(kept)}
    moving = iter([row for row in kept if row >= len(kept)])
    return [place if place in stay else next(moving) for place in range(len(kept))]


def unshared_reason(policy: nn.Module) -> str | None:
    """Reason why completions cannot read their prompt's states together, from declared properties; None if they can."""
    base = base_model(policy)
    if not getattr(base, "_supports_attention_backend", False):
        return f"the attention of {type(base).__name__} cannot be replaced"
    layers = {type(layer) for layer in DynamicCache(config=text_config(policy)).layers}
    if others := sorted(layer.__name__ for layer in layers if layer is not DynamicLayer):
        return f"the cache layer {', '.join(others)} is not of full attention"
    return None if layers else "the config does not contain the number of cache layers"
