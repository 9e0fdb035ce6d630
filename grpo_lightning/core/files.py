"""Files: atomic writes of a file or folder, JSON lines, and where a run keeps its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"
"""What the folder was made from; it lies inside, and marks the folder as one that may be replaced."""


def put_whole(folder: Path, recipe: str, fill: Callable[[Path], object]) -> bool:
    """Fill a folder in one step, in the place of an earlier one.

    One of the same recipe stays as it is: a run that reads it may be on its way.

    Args:
        folder: Where it goes.
        recipe: The text of its `recipe.json`, which decides whether it is the same.
        fill: Fills an empty folder; `recipe.json` is written behind it.

    Returns:
        True if it was filled, False if it was there.

    Raises:
        ValueError: If files of somebody else's lie there.
    """
    if is_whole(folder, recipe):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / RECIPE).exists():
        raise ValueError(f"{folder} holds other files: give what is made here a folder of its own.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        fill(whole)  # which may be killed half way
        (whole / RECIPE).write_text(recipe, encoding="utf-8")
        if is_whole(folder, recipe):  # another node was faster, on a disk that they share, and reads it by now
            return False
        shutil.rmtree(folder, ignore_errors=True)
        try:
            whole.rename(folder)
        except OSError:
            if not is_whole(folder, recipe):  # else it was faster by a moment
                raise
            return False
    return True


def is_whole(folder: Path, recipe: str) -> bool:
    """Whether a folder was made from this recipe."""
    mark = folder / RECIPE
    return mark.exists() and mark.read_text(encoding="utf-8") == recipe


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Atomic write of a file: yields a path next to it to write to, which replaces the file at the end.

    Readers, and a run that is killed meanwhile, find the old file or the new one. After an error the old one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def run_folder(trainer: Any, dirpath: str | None) -> Path:
    """The folder of a run's files: `dirpath`, or the Trainer's `log_dir`. Collective: call it on every rank.

    Lightning broadcasts `log_dir`: a rank that asks for it alone waits for the others forever.
    """
    return Path(dirpath or trainer.log_dir or trainer.default_root_dir)


def run_file(trainer: Any, dirpath: str | None, name: str) -> Path:
    """A file in the run's folder, which rank 0 creates. Collective: call it on every rank; rank 0 alone writes."""
    folder = run_folder(trainer, dirpath)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON: tensors as lists, null for nan and infinity, text for anything else."""
    return json.dumps(plain(record), ensure_ascii=False, default=str)


def plain(value: Any) -> Any:
    """The value in JSON's types: tensors and arrays as lists, null for nan and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
