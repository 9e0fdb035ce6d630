"""Files: atomic writes of a file or folder, JSON lines, and the folder of a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FINGERPRINT = "recipe.json"
"""Name of a file in each generated folder. The file contains a fingerprint of what the folder was made from."""


def put_whole(folder: Path, fingerprint: str, fill: Callable[[Path], object]) -> bool:
    """Create a folder atomically, replacing an earlier version that was made from other inputs.

    An existing folder that was made from the same inputs is left untouched, because a run can be reading it.
    `fill` is called with a temporary folder, and must write the files there.

    Returns:
        True if the folder was created.

    Raises:
        ValueError: If the folder is not empty and has no `recipe.json`.
    """
    if is_whole(folder, fingerprint):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / FINGERPRINT).exists():
        raise ValueError(f"{folder} holds other files: choose a folder that is empty or does not exist.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        fill(whole)  # may be killed halfway
        (whole / FINGERPRINT).write_text(fingerprint, encoding="utf-8")
        if is_whole(folder, fingerprint):  # another node on the same disk was faster, and may be reading it already
            return False
        shutil.rmtree(folder, ignore_errors=True)
        try:
            whole.rename(folder)
        except OSError:
            if not is_whole(folder, fingerprint):  # otherwise another node was faster
                raise
            return False
    return True


def is_whole(folder: Path, fingerprint: str) -> bool:
    """True if the folder is complete and has this fingerprint."""
    mark = folder / FINGERPRINT
    return mark.exists() and mark.read_text(encoding="utf-8") == fingerprint


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically. The context yields a temporary path, and replaces the file at the end.

    After an error, the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def set_default_modes(folder: Path) -> None:
    """Change the modes of a folder and of everything below it to the modes of new folders and files (umask).

    Without this call, only the owner could read some of the files and folders.
    """
    new_file, new_folder = folder / ".mode", folder / ".modes"
    new_file.touch()  # os.umask can read the umask only by changing it, also for other threads
    new_folder.mkdir()
    file_mode, folder_mode = (stat.S_IMODE(path.stat().st_mode) for path in (new_file, new_folder))
    new_file.unlink()
    new_folder.rmdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(folder_mode if path.is_dir() else file_mode)


def run_folder(trainer: Any, dirpath: str | None) -> Path:
    """Folder for a run's files. Collective: every rank must call this, because Lightning broadcasts `log_dir`."""
    return Path(dirpath or trainer.log_dir or trainer.default_root_dir).expanduser()


def is_writing(trainer: Any, dirpath: str | None) -> bool:
    """True if a callback is allowed to write its files. It is False in a `fast_dev_run` without `dirpath`.

    In a `fast_dev_run`, `run_folder` is the current folder, which can contain the user's own files.
    """
    return dirpath is not None or not trainer.fast_dev_run


def run_file(trainer: Any, dirpath: str | None, name: str) -> Path:
    """Path of a file in the run's folder. Every rank must call this function, and rank 0 creates the folder."""
    folder = run_folder(trainer, dirpath)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of JSON to a file."""
    # A row of the data may contain a lone surrogate. UTF-8 cannot encode it, but its escape \ud83d is valid JSON.
    with path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def json_line(record: Mapping[str, Any]) -> str:
    """Format a record as one line of JSON (see `plain`). An object of a type that JSON lacks becomes its `str`."""
    return json.dumps(plain(record), ensure_ascii=False, default=str)


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Tensors and arrays become lists, and nan and infinity become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
