"""Settings of a run that differ from the defaults of the classes that they configure."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

CLASSES = {
    "trainer": "lightning.Trainer",
    "model": "grpo_lightning.module.GRPOLightningModule",
    "data": "grpo_lightning.data.datamodule.PromptDataModule",
}
"""Classes of the sections of a recipe."""

UNKNOWN = object()
"""Marks a setting that has no known default."""

HIDDEN = ("trainer.logger", "trainer.default_root_dir")
"""Settings that the command line fills in."""

CLI_DEFAULTS: dict[str, Any] = {
    # This default names a class, so that the engine's arguments are keys of the parser, like the optimizer's arguments.
    "model.engine": {"class_path": "grpo_lightning.LocalEngine"},
    # With Lightning's default of 50, short runs would log nothing.
    "trainer.log_every_n_steps": 1,
    # Lightning's sanity check samples before training. This is slow, and training finds the same errors.
    "trainer.num_sanity_val_steps": 0,
}
"""Defaults of the command line that differ from those in the signatures."""

MISSING = "-"
"""Shown as the default of a setting that has no default."""

Setting = list[Any]
"""[key, value, default]."""


def different_settings(config: Mapping[str, Any]) -> list[Setting]:
    """List the settings that differ from their defaults: [key, value, default] each."""
    found: list[Setting] = []
    for key, value in config.items():
        if key in CLASSES and isinstance(value, Mapping):
            found += below(key, value, import_class(CLASSES[key]))
        elif value is not None and key not in ("subcommand", "config"):
            found.append([key, value, MISSING])
    return [setting for setting in found if not setting[0].startswith(HIDDEN)]


def below(key: str, values: Mapping[str, Any], owner: Any) -> Iterator[Setting]:
    """Yield the settings that differ from the defaults of the class `owner`.

    If the class is unknown, `owner` is None.
    """
    known = defaults(owner)
    for name, value in values.items():
        default = CLI_DEFAULTS.get(f"{key}.{name}", known.get(name, UNKNOWN))
        yield from differences(f"{key}.{name}", value, default, hint(owner, name))


def differences(key: str, value: Any, default: Any, kind: Any) -> Iterator[Setting]:
    """Yield the setting `key`, or the settings below it, if they differ from the default."""
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        path = value["class_path"]
        if not is_same_class(path, default):
            yield [key, path.rpartition(".")[2], format_default(default)]
        yield from below(key, value.get("init_args") or {}, import_class(path))
    elif isinstance(value, Mapping) and kind is not None:
        yield from below(key, value, kind)
    elif isinstance(value, list) and any(isinstance(item, Mapping) and "class_path" in item for item in value):
        for number, item in enumerate(value):
            yield from differences(f"{key}[{number}]", item, UNKNOWN, kind)
    elif isinstance(value, list) and kind is not None and all(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from below(f"{key}[{number}]", item, kind)
    elif not is_default(value, default):
        yield [key, value, format_default(default)]


def is_same_class(path: str, default: Any) -> bool:
    """True if the default is the class named `path`, an object of this class, or settings that name this class."""
    if isinstance(default, Mapping):
        return str(default.get("class_path")).rpartition(".")[2] == path.rpartition(".")[2]
    kind = default if isinstance(default, type) else type(default)
    return kind.__name__ == path.rpartition(".")[2]


def is_default(value: Any, default: Any) -> bool:
    """True if a value that was read from YAML equals a default. A null stands for the default."""
    if value is None:
        return True
    if isinstance(default, tuple | list) and isinstance(value, list):
        return list(default) == value
    if default is UNKNOWN or isinstance(value, Mapping) != isinstance(default, Mapping):
        return value in ([], {})
    return bool(value == default)


def format_default(default: Any) -> Any:
    """Convert a default to a JSON value, or to the name of its class."""
    if default is UNKNOWN:
        return MISSING
    if default is None or isinstance(default, bool | int | float | str | list | dict):
        return default
    if isinstance(default, tuple):
        return list(default)
    return (default if isinstance(default, type) else type(default)).__name__


def import_class(path: str) -> Any:
    """Import a class by its path; None if it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def defaults(owner: Any) -> dict[str, Any]:
    """Map the name of each parameter of a class to the parameter's default, or to `UNKNOWN` if there is none."""
    try:
        known = inspect.signature(owner).parameters
    except (TypeError, ValueError):  # an unknown class, or one that is written in C
        return {}
    found = {
        name: UNKNOWN if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in known.items()
    }
    for field in dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ():
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def hint(owner: Any, name: str) -> Any:
    """The dataclass in the type hint of a parameter, or None."""
    try:
        hints = typing.get_type_hints(owner if dataclasses.is_dataclass(owner) else owner.__init__)
    except (AttributeError, NameError, TypeError):  # no hints, or names that are imported only for type checkers
        return None
    return dataclass_in(hints.get(name))


def dataclass_in(kind: Any) -> Any:
    """The first dataclass in a type, such as `Sequence[Entry] | None`."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    is_nested = isinstance(kind, UnionType) or typing.get_origin(kind) is not None
    parts = (dataclass_in(part) for part in typing.get_args(kind)) if is_nested else ()
    return next((part for part in parts if part is not None), None)
