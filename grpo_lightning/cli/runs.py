"""One run, one folder: `runs/<run name>/version_<N>/` with metrics, completions, pictures, settings and checkpoints.

The run name is that of the first recipe, or `--run_name`. A run takes the next free version. `--ckpt_path auto` resumes
in the folder of the checkpoint it finds; every other run gets a folder of its own. Here are also the loggers, callbacks
and checkpoints that a run has although its recipe does not name them.
"""

from __future__ import annotations

import csv
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ModelSummary
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich.console import Console
from rich.table import Table
from torch import nn

from grpo_lightning.callbacks import CompletionLog, ProgressBar, WritePredictions
from grpo_lightning.callbacks.before_after import cell, is_bound
from grpo_lightning.cli.errors import ConfigurationError, rank
from grpo_lightning.core.files import atomic_write

log = logging.getLogger(__name__)

SAVE_DIR = "runs"
CHECKPOINT_INTERVAL = timedelta(minutes=15)

# Ranks that this process launches inherit the choice: looking for the next version, they would find this one taken.
CHOSEN = "GRPO_LIGHTNING_RUN_FOLDER"
LIGHTNINGS_NAME = "lightning_logs"
METRICS_LOGGER = f"{__name__}.MetricsLogger"
METRICS_LOGGERS = {"CSVLogger", "MetricsLogger"}
FILE_LOGGERS = METRICS_LOGGERS | {"TensorBoardLogger"}


# --------------------------------------------------------------------------------------------------------- its folder


def run_name(given: str | None, config_files: Sequence[Path]) -> str:
    """`given`, or the name of the first recipe; "run" without one.

    Raises:
        ConfigurationError: If it is no name of one folder.
    """
    name = given or (config_files[0].stem if config_files else "run")
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigurationError(
            f"run_name must be the name of a folder (letters, digits, '.', '-', '_', '+'), got {name!r}."
        )
    return name


def runs_folder(trainer: Namespace, name: str) -> Path:
    """The folder of all versions of a run."""
    return Path(trainer.get("default_root_dir") or ".") / SAVE_DIR / name


def versions(folder: Path) -> dict[int, Path]:
    """The versions that are there, by their number."""
    matches = ((re.fullmatch(r"version_(\d+)", path.name), path) for path in folder.glob("version_*"))
    return {int(match[1]): path for match, path in matches if match}


def version_of(path: Path, folder: Path) -> Path | None:
    """The version of a run that a file lies in; None for a file elsewhere."""
    above = path.resolve().parents
    return next((version for version in versions(folder).values() if version.resolve() in above), None)


def take_next(folder: Path) -> Path:
    """A new version of a run, made at once, so that no other run takes it; on other ranks the first one's choice."""
    if rank() and CHOSEN in os.environ:
        return Path(os.environ[CHOSEN])
    number = max(versions(folder), default=-1) + 1
    # A rank of another launcher makes no folder: what it writes goes where the first rank says (trainer.log_dir).
    while rank() == 0:
        path = folder / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run took it just now
            number += 1
            continue
        os.environ[CHOSEN] = str(path)
        break
    return folder / f"version_{number}"


def keep_old_config(folder: Path, text: str) -> None:
    """Before a resumed run writes its settings: keep those it started with as `config_<n>.yaml` if they differ."""
    path = folder / "config.yaml"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        number = sum(1 for _ in folder.glob("config_*.yaml"))
        path.rename(folder / f"config_{number}.yaml")


def remove_without_results(folder: Path) -> None:
    """Remove the folder of a run that did nothing, if it holds settings and empty logs alone.

    TensorBoard's files count as empty next to an empty metrics.csv, which has every number too.
    """

    def is_empty(path: Path) -> bool:
        is_log = path.name.startswith("events.out.tfevents.") or path.name in ("config.yaml", "hparams.yaml")
        return is_log or (path.name == "metrics.csv" and path.stat().st_size == 0)

    if all(is_empty(path) for path in folder.rglob("*") if not path.is_dir()):
        shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- its loggers


def default_loggers() -> list[dict[str, Any]]:
    """TensorBoard and metrics.csv, which get the run's folder."""
    return [
        {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": SAVE_DIR}},
        {"class_path": METRICS_LOGGER},
    ]


def place(trainer: Namespace, folder: Path) -> None:
    """Point a Trainer's settings at the run's folder: its files, and those of every logger without a name.

    Every run that logs has metrics.csv. Lightning keeps checkpoints where the first logger writes: one that writes
    files comes first, as others (W&B) would send them to a folder by their own ids.
    """
    trainer.default_root_dir = str(folder)
    loggers = trainer.get("logger")
    if not loggers:
        return
    loggers = list(loggers) if isinstance(loggers, list) else [loggers]
    for logger in loggers:
        place_logger(logger, folder)
    if not any(kind(logger) in METRICS_LOGGERS for logger in loggers):
        metrics = Namespace(class_path=METRICS_LOGGER, init_args=Namespace(name=LIGHTNINGS_NAME))
        place_logger(metrics, folder)
        loggers.append(metrics)

    def place_of(logger: Namespace) -> int:
        settings = logger.init_args
        is_inside = (settings.get("save_dir"), settings.get("version")) == (str(folder.parent.parent), folder.name)
        return 2 if kind(logger) not in FILE_LOGGERS else 0 if is_inside else 1

    if kind(loggers[0]) not in FILE_LOGGERS:
        first = min(loggers, key=place_of)
        loggers = [first, *(logger for logger in loggers if logger is not first)]
    trainer.logger = loggers


def kind(logger: Namespace) -> str:
    """The name of a logger's class."""
    return str(logger.class_path.rpartition(".")[2])


def place_logger(logger: Namespace, folder: Path) -> None:
    """Let one logger write into the run's folder, unless its recipe names a place; W&B calls the run by its name.

    A `save_dir` without a name gets the run's name and version: there, too, every run has a folder of its own.
    """
    settings = logger.init_args
    if kind(logger) == "WandbLogger":
        if settings.get("save_dir") in (None, ".") and settings.get("dir") is None:
            settings.save_dir = str(folder)
        if settings.get("name") is None:
            settings.name = folder.parent.name
    elif settings.get("name") == LIGHTNINGS_NAME and settings.get("version") is None:
        if settings.get("save_dir") in (None, SAVE_DIR):
            settings.save_dir = str(folder.parent.parent)
        settings.name, settings.version = folder.parent.name, folder.name


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
        save_dir: str = SAVE_DIR,
        name: str | None = LIGHTNINGS_NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment


class MetricsWriter(ExperimentWriter):
    """Appends to a metrics.csv that is there, from the step on that the run resumes at; Lightning's deletes it."""

    def __init__(self, log_dir: str) -> None:
        self.is_resumed = False
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        """Expect other files: the run's folder holds them all."""
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                header = file.readline()
            self.is_resumed = header.endswith("\n")
            if self.is_resumed:
                self.metrics_keys = next(csv.reader([header]))
            else:  # killed before the first row
                path.unlink()

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Record metrics; the first ones replace the rows that the interrupted run logged from this step on."""
        if self.is_resumed and step is not None:
            self.is_resumed = False
            self.drop_from(step)
        super().log_metrics(metrics_dict, step)

    def drop_from(self, step: int) -> None:
        """Remove the rows of steps that are trained again, and one that was not written to its end."""

        def is_kept(row: dict[str, str]) -> bool:
            is_whole = None not in row and None not in row.values() and (row.get("step") or "").isdigit()
            return is_whole and int(row["step"]) < step

        path = Path(self.metrics_file_path)
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(line for line in file if line.endswith("\n")) if is_kept(row)]
        with atomic_write(path) as shorter, shorter.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)


def without_anonymous(logger: Any) -> None:
    """Keep a WandbLogger from passing `anonymous` on, which it does even unset: W&B warns that it has no effect."""
    settings = getattr(logger, "_wandb_init", None)
    if isinstance(settings, dict) and settings.get("anonymous", "") is None:
        del settings["anonymous"]


# ------------------------------------------------------------------------------------------------------- its callbacks


class ResumedSteps(L.Callback):
    """Logs a resumed run from the optimizer step on that it resumes at.

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


class ParameterSummary(L.Callback):
    """Logs class and size of policy and reference, and how many parameters are trained, in one line.

    Lightning's table adds modes and FLOPs, which say nothing about a policy that samples.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the line."""
        if trainer.is_global_zero:
            parts = [
                f"{name} {type(module).__name__} ({num_parameters(module.parameters())})"
                for name, module in pl_module.named_children()
            ]
            trained = num_parameters(weight for weight in pl_module.parameters() if weight.requires_grad)
            every = num_parameters(pl_module.parameters())
            log.info("Model: %s; %s of %s parameters are trained.", ", ".join(parts), trained, every)


def num_parameters(parameters: Iterable[nn.Parameter]) -> str:
    """Their number, such as "1.2 B"; DeepSpeed's stage 3 leaves the full size in `ds_numel`."""
    count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in parameters)
    return " ".join(get_human_readable_count(count).split())


def is_saving(trainer: Namespace) -> bool:
    """True if a run writes checkpoints by its Trainer's settings."""
    return trainer.get("enable_checkpointing") is not False and not trainer.get("fast_dev_run")


def default_callbacks(subcommand: str, settings: Namespace, own: Sequence[L.Callback]) -> list[L.Callback]:
    """The callbacks of a command, except where its recipe has its `own` of the kind: a run has one progress bar.

    The checkpoints are the newest of the ends of epochs, and the newest in between: an epoch may take days.
    """
    callbacks: list[L.Callback] = [WritePredictions()] if subcommand == "predict" else [CompletionLog()]
    # Lightning refuses a progress bar that is there although it is switched off.
    if settings.trainer.get("enable_progress_bar") is not False:
        callbacks.append(ProgressBar())
    if settings.trainer.get("enable_model_summary") is not False:
        callbacks.append(ParameterSummary())
    if subcommand == "fit" and settings.get("ckpt_path"):
        callbacks.append(ResumedSteps())
    if subcommand == "fit" and is_saving(settings.trainer):
        callbacks += [
            ModelCheckpoint(),
            ModelCheckpoint(filename="latest-{epoch}-{step}", train_time_interval=CHECKPOINT_INTERVAL),
        ]
    kinds = {ProgressBar: AnyProgressBar, ModelCheckpoint: Checkpoint, ParameterSummary: ModelSummary}
    return [
        callback
        for callback in callbacks
        if not any(isinstance(other, kinds.get(type(callback), type(callback))) for other in own)
    ]


# --------------------------------------------------------------------------------------------------------- its results


def print_results(metrics: Mapping[str, float], console: Console | None = None) -> None:
    """Print the table of `validate` and `test`: a row per number, sampled next to greedy, with its interval.

    Args:
        metrics: By log name: `val/reward`, `val/greedy/avg@1/low`; with several loaders `val/loader_0/...`.
        console: Where to print; null is stdout.
    """
    # The stage is the title of the column; where there are several loaders, each keeps its name in front.
    numbers: dict[str, dict[str, float]] = {"sampled": {}, "greedy": {}}
    for log_name, value in metrics.items():
        name = log_name.partition("/")[2]
        kind = "greedy" if "greedy/" in name else "sampled"
        numbers[kind][name.replace("greedy/", "", 1)] = float(value)
    numbers = {kind: own for kind, own in numbers.items() if own}
    table = Table()
    table.add_column(next(iter(metrics), "").partition("/")[0], overflow="fold")
    for kind in numbers:
        table.add_column(kind, justify="right")
    for name in dict.fromkeys(name for own in numbers.values() for name in own):
        if not is_bound(name):
            table.add_row(name, *(cell(own, name) for own in numbers.values()))
    (console or Console()).print(table)
