"""What a forward pass keeps for the backward pass.

Counted tensor by tensor in the manner of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for what decoders
are built of today: RMS norms, grouped queries, fused attention, a gated feed-forward block, no dropout. Their
`s b h (34 + 5 a s / h)` bytes are the same count for GPT-3's layer: LayerNorms, dropout masks, a feed-forward width of
4 h and attention scores that are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.shape import ModelShape

LOGIT_BYTES_KEPT = 4
"""`token_logprobs` keeps the logits once, in float32, whatever the precision."""

LOGIT_BYTES_PASSING = 4 * 4
"""At its highest, `token_entropy` holds the log-softmax, its exponential, a masked copy and their product besides."""


class Pass(NamedTuple):
    """One forward: rows of tokens that attend to a context, their own tokens included."""

    rows: int
    tokens: int
    context: int


@dataclass(frozen=True)
class ScoredBatch:
    """A micro-batch and how it is run."""

    num_prompts: int
    num_completions: int
    prompt_length: int
    completion_length: int
    path: Literal["extended", "dense"] = "extended"
    chunk_size: int | None = None
    head_chunk_size: int | None = None
    """Tokens whose logits are there at a time; None: those of a whole chunk."""

    @property
    def has_sliced_head(self) -> bool:
        """True if a chunk's logits are never there at once."""
        return self.head_chunk_size is not None and self.chunk_rows[0] * self.completion_length > self.head_chunk_size

    @property
    def chunk_rows(self) -> list[int]:
        """Completions of every chunk, as `Scorer.chunks` cuts them."""
        if self.chunk_size is None or self.chunk_size >= self.num_completions:
            return [self.num_completions]
        chunks = math.ceil(self.num_completions / self.chunk_size)
        size, rest = divmod(self.num_completions, chunks)
        return [size + 1] * rest + [size] * (chunks - rest)

    @property
    def prompts(self) -> Pass | None:
        """The forward over the prompts; None on the dense path, where every row brings its own."""
        is_extended = self.path == "extended"
        return Pass(self.num_prompts, self.prompt_length, self.prompt_length) if is_extended else None

    @property
    def chunks(self) -> list[Pass]:
        """The forwards over the completions, the largest first."""
        total = self.prompt_length + self.completion_length
        if self.path == "dense":
            return [Pass(rows, total, total) for rows in self.chunk_rows]
        tokens = max(self.completion_length - 1, 2)  # the last token predicts nothing
        return [Pass(rows, tokens, self.prompt_length + tokens) for rows in self.chunk_rows]


def layer_bytes(shape: ModelShape, size: Pass, precision: Precision, *, is_eager: bool = False) -> int:
    """Bytes one decoder layer keeps of one forward.

    Per token, with c the bytes of a matrix product's numbers, h the hidden, i the feed-forward width, a heads of
    size d:

        2 norms       input 4 h, result c h (4 h under autocast; of fused LayerNorms the input alone), and what the
                      products behind it read: c h (under autocast a copy each: 3 c h and 2 c h)
        attention     queries and output 2 c a d, and per token of the context keys and values, repeated for every
                      query head, 2 c a d; the mask c per pair of token and context; the softmax's sum 4 a
                      (eager: the scores too, (4 + c) a per pair)
        feed-forward  gate, up, the activated gate and the product: 4 c i (2 c i without a gate), and c i for every
                      further number an activation function in several operations keeps (gelu_new: 3); each expert's
                      copy of its input and output: 2 c h
        more norms    of queries and keys, or behind a block: 8 bytes a number (6 at 16 bits)
        adapters      beside frozen weights norms keep their input alone; where the model runs in 16 bits, each layer's
                      32-bit adapter keeps a copy of what it reads (under autocast back in 16), and the products nothing

    Within 1 % of what autograd keeps for Llama and Qwen2, 8 % for GPT-2; experts may keep more.

    Args:
        shape: The model.
        size: The forward.
        precision: The widths.
        is_eager: True if attention keeps its scores instead of a fused kernel's few sums.
    """
    c, h, i = precision.compute, shape.hidden_size, shape.intermediate_size
    heads = shape.num_heads * shape.head_dim
    tokens, keys = size.rows * size.tokens, size.rows * size.context
    pairs = size.rows * size.tokens * size.context
    normed = 2 * (precision.residual if shape.has_fused_norms else 4 + precision.residual) * h
    readers = (3 + (2 if shape.has_gated_mlp else 1)) if precision.is_mixed else 2
    normed += shape.extra_norm_channels * (4 + precision.residual)
    routed = 2 * shape.experts_per_token * c * h
    width = (4 if shape.has_gated_mlp else 2) + shape.activation_numbers - 1
    read = readers * c * h
    if shape.adapted_channels:
        normed -= 0 if shape.has_fused_norms else 2 * precision.residual * h
        if precision.adapter_reads:
            read, width = precision.adapter_reads * shape.adapted_channels, width - 1
    per_token = normed + routed + read + 2 * c * heads + width * c * i
    attention = keys * 2 * c * heads + pairs * c + tokens * 4 * shape.num_heads
    scores = pairs * shape.num_heads * (4 + c) if is_eager else 0
    return tokens * per_token + attention + scores


def ends_bytes(shape: ModelShape, size: Pass, precision: Precision) -> int:
    """Bytes kept outside the layers: the last norm's input and result, and what the head reads."""
    return size.rows * size.tokens * shape.hidden_size * (4 + precision.residual + precision.compute)


def prefix_bytes(shape: ModelShape, batch: ScoredBatch, precision: Precision) -> int:
    """Bytes of the prompts' keys and values that the completions read: nothing on the dense path.

    The write-once cache of scoring keeps values in their own type.
    """
    if batch.prompts is None:
        return 0
    positions = batch.num_prompts * cached_positions(shape, batch.prompt_length)
    return positions * shape.num_kv_heads * shape.head_dim * (precision.cached + precision.compute)


def activation_bytes(
    shape: ModelShape,
    batch: ScoredBatch,
    precision: Precision,
    *,
    checkpointing: Literal["none", "layers", "chunks"] = "none",
    is_eager: bool = False,
) -> int:
    """Bytes kept for the backward pass of one micro-batch, without the logits.

        none      every layer of every forward
        layers    every layer's input; a layer being recomputed comes on top, see `recomputed_bytes`
        chunks    every layer of the prompts' forward, and of the largest chunk, which is being recomputed

    Args:
        shape: The model.
        batch: The micro-batch.
        precision: The widths.
        checkpointing: `policy.activation_checkpointing`.
        is_eager: See `layer_bytes`.
    """

    def whole(size: Pass) -> int:
        layer = layer_bytes(shape, size, precision, is_eager=is_eager)
        return shape.num_layers * layer + ends_bytes(shape, size, precision)

    prompts = [] if batch.prompts is None else [batch.prompts]
    prefix = prefix_bytes(shape, batch, precision)
    if checkpointing == "chunks":
        return prefix + sum(map(whole, prompts)) + whole(batch.chunks[0])
    passes = [*prompts, *batch.chunks]
    if checkpointing == "none":
        return prefix + sum(map(whole, passes))
    inputs = sum(size.rows * size.tokens for size in passes) * shape.hidden_size * precision.residual
    ends = sum(ends_bytes(shape, size, precision) for size in passes)
    return prefix + shape.num_layers * inputs + ends


def recomputed_bytes(shape: ModelShape, batch: ScoredBatch, precision: Precision, *, is_eager: bool = False) -> int:
    """Bytes of the one layer that is recomputed at a time, of the largest forward, with checkpointing "layers"."""
    passes = [*([] if batch.prompts is None else [batch.prompts]), *batch.chunks]
    return max(layer_bytes(shape, size, precision, is_eager=is_eager) for size in passes)


def logits_bytes(
    shape: ModelShape, batch: ScoredBatch, *, checkpointing: Literal["none", "layers", "chunks"] = "none"
) -> tuple[int, int]:
    """Bytes of the logits: (kept for the backward pass, passing, while the entropy is computed).

        whole    kept = 4 rows T V (of all completions, or of one chunk where chunks are recomputed),
                 passing = 16 rows' T V, with rows' those of the largest chunk
        slices   kept = 0, passing = (4 + 16) S V: a chunk of more than S tokens runs the head on S at a time, and again
                 in the backward pass

    See `policy/scorer.py` and `functional/logprobs.py`, of which they are counted.
    """
    if batch.has_sliced_head:
        assert batch.head_chunk_size is not None
        return 0, batch.head_chunk_size * shape.vocab_size * (LOGIT_BYTES_KEPT + LOGIT_BYTES_PASSING)
    per_row = batch.completion_length * shape.vocab_size
    kept_rows = batch.chunk_rows[0] if checkpointing == "chunks" else batch.num_completions
    return kept_rows * per_row * LOGIT_BYTES_KEPT, batch.chunk_rows[0] * per_row * LOGIT_BYTES_PASSING


def cache_bytes(shape: ModelShape, rows: int, tokens: int, precision: Precision) -> int:
    """Bytes of the key-value cache.

        sum over layers of  rows x min(tokens, window - 1) x key-value heads x head size x 2 x bytes of a number

    A layer with a sliding window keeps one token less than the window: the next token fills it.

    Args:
        shape: The model.
        rows: Sequences.
        tokens: Of each; the last token drawn is never fed back, so L + T - 1 after sampling.
        precision: The widths.
    """
    return rows * cached_positions(shape, tokens) * shape.num_kv_heads * shape.head_dim * 2 * precision.compute


def cached_positions(shape: ModelShape, tokens: int) -> int:
    """Positions the layers keep of one sequence, all layers together."""
    return sum(tokens if window is None else min(tokens, window - 1) for window in shape.windows)
