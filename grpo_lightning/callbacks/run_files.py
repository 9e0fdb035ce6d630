"""Where a callback's files go, and how records become JSON lines."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L

T = TypeVar("T")


def run_folder(trainer: L.Trainer, dirpath: str | None) -> Path:
    """The folder of a run's files: `dirpath`, or the trainer's `log_dir`. To be called on every rank.

    Lightning broadcasts `log_dir`: a rank that asks for it alone would wait for the others for ever.
    """
    return Path(dirpath or trainer.log_dir or trainer.default_root_dir)


def run_file(trainer: L.Trainer, dirpath: str | None, name: str) -> Path:
    """A file in the run's folder, which rank 0 makes: it alone writes, what belongs to all ranks."""
    folder = run_folder(trainer, dirpath)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def in_order_of_prompts(ranks: Sequence[Sequence[T]]) -> list[T]:
    """What each rank has of its prompts, prompt by prompt, in the order of the data.

    The i-th prompt of rank r is number `i * world_size + r`: ranks take turns.
    """
    turns = itertools.zip_longest(*([[item] for item in items] for items in ranks), fillvalue=[])
    return [item for turn in turns for items in turn for item in items]


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def json_line(record: Mapping[str, Any]) -> str:
    """A record as JSON in one line; what JSON has no word for is written as text.

    Also what ranks gather of their records: text is small, and anything becomes text.
    """
    return json.dumps(plain(record), ensure_ascii=False, default=str)


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
