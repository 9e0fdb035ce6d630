"""How long a rollout and its updates take at best: bytes to be moved and products to be computed, by assumed speeds.

A lower bound, to tell minutes from days. Rewards, data, validation and waiting for the slowest rank are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.trained_weights import TrainedWeights

MAX_ROLLOUT_HOURS = 1.0
"""A rollout that takes longer than this is not worth waiting for: a run has hundreds."""


@dataclass(frozen=True)
class Speeds:
    """What is assumed of a device: of the order of an A100, or an H100 that waits for Python."""

    products_per_second: float = 1.5e14
    """16-bit floating-point operations, half of an A100's peak; an eighth of it in 32 bits."""

    memory_bytes: float = 1.5e12
    """Per second, out of the device's memory."""

    node_bytes: float = 2.0e11
    """Per second, into a device from the others of its node (NVLink)."""

    far_bytes: float = 2.5e10
    """Per second, into a device from the CPU (PCIe 4.0 x16) or from other nodes (200 Gbit/s for each device)."""

    layer_seconds: float = 6e-4
    """Of one layer and one token of all rows: how fast kernels are launched."""

    def __str__(self) -> str:
        return (
            f"{self.products_per_second / 1e12:g} TFLOP/s in 16 bits, {self.memory_bytes / 1e9:,g} GB/s of device "
            f"memory, {self.node_bytes / 1e9:g} GB/s between the devices of a node, {self.far_bytes / 1e9:g} GB/s from "
            f"the CPU and between nodes, {self.layer_seconds * 1e3:g} ms a layer and token"
        )


@dataclass(frozen=True)
class StepTimes:
    """Seconds, of one rank, all ranks running beside each other."""

    rollout: float
    """Drawing all completions of a rollout at their longest."""

    gathering: float
    """Among it, collecting the weights of the layers at every token."""

    scoring: float
    """Log-probs and gradients of a rollout, all passes."""

    @property
    def cycle(self) -> float:
        """A rollout and everything trained on it."""
        return self.rollout + self.scoring


def step_times(
    shape: ModelShape, settings: MemorySettings, batches: BatchPlan, *, num_nodes: int = 1, speeds: Speeds | None = None
) -> StepTimes:
    """The times of a cycle.

        token      max(layers x launch, (weights + half of the cache) / memory) + gathered bytes / slowest link
        rollout    waves x T tokens, and a gather of everything where weights are gathered once
        scoring    2 operations per weight and token of a forward, 4 of a backward (2 where weights are frozen), and a
                   forward more where activations are recomputed; a gather of everything for each of them. Of a vision
                   tower that is trained as many per patch; a frozen one has done its work when completions are drawn

    Args:
        shape: The model.
        settings: How it is run.
        batches: Of a cycle.
        num_nodes: Machines.
        speeds: Of a device.
    """
    speeds = speeds or Speeds()
    trained = settings.trained or TrainedWeights.all_of(shape)
    whole = trained.model_bytes(shape, settings.widths.compute)
    link = speeds.far_bytes if num_nodes > 1 or settings.division.are_weights_offloaded else speeds.node_bytes
    gather = whole / link * settings.division.gathers_layers
    rollout = gathering = 0.0
    if settings.sampling_rows:
        batch = settings.batch
        waves = math.ceil(batches.batch_size / max(1, settings.sampling_prompts))
        tokens = waves * batch.completion_length
        positions = len(shape.windows) * (batch.prompt_length + batch.completion_length / 2)
        cache = settings.sampling_rows * positions * shape.num_kv_heads * shape.head_dim * 2 * settings.widths.compute
        token = max(shape.num_layers * speeds.layer_seconds, (whole + cache) / speeds.memory_bytes)
        gathering = gather if settings.gathers_for_sampling else gather * tokens
        rollout = tokens * token + gathering
    return StepTimes(rollout, gathering, scoring_seconds(shape, settings, batches, gather, speeds))


def scoring_seconds(
    shape: ModelShape, settings: MemorySettings, batches: BatchPlan, gather: float, speeds: Speeds
) -> float:
    """Seconds of the log-probs and gradients of a cycle."""
    trained, batch = settings.trained or TrainedWeights.all_of(shape), settings.batch
    prompts = batches.batch_size * batches.num_generations if batch.path == "dense" else batches.batch_size
    tokens = prompts * batch.prompt_length + batches.batch_size * batches.num_generations * batch.completion_length
    is_recomputed = settings.checkpointing != "none"
    backwards = 1 + trained.own_matrices / max(1, shape.num_matrix_weights)
    per_update = 1 + is_recomputed + backwards
    others = settings.has_reference + (batches.steps_per_rollout > 1)
    forwards = batches.num_iterations * per_update + others
    speed = speeds.products_per_second / (1 if settings.widths.compute == 2 else 8)
    calls = batches.micro_batches * (len(batch.chunks) + (batch.prompts is not None))
    gathers = calls * (batches.num_iterations * (2 + is_recomputed) + others)
    text, vision = shape.num_matrix_weights, 0.0
    if shape.tower is not None:
        text -= shape.tower.num_matrix_weights
        if settings.images is not None and settings.images.is_tower_trained:
            patches = prompts * settings.images.tokens * shape.tower.patches_per_token
            vision = 2 * shape.tower.num_matrix_weights * patches * forwards
    return (2 * text * tokens * forwards + vision) / speed + gathers * gather


def sampling_refusal(times: StepTimes, shape: ModelShape, settings: MemorySettings, num_nodes: int) -> str | None:
    """Why a policy should not sample itself as it lies over the devices; None if it can."""
    hours = times.rollout / 3600
    if hours <= MAX_ROLLOUT_HOURS or settings.gathers_for_sampling or not settings.division.gathers_layers:
        return None
    gib = shape.num_weights * settings.widths.compute / 2**30
    place = (
        "the CPU" if settings.division.are_weights_offloaded else "other nodes" if num_nodes > 1 else "other devices"
    )
    return (
        f"A rollout would take {hours:,.1f} hours ({times.gathering / 3600:,.1f} of them collecting weights): each of "
        f"up to {settings.batch.completion_length:,} tokens needs all {gib:,.0f} GiB of weights on every device, layer "
        f"by layer from {place}. Set model.engine.gather_for_generation to true if a device has room for all of them, "
        "lower model.sampling.max_completion_length, take a smaller policy, or sample with an engine that has devices "
        "of its own (model.engine)."
    )
