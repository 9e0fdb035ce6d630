"""What `grpo-lightning plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from grpo_lightning.cli.plan.batches import BatchPlan, RunPlan, plan_run
from grpo_lightning.cli.plan.costs import print_memory, time_lines
from grpo_lightning.cli.plan.memory_table import Described, describe
from grpo_lightning.cli.plan.times import sampling_refusal, step_times

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from grpo_lightning.cli.plan.lengths import Known
    from grpo_lightning.cli.plan.translate import OtherScript, Translation
    from grpo_lightning.data.datamodule import PromptDataModule
    from grpo_lightning.module import GRPOLightningModule


def print_plan(
    config: Namespace, module: GRPOLightningModule, data: PromptDataModule, known: Known, batches: BatchPlan
) -> str | None:
    """Print batches, length, tokens, memory and time.

    Returns:
        Why the run should not be started as it is; None if it can be.
    """
    console = Console(highlight=False, soft_wrap=False)
    print_lines(console, "Batches", [*batch_lines(batches, known.ranks.why), *filter(None, [known.ranks.idle])])
    length = run_length(config, batches, None if known.train_prompts is None else len(known.train_prompts))
    print_lines(
        console,
        "Length",
        [*length_lines(config, batches, length, known), *validation_lines(config, batches, length, known)],
    )
    try:
        described = describe(config, module, batches, known.longest, known.device_gib)
    except FileNotFoundError as error:
        if data.prepare is None:
            raise
        print_lines(console, "Memory", [f"Not known: {error} data.prepare may build it: add --prepare to do so now."])
        return None
    print_lines(console, "Tokens", token_lines(described, known.longest.why))
    too_large = print_memory(console, described, known.device_gib)
    nodes = known.ranks.num_nodes
    times = step_times(described.shape, described.settings, batches, num_nodes=nodes)
    if not runs_on_cpu(config):
        cycles = None if length.total_steps is None else length.total_steps / batches.steps_per_rollout
        print_lines(console, "Time, estimated", time_lines(times, cycles))
    if runs_on_cpu(config) and known.device_gib is None:
        too_large = None  # the device it was compared with is not used
    return too_large or sampling_refusal(times, described.shape, described.settings, nodes)


def runs_on_cpu(config: Namespace) -> bool:
    """True if the run is one on CPUs, whose times are not those of accelerators."""
    return str(config.trainer.accelerator) == "cpu"


def print_lines(console: Console, title: str, lines: list[str]) -> None:
    """A heading and its lines."""
    console.print(f"\n[bold]{title}[/bold]")
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def batch_lines(batches: BatchPlan, why_world_size: str) -> list[str]:
    """The arithmetic of a cycle."""
    b = batches
    update = f"{b.completions_per_update:,.6g}"
    return [
        f"{count(b.batch_size, 'prompt')} per rank x {count(b.world_size, 'rank')} x {b.num_generations} completions = "
        f"{b.completions_per_rollout:,} completions per rollout (ranks: {why_world_size}).",
        f"A rank cuts its {b.batch_size * b.num_generations:,} into {b.accumulate_grad_batches} x "
        f"{b.updates_per_rollout} = {count(b.micro_batches, 'micro-batch', 'es')} (accumulate_grad_batches x "
        f"updates_per_rollout) of about {b.batch_size * b.num_generations / b.micro_batches:,.3g} completions.",
        f"A rollout is trained for {b.updates_per_rollout} x {b.num_iterations} = "
        f"{count(b.steps_per_rollout, 'optimizer step')} (updates_per_rollout x num_iterations), each on {update} "
        "completions over all ranks.",
    ]


def run_length(config: Namespace, batches: BatchPlan, num_prompts: int | None) -> RunPlan:
    """The run's length under the trainer's limits; `max_time` is not counted."""
    trainer = config.trainer
    if trainer.fast_dev_run:  # Lightning's own settings then; the run rounds them up to a whole cycle
        steps = int(trainer.fast_dev_run)
        return plan_run(batches, num_prompts, max_steps=steps, max_epochs=1, limit_train_batches=steps)
    return plan_run(
        batches,
        num_prompts,
        max_steps=trainer.max_steps,
        max_epochs=trainer.max_epochs,
        limit_train_batches=trainer.overfit_batches or trainer.limit_train_batches,
    )


def further_prompts(config: Namespace) -> list[str]:
    """What dynamic sampling adds to a rollout, at most."""
    settings = config.model.dynamic_sampling
    if settings is None:
        return []
    return [
        f"With dynamic_sampling, a rollout may take up to {settings.max_resample_times + 1} times the prompts and the "
        "time to draw, and an epoch may have fewer steps."
    ]


def length_lines(config: Namespace, batches: BatchPlan, length: RunPlan, known: Known) -> list[str]:
    """Steps per epoch and in all; of an epoch with dynamic sampling only how many there may be."""
    trainer, lines = config.trainer, []
    is_open = config.model.dynamic_sampling is not None
    most = "up to " if is_open else ""
    if known.train_prompts is None:
        lines.append(f"The number of prompts is not known: {known.why_no_prompts}.".replace("..", "."))
    else:
        assert length.steps_per_epoch is not None
        rollouts = length.steps_per_epoch // batches.steps_per_rollout
        lines.append(
            f"{count(len(known.train_prompts), 'prompt')}: {most}{count(rollouts, 'rollout')} = "
            f"{count(length.steps_per_epoch, 'optimizer step')} per epoch."
        )
    lines += further_prompts(config)
    limits = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs, "max_time": trainer.max_time}
    if trainer.fast_dev_run:
        limits = {"fast_dev_run": trainer.fast_dev_run}
    elif length.asked_steps is not None:
        lines.append(f"max_steps {length.asked_steps} ends inside a cycle: it is rounded up.")
    by = ", ".join(f"{name} {value}" for name, value in limits.items() if value not in (None, -1))
    if length.total_steps is None:
        is_endless = trainer.max_steps < 0 and trainer.max_epochs in (None, -1)
        if is_endless and trainer.max_time is not None:
            return [*lines, f"The time decides how long the run is ({by})."]
        if is_endless:
            return [*lines, "Nothing ends the run: max_epochs -1, and neither max_steps nor max_time."]
        return [*lines, f"The length of the run follows from the number of prompts ({by})."]
    if "max_time" in by:
        by += ": fewer if the time is up before"
    by_epochs = trainer.max_epochs not in (None, -1)
    told = f"The run: {most if by_epochs else ''}{count(length.total_steps, 'optimizer step')}"
    if length.num_prompts is not None:
        told += f", {count(length.num_prompts, 'prompt')} {'trained on' if is_open else 'sampled for'}"
        told += f", {count(length.num_prompts * batches.num_generations, 'completion')}"
    if length.epochs is not None:
        least = "at least " if is_open and not by_epochs else ""
        told += f", {least}{length.epochs:.3g} epoch{'' if length.epochs == 1 else 's'}"
    return [*lines, f"{told} ({by})."]


def validation_lines(config: Namespace, batches: BatchPlan, length: RunPlan, known: Known) -> list[str]:
    """How often is validated."""
    if not known.val_prompts:
        return ["No validation data."] if known.train_prompts is not None else []
    trainer, prompts = config.trainer, f"Validation on {count(len(known.val_prompts), 'prompt')}"
    every = trainer.val_check_interval
    every = 1.0 if every is None else every
    if isinstance(every, int) and not isinstance(every, bool):
        steps = every / batches.accumulate_grad_batches
        return [f"{prompts} every {steps:g} optimizer steps ({every} micro-steps)."]
    epochs = trainer.check_val_every_n_epoch or 1
    if not isinstance(every, float):
        return [f"{prompts} every {every}."]
    if every == 1.0 or length.steps_per_epoch is None:
        share = "" if every == 1.0 else f"{every:g} of "
        return [f"{prompts} every {share}{'epoch' if epochs == 1 else f'{epochs} epochs'}."]
    micro_steps = int(length.steps_per_epoch * batches.accumulate_grad_batches * every)
    return [f"{prompts} every {micro_steps / batches.accumulate_grad_batches:g} optimizer steps of an epoch."]


def token_lines(described: Described, why_prompt_tokens: str) -> list[str]:
    """The largest micro-batch in tokens, and what chunks make of it."""
    batch, mode = described.settings.batch, described.settings.checkpointing
    N, B, L, T = batch.num_prompts, batch.num_completions, batch.prompt_length, batch.completion_length
    dense = B * (L + T)
    lines = [f"Longest prompt: {count(L, 'token')} ({why_prompt_tokens}). Longest completion: {T:,}."]
    if batch.path == "extended":
        slots = N * L + B * T
        lines.append(
            f"The largest micro-batch: {N} x {L:,} prompt + {B} x {T:,} completion tokens = {slots:,}; with the prompt "
            f"in every row it would be {dense:,}, {dense / slots:.1f} times as many."
        )
    else:
        lines.append(f"The largest micro-batch: {B} x ({L:,} + {T:,}) = {dense:,} tokens (dense path).")
    chunks = batch.chunk_rows
    size = f"{count(len(chunks), 'forward')} of at most {count(chunks[0], 'completion')}"
    if len(chunks) == 1:
        lines.append(
            f"policy.chunk_size {batch.chunk_size}: all {B} completions in one forward.".replace("None", "null")
        )
    elif mode == "chunks":
        lines.append(f"policy.chunk_size {batch.chunk_size}: {size}, each recomputed in the backward pass.")
    else:
        lines.append(
            f"policy.chunk_size {batch.chunk_size}: {size}. Their activations are all kept: "
            "policy.activation_checkpointing 'chunks' keeps one at a time."
        )
    return lines


def print_translation(script: OtherScript, translation: Translation) -> None:
    """A script's batches in our keys, the arithmetic, and what differs."""
    console = Console(highlight=False)
    b, s = translation.batches, script
    spans = max(s.micro_steps, s.gradient_accumulation_steps)
    there = [
        f"{s.per_device_train_batch_size} completions per device x {count(s.world_size, 'process', 'es')} x "
        f"{count(spans, 'micro-step')} = {s.completions_per_step * spans} completions per rollout, of "
        f"{count(s.prompts_per_rollout, 'prompt')}.",
        f"An update trains on {s.completions_per_update} completions; every rollout is trained on "
        f"{count(s.num_iterations, 'time')}.",
    ]
    print_lines(console, s.whose, there)
    console.print("\n[bold]Here[/bold]")
    for line in (
        "trainer:",
        f"  accumulate_grad_batches: {b.accumulate_grad_batches}",
        "data:",
        f"  batch_size: {b.batch_size}",
        "model:",
        f"  num_generations: {b.num_generations}",
        f"  updates_per_rollout: {b.updates_per_rollout}",
        f"  num_iterations: {b.num_iterations}",
    ):
        console.print(line, markup=False)
    print_lines(console, "In words", batch_lines(b, "the script's processes"))
    exact = "Every update trains on as many prompts and completions as the script's."
    print_lines(console, "Differences", [*(translation.differences or [exact]), *translation.notes])


def count(number: int, noun: str, plural: str = "s") -> str:
    """`1 prompt`, `1,600 prompts`."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
