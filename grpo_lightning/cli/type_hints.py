"""Type hints: what a setting may be, in the parser's eyes and in words."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser


def choices(hint: Any) -> list[Any]:
    """The types of a union, or the type itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def kind_of(hint: Any) -> Any:
    """`list` of `list[int]`, `Iterable` of `Iterable[int]`."""
    origin = get_origin(hint) or hint
    return Iterable if origin in (Iterable, typing.Sequence, typing.Iterable) or "Sequence" in str(origin) else origin


def takes_objects(members: list[Any]) -> bool:
    """True where an object or function is named by its import path."""
    return any(is_callable(member) or is_plain_class(member) for member in members)


def is_callable(hint: Any) -> bool:
    """True for `Callable[...]`."""
    return (get_origin(hint) or hint) is Callable or "collections.abc.Callable" in str(hint)


def num_call_arguments(members: list[Any]) -> int:
    """How many arguments a `Callable[[...], ...]` is called with: they are nobody's settings."""
    signatures = [get_args(member) for member in members if is_callable(member)]
    return next((len(signature[0]) for signature in signatures if signature and isinstance(signature[0], list)), 0)


def is_plain_class(hint: Any) -> bool:
    """True for a class whose subclasses are named by `class_path`."""
    builtin = (str, int, float, bool, list, dict, tuple, set, type(None), os.PathLike)
    return inspect.isclass(hint) and get_origin(hint) is None and hint not in builtin and hint.__module__ != "pathlib"


def default_path(default: Any) -> str:
    """The import path of a default, "" if it has none."""
    if isinstance(default, Mapping):
        return str(default.get("class_path", ""))
    if hasattr(default, "class_path"):
        return str(default.class_path)
    return ""


def imported(path: str, members: list[Any]) -> Any:
    """The class or function of an import path, or of the name of a subclass; None if there is none."""
    module_name, _, name = path.rpartition(".")
    if module_name:
        try:
            return getattr(import_module(module_name), name, None)
        except ImportError:
            return None
    return next((other for other in named_classes(members) if other.__name__ == name), None)


def class_names(members: list[Any]) -> list[str]:
    """The names that stand for a class without its module."""
    return sorted({other.__name__ for other in named_classes(members)})


def named_classes(members: list[Any]) -> list[type]:
    """The classes that may be named for an object or a `Callable[..., object]`; the package's own first."""
    made = [get_args(member)[-1] if is_callable(member) and get_args(member) else member for member in members]
    found: list[type] = [other for kind in made if is_plain_class(kind) for other in descendants(kind)]
    return sorted(found, key=lambda kind: not kind.__module__.startswith("grpo_lightning"))


def descendants(kind: type) -> Iterable[type]:
    """A class and all below it."""
    yield kind
    children: list[type] = type.__subclasses__(kind)
    for other in children:
        yield from descendants(other)


def settings_class(hint: Any, default: Any = None) -> Any:
    """The class of the object whose settings stand below a key, also of a list's entries; None if it is to be named.

    That is a dataclass, the class of the default, or a class of the package that has no others below it.
    """
    members = choices(hint)
    elements = [get_args(kind)[0] for kind in members if kind_of(kind) is list and get_args(kind)]
    for kind in [*members, *elements]:
        if dataclasses.is_dataclass(kind):
            return kind
    if path := default_path(default):
        return imported(path, members)
    own = [kind for kind in members if is_plain_class(kind) and kind.__module__.startswith("grpo_lightning")]
    return next((kind for kind in own if not kind.__subclasses__() and not getattr(kind, "_is_protocol", False)), None)


def arguments(kind: Any) -> dict[str, Any] | None:
    """The arguments of a class or function with their types; None if it takes any."""
    function = kind.__init__ if inspect.isclass(kind) else kind
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function)
    except (TypeError, ValueError, NameError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {name: hints.get(name, Any) for name in parameters if name != "self"}


def is_accepted(value: Any, hint: Any) -> bool:
    """What the parser itself thinks of a value of this type."""
    if hint is Any:
        return True
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
        parser.parse_object({"value": value})
    except Exception:  # noqa: BLE001 - every kind of refusal counts
        return False
    return True


def named(hint: Any) -> str:
    """A type in words."""
    if hint is type(None):
        return "null"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(named, get_args(hint)))
    if is_callable(hint):
        return "an import path (module.name)"
    if hint in (int, float, bool, str):
        return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    if (get_origin(hint) or hint) is dict:
        return "settings (key: value)"
    if get_origin(hint) in (list, Iterable):
        return f"a list of {named(get_args(hint)[0])}"
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} values"
    return getattr(hint, "__name__", None) or str(hint)
