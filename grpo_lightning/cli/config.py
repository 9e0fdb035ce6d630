"""Expand short names in the values of settings, and find the types that these values must have.

A short name is a name without its module, as in `optimizer: AdamW`. The parser itself accepts a class name without its
module only if the name is unique. The name AdamW is not unique, so this module expands it to
`grpo_lightning.optimizers.AdamW`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pydoc import locate
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import Namespace

from grpo_lightning import environments, optimizers, schedules
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.runs import default_loggers
from grpo_lightning.cli.sources import load_settings, nest_value, pairs
from grpo_lightning.data.dataset_entry import DatasetEntry, is_data_file
from grpo_lightning.rewards import registry  # noqa: F401 - loads the rewards, so that the parser knows their names

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")

NAMED = {"optimizer": optimizers, "scheduler": schedules}
"""Settings of the module that accept short names, and the modules of their classes."""

TOOLS = ("grpo_lightning.environments.Tools", "grpo_lightning.environments.tools.Tools")
"""Import paths of the environment whose tools accept short names."""

MIXTURES = ("datasets", "val_datasets", "test_datasets")


def unset_argument(settings: Any, key: str = "") -> str | None:
    """Error message for a missing argument without type annotation. The parser passes None for such an argument."""
    if isinstance(settings, list):
        found = (unset_argument(item, f"{key}[{i}]") for i, item in enumerate(settings))
        return next(filter(None, found), None)
    if not isinstance(settings, Namespace | Mapping):
        return None
    values = vars(settings) if isinstance(settings, Namespace) else settings
    if callable(kind := locate(str(values.get("class_path")))):
        for name, value in vars(values.get("init_args") or Namespace()).items():
            if value is None and (owner := owner_of_untyped(kind, name)):
                if not inspect.isclass(kind):
                    return function_is_called(key, values["class_path"], name)
                return (
                    f"{key}: {values['class_path']} requires the argument {name!r}, which has no value. Set it: "
                    f"init_args: {{{name}: ...}}. If null is meant, annotate the argument in "
                    f"{owner.__name__}.__init__, for example `{name}: float | None`."
                )
    found = (unset_argument(value, f"{key}.{name}".lstrip(".")) for name, value in values.items())
    return next(filter(None, found), None)


TRAINING_LIMITS = {
    "max_steps": "the number of optimizer steps, or -1 for no limit",
    "max_epochs": "the number of epochs, or -1 for no limit",
    "max_time": "a time (days:hours:minutes:seconds), or null for no limit",
    "limit_train_batches": "a number of batches or a fraction of them, or null for all",
}
"""Settings of the Trainer that limit training, and the values that they may have."""


def trains_nothing(trainer: Namespace) -> str | None:
    """Error message if a limit of the Trainer is 0. `fit` would silently train nothing."""
    for name, values in TRAINING_LIMITS.items():
        if is_zero(value := trainer.get(name)):
            return (
                f"trainer.{name} is {value}: the run would train nothing. Set it to {values}. To evaluate without "
                "training, use the command validate."
            )
    return None


def is_zero(limit: Any) -> bool:
    """True if a limit is 0 (also `00:00:00:00` and `{hours: 0}`)."""
    if isinstance(limit, str):
        return set(re.findall(r"\d", limit)) == {"0"}
    if isinstance(limit, Mapping):
        return not any(limit.values())
    return limit is not None and not limit


def function_is_called(key: str, path: str, argument: str) -> str:
    """Error message if `class_path` names a function, and an argument has no value."""
    return (
        f"{key}: {path} is a function: write `{f'- {path}' if key.endswith(']') else path}`. With class_path, it would "
        f"be called when the run starts, without its argument {argument!r}. If this call is meant, write "
        f"init_args: {{{argument}: ...}}."
    )


def owner_of_untyped(kind: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The class or function in which this argument is required and has no annotation."""
    for own in inspect.getmro(kind) if inspect.isclass(kind) else (kind,):
        function = vars(own).get("__init__") if inspect.isclass(own) else own
        if function is not None and (argument := inspect.signature(function).parameters.get(name)):
            return own if argument.default is argument.empty and argument.annotation is argument.empty else None
    return None


# ---------------------------------------------------------------------------------------------------------- short names


def full_name(name: Any) -> Any:
    """Convert the name of an optimizer or schedule of the package to its import path. Keep any other value."""
    for home in NAMED.values() if isinstance(name, str) and name.isidentifier() else ():
        kind = getattr(home, name, None)
        if inspect.isclass(kind) and kind.__module__ == home.__name__:
            return f"{home.__name__}.{name}"
    return name


def full_name_of_environment(name: Any) -> Any:
    """Convert the name of an environment or tool of the package to its import path. Keep any other value."""
    is_own = isinstance(name, str) and name in environments.__all__
    return f"{environments.__name__}.{name}" if is_own else name


def environment_in_full(value: Any) -> Any:
    """Expand short names in `model.environment`, in its lists, and in the argument `tools` of the class `Tools`."""
    if isinstance(value, list):
        return [environment_in_full(item) for item in value]
    if not isinstance(value, Mapping) or "class_path" not in value:
        return full_name_of_environment(value)
    found = {**value, "class_path": full_name_of_environment(value["class_path"])}
    given = value.get("init_args")
    # An argument `tools` of a user's own class may contain texts that do not name functions.
    if found["class_path"] in TOOLS and isinstance(given, Mapping) and "tools" in given:
        found["init_args"] = {**given, "tools": environment_in_full(given["tools"])}
    return found


def in_flags(args: Sequence[str], *, expands_policy: bool = False) -> list[str]:
    """Expand short names in flags (`--model.optimizer=AdamW`)."""
    full = list(args)
    for i, flag, value in pairs(args):
        *sections, key = flag.removeprefix("--").split(".")
        if not flag.startswith("--") or not sections or not value:
            continue
        # The parser and `load_settings` would read the rows of a data file as settings.
        is_data = sections == ["data"] and key.removesuffix("+") in MIXTURES and is_data_file(value)
        given = value if is_data else load_settings(value)
        tree = nest_value([*sections, key], given)
        new = value_at(in_tree(tree, expands_policy=expands_policy), [*sections, key])
        if new == given:
            continue
        # PyYAML reads 1e-5 as text and writes it without quotes, so the parser reads the written value as a number.
        inline = yaml.safe_dump(new, default_flow_style=True, width=float("inf"), sort_keys=False).strip()
        text = new if isinstance(new, str) else inline
        full[i : i + 1 + ("=" not in args[i])] = [f"{flag}={text}"] if "=" in args[i] else [flag, text]
    return full


def value_at(tree: Any, names: Iterable[str]) -> Any:
    """Value of nested settings at a dotted key; None if the key is missing."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def in_tree(tree: Any, *, expands_policy: bool = False) -> Any:
    """Expand short names in the settings of a YAML file.

    With `expands_policy`, `policy: x` becomes `policy: {init_args: {name: x}}`.
    """
    if not isinstance(tree, dict):
        return tree
    found = dict(tree)
    if isinstance(model := tree.get("model"), dict):
        found["model"] = model_in_full(model, expands_policy=expands_policy)
    if isinstance(trainer := tree.get("trainer"), dict) and trainer.get("logger") is True:
        found["trainer"] = trainer | {"logger": default_loggers()}
    if isinstance(data := tree.get("data"), dict):
        found["data"] = {
            key: mixture_in_full(value, f"data.{name}", is_appended=key != name)
            if (name := str(key).removesuffix("+")) in MIXTURES
            else value
            for key, value in data.items()
        }
    return found


def mixture_in_full(mixture: Any, key: str, *, is_appended: bool) -> Any:
    """Convert paths of data files to dataset entries.

    The path of a YAML file is not converted. A YAML file in a list, or in an appended value (`datasets+`), is refused.

    Raises:
        ConfigurationError: If an item is neither settings nor the path of a data file.
    """
    if isinstance(mixture, str) and (is_appended or is_data_file(mixture)):
        mixture = [mixture]
    if not isinstance(mixture, list):
        return mixture
    found = []
    for number, item in enumerate(mixture, start=1):
        if not isinstance(item, str | Mapping):
            raise ConfigurationError(f"{key}[{number - 1}] must be settings (key: value), got {item!r}.")
        try:
            is_path = isinstance(item, str) and DatasetEntry.of(item, where=f"{key}, entry {number}")
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        found.append({"json_path": item} if is_path else item)
    return found


def model_in_full(model: Mapping[str, Any], *, expands_policy: bool) -> dict[str, Any]:
    """Expand short names in the section `model`."""
    found = dict(model)
    for key in NAMED:
        value = model.get(key)
        if isinstance(value, str):
            found[key] = full_name(value)
        elif isinstance(value, dict) and "class_path" in value:
            found[key] = value | {"class_path": full_name(value["class_path"])}
    if "environment" in model:
        found["environment"] = environment_in_full(model["environment"])
    if expands_policy and is_name(model.get("policy")):
        # The settings have no class_path, so that a subclass of PolicyLoader that an earlier file names is kept.
        found["policy"] = {"init_args": {"name": model["policy"]}}
    return found


def is_name(policy: Any) -> bool:
    """True if a policy is given as text, but not by the class path of `PolicyLoader`."""
    return isinstance(policy, str) and bool(policy) and policy.rpartition(".")[2] != "PolicyLoader"


def has_policy_settings(trees: Iterable[Mapping[str, Any]]) -> bool:
    """True if any setting below `model.policy` is given."""
    return any(isinstance(value_at(tree, ("model", "policy")), Mapping) for tree in trees)


# -------------------------------------------------------------------------------------------------------- types of keys


@dataclass(frozen=True)
class Key:
    """A key of the parser."""

    hint: Any
    """Type annotation."""

    default: Any
    help: str


def members(hint: Any) -> list[Any]:
    """Types of a union, or the type itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def settings_class(hint: Any, default: Any = None) -> Any:
    """Return the class of the object that a key configures; None if `class_path` has to name the class.

    The class is the first of these that exists:

    - the key's type, if this type is a dataclass
    - the class at the `class_path` in the key's default value
    - the key's type, if this type is a class of this package and has no subclasses

    If the key's type is a list, the type of the list's items is used instead.
    """
    kinds = [
        kind for member in members(hint) for kind in (get_args(member) if get_origin(member) is list else [member])
    ]
    if kind := next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None):
        return kind
    if hasattr(default, "get") and default.get("class_path"):
        module_name, _, name = default.get("class_path").rpartition(".")
        return getattr(import_module(module_name), name)
    own = [kind for kind in kinds if inspect.isclass(kind) and kind.__module__.startswith("grpo_lightning")]
    return next((kind for kind in own if not kind.__subclasses__()), None)


def arguments(kind: Any, hint: Any = None) -> dict[str, Any]:
    """Types of the arguments of a class or function, by name.

    If `hint` contains a `Callable` with n arguments, the result does not have the first n arguments of the class or
    function. The caller of the `Callable` passes these n arguments.
    """
    function = kind.__init__ if inspect.isclass(kind) else kind
    try:
        hints = get_type_hints(function)
    except NameError:  # a name imported only under TYPE_CHECKING
        hints = {}
    parameters = inspect.signature(function).parameters.values()
    names = [
        own.name for own in parameters if own.name != "self" and own.kind not in (own.VAR_KEYWORD, own.VAR_POSITIONAL)
    ]
    return {name: hints.get(name, Any) for name in names[num_call_arguments(hint) :]}


def num_call_arguments(hint: Any) -> int:
    """Number of arguments that the caller of a `Callable[[...], ...]` passes."""
    signatures = [get_args(kind)[:1] for kind in members(hint) if get_origin(kind) is Callable]
    return next((len(own[0]) for own in signatures if own and isinstance(own[0], list)), 0)


def named_classes(hint: Any) -> list[type]:
    """Return the classes that a key accepts, and all their subclasses.

    For each type that the key accepts, classes of this package come first.
    """

    def below(kind: type) -> Iterator[type]:
        yield kind
        children: list[type] = type.__subclasses__(kind)
        for other in children:
            yield from below(other)

    parts = get_args(hint)[-1:] if get_origin(hint) is Callable else get_args(hint)
    if not parts and inspect.isclass(hint) and hint.__module__ != "builtins":
        return sorted(below(hint), key=lambda kind: not kind.__module__.startswith("grpo_lightning"))
    return [kind for part in parts for kind in named_classes(part)]


def nested_keys(key: str, hint: Any, default: Any = None) -> Iterator[str]:
    """Iterate recursively over the keys of the object below a key: "model.policy.lora.rank"."""
    kind = settings_class(hint, default)
    for name, inner in arguments(kind, hint).items() if kind is not None else ():
        yield f"{key}.{name}"
        yield from nested_keys(f"{key}.{name}", inner)


def defaults_of_null(keys: Mapping[str, Key]) -> dict[str, dict[str, Any]]:
    """Default values of each dataclass setting, by dotted key, for settings that are null."""
    kinds = {key: kind for key, own in keys.items() for kind in members(own.hint) if dataclasses.is_dataclass(kind)}
    return {
        key: {
            field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
        }
        for key, kind in kinds.items()
    }
