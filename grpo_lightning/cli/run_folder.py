"""One run, one folder: `runs/<run name>/version_<N>/` with metrics, completions, pictures, settings and checkpoints.

The run name is that of the first recipe, or `--run_name`. A run takes the next free version. `--ckpt_path auto` goes on
in the folder of the checkpoint it finds; every other run gets a folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from grpo_lightning.cli.defaults import SAVE_DIR
from grpo_lightning.cli.errors import ConfigurationError, rank
from grpo_lightning.cli.loggers import MetricsLogger

# Ranks that this process launches inherit the choice: looking for the next version, they would find this one taken.
CHOSEN = "GRPO_LIGHTNING_RUN_FOLDER"
LIGHTNINGS_NAME = "lightning_logs"
SETTINGS = ("config.yaml", "hparams.yaml")
METRICS_LOGGERS = {"CSVLogger", "MetricsLogger"}
FILE_LOGGERS = METRICS_LOGGERS | {"TensorBoardLogger"}


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
    return Path(trainer.get("default_root_dir") or ".") / "runs" / name


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
        except FileExistsError:  # somebody took it just now
            number += 1
            continue
        os.environ[CHOSEN] = str(path)
        break
    return folder / f"version_{number}"


def place(trainer: Namespace, folder: Path) -> None:
    """Point a Trainer's settings at the run's folder: where nothing is logged, and every logger without a name.

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
        metrics = Namespace(class_path=f"{MetricsLogger.__module__}.MetricsLogger", init_args=Namespace())
        place_logger(metrics, folder, is_new=True)
        loggers.append(metrics)
    if kind(loggers[0]) not in FILE_LOGGERS:
        files = [logger for logger in loggers if kind(logger) in FILE_LOGGERS]
        inside = [logger for logger in files if is_inside(logger, folder)]
        first = (inside or files)[0]
        loggers = [first, *(logger for logger in loggers if logger is not first)]
    trainer.logger = loggers


def is_inside(logger: Namespace, folder: Path) -> bool:
    """True for a placed logger that writes into the run's folder."""
    settings = logger.init_args
    return (settings.get("save_dir"), settings.get("version")) == (str(folder.parent.parent), folder.name)


def kind(logger: Namespace) -> str:
    """The name of a logger's class."""
    return str(logger.class_path.rpartition(".")[2])


def place_logger(logger: Namespace, folder: Path, *, is_new: bool = False) -> None:
    """Let one logger write into the run's folder, unless its recipe names a place; W&B calls the run by its name.

    A `save_dir` without a name gets the run's name and version: there, too, every run has a folder of its own.
    """
    settings = logger.init_args
    if kind(logger) == "WandbLogger":
        if settings.get("save_dir") in (None, ".") and settings.get("dir") is None:
            settings.save_dir = str(folder)
        if settings.get("name") is None:
            settings.name = folder.parent.name
    elif is_new or (settings.get("name") == LIGHTNINGS_NAME and settings.get("version") is None):
        if settings.get("save_dir") in (None, SAVE_DIR):
            settings.save_dir = str(folder.parent.parent)
        settings.name, settings.version = folder.parent.name, folder.name


def keep_old_config(folder: Path, text: str) -> None:
    """Before a continued run writes its settings: keep those it started with as `config_<n>.yaml` if they differ."""
    path = folder / "config.yaml"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        number = sum(1 for _ in folder.glob("config_*.yaml"))
        path.rename(folder / f"config_{number}.yaml")


def remove_without_results(folder: Path) -> None:
    """Remove the folder of a run that did nothing, if it holds settings and empty logs alone."""
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    if all(is_without_results(path) for path in paths):
        shutil.rmtree(folder, ignore_errors=True)


def is_without_results(path: Path) -> bool:
    """True for settings and for a log in which nothing stands."""
    if path.name == "metrics.csv":
        return path.stat().st_size == 0
    return path.name in SETTINGS or (path.name.startswith("events.out.tfevents.") and not has_events(path))


def has_events(path: Path) -> bool:
    """True if a TensorBoard file holds more than hyperparameters; also where nobody can tell."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
            LegacyEventFileLoader,
        )
    except ImportError:
        return True
    tags = [value.tag for event in LegacyEventFileLoader(str(path)).Load() for value in event.summary.value]
    return any(tag != "hp_metric" and not tag.startswith("_hparams_/") for tag in tags)
