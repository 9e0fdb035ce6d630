"""Base class of callbacks that record the metrics of every optimizer step."""

from __future__ import annotations

from typing import Any

import lightning as L


class StepMetrics(L.Callback):
    """Calls `note` when an optimizer step has ended, and again when all metrics of the step have been logged.

    Some metrics of a step, for example `time/update`, are logged only after this callback's `on_train_batch_end`. The
    second call is therefore made at the start of the next step or at the end of the epoch.
    """

    def note(self, trainer: L.Trainer) -> None:
        """Record what the last finished step has logged so far (`training.metrics.logged_this_step`)."""
        raise NotImplementedError

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before the first micro-batch of a step, record late metrics of the previous step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.note(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the metrics of a finished optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.note(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record late metrics of the epoch's last step, before Lightning discards them."""
        self.note(trainer)
