"""Loads a user's own function or class by its import path (`my_losses.my_surrogate`), and explains invalid paths."""

from __future__ import annotations

import os
import traceback
from importlib import import_module
from typing import Any

from grpo_lightning.core.log_messages import nearest

MAX_LISTED = 60
"""Maximum number of names that an error lists."""


def import_object(path: str) -> Any:
    """Import a function or class by its path. Raises: ValueError if the path is invalid."""
    if problem := import_path_problem(path):
        raise ValueError(problem)
    module_name, _, name = path.rpartition(".")
    return getattr(import_module(module_name), name)


def import_path_problem(path: str) -> str | None:
    """Describe why an import path is invalid. Return None if it is valid."""
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            return f"{module_name} (for {path}) imports {missing}, which is not installed."
        return (
            f"there is no module {missing!r} for {path}. "
            f"Searched the installed packages and the current folder, {os.getcwd()}."
        )
    except Exception as error:  # noqa: BLE001 - importing a user's module can raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        # The text of a SyntaxError names the place already, and its last frame is that of Python's compiler.
        where = "" if isinstance(error, SyntaxError) else f" (at {frame.filename}:{frame.lineno})"
        return f"importing {module_name} for {path} failed: {type(error).__name__}: {error}{where}."
    if hasattr(module, name):
        value = getattr(module, name)
        return None if callable(value) else f"{path} is {value!r}, not a function."
    public = [other for other in dir(module) if not other.startswith("_")]
    near = nearest(name, public)
    choices = f"It has: {', '.join(public[:MAX_LISTED])}."
    known = f"Did you mean {' or '.join(f'{module_name}.{other}' for other in near)}?" if near else choices
    return f"{module_name} has no {name!r}. {known}"
