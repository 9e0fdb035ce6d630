"""Logs of a run that may be continued: Lightning's own logger deletes metrics.csv when it is opened again."""

from __future__ import annotations

import csv
import os
from typing import Any

import lightning as L
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter


class MetricsWriter(ExperimentWriter):
    """Appends to what is there, from the step on that the run continues at."""

    def __init__(self, log_dir: str) -> None:
        self.is_continued = False
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        """Other files are expected: the run's folder holds them all. An old metrics.csv is continued."""
        if os.path.isfile(self.metrics_file_path):
            self.is_continued = True
            with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                header = file.readline()
            if not header.endswith("\n"):  # killed before the first row: nothing is in it
                os.remove(self.metrics_file_path)
                self.is_continued = False
                return
            self.metrics_keys = next(csv.reader([header]))

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Record metrics; the first ones replace what the interrupted run logged from this step on."""
        if self.is_continued and step is not None:
            self.is_continued = False
            self.drop_from(step)
        super().log_metrics(metrics_dict, step)

    def drop_from(self, step: int) -> None:
        """Remove the rows of steps that are trained again, and one that was not written to its end.

        A run may be killed here, too: the old file stands until the new one is whole.
        """
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        rows = [row for row in csv.DictReader(whole) if is_row(row) and int(row["step"]) < step]
        scratch = f"{self.metrics_file_path}.tmp"
        with open(scratch, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(scratch, self.metrics_file_path)


def is_row(row: dict[str, str]) -> bool:
    """True for a row with a value for every column, and a step."""
    return None not in row and None not in row.values() and (row.get("step") or "").isdigit()


class ContinuedSteps(L.Callback):
    """Logs a resumed run from the optimizer step on that it continues at.

    Lightning counts the steps of its loggers apart from `global_step`, and one too far after a checkpoint taken
    at the end of an epoch: the curve would have a gap, and what was logged for that step before would stay.
    """

    def __init__(self) -> None:
        self.is_done = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the loggers' count right, once: the loop has restored its own by now."""
        if not self.is_done:
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
            self.is_done = True


class MetricsLogger(CSVLogger):
    """`metrics.csv`: a row per step and kind of metric, written at once, so that a killed run loses none.

    Args:
        save_dir: Folder of all runs.
        name: Of the run; null lets the command line choose.
        version: Of the run; null lets the command line choose.
        prefix: Put before every metric's name.
        flush_logs_every_n_steps: Write after every so many steps.
    """

    def __init__(
        self,
        save_dir: str = "runs",
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """What writes the file."""
        if self._experiment is None:
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment


def without_anonymous(logger: Any) -> None:
    """Keep a WandbLogger from handing on `anonymous`, which it does even unset: W&B warns that it has no effect."""
    settings = getattr(logger, "_wandb_init", None)
    if isinstance(settings, dict) and settings.get("anonymous", "") is None:
        del settings["anonymous"]
