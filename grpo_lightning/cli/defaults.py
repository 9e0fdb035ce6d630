"""What a run has although its recipe does not name it: loggers, callbacks and checkpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar

from grpo_lightning.callbacks import CompletionLog, ProgressBar, WritePredictions
from grpo_lightning.cli.loggers import ContinuedSteps, MetricsLogger

SAVE_DIR = "runs"
CHECKPOINT_INTERVAL = timedelta(minutes=15)


def default_loggers() -> list[dict[str, Any]]:
    """TensorBoard and metrics.csv, which get the run's folder."""
    return [
        {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": SAVE_DIR}},
        {"class_path": f"{MetricsLogger.__module__}.MetricsLogger"},
    ]


def is_saving(trainer: Namespace) -> bool:
    """True if a run writes checkpoints by its Trainer's settings."""
    return trainer.get("enable_checkpointing") is not False and not trainer.get("fast_dev_run")


def default_callbacks(subcommand: str, settings: Namespace) -> list[L.Callback]:
    """The callbacks of a command, as far as its recipe has none of their kind."""
    callbacks: list[L.Callback] = [WritePredictions()] if subcommand == "predict" else [CompletionLog()]
    # Lightning refuses a progress bar that is there although it is switched off.
    if settings.trainer.get("enable_progress_bar") is not False:
        callbacks.append(ProgressBar())
    if subcommand == "fit" and settings.get("ckpt_path"):
        callbacks.append(ContinuedSteps())
    if subcommand == "fit" and is_saving(settings.trainer):
        callbacks += default_checkpoints()
    return callbacks


def default_checkpoints() -> list[L.Callback]:
    """The newest of the ends of epochs, and the newest in between: an epoch may take days."""
    return [
        ModelCheckpoint(),
        ModelCheckpoint(filename="latest-{epoch}-{step}", train_time_interval=CHECKPOINT_INTERVAL),
    ]


def kind_of_default(callback: L.Callback) -> type[L.Callback]:
    """What one of the default callbacks is an instance of: a run has one progress bar, whosever it is."""
    kinds: tuple[type[L.Callback], ...] = (AnyProgressBar, Checkpoint)
    return next((kind for kind in kinds if isinstance(callback, kind)), type(callback))
