"""A device's memory, part by part, in the three moments of a cycle that can be its highest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from grpo_lightning.planning.activations import (
    ScoredBatch,
    activation_bytes,
    cache_bytes,
    logits_bytes,
    recomputed_bytes,
)
from grpo_lightning.planning.precision import Precision
from grpo_lightning.planning.shape import ModelShape
from grpo_lightning.planning.states import Sharding, shard_bytes

GIB = 2**30

Moment = Literal["sampling", "update", "step"]
"""While completions are drawn; in a micro-batch's forward and backward; while the optimizer steps."""

MOMENTS: tuple[Moment, ...] = ("sampling", "update", "step")
ALWAYS = frozenset(MOMENTS)


class Part(NamedTuple):
    """One part of a device's memory."""

    name: str
    num_bytes: int
    moments: frozenset[Moment]
    is_exact: bool
    """True if real tensors have this size to the byte; False for an estimate."""

    how: str
    """What it is made of."""


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a run depends on, beside the model."""

    batch: ScoredBatch
    """The largest micro-batch, at its longest."""

    sampling_rows: int
    """Completions decoded at the same time; 0 if the policy does not sample itself."""

    sampling_prompts: int
    precision: Precision
    optimizer_bytes: float
    """Of optimizer state per trained weight."""

    sharding: Sharding = field(default_factory=Sharding)
    checkpointing: Literal["none", "layers", "chunks"] = "none"
    is_eager: bool = False
    has_reference: bool = True
    accumulates: bool = False
    """True with several micro-batches per step: gradients of the first are there while the next ones run."""

    @property
    def holds_gradients(self) -> bool:
        """True if gradients are there while activations are: those of the micro-batch or the chunk before."""
        return self.accumulates or (self.checkpointing == "chunks" and len(self.batch.chunks) > 1)

    @property
    def widths(self) -> Precision:
        """The precision as the strategy runs it: DeepSpeed converts the model and keeps masters in the optimizer."""
        width = self.precision.compute
        return Precision(width, width) if self.sharding.has_masters else self.precision


def memory_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """Every part, largest moments included; parts of no bytes are left out."""
    parts = [*state_parts(shape, settings), *sampling_parts(shape, settings), *update_parts(shape, settings)]
    return [part for part in parts if part.num_bytes]


def peak(parts: list[Part], moment: Moment) -> int:
    """Bytes at one moment."""
    return sum(part.num_bytes for part in parts if moment in part.moments)


def state_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """What stays from step to step; see `planning.states` for the division among ranks."""
    widths, sharding, count = settings.widths, settings.sharding, shape.num_weights
    weights = shard_bytes(count, widths.weights, sharding.weights)
    gradients = shard_bytes(count, widths.weights, sharding.gradients)
    during: frozenset[Moment] = frozenset({"update", "step"} if settings.holds_gradients else {"step"})
    bucket_bytes = count * widths.weights if sharding.has_buckets else 0
    master_bytes = shard_bytes(count, 4, sharding.optimizer) if sharding.has_masters else 0
    states = shard_bytes(count, settings.optimizer_bytes, sharding.optimizer)
    layers = 2 * (shape.num_matrix_weights // shape.num_layers) * widths.compute
    is_plain = not (sharding.has_masters or sharding.gathers_layers)
    width = f"{widths.weights} bytes a weight"
    return [
        Part("weights", weights, ALWAYS, is_plain, f"{width}{shared(sharding.weights)}"),
        Part("reference", weights * settings.has_reference, ALWAYS, is_plain, "a frozen copy of the weights"),
        Part("gradients", gradients, during, is_plain, f"{width}{shared(sharding.gradients)}"),
        Part("gradient buckets", bucket_bytes, ALWAYS, False, "DDP's second copy of the gradients"),
        Part(
            "optimizer states",
            states,
            ALWAYS,
            is_plain,
            f"{settings.optimizer_bytes:g} bytes a weight{shared(sharding.optimizer)}, from the first step on",
        ),
        Part("master weights", master_bytes, ALWAYS, False, f"4 bytes a weight{shared(sharding.optimizer)}"),
        Part(
            "gathered layers",
            layers * sharding.gathers_layers,
            frozenset({"sampling", "update"}),
            False,
            "the running layer's weights and the next one's",
        ),
        Part(
            "optimizer's work",
            shard_bytes(count, settings.optimizer_bytes / 2, sharding.optimizer),
            frozenset({"step"}),
            False,
            "one state's copy, where the optimizer takes all weights at once",
        ),
    ]


def sampling_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """What decoding needs: the cache at its fullest, one layer of it twice, and the scores of the next token."""
    batch, widths, rows = settings.batch, settings.widths, settings.sampling_rows
    now: frozenset[Moment] = frozenset({"sampling"})
    tokens = batch.prompt_length + batch.completion_length - 1
    cache = cache_bytes(shape, rows, tokens, widths)
    layer = cache // max(1, len(shape.windows))
    scores = 4 * rows * shape.vocab_size * 4
    prefill = settings.sampling_prompts * batch.prompt_length * 4 * widths.compute
    prefill *= shape.intermediate_size + shape.hidden_size
    return [
        Part(
            "key-value cache",
            cache,
            now,
            shape.num_linear_layers == 0,
            f"{rows} completions x {tokens:,} tokens, {len(shape.windows)} layers",
        ),
        Part("growing the cache", layer, now, False, "a layer of it is copied for every token"),
        Part("next-token scores", max(scores, prefill), now, False, "four copies in float32, or the prompts' forward"),
    ]


def update_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """What one forward and backward of the largest micro-batch needs."""
    batch, widths, mode = settings.batch, settings.widths, settings.checkpointing
    now: frozenset[Moment] = frozenset({"update"})
    activations = activation_bytes(shape, batch, widths, checkpointing=mode, is_eager=settings.is_eager)
    kept, passing = logits_bytes(shape, batch, checkpointing=mode)
    casts = shape.num_matrix_weights * widths.compute if widths.is_mixed else 0
    rows, width = batch.chunk_rows[0], f"{batch.completion_length:,} x {shape.vocab_size:,}"
    rows_kept = rows if mode == "chunks" else batch.num_completions
    passing_part = Part(
        "logits, passing", passing, now, False, f"4 copies of {rows} x {width} float32, for the entropy"
    )
    if mode == "layers":
        # Layers are recomputed when the logits in passing are gone: only the larger of the two counts.
        layer = recomputed_bytes(shape, batch, widths, is_eager=settings.is_eager)
        if layer > passing:
            passing_part = Part("recomputed layer", layer, now, False, "one at a time")
    return [
        Part("16-bit weights", casts, frozenset({"sampling", "update"}), False, "autocast's copies of all matrices"),
        Part("activations", activations, now, False, f"{batch.path} path, checkpointing: {mode}"),
        Part("logits, kept", kept, now, True, f"{rows_kept} x {width} float32, for the backward pass"),
        passing_part,
    ]


def shared(ranks: int) -> str:
    """How a part is divided, in words."""
    return f", over {ranks} ranks" if ranks > 1 else ""
