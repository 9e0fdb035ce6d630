"""Callbacks of every training run: logging per optimizer step, checkpoints at its end, SLURM auto-requeue."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.training.checkpoints import StepEnds
from grpo_lightning.training.lightning_internals import last_value, logged_items
from grpo_lightning.training.signals import RequeueAtStepEnd


def own_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Create the callbacks of a run: logging, step ends for checkpoints and reference, requeueing, peak memory.

    Removes those of an earlier run of the same Trainer: Lightning would replace them too, but with a warning that it
    overrides the user's callbacks.
    """
    own: list[L.Callback] = [StepLog(), UpdateLog(), StepEnds(), RequeueAtStepEnd()]
    if trainer.strategy.root_device.type == "cuda":
        own.append(PeakMemory())
    kinds = {PeakMemory, *map(type, own)}
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if type(callback) not in kinds]
    return own


class StepLog(L.Callback):
    """Logs the metrics of every rollout exactly once.

    Lightning keeps the last value of everything a training step logged, and passes it to the loggers again at every
    later step. A rollout trained for several updates would log its rewards in each of them, and a rollout without a
    scorable reward would log those of the previous one. `trainer.callback_metrics` still contains the last values, so
    metrics that callbacks monitor never disappear.

    The metrics of a rollout belong to the first optimizer step of its cycle. `log_every_n_steps` counts steps and may
    never select that one: with two updates per rollout and an even number it never does. So
    `trainer.log_every_n_steps` is 1 during the first step of a cycle and applies to the others; 0 stays 0, which logs
    nothing.
    """

    def __init__(self) -> None:
        self.log_every_n_steps: int | None = None
        """The user's setting, which the run temporarily overrides."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the user's setting."""
        self.log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Reset step metrics before the first micro-batch of an optimizer step; epoch means continue."""
        accumulate = trainer.accumulate_grad_batches
        if batch_idx % accumulate:
            return
        begins_cycle = batch_idx % pl_module.cycle_length(accumulate) == 0
        trainer.log_every_n_steps = (  # type: ignore[attr-defined]
            1 if begins_cycle and self.log_every_n_steps else self.log_every_n_steps
        )
        for item in logged_items(trainer):
            # Metrics that other callbacks logged in this hook belong to the step that begins.
            is_new = item.meta.fx == "on_train_batch_start"
            if item.meta.on_step and not item.meta.on_epoch and not is_new:
                item.reset()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the user's setting back."""
        trainer.log_every_n_steps = self.log_every_n_steps  # type: ignore[attr-defined]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the user's setting back."""
        if self.log_every_n_steps is not None:
            trainer.log_every_n_steps = self.log_every_n_steps  # type: ignore[attr-defined]


def logged_this_step(trainer: L.Trainer) -> dict[str, Tensor]:
    """Metrics that this optimizer step has logged so far, by name."""
    return {
        item.meta.name: last_value(item)
        for item in logged_items(trainer)
        if item.meta.on_step and not item.has_reset and isinstance(last_value(item), Tensor)
    }


class UpdateLog(L.Callback):
    """Logs `time/update`, `policy/lr` and `policy/grad_norm`, once per optimizer step.

    The learning rate is that of the first parameter group in this step. The seconds are those of forward, backward and
    optimizer, summed over the micro-batches, on the slowest rank. The gradient norm is that of the entire step over all
    ranks, before clipping.
    """

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the learning rate, before the schedule changes it at the end of the step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            pl_module.log("policy/lr", float(trainer.optimizers[0].param_groups[0]["lr"]), batch_size=1)

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """Start the timer when the update of a micro-batch begins."""
        if name == "update":
            self.started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm, if gradients are accessible before the step."""
        gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        self.log_norm(pl_module, pl_module.sharding.norm(gradients))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the seconds, and the gradient norm if the strategy provides it only after the step."""
        self.seconds += time.perf_counter() - self.started
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            slowest = ranks.max_over_ranks(torch.tensor(self.seconds))
            pl_module.log("time/update", slowest, batch_size=1)
            self.log_norm(pl_module, pl_module.sharding.norm_of_last_step())
            self.seconds = 0.0

    def log_norm(self, module: Any, norm: torch.Tensor | float | None) -> None:
        """Log the gradient norm if it is known."""
        if norm is not None:
            module.log("policy/grad_norm", norm, batch_size=1)


class PeakMemory(L.Callback):
    """Logs `memory/<phase>_gib` on CUDA devices, once per optimizer step: the peak of allocated memory in each phase.

    It is torch.cuda.max_memory_allocated of the rank with the most, in GiB. The phases are those of `on_phase`;
    "update" ends with the optimizer's step. torch's peak is reset at the start of each phase.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.peaks: dict[str, float] = {}

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """Begin another phase."""
        self.close_phase(trainer.strategy.root_device)
        self.phase = name

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the peaks at the end of an optimizer step."""
        device = trainer.strategy.root_device
        self.close_phase(device)
        if device.type == "cuda" and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            everyone = ranks.gather_objects(self.peaks)
            for name in sorted({name for peaks in everyone for name in peaks}):
                highest = max(peaks.get(name, 0.0) for peaks in everyone)
                pl_module.log(f"memory/{name}_gib", highest, batch_size=1)
            self.peaks = {}

    def close_phase(self, device: torch.device) -> None:
        """Record the peak of the phase that ends, and reset it for the next one."""
        if device.type != "cuda":
            return
        if self.phase:
            peak = torch.cuda.max_memory_allocated(device) / 2**30
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0.0))
        self.phase = ""
        torch.cuda.reset_peak_memory_stats(device)
