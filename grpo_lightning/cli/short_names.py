"""Optimizers and schedules by their names alone: `optimizer: AdamW`, `scheduler: {class_path: Cosine}`.

The parser finds a class by its name where there is one of that name. There are two AdamW: torch's and the one of
`grpo_lightning.optimizers`, which is meant here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from grpo_lightning import optimizers, schedules
from grpo_lightning.rewards import registry  # noqa: F401 - the parser knows the names of loaded classes: the rewards

KEYS = {"optimizer": optimizers, "scheduler": schedules}
"""The settings of the module that take such names, and where the classes are."""


def full_name(name: Any) -> Any:
    """The import path of an optimizer or schedule of ours; anything else as it is."""
    for home in KEYS.values() if isinstance(name, str) and name.isidentifier() else ():
        kind = getattr(home, name, None)
        if inspect.isclass(kind) and kind.__module__ == home.__name__:
            return f"{home.__name__}.{name}"
    return name


def in_flags(args: Sequence[str]) -> list[str]:
    """A command line with import paths in the place of names: `--model.optimizer=AdamW`."""
    flags = {f"--model.{key}{end}" for key in KEYS for end in ("", ".class_path")}
    full = []
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if equals and flag in flags:
            full.append(f"{flag}={full_name(value)}")
        else:
            full.append(full_name(arg) if i and args[i - 1] in flags else arg)
    return full


def in_tree(tree: Any) -> Any:
    """Settings as a YAML file has them, with import paths in the place of names."""
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict):
        return tree
    found = {}
    for key in KEYS:
        value = model.get(key)
        if isinstance(value, str):
            found[key] = full_name(value)
        elif isinstance(value, dict) and "class_path" in value:
            found[key] = value | {"class_path": full_name(value["class_path"])}
    return tree | {"model": model | found}


class Parser(LightningArgumentParser):
    """Takes short names in configuration files."""

    def _apply_actions(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._apply_actions(in_tree(cfg), *args, **kwargs)
