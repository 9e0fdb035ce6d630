"""Atomic creation of a folder, with a fingerprint of its inputs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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
