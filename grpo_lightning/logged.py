"""What the running optimizer step has logged, apart from what earlier ones did.

Lightning keeps the last value of everything a training step logged, and hands it to the loggers again with every later
step. A rollout trained for several updates would show its rewards in each of them, and a rollout without a scorable
reward those of the one before. `trainer.callback_metrics` still holds the last values: what callbacks monitor never
vanishes.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor


class StepLog(L.Callback):
    """Leaves what earlier optimizer steps logged out of what the loggers get for this one."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forget, before the first micro-batch of an optimizer step; means over the epoch go on."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        for item in _results(trainer):
            # What other callbacks logged in this hook just now belongs to the step that begins.
            is_new = item.meta.fx == "on_train_batch_start"
            if item.meta.on_step and not item.meta.on_epoch and not is_new:
                item.reset()


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
