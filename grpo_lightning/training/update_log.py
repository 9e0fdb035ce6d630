"""What is logged of an optimizer step as a whole: seconds, learning rate, and gradient norm under any strategy."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from grpo_lightning.core import ranks


class UpdateLog(L.Callback):
    """Logs `time/update`, `policy/lr` and `policy/grad_norm`, once per optimizer step.

    The learning rate is the one that the step uses, of the first parameter group. The seconds are those of forward,
    backward and optimizer, summed over the micro-batches, on the slowest rank. The gradient is that of the whole step
    over all ranks, before it is clipped.
    """

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The learning rate, before the schedule moves it on at the end of the step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            pl_module.log("policy/lr", float(trainer.optimizers[0].param_groups[0]["lr"]), batch_size=1)

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """The update of a micro-batch begins."""
        if name == "update":
            self.started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """The norm, where gradients can be seen before the step."""
        gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        self.log_norm(pl_module, pl_module.sharding.norm(gradients))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The seconds; and the norm, where the strategy tells it after the step."""
        self.seconds += time.perf_counter() - self.started
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            slowest = ranks.max_over_ranks(torch.tensor(self.seconds))
            pl_module.log("time/update", slowest, batch_size=1)
            self.log_norm(pl_module, pl_module.sharding.norm_of_last_step())
            self.seconds = 0.0

    def log_norm(self, module: Any, norm: torch.Tensor | float | None) -> None:
        """Log it if it is known here."""
        if norm is not None:
            module.log("policy/grad_norm", norm, batch_size=1)
