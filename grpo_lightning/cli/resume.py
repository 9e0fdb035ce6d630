"""Resuming: find the newest usable checkpoint, and compare its settings with those of this run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace

from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.runs import place, version_around, versions
from grpo_lightning.training.checkpoint_files import RankFiles, saved_by, was_interrupted, why_incomplete

LIGHTNINGS_NAMES = ("best", "last", "hpc")
WHOLE_CONFIG = "# lightning.pytorch=="
"""Beginning of every `config.yaml` that a run writes. Any other `config.yaml` is ignored."""

MISSING = "(not set)"
SHOWN = 20


def why_unusable(path: Path, *, to_train: bool = False) -> str | None:
    """Return why a checkpoint is not usable; None if it is usable.

    A usable checkpoint is complete. If `to_train` is true, a run must also be able to resume from the checkpoint. Only
    DeepSpeed itself can read a DeepSpeed checkpoint, so the function reads only the `complete.json` of such a
    checkpoint.
    """
    if why := why_incomplete(path):
        return why
    if to_train and path.is_dir() and was_interrupted(path):
        return "it was saved inside an optimizer step that an error interrupted"
    file = path if path.is_file() else path / "meta.pt"
    if not to_train or not file.is_file():
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # contains custom objects: the Trainer decides if it can load them
        return None
    except (RuntimeError, EOFError, OSError) as error:
        return f"it cannot be read ({str(error).strip().partition(chr(10))[0]})"
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, not a checkpoint"
    if (content.get("grpo") or {}).get("is_interrupted"):
        return "it was saved inside an optimizer step that an error interrupted"
    if why := RankFiles(path).why_missing(content.get("grpo")):
        return why
    # The optimizer state of a sharded checkpoint is in its shards. meta.pt then contains the schedulers, which are
    # checked instead.
    if ("optimizer_states" if path.is_file() else "lr_schedulers") not in content:
        return "it holds weights without the optimizer's state (save_weights_only)"
    return None


def newest(
    folders: Iterable[Path], *, elsewhere: Sequence[Path] = (), runs: Path | None = None, to_train: bool = False
) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest usable checkpoint.

    Every checkpoint in `folders` belongs to the run. In the folders `elsewhere`, checkpoints of other runs are skipped.
    `runs` is the folder `runs/<run name>` of the run. With `to_train`, checkpoints from which a run cannot resume are
    skipped.

    Returns:
        The path of the checkpoint, and why newer checkpoints are skipped.
    """
    skipped: dict[Path, str] = {}
    found = [path for folder in [*folders, *elsewhere] for path in folder.glob("*.ckpt")]
    for path in sorted(found, key=written_at, reverse=True):
        why = why_unusable(path, to_train=to_train)
        if why is None and runs is not None and path.parent in elsewhere:
            why = why_of_other_run(path, runs)
        if why is None:
            return path, skipped
        skipped[path] = why
    return None, skipped


def why_of_other_run(path: Path, runs: Path) -> str | None:
    """Return why a checkpoint does not belong to the run `runs/<run name>`.

    A checkpoint usually names the folder of the run that saved the checkpoint. If this folder no longer exists (for
    example, after a move), only the names of the two runs are compared. If the checkpoint names no folder, the
    checkpoint counts as a checkpoint of the run `runs/<run name>`.
    """
    folder = saved_by(path)
    if folder is None or folder.parent.resolve() == runs.resolve():
        return None
    if folder.parent.name == runs.name and not folder.exists():
        return None
    return f"it belongs to another run, {folder}"


def version_of(path: Path, runs: Path) -> Path | None:
    """Find the version folder in `runs` that a checkpoint belongs to.

    Returns:
        - The version folder that contains the checkpoint, if `runs` has such a version folder.
        - Otherwise, the version folder of the run that saved the checkpoint, if `runs` has this version folder.
        - Otherwise, None.
    """
    inside = version_around(path, runs)
    if inside is not None or (folder := saved_by(path)) is None:
        return inside
    return next((version for version in versions(runs).values() if version.resolve() == folder.resolve()), None)


def folders_of_run(path: Path) -> list[Path]:
    """Checkpoint folders of one version of a run, or of all its versions.

    `path` is `runs/<run name>/version_<N>` or `runs/<run name>`. For any other path, the list is empty. The folder
    `version_<N>` is included if it has a checkpoint of a SLURM requeue, which Lightning saves there.
    """

    def requeued_folders(run: Path) -> list[Path]:
        return [run] if any(run.glob("hpc_ckpt_*.ckpt")) else []

    is_run = (path / "checkpoints").is_dir() or requeued_folders(path)
    runs = [path] if is_run else versions(path).values()
    return [folder for run in runs for folder in (run / "checkpoints", *requeued_folders(run))]


def is_requeued() -> bool:
    """True if SLURM has requeued the job."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def folders_elsewhere(trainer: Namespace, runs: Path) -> list[Path]:
    """Folders in which a recipe saves checkpoints, other than `runs/<run name>/version_<N>/checkpoints`.

    These are the `dirpath` of each ModelCheckpoint, and the folder `save_dir/name/version/checkpoints` that Lightning
    derives from the first logger.
    """
    callbacks = trainer.get("callbacks") or []
    settings = [callback.get("init_args") for callback in (callbacks if isinstance(callbacks, list) else [callbacks])]
    given = [Path(str(own.dirpath)).expanduser() for own in settings if own and own.get("dirpath")]
    for version in versions(runs).values() or [runs / "version_0"]:
        given += folders_of_logger(trainer, version)
    usual = {folder.resolve() for folder in folders_of_run(runs)} | {(runs / "version_0" / "checkpoints").resolve()}
    return list({folder.resolve(): folder for folder in given if folder.resolve() not in usual}.values())


def folders_of_logger(trainer: Namespace, folder: Path) -> list[Path]:
    """Folders of checkpoints that Lightning derives from the first logger of a run."""
    placed = trainer.clone()
    place(placed, folder)
    if not placed.get("logger"):
        return []
    first = placed.logger[0].init_args
    if first.get("save_dir") is None:
        return []
    version = first.get("version")
    base = Path(first.save_dir) / str(first.get("project") or first.get("name") or "")
    if version is None:
        return sorted(base.glob("*/checkpoints"))
    return [base / (f"version_{version}" if isinstance(version, int) else version) / "checkpoints"]


def written_at(path: Path) -> tuple[int, str]:
    """Return the time of the last write to a checkpoint, and the checkpoint's name."""
    files = [path] if path.is_file() else [other for other in path.rglob("*") if other.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=path.stat().st_mtime_ns), path.name


def check_there(path: str | None, *, to_train: bool = False) -> None:
    """Before weights are loaded, check that a checkpoint exists and is usable. Raises: ConfigurationError if not."""
    if path is None or "://" in path or path.startswith("registry"):
        return
    if path in LIGHTNINGS_NAMES:  # refers to an earlier run in the same process, but there is none
        raise ConfigurationError(f"--ckpt_path {path}: use auto (the newest checkpoint of the run) or a file.")
    if Path(path).exists():
        if why := why_incomplete(Path(path)):
            what = "file of another kind" if Path(path).is_file() else "folder without a checkpoint"
            raise ConfigurationError(
                f"--ckpt_path: {path} is not a complete checkpoint: {why}, or it is a {what}. Give another one, or "
                "auto for the newest of this run."
            )
        if why := why_unusable(Path(path), to_train=to_train):
            raise ConfigurationError(f"--ckpt_path: cannot resume from {path}: {why}. Give another one, or auto.")
        return
    parent = Path(path).parent
    there = sorted(other.name for other in parent.glob("*.ckpt")) if parent.is_dir() else []
    hint = f"There are: {', '.join(there)}." if there else "Give a file, or auto for the newest of this run."
    raise ConfigurationError(f"--ckpt_path: there is no checkpoint {path} (current folder: {Path.cwd()}). {hint}")


def settings(path: Path) -> tuple[dict[str, Any], bool]:
    """Sections "model" and "data" of the settings of a checkpoint's run, and True if the settings are complete.

    Without the run's `config.yaml`, the settings are only the hyperparameters in the checkpoint.
    """
    config = path.parent.parent / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    if text.startswith(WHOLE_CONFIG):
        tree = yaml.safe_load(text) or {}
        return {name: tree[name] for name in ("model", "data") if name in tree}, True
    file = path if path.is_file() else path / "meta.pt"
    if not file.is_file():
        return {}, False
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError):  # no error: the settings serve only to log differences
        return {}, False
    return {"model": dict(content.get("hyper_parameters") or {})}, False


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys. A list counts as one value."""
    if not isinstance(value, Mapping):
        return {key: value}
    return {
        inner: item
        for name, child in value.items()
        for inner, item in flat(child, f"{key}.{name}" if key else str(name)).items()
    }


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]],
    *,
    is_whole: bool = True,
) -> list[str]:
    """Format differing settings as lines `key: before -> now`. Sections that are not in both mappings are skipped.

    `defaults` maps the dotted key of a setting to the value that applies if the setting is null. If `is_whole` is
    False, only keys that are in both mappings are compared.
    """
    groups = sorted(before.keys() & now.keys())
    old, new = (flat(fill_defaults({name: tree[name] for name in groups}, defaults)) for tree in (before, now))
    keys = old.keys() | new.keys() if is_whole else old.keys() & new.keys()
    return [
        f"{key}: {format_setting(old.get(key, MISSING))} -> {format_setting(new.get(key, MISSING))}"
        for key in sorted(keys)
        if plain(old.get(key, MISSING)) != plain(new.get(key, MISSING))
    ]


def fill_defaults(
    tree: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], prefix: str = ""
) -> dict[str, Any]:
    """Replace null by defaults in nested settings."""
    return {
        name: defaults.get(f"{prefix}{name}")
        if value is None
        else fill_defaults(value, defaults, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
    }


def plain(value: Any) -> Any:
    """Convert tuples to lists, as YAML does."""
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def format_setting(value: Any) -> str:
    """Format a value as one short line."""
    text = value if value is MISSING else yaml.safe_dump(plain(value), default_flow_style=True, width=1000)
    text = text.replace("\n...", "").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def notice(path: Path, now: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Format the settings that differ from the settings of the checkpoint."""
    before, is_whole = settings(path)
    lines = differences(before, now, defaults, is_whole=is_whole)
    if not lines:
        return None
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    text = "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])
    return f"Settings that differ from the checkpoint; those of the command line are used (checkpoint -> now):\n{text}"
