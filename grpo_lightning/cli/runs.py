"""Folder of a run, `runs/<run name>/version_<N>/`, and its default loggers, callbacks and checkpoints.

Every run gets a new folder. Only a run that resumes with `--ckpt_path auto` continues in the folder of its checkpoint.
"""

from __future__ import annotations

import contextlib
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
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ModelSummary, OnExceptionCheckpoint
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich.console import Console
from rich.table import Table
from torch import nn

from grpo_lightning.callbacks import CompletionLog, ProgressBar, RunRecord, RunSummary, Watchdog, WritePredictions
from grpo_lightning.callbacks.before_after import cell, is_bound
from grpo_lightning.callbacks.last_checkpoint import LastCheckpoint
from grpo_lightning.callbacks.newest_checkpoints import NewestCheckpoints
from grpo_lightning.cli.errors import ConfigurationError, rank
from grpo_lightning.core.files import atomic_write

log = logging.getLogger(__name__)

SAVE_DIR = "runs"
CHECKPOINT_INTERVAL = timedelta(minutes=15)

# Ranks that this process launches inherit the run's folder through this environment variable.
CHOSEN = "GRPO_LIGHTNING_RUN_FOLDER"
LIGHTNINGS_NAME = "lightning_logs"
METRICS_LOGGER = f"{__name__}.MetricsLogger"
METRICS_LOGGERS = {"CSVLogger", "MetricsLogger"}
FILE_LOGGERS = METRICS_LOGGERS | {"TensorBoardLogger"}


# --------------------------------------------------------------------------------------------------------- its folder


def run_name(given: str | float | None, config_files: Sequence[Path]) -> str:
    """Name of the run: `given`, or the name of the first recipe (invalid characters become "-"), or "run".

    Raises:
        ConfigurationError: If `given` is not a valid folder name.
    """
    if given is None or given == "":
        stem = config_files[0].stem if config_files else ""
        return re.sub(r"[^\w.+-]+", "-", stem).strip("-.+") or "run"
    name = str(given)
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigurationError(
            f"run_name must be the name of a folder (letters, digits, '.', '-', '_', '+'), got {name!r}."
        )
    return name


def runs_folder(trainer: Namespace, name: str) -> Path:
    """Folder that holds all versions of a run."""
    return Path(trainer.get("default_root_dir") or ".").expanduser() / SAVE_DIR / name


def versions(folder: Path) -> dict[int, Path]:
    """Existing versions of a run, by number."""
    matches = ((re.fullmatch(r"version_(\d+)", path.name), path) for path in folder.glob("version_*"))
    return {int(match[1]): path for match, path in matches if match}


def version_around(path: Path, folder: Path) -> Path | None:
    """Version folder below `folder` that contains the file `path`."""
    above = path.resolve().parents
    return next((version for version in versions(folder).values() if version.resolve() in above), None)


def take_next(folder: Path) -> Path:
    """Reserve the next version folder of a run by creating it. Other ranks get the folder of rank 0."""
    if rank() and CHOSEN in os.environ:
        return Path(os.environ[CHOSEN])
    number = max(versions(folder), default=-1) + 1
    # If a launcher such as torchrun started the ranks, only rank 0 creates a folder. Lightning then sends the path of
    # this folder to the other ranks (trainer.log_dir).
    while rank() == 0:
        path = folder / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run was faster
            number += 1
            continue
        os.environ[CHOSEN] = str(path)
        break
    return folder / f"version_{number}"


def keep_old_config(folder: Path, text: str) -> None:
    """If config.yaml differs from `text`, rename it to `config_<n>.yaml`."""
    path = folder / "config.yaml"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        number = sum(1 for _ in folder.glob("config_*.yaml"))
        path.rename(folder / f"config_{number}.yaml")


def remove_without_results(folder: Path) -> None:
    """Remove a run's folder if it holds only settings and empty logs, and then the parent folder if that is empty."""

    def is_empty(path: Path) -> bool:
        if path.name.startswith("events.out.tfevents."):
            return not has_numbers(path)
        if path.name == "metrics.csv":
            return not path.stat().st_size
        return path.name in ("config.yaml", "hparams.yaml", "run.json")

    if all(is_empty(path) for path in folder.rglob("*") if not path.is_dir()):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other versions of the run
            folder.parent.rmdir()


def has_numbers(events: Path) -> bool:
    """True if a TensorBoard file holds more than hyperparameters. Also True if tensorboard is not installed."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
            LegacyEventFileLoader,
        )
    except ImportError:
        return True
    tags = [value.tag for event in LegacyEventFileLoader(str(events)).Load() for value in event.summary.value]
    return any(tag != "hp_metric" and not tag.startswith("_hparams_/") for tag in tags)


# --------------------------------------------------------------------------------------------------------- its loggers


def default_loggers() -> list[dict[str, Any]]:
    """Default loggers: TensorBoard and metrics.csv, both in the run's folder."""
    return [
        {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": SAVE_DIR}},
        {"class_path": METRICS_LOGGER},
    ]


def place(trainer: Namespace, folder: Path) -> None:
    """Make the Trainer and its loggers write into the run's folder.

    If loggers are set but none of them writes metrics.csv, a `MetricsLogger` is added. Lightning saves checkpoints in
    the folder of the first logger, and callbacks write their files there. So a logger that writes into the run's folder
    is moved to the front. A W&B logger must not be the first, because Lightning would use the id of the W&B run as the
    name of the checkpoints' folder.
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

    first = min(loggers, key=place_of)
    trainer.logger = [first, *(logger for logger in loggers if logger is not first)]


def kind(logger: Namespace) -> str:
    """Class name of a logger."""
    return str(logger.class_path.rpartition(".")[2])


def place_logger(logger: Namespace, folder: Path) -> None:
    """If the recipe sets no folder for a logger, make the logger write into the run's folder.

    If the recipe sets no name, a W&B logger gets the run's name, and any other logger gets the run's name and version.
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
    if settings.get("save_dir") is not None:
        settings.save_dir = os.path.expanduser(settings.save_dir)


class MetricsLogger(CSVLogger):
    """Writes the file `metrics.csv`. Each call of `log_metrics` adds one row.

    Args:
        save_dir: Folder of all runs.
        name: Name of the run. If neither `name` nor `version` is set, the `grpo-lightning` command uses the name and
            the version of its run.
        version: Version of the run. If only `name` is set, the version is the next free number.
        prefix: Prefix of every metric name.
        flush_logs_every_n_steps: Write the rows every n steps. If n is above 1, a killed run loses the rows that are
            not yet written.
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
        """Writer of the file."""
        if self._experiment is None:
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment


class MetricsWriter(ExperimentWriter):
    """Continues an existing metrics.csv at the step at which a run resumes. Lightning's writer would delete it."""

    def __init__(self, log_dir: str) -> None:
        self.is_resumed = False
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        """Read the header of an existing file. Lightning's method would instead warn of files in the folder."""
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
        """Record metrics. The first call after a resume removes the old rows of `step` and of all later steps."""
        if self.is_resumed and step is not None:
            self.is_resumed = False
            self.drop_from(step)
        super().log_metrics(metrics_dict, step)

    def drop_from(self, step: int) -> None:
        """Remove the rows of steps that are trained again, and incomplete rows."""

        def is_kept(row: dict[str, str]) -> bool:
            is_complete = None not in row and None not in row.values() and (row.get("step") or "").isdigit()
            return is_complete and int(row["step"]) < step

        path = Path(self.metrics_file_path)
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(line for line in file if line.endswith("\n")) if is_kept(row)]
        with atomic_write(path) as shorter, shorter.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)


def without_anonymous(logger: Any) -> None:
    """If the argument `anonymous` of a WandbLogger is None, remove this argument to avoid a warning from W&B."""
    settings = getattr(logger, "_wandb_init", None)
    if isinstance(settings, dict) and settings.get("anonymous", "") is None:
        del settings["anonymous"]


# ------------------------------------------------------------------------------------------------------- its callbacks


class ParameterSummary(L.Callback):
    """Logs class and size of policy and reference, and the number of trainable parameters, in one line."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the line."""
        if trainer.is_global_zero:
            parts = [
                f"{name} {type(module).__name__} ({num_parameters(module.parameters())})"
                for name, module in pl_module.named_children()
            ]
            trained = num_parameters(weight for weight in pl_module.parameters() if weight.requires_grad)
            every = num_parameters(pl_module.parameters())
            log.info("Model: %s; %s of %s parameters are trainable.", ", ".join(parts), trained, every)


def describe_devices(trainer: L.Trainer) -> str:
    """Message with the devices, the strategy and the precision of a run."""
    count, kind = trainer.num_devices * trainer.num_nodes, trainer.strategy.root_device.type
    if count == 1:
        return f"Device: {kind}, precision {trainer.precision}."
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"Devices: {count} x {kind}{nodes}, {type(trainer.strategy).__name__}, precision {trainer.precision}."


def num_parameters(parameters: Iterable[nn.Parameter]) -> str:
    """Format the number of parameters, e.g. "1.2 B"; ZeRO-3 keeps the unsharded size in `ds_numel`."""
    count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in parameters)
    return " ".join(get_human_readable_count(count).split())


def is_saving(trainer: Namespace) -> bool:
    """True if the Trainer's settings enable checkpoints."""
    return trainer.get("enable_checkpointing") is not False and not trainer.get("fast_dev_run")


def default_callbacks(subcommand: str, settings: Namespace, own: Sequence[L.Callback]) -> list[L.Callback]:
    """Default callbacks of a command. The recipe's own callbacks (`own`) replace default callbacks of the same kind."""
    callbacks: list[L.Callback] = [WritePredictions()] if subcommand == "predict" else [CompletionLog()]
    # Lightning raises an error for a progress bar callback if enable_progress_bar is false.
    if settings.trainer.get("enable_progress_bar") is not False:
        callbacks.append(ProgressBar())
    if settings.trainer.get("enable_model_summary") is not False:
        callbacks.append(ParameterSummary())
    if subcommand == "fit":
        callbacks += [Watchdog(), RunRecord(), RunSummary()]
    kinds = {ProgressBar: AnyProgressBar, ParameterSummary: ModelSummary}
    callbacks = [
        callback
        for callback in callbacks
        if not any(isinstance(other, kinds.get(type(callback), type(callback))) for other in own)
    ]
    return [*callbacks, *default_checkpoints(own)] if subcommand == "fit" and is_saving(settings.trainer) else callbacks


def default_checkpoints(own: Sequence[L.Callback]) -> list[ModelCheckpoint]:
    """Default checkpoint callbacks of `fit`, in addition to the recipe's own (`own`).

    By default, two checkpoints are kept: the newest that was saved at the end of an epoch, and the newest that was
    saved during an epoch. If the recipe has checkpoint callbacks, these two checkpoints are not kept. But if
    `keeps_only_best` is true for all these callbacks, the newest checkpoint that was saved during an epoch is still
    kept. `OnExceptionCheckpoint` does not count as a checkpoint callback, because it saves nothing in a run without
    errors.

    If the recipe has a `ModelCheckpoint` with a `save_top_k` other than 0, a `LastCheckpoint` is added. It saves the
    last step of a run. But if the recipe has a `NewestCheckpoints`, no `LastCheckpoint` is added, because
    `NewestCheckpoints` saves the last step itself.
    """
    own = [each for each in own if isinstance(each, Checkpoint) and not isinstance(each, OnExceptionCheckpoint)]
    saving = [callback for callback in own if isinstance(callback, ModelCheckpoint) and callback.save_top_k != 0]
    callbacks: list[ModelCheckpoint] = []
    if not own:
        callbacks.append(ModelCheckpoint(save_on_train_epoch_end=True))  # otherwise only after a validation
    if all(isinstance(callback, ModelCheckpoint) and keeps_only_best(callback) for callback in own):
        # In the run's folder: a `dirpath` of the recipe may be remote, where several ranks cannot save inside a cycle.
        callbacks.append(ModelCheckpoint(filename="latest-{epoch}-{step}", train_time_interval=CHECKPOINT_INTERVAL))
    if saving and not any(isinstance(callback, NewestCheckpoints) for callback in saving):
        callbacks.append(LastCheckpoint(saving))
    return callbacks


def keeps_only_best(callback: ModelCheckpoint) -> bool:
    """True if a callback keeps only the best checkpoints and does not set `save_weights_only`."""
    return callback.monitor not in (None, "step") and callback.save_top_k > 0 and not callback.save_weights_only


# --------------------------------------------------------------------------------------------------------- its results


def print_results(metrics: Mapping[str, float], console: Console | None = None, *, solved: str = "") -> None:
    """Print the table of `validate` and `test`.

    Args:
        metrics: Values by log key, for example `val/reward`, `val/greedy/avg@1/low` and `val/loader_0/reward`.
        console: Console that prints the table; None prints to stdout.
        solved: Condition under which a completion counts as solved. A line below the table states this condition; ""
            prints no line.
    """
    # The stage ("val", "test") is the title of the column.
    numbers: dict[str, dict[str, float]] = {"sampled": {}, "greedy": {}}
    for log_name, value in metrics.items():
        name = log_name.partition("/")[2]
        match = re.fullmatch(r"(loader_\d+/)?greedy/(.*)", name)  # a data source may have the name "greedy/..."
        kind, row = ("greedy", f"{match[1] or ''}{match[2]}") if match else ("sampled", name)
        numbers[kind][row] = float(value)
    numbers = {kind: own for kind, own in numbers.items() if own}
    table = Table()
    table.add_column(next(iter(metrics), "").partition("/")[0], overflow="fold")
    for kind in numbers:
        table.add_column(kind, justify="right")
    for name in dict.fromkeys(name for own in numbers.values() for name in own):
        if not is_bound(name):
            table.add_row(name, *(cell(own, name) for own in numbers.values()))
    console = console or Console()
    console.print(table)
    if solved:
        console.print(f"avg@G and pass@k count a completion as solved if {solved}.", markup=False, highlight=False)
