"""A callback that saves the last step of a run, if no other callback has saved it."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks.newest_checkpoints import is_last_step_due
from grpo_lightning.training.lightning_internals import last_saved_step


class LastCheckpoint(ModelCheckpoint):
    """Saves `finished-step=<N>.ckpt` after the last step of a run, if `others` have not saved this step.

    A `ModelCheckpoint` that monitors a validation metric saves only after a validation.

    Args:
        others: The run's other checkpoint callbacks, at least one. The checkpoint is saved in the folder of the first.
            If all of them save only weights, the checkpoint has no optimizer and no schedule.
    """

    def __init__(self, others: Sequence[ModelCheckpoint]) -> None:
        super().__init__(
            others[0].dirpath,
            filename="finished-{step}",
            save_weights_only=all(other.save_weights_only for other in others),
            save_on_train_epoch_end=True,
        )
        self.others = others

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """At the end of the last epoch, save the last step (see `is_last_step_due`)."""
        if is_last_step_due(self, trainer):
            self.save_last_step(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last weights, or their average (`WeightAveraging`)."""
        if self.save_weights_only:
            self.save_last_step(trainer, pl_module)

    def save_last_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step, if the other callbacks have not saved it."""
        if not any(last_saved_step(other) == trainer.global_step for other in self.others):
            super().on_train_epoch_end(trainer, pl_module)
