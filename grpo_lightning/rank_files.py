"""What every rank keeps for itself beside a checkpoint: `step=12.ckpt` has `step=12.ckpt.ranks/<moment>-<rank>.pt`.

The strategies save one rank's state, or gather everything on it. A pending rollout is each rank's own and may be large:
each writes its part. The checkpoint names the moment, so that files of another save are never taken for its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch


def folder_of(checkpoint: Path) -> Path:
    """Where the ranks' files of a checkpoint are; of a link, those of the checkpoint it points to."""
    target = checkpoint.resolve()
    return target.with_name(f"{target.name}.ranks")


def write(checkpoint: Path, moment: str, rank: int, state: dict[str, Any]) -> None:
    """Save one rank's part; the file is there when it is whole."""
    folder = folder_of(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{moment}-{rank}.pt"
    torch.save(state, unfinished)
    unfinished.replace(folder / f"{moment}-{rank}.pt")


def read(checkpoint: Path, moment: str, rank: int) -> dict[str, Any]:
    """One rank's part. Raises: FileNotFoundError if it is not there."""
    path = folder_of(checkpoint) / f"{moment}-{rank}.pt"
    if not path.is_file():
        raise FileNotFoundError(
            f"The checkpoint {checkpoint} was saved inside a cycle, and the rollout of rank {rank} is not beside it: "
            f"no {path}. Keep the folder {path.parent.name} with its checkpoint, or resume from one saved at the end "
            "of a cycle."
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


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
