"""A callback that saves checkpoints every few optimizer steps, and keeps the newest."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class NewestCheckpoints(ModelCheckpoint):
    """Saves a checkpoint every `save_steps` optimizer steps and at the end of the run.

    A run keeps its newest `save_total_limit` checkpoints. A resumed run also keeps the checkpoint from which it was
    resumed.

    Args:
        save_steps: Optimizer steps between two checkpoints.
        save_total_limit: Number of checkpoints to keep; null keeps all.
        save_only_model: Save only the weights. A run cannot resume from such a checkpoint.
        dirpath: Output folder; null is `checkpoints` in the run's folder.
    """

    def __init__(
        self,
        save_steps: int = 500,
        save_total_limit: int | None = None,
        save_only_model: bool = False,  # noqa: FBT001, FBT002 - a YAML key
        dirpath: str | None = None,
    ) -> None:
        for name, value in {"save_steps": save_steps, "save_total_limit": save_total_limit}.items():
            if value is not None and value < 1:
                all_of_them = ", or null to keep all" * (name == "save_total_limit")
                raise ValueError(f"NewestCheckpoints.{name} must be at least 1{all_of_them}, got {value}.")
        super().__init__(
            dirpath,
            filename="{step}",
            # Lightning needs a metric to choose the checkpoints to keep: here the step itself.
            monitor="step",
            mode="max",
            save_top_k=-1 if save_total_limit is None else save_total_limit,
            save_weights_only=save_only_model,
            every_n_train_steps=save_steps,
            # Otherwise Lightning delays the checkpoint at the end of an epoch until the next validation.
            save_on_train_epoch_end=True,
        )
        self.as_made = copy.deepcopy(self.state_dict())
        """State of this callback in a new run."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """At the start of a run, forget the list of checkpoints.

        After this hook, Lightning loads the list of a resumed run.
        """
        if stage == "fit" and trainer.global_step == 0:
            self.dirpath = self.as_made["dirpath"]
            self.load_state_dict(copy.deepcopy(self.as_made))
            self._last_global_step_saved, self._last_checkpoint_saved = 0, ""
        super().setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """At the end of the last epoch, save a checkpoint of the last step."""
        super().on_train_epoch_end(trainer, pl_module)
        if is_last_step_due(self, trainer):
            self.save_last_step(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step, if it is not saved yet."""
        self.save_last_step(trainer)
        super().on_train_end(trainer, pl_module)

    def save_last_step(self, trainer: L.Trainer) -> None:
        """Save the current step, if it is not saved yet."""
        if trainer.global_step != self._last_global_step_saved and not self._should_skip_saving_checkpoint(trainer):
            candidates: dict[str, Any] = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)


def is_last_step_due(callback: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """True if a callback must save the last step at the end of this epoch, and not in `on_train_end`.

    In `on_train_end`, Lightning's `WeightAveraging` replaces the weights by their average. A run cannot resume from the
    average. Therefore a checkpoint for resuming must be saved before `on_train_end`.

    If `save_weights_only` is true, no run can resume from the checkpoints of the callback. In this case, the result is
    False, and the callback saves the last step in `on_train_end`.
    """
    return not callback.save_weights_only and is_last_epoch(trainer)


def is_last_epoch(trainer: L.Trainer) -> bool:
    """True at the end of the last epoch, by the conditions of Lightning's fit loop."""
    loop: Any = trainer.fit_loop
    epochs = trainer.max_epochs
    return (
        0 <= trainer.max_steps <= trainer.global_step
        or (epochs is not None and 0 <= epochs <= loop.epoch_progress.current.processed)
        or (trainer.should_stop and loop._can_stop_early)
    )
