"""Checkpoints on the command line: the newest complete one, and in which settings it differs from this run's."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_lightning.cli.errors import ConfigurationError

LIGHTNINGS_NAMES = ("best", "last", "hpc")
MISSING = "(not set)"
SHOWN = 20


def is_complete(path: Path) -> bool:
    """True for a checkpoint that was written to its end.

    A file is a zip archive, whose directory is written last. A folder of FSDP2 gets `meta.pt` last, one of DeepSpeed
    gets `latest`, which names the folder of its parts.
    """
    if path.is_file():
        return zipfile.is_zipfile(path)
    if (path / ".metadata").is_file():
        return zipfile.is_zipfile(path / "meta.pt")
    latest = path / "latest"
    return latest.is_file() and (path / latest.read_text(encoding="utf-8").strip()).is_dir()


def newest(folders: list[Path]) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint in the `checkpoints/` of some runs, and newer ones that are half-written."""
    skipped: list[Path] = []
    found = [path for folder in folders for path in (folder / "checkpoints").glob("*.ckpt")]
    for path in sorted(found, key=written_at, reverse=True):
        if is_complete(path):
            return path, skipped
        skipped.append(path)
    return None, skipped


def written_at(path: Path) -> tuple[int, str]:
    """When a checkpoint was last written to; the name decides between two of the same moment."""
    files = [path] if path.is_file() else [other for other in path.rglob("*") if other.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=path.stat().st_mtime_ns), path.name


def check_there(path: str | None) -> None:
    """Refuse a checkpoint that is not there, before anything is loaded. Raises: ConfigurationError."""
    if path is None or path in LIGHTNINGS_NAMES or "://" in path or path.startswith("registry") or Path(path).exists():
        return
    parent = Path(path).parent
    there = sorted(other.name for other in parent.glob("*.ckpt")) if parent.is_dir() else []
    hint = f"There are: {', '.join(there)}." if there else "Give a file, or auto for the newest of this run."
    raise ConfigurationError(f"--ckpt_path: there is no checkpoint {path} (current folder: {Path.cwd()}). {hint}")


def settings(path: Path) -> tuple[dict[str, Any], bool]:
    """The settings a checkpoint was trained with, below "model" and "data", and True if they are all of them.

    All stand in the `config.yaml` of the run; a checkpoint without its run has those that could be saved in it.
    """
    config = path.parent.parent / "config.yaml"
    if config.is_file():
        tree = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        return {name: tree[name] for name in ("model", "data") if name in tree}, True
    file = path if path.is_file() else path / "meta.pt"
    if not file.is_file():
        return {}, False
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError):  # what it says is worth a notice, not a failure
        return {}, False
    return {"model": dict(content.get("hyper_parameters") or {})}, False


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys; lists count as one value."""
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
    """Lines `key: before -> now` for what differs among the groups that both have.

    Args:
        before: The checkpoint's settings, "model" and "data".
        now: This command line's.
        defaults: What null stands for, by dotted key.
        is_whole: False if `before` may lack settings that were there: then only what both have is compared.
    """
    groups = sorted(before.keys() & now.keys())
    old, new = (flat(filled({name: tree[name] for name in groups}, defaults)) for tree in (before, now))
    keys = old.keys() | new.keys() if is_whole else old.keys() & new.keys()
    return [
        f"{key}: {shown(old.get(key, MISSING))} -> {shown(new.get(key, MISSING))}"
        for key in sorted(keys)
        if plain(old.get(key, MISSING)) != plain(new.get(key, MISSING))
    ]


def filled(tree: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], prefix: str = "") -> dict[str, Any]:
    """A tree of settings with defaults in the place of null: the same run, written out."""
    return {
        name: defaults.get(f"{prefix}{name}")
        if value is None
        else filled(value, defaults, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
    }


def plain(value: Any) -> Any:
    """Tuples as the lists that YAML makes of them."""
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def shown(value: Any) -> str:
    """A value in one short line."""
    text = value if value is MISSING else yaml.safe_dump(plain(value), default_flow_style=True, width=1000)
    text = text.replace("\n...", "").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def notice(path: Path, now: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a checkpoint was trained with and this run is not; None if nothing differs or nothing is known."""
    before, is_whole = settings(path)
    lines = differences(before, now, defaults, is_whole=is_whole)
    if not lines:
        return None
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    said = "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])
    return f"Settings that differ from those of the checkpoint; this command line's count (checkpoint -> now):\n{said}"
