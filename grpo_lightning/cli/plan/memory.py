"""A device's memory, part by part: the states, and what sampling and an update need beside them."""

from __future__ import annotations

from grpo_lightning.cli.plan.activations import activation_bytes, cache_bytes, logits_bytes, recomputed_bytes
from grpo_lightning.cli.plan.image_parts import image_parts
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.parts import Moment, Part
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.state_parts import state_parts
from grpo_lightning.cli.plan.trained_weights import TrainedWeights


def memory_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """Every part, largest moments included; parts of no bytes are left out."""
    batch = settings.batch
    images = image_parts(
        shape,
        settings.images,
        settings.widths,
        prompts=batch.num_completions if batch.path == "dense" else batch.num_prompts,
        checkpointing=settings.checkpointing,
    )
    parts = [*state_parts(shape, settings), *images, *sampling_parts(shape, settings), *update_parts(shape, settings)]
    return [part for part in parts if part.num_bytes]


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
    if shape.tower is not None and settings.images is not None:  # which encodes the images before the prompts run
        patches = settings.sampling_prompts * settings.images.tokens * shape.tower.patches_per_token
        width = shape.tower.intermediate_size + shape.tower.hidden_size
        prefill = max(prefill, patches * 4 * widths.compute * width)
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
    rows, width = batch.chunk_rows[0], f"{batch.completion_length:,} x {shape.vocab_size:,}"
    rows_kept = rows if mode == "chunks" else batch.num_completions
    how = f"4 copies of {rows} x {width} float32, for the entropy"
    if batch.has_sliced_head:
        how = f"of {batch.head_chunk_size:,} tokens x {shape.vocab_size:,} at a time (policy.head_chunk_size)"
    passing_part = Part("logits, passing", passing, now, False, how)
    if mode == "layers":
        # Layers are recomputed when the logits in passing are gone: only the larger of the two counts.
        layer = recomputed_bytes(shape, batch, widths, is_eager=settings.is_eager)
        if layer > passing:
            passing_part = Part("recomputed layer", layer, now, False, "one at a time")
    return [
        *autocast_parts(shape, settings),
        Part("activations", activations, now, False, f"{batch.path} path, checkpointing: {mode}"),
        Part("logits, kept", kept, now, True, f"{rows_kept} x {width} float32, for the backward pass"),
        passing_part,
    ]


def autocast_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """Autocast's 16-bit copies of 32-bit matrices.

    Those of trained ones are kept and used again; those of frozen ones are made anew by every forward, which keeps them
    for its backward pass. FSDP2 gathers in 16 bits and needs none.
    """
    if not settings.widths.is_mixed or settings.division.gathers_layers:
        return []
    trained = settings.trained or TrainedWeights.all_of(shape)
    frozen = max(0, shape.num_matrix_weights - trained.own_matrices - trained.quantized)
    if shape.tower is not None and settings.images is not None and not settings.images.is_tower_trained:
        frozen = max(0, frozen - shape.tower.num_matrix_weights)  # it runs while completions are drawn, and not again
    chunks = 1 if settings.checkpointing == "chunks" else len(settings.batch.chunks)
    forwards = 1 if settings.checkpointing == "layers" else chunks + (settings.batch.prompts is not None)
    width, always = settings.widths.compute, frozenset[Moment]({"sampling", "update"})
    how = f"autocast's copies of frozen matrices, of {forwards} forwards: policy.dtype bfloat16 needs none"
    return [
        Part(
            "16-bit weights", trained.own_matrices * width, always, False, "autocast's copies of all trained matrices"
        ),
        Part("16-bit frozen", frozen * forwards * width, frozenset({"update"}), False, how),
    ]
