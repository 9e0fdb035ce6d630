"""What a run costs, as `grpo-lightning plan` prints it: the memory of a device by part, and the time of a cycle."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from grpo_lightning.cli.plan.memory import memory_parts
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.memory_table import Described
from grpo_lightning.cli.plan.parts import ALWAYS, GIB, MOMENTS, TRAINING, Moment, Part, peak
from grpo_lightning.cli.plan.times import Speeds, StepTimes
from grpo_lightning.cli.plan.trained_weights import TrainedWeights

TITLES: dict[Moment, str] = {"sampling": "sampling", "update": "update", "step": "step"}


def print_memory(console: Console, described: Described, device_gib: float | None = None) -> str | None:
    """Print the table of parts, the highest moment, and the device it has to fit.

    Returns:
        That it does not fit, with the settings that need less; None if it may fit, or there is no device to compare.
    """
    shape, settings, remarks = described
    parts = memory_parts(shape, settings)
    peaks = {moment: peak(parts, moment) for moment in MOMENTS}
    highest = max(MOMENTS, key=peaks.__getitem__)
    unit, name = (GIB, "GiB") if peaks[highest] > GIB / 10 else (2**20, "MiB")
    table = Table(title=f"Memory of one device, {name}", title_justify="left", title_style="bold")
    table.add_column("part")
    for moment in MOMENTS:
        table.add_column(TITLES[moment], justify="right")
    table.add_column("made of")
    for part in parts:
        if part.place == "device":
            table.add_row(*part_row(part, unit))
    total = [f"~{peaks[moment] / unit:.2f}" for moment in MOMENTS]
    table.add_section()
    table.add_row("together", *total, f"highest: {TITLES[highest]}", style="bold")
    console.print()
    console.print(table)
    trained = settings.trained or TrainedWeights.all_of(shape)
    weights = f"{shape.num_weights:,} weights, {shape.num_layers} layers"
    notes = [
        f"The policy has {weights}, {settings.widths.weights} bytes each (trainer.precision, policy.dtype)."
        + f" {trained.count:,} are trained ({trained.count / shape.num_weights:.2%})."
        * (trained.count != shape.num_weights),
        "sampling: while completions are drawn; update: in a micro-batch's forward and backward; step: while the "
        "optimizer steps. ~ is an estimate by formula, the others are the sizes of real tensors; fragmentation and the "
        "CUDA context (about 0.5 GiB) come on top.",
        *[f"{remark[0].upper()}{remark[1:]}." for remark in remarks],
    ]
    notes += host_lines(parts)
    compared = device_line(peaks[highest], device_gib)
    for note in [*notes, compared]:
        console.print(note, markup=False)
    if not compared.startswith(verdict(2)):
        return None
    too_high = [moment for moment in MOMENTS if verdict_at(peaks[moment], device_gib) == verdict(2)]
    lines = [f"{TITLES[moment]}: {'; '.join(levers(settings, moment))}" for moment in too_high]
    return "\n".join([f"{compared} What needs less, by moment:", *lines])


def levers(settings: MemorySettings, moment: Moment) -> list[str]:
    """The settings that lower the memory of a moment and are not used yet, the cheapest in time first."""
    division, batch, trained = settings.division, settings.batch, settings.trained
    is_full = trained is None or not trained.adapters
    has_copy = settings.has_reference and is_full and not division.are_weights_offloaded
    found = [
        (batch.num_completions > 1, {"update"}, "a larger trainer.accumulate_grad_batches (the update stays the same)"),
        (settings.checkpointing == "none", {"update"}, "policy.activation_checkpointing: layers"),
        (settings.sampling_prompts > 1, {"sampling"}, "model.engine.max_rows: sample in several waves"),
        (
            has_copy and "reference" not in settings.offloaded,
            {"sampling"},
            "model.offload: [reference, optimizer]",
        ),
        (has_copy, ALWAYS, "objective.beta: 0, which needs no reference"),
        (
            settings.optimizer_bytes > 4 and is_full and not division.is_optimizer_offloaded,
            ALWAYS,
            "the optimizer AdamW8bit",
        ),
        (is_full, ALWAYS, "policy.lora"),
        (not division.gathers_layers, ALWAYS, "--config strategies/zero3 (or fsdp2) on several devices"),
        (division.gathers_layers, ALWAYS, "more devices (each holds a smaller share)"),
        (not division.is_optimizer_offloaded, TRAINING, "--config strategies/zero3_offload"),
        (settings.gathers_for_sampling, {"sampling"}, "model.engine.gather_for_generation: false"),
        (True, {"sampling", "update"}, "a smaller sampling.max_completion_length"),
    ]
    return [text for is_open, moments, text in found if is_open and moment in moments]


def part_row(part: Part, unit: int) -> list[str]:
    """A row of the table."""
    size = f"{'' if part.is_exact else '~'}{part.num_bytes / unit:.2f}"
    cells = [size if moment in part.moments else "" for moment in MOMENTS]
    return [part.name, *cells, part.how]


def host_lines(parts: list[Part]) -> list[str]:
    """What is kept on the CPU instead of the device."""
    there = [part for part in parts if part.place == "host"]
    if not there:
        return []
    needed = max(peak(parts, moment, "host") for moment in MOMENTS)
    sizes = ", ".join(f"{part.name} {part.num_bytes / GIB:.2f}" for part in there)
    return [f"On the CPU, for every device of a node: {needed / GIB:.2f} GiB ({sizes})."]


def verdict_at(needed: int, device_gib: float | None) -> str:
    """Whether so many bytes fit the device that is planned for."""
    total = torch.cuda.get_device_properties(0).total_memory if device_gib is None else device_gib * GIB
    return verdict(needed / total)


def device_line(needed: int, device_gib: float | None = None) -> str:
    """What is needed against what is there, or against a device that is named."""
    if device_gib is not None:
        return f"{verdict_at(needed, device_gib)}: {needed / GIB:.1f} of {device_gib:g} GiB."
    if not torch.cuda.is_available():
        return "No CUDA device is here to compare with; --device_gib N names one."
    device: Any = torch.cuda.get_device_properties(0)
    share = needed / device.total_memory
    return (
        f"{verdict(share)}: {needed / GIB:.1f} GiB of the {device.total_memory / GIB:.1f} GiB of this machine's "
        f"{device.name} ({share:.0%})."
    )


def verdict(share: float) -> str:
    """Whether this share of a device's memory is there."""
    return "It fits" if share <= 0.9 else "It may not fit" if share <= 1 else "It does not fit"


def time_lines(times: StepTimes, cycles: float | None) -> list[str]:
    """Of a cycle, and of the run where its length is known."""
    rollout = f"{duration(times.rollout)} to draw the completions" if times.rollout else "drawing not known"
    if times.gathering >= 1:
        rollout += f" ({duration(times.gathering)} of it collecting weights)"
    lines = [f"A rollout and its updates: at least {rollout}, {duration(times.scoring)} to score and train on them."]
    if cycles is not None:
        lines.append(f"The run, {cycles:,.6g} rollouts: at least {duration(times.cycle * cycles)}.")
    return [*lines, f"Not measured. All completions at their longest; assumed: {Speeds()}."]


def duration(seconds: float) -> str:
    """`8 s`, `3.5 min`, `12 h`, `9.1 days`."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.2g} {name}" if seconds / unit < 10 else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.3g} days"
