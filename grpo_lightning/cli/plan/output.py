"""Output of `grpo-lightning plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.plan import vllm
from grpo_lightning.cli.plan.batches import BatchPlan, RunPlan
from grpo_lightning.cli.plan.memory import ALWAYS, GIB, MOMENTS, SAMPLING, TRAINING, UPDATE, MemorySettings, Part, peak
from grpo_lightning.cli.plan.model import ModelSizes
from grpo_lightning.data.prompt_source import remedy_for_few_prompts
from grpo_lightning.policy.completion_logprobs import AutoChunks

if TYPE_CHECKING:
    from jsonargparse import Namespace

TIGHT = 0.9
"""Fraction of a device's memory. If a run needs a fraction from `TIGHT` to 1, it depends on fragmentation and
on the CUDA context whether the run fits."""


def print_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print a heading and its lines."""
    console.print(f"\n[bold]{title}[/bold]")
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def count(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun (`1,600 prompts`)."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


# ------------------------------------------------------------------------------------------------- batches and length


def batch_lines(batches: BatchPlan, why_world_size: str) -> list[str]:
    """Format the batch arithmetic of a cycle."""
    b = batches
    update = f"{b.completions_per_update:,.6g}"
    if b.ranks_per_group == 1:
        where = f"{count(b.batch_size, 'prompt')} per rank x {count(b.world_size, 'rank')}"
        shared = []
    else:
        where = f"{count(b.batch_size, 'prompt')} per team x {count(b.num_teams, 'team')} of {b.ranks_per_group} ranks"
        each = f"{b.num_generations / b.ranks_per_group:.3g}"
        shared = [
            f"The {b.ranks_per_group} ranks of a team share their prompts: each samples and trains on {each} of the "
            f"{b.num_generations} completions (model.ranks_per_group)."
        ]
    size = f"x {b.num_generations} completions = {b.completions_per_rollout:,} completions per rollout"
    full = b.batch_size * b.num_teams
    rollout = f"{where} {size} (ranks: {why_world_size})."
    if b.prompts_per_rollout < full:
        rollout = (
            f"{where} = {full:,} prompts, but the data have only {b.prompts_per_rollout:,}: "
            f"{count(b.prompts_per_rollout, 'prompt')} {size} (ranks: {why_world_size}). "
            f"{remedy_for_few_prompts(b.prompts_per_rollout, b.num_teams)}"
        )
    return [
        rollout,
        *shared,
        f"Each rank splits its {b.completions_per_rank:,} into {b.accumulate_grad_batches} x "
        f"{b.updates_per_rollout} = {count(b.micro_batches, 'micro-batch', 'es')} (accumulate_grad_batches x "
        f"updates_per_rollout) of about {b.completions_per_rank / b.micro_batches:,.3g} completions.",
        f"Each rollout is used for {b.updates_per_rollout} x {b.num_iterations} = "
        f"{count(b.steps_per_rollout, 'optimizer step')} (updates_per_rollout x num_iterations), each on {update} "
        "completions over all ranks.",
    ]


def length_lines(
    config: Namespace, batches: BatchPlan, length: RunPlan, num_prompts: int | None, why_unknown: str
) -> list[str]:
    """Format the numbers of steps per epoch and of the run. With dynamic sampling, both are maximums."""
    settings = config.model.dynamic_sampling
    most = "" if settings is None else "up to "
    if num_prompts is None or length.steps_per_epoch is None:
        lines = [f"The number of prompts is unknown: {why_unknown}.".replace("..", ".")]
    else:
        rollouts = length.steps_per_epoch // batches.steps_per_rollout
        epoch = f"{count(rollouts, 'rollout')} = {count(length.steps_per_epoch, 'optimizer step')} per epoch."
        lines = [f"{count(num_prompts, 'prompt')}: {most}{epoch}"]
    if settings is not None:
        lines.append(
            f"With dynamic_sampling, a rollout may take up to {settings.max_resample_times + 1} times the prompts and "
            "the sampling time, and an epoch may have fewer steps."
        )
    if length.requested_steps is not None and not config.trainer.fast_dev_run:
        lines.append(f"max_steps {length.requested_steps} ends inside a cycle: it is rounded up.")
    return [*lines, total_line(config, batches, length)]


def total_line(config: Namespace, batches: BatchPlan, length: RunPlan) -> str:
    """Format the length of the run and the limits that determine it."""
    trainer, is_open = config.trainer, config.model.dynamic_sampling is not None
    limits = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs, "max_time": trainer.max_time}
    if trainer.fast_dev_run:
        limits = {"fast_dev_run": trainer.fast_dev_run}
    by = ", ".join(f"{name} {value}" for name, value in limits.items() if value not in (None, -1))
    by_epochs = trainer.max_epochs not in (None, -1)
    if length.total_steps is None:
        if trainer.max_steps >= 0 or by_epochs:
            return f"The length of the run depends on the number of prompts ({by})."
        if trainer.max_time is None:
            return "The run has no end: max_epochs is -1, and neither max_steps nor max_time is set."
        return f"The length of the run depends on the time limit ({by})."
    by += ": fewer if the time limit is reached first" * ("max_time" in by)
    line = f"The run: {'up to ' * (is_open and by_epochs)}{count(length.total_steps, 'optimizer step')}"
    if length.num_prompts is not None:
        line += f", {count(length.num_prompts, 'prompt')} {'trained on' if is_open else 'sampled for'}"
        line += f", {count(length.num_prompts * batches.num_generations, 'completion')}"
    if length.epochs is not None:
        least = "at least " * (is_open and not by_epochs)
        line += f", {least}{length.epochs:.3g} epoch{'' if length.epochs == 1 else 's'}"
    return f"{line} ({by})."


def validation_line(trainer: Namespace, batches: BatchPlan, length: RunPlan, num_prompts: int) -> str:
    """Format how often the run validates."""
    if not num_prompts:
        return "No validation data."
    prompts, every = f"Validation on {count(num_prompts, 'prompt')}", trainer.val_check_interval
    every = 1.0 if every is None else every
    if isinstance(every, int) and not isinstance(every, bool):
        return f"{prompts} every {every / batches.accumulate_grad_batches:g} optimizer steps ({every} micro-steps)."
    if not isinstance(every, float):
        return f"{prompts} every {every}."
    epochs = trainer.check_val_every_n_epoch or 1
    if every == 1.0 or length.steps_per_epoch is None:
        share = "" if every == 1.0 else f"{every:g} of "
        return f"{prompts} every {share}{'epoch' if epochs == 1 else f'{epochs} epochs'}."
    micro_steps = int(length.steps_per_epoch * batches.accumulate_grad_batches * every)
    return f"{prompts} every {micro_steps / batches.accumulate_grad_batches:g} optimizer steps of an epoch."


def token_lines(settings: MemorySettings, why_prompt_tokens: str) -> list[str]:
    """Format the largest micro-batch in tokens, and its chunks."""
    batch = settings.batch
    N, B, L, T = batch.num_prompts, batch.num_completions, batch.prompt_length, batch.completion_length
    dense, shared = B * (L + T), N * L + B * T
    lines = [f"Longest prompt: {count(L, 'token')} ({why_prompt_tokens}). Longest completion: {T:,}."]
    if batch.path == "dense":
        lines.append(f"The largest micro-batch: {B} x ({L:,} + {T:,}) = {dense:,} tokens (dense path).")
    else:
        lines.append(
            f"The largest micro-batch: {N} x {L:,} prompt + {B} x {T:,} completion tokens = {shared:,}; with a copy of "
            f"the prompt in every row it would be {dense:,}, {dense / shared:.1f} times as many."
        )
    chosen = "auto" if isinstance(batch.chunk_size, AutoChunks) else batch.chunk_size or "null"
    chunks, setting = batch.chunk_rows, f"policy.chunk_size {chosen}"
    size = f"{count(len(chunks), 'forward')} of at most {count(chunks[0], 'completion')}"
    if len(chunks) == 1:
        size = f"all {B} completions in one forward."
    elif settings.checkpointing == "chunks":
        size += ", each recomputed in the backward pass."
    else:
        size += ". All their activations are kept: policy.activation_checkpointing 'chunks' keeps one chunk at a time."
    return [*lines, f"{setting}: {size}"]


# ------------------------------------------------------------------------------------------------------------- memory


def print_memory(
    console: Console,
    model: ModelSizes,
    settings: MemorySettings,
    parts: list[Part],
    remarks: list[str],
    device_gib: float | None,
    engine: vllm.VLLMSize | None = None,
    *,
    uses_device: bool = True,
) -> str | None:
    """Print the table of parts, the peak, and the comparison with the device.

    If `device_gib` is None, the peak is compared with the memory of this machine's GPU, if there is one. `uses_device`
    is False for a run on the CPU without `device_gib`.

    Returns:
        An error message if the run does not fit the device, or if vLLM does not fit its share. The message suggests
        other settings. None if both fit, if no device's memory is known, or if `uses_device` is False.
    """
    peaks = {moment: peak(parts, moment) for moment in MOMENTS}
    highest = max(MOMENTS, key=peaks.__getitem__)
    unit, name = (GIB, "GiB") if peaks[highest] > GIB / 10 else (2**20, "MiB")
    table = Table(title=f"Memory of one device, {name}", title_justify="left", title_style="bold")
    table.add_column("part")
    for moment in MOMENTS:
        table.add_column(moment, justify="right")
    table.add_column("made of")
    for part in parts:
        if not part.is_on_cpu:
            size = f"{'~' * part.is_estimate}{part.num_bytes / unit:.2f}"
            table.add_row(part.name, *[size if moment in part.moments else "" for moment in MOMENTS], part.how)
    table.add_section()
    total = [f"~{peaks[moment] / unit:.2f}" for moment in MOMENTS]
    table.add_row("together", *total, f"highest: {highest}", style="bold")
    console.print()
    console.print(table)
    compared = device_line(peaks[highest], device_gib)
    if model.has_trained_tower:
        compared += " The activations of the trained vision tower come on top."
    fits = not uses_device or not compared.startswith(verdict(math.inf))
    for note in [*memory_notes(model, settings, remarks), *cpu_lines(parts), *[compared] * fits]:
        console.print(note, markup=False)
    too_small = None if engine is None or not uses_device else vllm.problem(engine)
    if fits:
        return too_small
    total_bytes = device_bytes(device_gib)
    assert total_bytes is not None
    lines = [] if too_small is None else [too_small]
    lines.append(f"{compared} Settings that reduce memory, by phase:")
    for moment in MOMENTS:
        if peaks[moment] > total_bytes:
            found = [] if engine is None else vllm.levers(engine, settings, moment)
            lines.append(f"{moment}: {'; '.join([*found, *levers(model, settings, moment)])}")
    return "\n".join(lines)


def memory_notes(model: ModelSizes, settings: MemorySettings, remarks: list[str]) -> list[str]:
    """Format notes on the table."""
    weights = f"{model.num_weights:,} weights, {model.num_layers} layers, {settings.widths.weights} bytes each"
    trained = f" {model.num_stepped:,} are trained ({model.num_stepped / model.num_weights:.2%})."
    return [
        f"The policy has {weights} (trainer.precision, policy.dtype)."
        + trained * (model.num_stepped != model.num_weights),
        "sampling: sampling completions; update: forward and backward of a micro-batch; step: the optimizer step. "
        "~ is an estimate by formula. Fragmentation, the CUDA context (about 0.5 GiB) and DeepSpeed's buckets (up to "
        "0.8 GiB) come on top. A run on a GPU logs its measured peaks as memory/<phase>_gib.",
        *[f"{remark[0].upper()}{remark[1:]}." for remark in remarks],
    ]


def cpu_lines(parts: list[Part]) -> list[str]:
    """Format the memory on the CPU."""
    on_cpu = [part for part in parts if part.is_on_cpu]
    if not on_cpu:
        return []
    needed = max(peak(parts, moment, is_on_cpu=True) for moment in MOMENTS)
    sizes = ", ".join(f"{part.name} {part.num_bytes / GIB:.2f}" for part in on_cpu)
    return [f"On the CPU, for every device of a node: {needed / GIB:.2f} GiB ({sizes})."]


def device_bytes(device_gib: float | None) -> float | None:
    """Convert `device_gib` to bytes.

    If `device_gib` is None, the result is the memory of this machine's GPU in bytes. If there is also no GPU, the
    result is None.
    """
    if device_gib is not None:
        return device_gib * GIB
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def device_line(needed: int, device_gib: float | None) -> str:
    """Compare the needed bytes with the device's memory."""
    total = device_bytes(device_gib)
    if total is None:
        return "No CUDA device to compare with; set its memory with --device_gib N."
    line = f"{verdict(needed / total)}: {needed / GIB:.1f}"
    if device_gib is not None:
        return f"{line} of {device_gib:g} GiB."
    name = torch.cuda.get_device_properties(0).name
    return f"{line} GiB of the {total / GIB:.1f} GiB of this machine's {name} ({needed / total:.0%})."


def verdict(share: float) -> str:
    """Format whether a run that needs this fraction of a device's memory fits."""
    return "It fits" if share <= TIGHT else "It may not fit" if share <= 1 else "It does not fit"


def levers(model: ModelSizes, settings: MemorySettings, moment: str) -> list[str]:
    """Settings that would reduce the memory of a phase."""
    division, batch, is_full = settings.division, settings.batch, not model.num_adapters
    has_copy = settings.has_reference and is_full and not division.offloads_weights
    found = [
        (batch.num_completions > 1, UPDATE, "a larger trainer.accumulate_grad_batches (the update stays the same)"),
        (settings.checkpointing == "none", UPDATE, "policy.activation_checkpointing: layers"),
        (settings.sampling.prompts > 1, SAMPLING, "model.engine.max_rows: decode fewer completions at a time"),
        (has_copy and "reference" not in settings.offloaded, SAMPLING, "model.offload: [reference, optimizer]"),
        (has_copy, ALWAYS, "objective.beta: 0, which needs no reference"),
        (
            settings.optimizer_bytes > 4 and is_full and not division.offloads_optimizer,
            ALWAYS,
            "the optimizer AdamW8bit",
        ),
        (is_full, ALWAYS, "policy.lora"),
        (not division.gathers_layers, ALWAYS, "--config strategies/zero3 (or fsdp2) on several devices"),
        (division.num_replicas > 1, ALWAYS, "a smaller strategy.num_replicas (each device holds a smaller share)"),
        (division.gathers_layers, ALWAYS, "more devices (each holds a smaller share)"),
        (not division.offloads_optimizer, TRAINING, "--config strategies/zero3_offload"),
        (settings.gathers_for_sampling, SAMPLING, "model.engine.gather_for_generation: false"),
        (True, UPDATE | SAMPLING, "a smaller sampling.max_completion_length"),
    ]
    return [text for is_open, moments, text in found if is_open and moment in moments]


# -------------------------------------------------------------------------------------------------------- translation


def print_translation(trainer: str, batches: BatchPlan, differences: list[str], ignored: list[str]) -> None:
    """Print the translation of a script's flags."""
    console = Console(highlight=False)
    console.print("\n[bold]Here[/bold]")
    for line in (
        "trainer:",
        f"  accumulate_grad_batches: {batches.accumulate_grad_batches}",
        "data:",
        f"  batch_size: {batches.batch_size}",
        "model:",
        f"  num_generations: {batches.num_generations}",
        *([f"  ranks_per_group: {batches.ranks_per_group}"] if batches.ranks_per_group > 1 else []),
        f"  updates_per_rollout: {batches.updates_per_rollout}",
        f"  num_iterations: {batches.num_iterations}",
    ):
        console.print(line, markup=False)
    print_lines(console, "Batches", batch_lines(batches, f"{trainer}'s processes"))
    same = "Every update trains on as many prompts and completions as the script's."
    print_lines(console, "Differences", differences or [same])
    if ignored:
        print_lines(
            console,
            "Not translated",
            [f"{', '.join(ignored)}: docs/migrating.md says for each flag of {trainer} what replaces it."],
        )
