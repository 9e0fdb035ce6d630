"""Settings as dataclasses: made from the mappings of YAML and checkpoints, and checked against their ranges."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings:
    """The settings given: None takes the defaults, a mapping (as checkpoints and YAML have it) names the fields.

    Raises:
        ValueError: If it is something else, or names a field that does not exist.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key} must be of {kind.__name__}, got {value!r:.80}: write {kind.__name__}(...).")
    if unknown := [name for name in value or {} if name not in names]:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{key} has no field {unknown[0]!r}: {meant}There are: {', '.join(names)}.")
    return kind(**(value or {}))


def optional_settings(kind: type[Settings], value: Settings | Mapping[str, Any] | None, key: str) -> Settings | None:
    """The settings given, or None for None. Raises: ValueError as `settings_of` does."""
    return None if value is None else settings_of(kind, value, key)


def check_ranges(prefix: str, settings: Any, limits: Iterable[tuple[str, bool, str]]) -> None:
    """Check the fields of some settings. Raises: ValueError naming the first that is wrong, its value and the range.

    Args:
        prefix: Of the keys: "sampling" for `sampling.top_p`.
        settings: Has the fields.
        limits: Name of a field, whether its value is allowed, and what is, in words.
    """
    for name, is_valid, allowed in limits:
        if not is_valid:
            raise ValueError(f"{prefix}.{name} must be {allowed}, got {getattr(settings, name)!r}.")
