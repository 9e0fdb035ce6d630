"""What every rank keeps for itself beside a checkpoint: `step=12.ckpt` has `step=12.ckpt.ranks/<moment>-<rank>.pt`.

The strategies save one rank's state, or gather everything on it. A pending rollout is each rank's own and may be large:
each writes its part. The checkpoint names the moment, so that files of another save are never taken for its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

REFERENCE = "reference"
"""In the place of a rank: the weights of a reference that has moved."""


def folder_of(checkpoint: Path) -> Path:
    """Where the ranks' files of a checkpoint are; of a link, those of the checkpoint it points to."""
    target = checkpoint.resolve()
    return target.with_name(f"{target.name}.ranks")


def write(checkpoint: Path, moment: str, rank: int | str, state: Any) -> None:
    """Save one rank's part, or something else under a name; the file is there when it is whole."""
    folder = folder_of(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{moment}-{rank}.pt"
    torch.save(state, unfinished)
    unfinished.replace(folder / f"{moment}-{rank}.pt")


def read(checkpoint: Path, moment: str, rank: int | str) -> Any:
    """One rank's part, tensors mapped from the file. Raises: FileNotFoundError if it is not there."""
    path = folder_of(checkpoint) / f"{moment}-{rank}.pt"
    if not path.is_file():
        raise FileNotFoundError(
            f"The checkpoint {checkpoint} was saved with something beside it, and it is not there: no {path}. Keep the "
            f"folder {path.parent.name} with its checkpoint, on a disk that all nodes share, or resume from one saved "
            "at the end of a cycle."
        )
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def why_missing(checkpoint: Path, state: Mapping[str, Any] | None) -> str | None:
    """Say which of the files are not there that a checkpoint was saved with; None if all are.

    Args:
        checkpoint: The file.
        state: What the checkpoint says of the run (`checkpoint["grpo"]`).
    """
    moment = (state or {}).get("moment")
    if state is None or moment is None:
        return None
    keepers: list[int | str] = list(range(state["world_size"])) if state["is_pending"] else []
    keepers += [REFERENCE] if state["has_moved"] else []
    folder = folder_of(checkpoint)
    missing = [name for keeper in keepers if not (folder / (name := f"{moment}-{keeper}.pt")).is_file()]
    if not missing:
        return None
    return (
        f"{folder.name}/{missing[0]} is missing, which was saved next to it: copy the folder {folder.name} together "
        "with the checkpoint"
    )


def of_moment(checkpoint: Path, moment: str | None) -> list[Path]:
    """The files of a moment."""
    return [] if moment is None else sorted(folder_of(checkpoint).glob(f"{moment}-*.pt"))


def tidy(checkpoint: Path, moment: str | None) -> None:
    """Remove the files of earlier saves under the same name; of all, if this one has none (None)."""
    folder = folder_of(checkpoint)
    for path in folder.glob("*.pt") if folder.is_dir() else ():
        if moment is None or not path.name.startswith(f"{moment}-"):
            path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def remove(checkpoint: Path) -> None:
    """Remove them with their checkpoint."""
    shutil.rmtree(folder_of(checkpoint), ignore_errors=True)
