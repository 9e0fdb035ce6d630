"""FlashAttention's kernels in plain torch, behind transformers' own integration: what the kernels get is what they get.

They take 16 bits only, know no mask but the lengths of the rows, and align the last query with the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One row: [q, heads, d] over [k, kv heads, d]."""
    if {query.dtype, key.dtype, value.dtype} not in ({torch.float16}, {torch.bfloat16}):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1).float() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * (softmax_scale or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The distance to every key, in tokens: the last query is at the last key.
    places = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = places - torch.arange(len(key))
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


class Kernels:
    """The functions of the package, and how often each ran."""

    def __init__(self) -> None:
        self.calls = {"whole": 0, "ragged": 0}

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Rows of one length: [B, L, heads, d]."""
        self.calls["whole"] += 1
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
        options |= {"window_size": window_size, "softcap": softcap}
        return torch.stack([attend(*row, **options) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Rows of any lengths, without padding: [tokens, heads, d]."""
        self.calls["ragged"] += 1
        lengths = [ends.diff().tolist() for ends in (cu_seqlens_q, cu_seqlens_k)]
        assert max(lengths[0]) <= max_seqlen_q
        assert max(lengths[1]) <= max_seqlen_k
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
        options |= {"window_size": window_size, "softcap": softcap}
        rows = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        return torch.cat([attend(*row, **options) for row in rows])


def install(monkeypatch: Any) -> Kernels:
    """Have transformers find the stand-in, on the CPU, for the length of a test."""
    kernels = Kernels()
    utils = modeling_flash_attention_utils
    functions = kernels.flash_attn_func, kernels.flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: functions)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(utils, name, None)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    dispatch = PreTrainedModel._flash_attn_can_dispatch

    def can_dispatch(self: PreTrainedModel, *args: Any, **kwargs: Any) -> bool:
        return True if self._supports_flash_attn else dispatch(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch)
    return kernels
