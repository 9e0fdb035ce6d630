"""Detecting incomplete checkpoints.

A file is a zip archive, whose directory is written last. A folder (ZeRO, FSDP2) is written by all ranks, file by file:
it gets a list of its files once all of them are there.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

MARK = "complete.json"


def mark(checkpoint: Path, *, beside: Sequence[Path] = (), is_broken_off: bool = False) -> None:
    """Say of a folder that it is whole now; called by one rank, when all are done.

    Args:
        checkpoint: The folder.
        beside: Files outside that belong to it.
        is_broken_off: An exception ended the run inside an optimizer step, which no run can go on from.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MARK]
    sizes = {os.path.relpath(path, checkpoint.resolve()): path.stat().st_size for path in beside}
    sizes |= {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    text = json.dumps({"is_broken_off": is_broken_off, "bytes": sizes}, indent=1)
    unfinished = checkpoint / f".{MARK}"
    unfinished.write_text(f"{text}\n", encoding="utf-8")
    unfinished.replace(checkpoint / MARK)


def unmark(checkpoint: Path) -> None:
    """Say of a folder that it is about to be written again."""
    (checkpoint / MARK).unlink(missing_ok=True)


def why_incomplete(checkpoint: Path) -> str | None:
    """What a checkpoint lacks; None if it was written to its end."""
    if checkpoint.is_file():
        return None if zipfile.is_zipfile(checkpoint) else "it was not written to its end"
    if not (checkpoint / MARK).is_file():
        return (
            f"it was not written to its end (it has no {MARK}; neither has a folder that is not on a disk which all "
            "nodes share)"
        )
    sizes = json.loads((checkpoint / MARK).read_text(encoding="utf-8"))["bytes"]
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def is_broken_off(checkpoint: Path) -> bool:
    """True of a marked folder that no run can go on from: an error ended its run inside an optimizer step."""
    return bool(json.loads((checkpoint / MARK).read_text(encoding="utf-8")).get("is_broken_off"))
