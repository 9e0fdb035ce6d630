"""Saying which setting named what cannot be loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(key: str, name: str) -> Iterator[None]:
    """Say which setting named what cannot be loaded; Transformers' own message asks for a hub login."""
    # What can only be a folder: hub names are `name` or `owner/name`.
    if (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not Path(name).is_dir():
        raise FileNotFoundError(
            f"{key} {name!r}: no folder {Path(name).resolve()}. The current folder is {Path.cwd()}."
        )
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a folder without a tokenizer
        found = (
            f"the folder {Path(name).resolve()}" if Path(name).is_dir() else "no such folder, nor a model on the hub"
        )
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{key} {name!r} cannot be loaded ({found}): {reason} Check the name; without a network only folders and "
            "models in the hub's cache can be loaded."
        ) from error
