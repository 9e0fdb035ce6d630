"""Where a callback's files go, and how records become JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L


def run_folder(trainer: L.Trainer, dirpath: str | None) -> Path:
    """The folder of a run's files: `dirpath`, or the trainer's `log_dir`. To be called on every rank.

    Lightning broadcasts `log_dir`: a rank that asks for it alone would wait for the others for ever.
    """
    return Path(dirpath or trainer.log_dir or trainer.default_root_dir)


def rank_file(trainer: L.Trainer, dirpath: str | None, name: str) -> Path:
    """This rank's file in the run's folder, which is made: `<name>.jsonl`, on rank r > 0 `<name>.rank<r>.jsonl`."""
    folder = run_folder(trainer, dirpath)
    folder.mkdir(parents=True, exist_ok=True)
    rank = f".rank{trainer.global_rank}" if trainer.global_rank else ""
    return folder / f"{name}{rank}.jsonl"


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add one JSON line per record; what JSON has no word for is written as text."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(plain(record), ensure_ascii=False, default=str) + "\n" for record in records)


def plain(value: Any) -> Any:
    """The value as JSON can say it: tensors and arrays as lists, null for nan and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def keep_rollouts_before(path: Path, rollout: int) -> None:
    """Drop the lines of this and later rollouts, which a resumed run draws again; and a last one that was cut off.

    The file is replaced at once: killed meanwhile, the run leaves it as it was.

    Raises:
        ValueError: If a line is none of a log of completions, naming file and line.
    """
    if not path.exists():
        return
    shorter = path.with_name(f"{path.name}.unfinished")
    with path.open(encoding="utf-8", newline="\n") as old, shorter.open("w", encoding="utf-8", newline="\n") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith("\n"):
                break
            try:
                is_kept = json.loads(line)["rollout"] < rollout
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number} is no line of a log of completions: {line[:80]!r}. Move the file away, or give "
                    "the callback another dirpath."
                ) from error
            if is_kept:
                new.write(line)
    os.replace(shorter, path)
