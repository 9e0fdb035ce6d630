"""What the running optimizer step has logged, apart from what earlier ones did; and which steps reach the loggers.

Lightning keeps the last value of everything a training step logged, and hands it to the loggers again with every later
step. A rollout trained for several updates would show its rewards in each of them, and a rollout without a scorable
reward those of the one before. `trainer.callback_metrics` still holds the last values: what callbacks monitor never
vanishes.

The metrics of a rollout belong to the first optimizer step of its cycle. `log_every_n_steps` counts steps and may never
choose that one: with two updates per rollout and an even number it never does. So the first step of every cycle is
logged, and `log_every_n_steps` chooses among the others.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor


class StepLog(L.Callback):
    """Logs every rollout once, and leaves what earlier optimizer steps logged out of what the loggers get for this one.

    `trainer.log_every_n_steps` is 1 during the first step of a cycle; 0 stays 0, which logs nothing.
    """

    def __init__(self) -> None:
        self.log_every_n_steps: int | None = None
        """As the user has set it, while the run may have another one."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the user's setting."""
        self.log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Forget, before the first micro-batch of an optimizer step; means over the epoch go on."""
        accumulate = trainer.accumulate_grad_batches
        if batch_idx % accumulate:
            return
        begins_cycle = batch_idx % pl_module.cycle_length(accumulate) == 0
        trainer.log_every_n_steps = (  # type: ignore[attr-defined]
            1 if begins_cycle and self.log_every_n_steps else self.log_every_n_steps
        )
        for item in _results(trainer):
            # What other callbacks logged in this hook just now belongs to the step that begins.
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
    """The metrics that this optimizer step has logged so far, by name."""
    return {
        item.meta.name: item._forward_cache
        for item in _results(trainer)
        if item.meta.on_step and not item.has_reset and isinstance(item._forward_cache, Tensor)
    }


def _results(trainer: L.Trainer) -> list[Any]:
    """Lightning's record of every `self.log` of the training loop; it has no public view of it."""
    return trainer.fit_loop.epoch_loop._results.result_metrics
