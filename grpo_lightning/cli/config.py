"""Settings as they were written: the file or flag that they stand in, short names, and the types of keys.

Short names are `optimizer: AdamW`, `scheduler: {class_path: Cosine}`, `logger: true`, and `a.jsonl` for
`{json_path: a.jsonl}` in a list of data sets. The parser finds a class by its name where there is one of that name.
There are two AdamW: torch's and the one of `grpo_lightning.optimizers`, which is meant here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from grpo_lightning import optimizers, schedules
from grpo_lightning.cli import recipes
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.runs import default_loggers
from grpo_lightning.core import unique_keys
from grpo_lightning.data.entry import DatasetEntry
from grpo_lightning.rewards import registry  # noqa: F401 - the parser knows the names of loaded classes: the rewards

CONFIG_FLAGS = ("--config", "-c")
SETTINGS_FILES = (".yaml", ".yml", ".json")
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")

NAMED = {"optimizer": optimizers, "scheduler": schedules}
"""The settings of the module that take short names, and where the classes are."""

MIXTURES = ("datasets", "val_datasets", "test_datasets")


# ----------------------------------------------------------------------------------------------------- where they stand


@dataclass(frozen=True)
class Source:
    """Settings as somebody wrote them."""

    where: str
    """ "in recipe.yaml", "on the command line"."""

    tree: dict[str, Any]
    """Nested, not checked."""

    is_flag: bool = False


def pairs(args: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(position, flag, value) of `--flag=value` and `--flag value`; a flag without a value has the value ""."""
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if not flag.startswith("-"):
            continue
        if not equals and i + 1 < len(args) and not args[i + 1].startswith("--"):
            value = args[i + 1]
        yield i, flag, value


def find_configs(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with shipped recipes in place of their names, and a line about each that was found so.

    Raises:
        ConfigurationError: If a `--config` is neither a file nor a recipe.
    """
    found, notices = list(args), []
    for i, flag, value in pairs(args):
        # Settings may also be given in the place of a file: "{trainer: {max_steps: 1}}".
        if flag not in CONFIG_FLAGS or Path(value).is_file() or isinstance(load(value, flag), dict):
            continue
        if not value:
            raise ConfigurationError(f"{flag} needs a file or the name of a recipe. {recipes.unknown('')}")
        path = recipes.find(value)
        if path is None:
            raise ConfigurationError(f"--config: there is no file {value} in {Path.cwd()}. {recipes.unknown(value)}")
        if "=" in args[i]:
            found[i] = f"{flag}={path}"
        else:
            found[i + 1] = str(path)
        notices.append(f"Recipe {value}: {path} (`grpo-lightning recipes copy {value}` gives you a copy to change).")
    return found, notices


def check_positions(args: Sequence[str]) -> None:
    """Check that everything after the command is a flag or the value of one.

    Raises:
        ConfigurationError: If something is not, with what to write for a file or recipe.
    """
    values = {i + 1 for i, flag, value in pairs(args) if value and "=" not in args[i]}
    for i, arg in enumerate(args[1:], start=1):
        if arg.startswith("-") or i in values:
            continue
        is_config = Path(arg).suffix in (".yaml", ".yml") or Path(arg).is_file() or recipes.find(arg) is not None
        hint = f"write --config {arg}" if is_config else "settings are written --key=value"
        raise ConfigurationError(f"{arg!r} belongs to no flag: {hint}.")


def config_files(args: Sequence[str]) -> list[Path]:
    """The files given by `--config`, in their order."""
    return [Path(value) for _, flag, value in pairs(args) if flag in CONFIG_FLAGS and Path(value).is_file()]


def read(args: Sequence[str], settings_flags: Collection[str] = ()) -> list[Source]:
    """Every `--config` and the flags, in their order.

    Args:
        args: The command line.
        settings_flags: The flags that also take a file of settings.

    Raises:
        ConfigurationError: If a file is no YAML mapping, with its line, or a key is given twice.
    """
    sources = []
    for _, flag, value in pairs(args):
        if flag in CONFIG_FLAGS:
            is_file = Path(value).is_file()
            name = value if is_file else "--config"
            tree = load(Path(value).read_text(encoding="utf-8") if is_file else value, name, is_strict=True)
            if tree is None:
                continue
            if not isinstance(tree, dict):
                raise ConfigurationError(
                    f"{name} must hold settings (key: value), got {type(tree).__name__}: {tree!r}."
                )
            sources.append(Source(f"in {name}", tree))
        elif flag.startswith("--"):
            is_file = flag in settings_flags and is_settings_file(value)
            tree = load_settings(value) if is_file else load(value, flag) if value else None
            tree = nested(flag.removeprefix("--").split("."), tree)
            sources.append(Source(f"in {value}" if is_file else "on the command line", tree, is_flag=not is_file))
    return sources


def is_settings_file(value: str) -> bool:
    """True if the value of a flag names a file that may have settings."""
    return Path(value).suffix.lower() in SETTINGS_FILES and Path(value).is_file()


def load_settings(value: str) -> Any:
    """The settings that the value of a flag stands for: those of the file that it names, or itself as YAML.

    Raises:
        ConfigurationError: As `load`.
    """
    if is_settings_file(value):
        return load(Path(value).read_text(encoding="utf-8"), value, is_strict=True)
    return load(value, "the command line")


def load(text: str, name: str, *, is_strict: bool = False) -> Any:
    """YAML, or the text itself if it is none and need not be.

    Keys are read strictly where settings are meant: text of several lines may be YAML by accident ("Rule: ...").

    Raises:
        ConfigurationError: If it must be YAML and is not, with file, line and column, or has a key twice.
    """
    try:
        is_meant = is_strict or text.lstrip()[:1] in ("{", "[")
        return unique_keys.load(text, name) if is_meant else yaml.safe_load(text)
    except unique_keys.DuplicateKeyError as error:
        raise ConfigurationError(str(error)) from None
    except yaml.YAMLError as error:
        if not is_strict:
            return text
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error)
        snippet = mark.get_snippet(indent=2, max_length=100) if mark and mark.buffer else ""
        raise ConfigurationError(
            f"{where} is not valid YAML: {problem}." + (f"\n{snippet}" if snippet else "")
        ) from None


def with_origin(message: str, sources: Iterable[Source]) -> str:
    """What a constructor says about a setting, with the place it was given at and its whole key.

    The constructor knows its arguments, but neither the section they stand in nor the file.
    """
    key = re.match(r"[A-Za-z_][\w.]*\w", message)
    if key is None:
        return message
    for source in reversed(list(sources)):
        for section in ("", "model.", "data."):
            if holds(source.tree, f"{section}{key[0]}".split(".")):
                return f"{source.where.removeprefix('in ')}: {section}{message}"
    return message


def holds(tree: Any, keys: Sequence[str]) -> bool:
    """True if nested settings have a value at a dotted key; `init_args` may be left out of it."""
    if not keys:
        return True
    if not isinstance(tree, Mapping):
        return False
    below = tree.get(keys[0], tree.get(f"{keys[0]}+"))
    return (below is not None and holds(below, keys[1:])) or holds(tree.get("init_args"), keys)


# ---------------------------------------------------------------------------------------------------------- short names


def full_name(name: Any) -> Any:
    """The import path of an optimizer or schedule of ours; anything else as it is."""
    for home in NAMED.values() if isinstance(name, str) and name.isidentifier() else ():
        kind = getattr(home, name, None)
        if inspect.isclass(kind) and kind.__module__ == home.__name__:
            return f"{home.__name__}.{name}"
    return name


def in_flags(args: Sequence[str], *, expands_policy: bool = False) -> list[str]:
    """A command line with what short names stand for: `--model.optimizer=AdamW`; files of settings stay."""
    full = list(args)
    for i, flag, value in pairs(args):
        *sections, key = flag.removeprefix("--").split(".")
        if not flag.startswith("--") or not sections or not value:
            continue
        given = load_settings(value)
        tree = nested([*sections, key], given)
        new = value_at(in_tree(tree, expands_policy=expands_policy), [*sections, key])
        if new == given:
            continue
        # YAML leaves text like 1e-5, a number to the parser, without quotes.
        inline = yaml.safe_dump(new, default_flow_style=True, width=float("inf"), sort_keys=False).strip()
        text = new if isinstance(new, str) else inline
        full[i : i + 1 + ("=" not in args[i])] = [f"{flag}={text}"] if "=" in args[i] else [flag, text]
    return full


def nested(names: Iterable[str], value: Any) -> Any:
    """Settings with one value at a dotted key."""
    for name in reversed(list(names)):
        value = {name: value}
    return value


def value_at(tree: Any, names: Iterable[str]) -> Any:
    """The value of nested settings at a dotted key; None if there is none."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def in_tree(tree: Any, *, expands_policy: bool = False) -> Any:
    """Settings as a YAML file has them, with import paths in the place of names.

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
    """Data sets with entries in the place of paths in a list, or of the one that is appended.

    Raises:
        ConfigurationError: If a text is not the path of a data file.
    """
    if is_appended and isinstance(mixture, str):
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
    """The section `model`, with import paths in the place of names."""
    found = dict(model)
    for key in NAMED:
        value = model.get(key)
        if isinstance(value, str):
            found[key] = full_name(value)
        elif isinstance(value, dict) and "class_path" in value:
            found[key] = value | {"class_path": full_name(value["class_path"])}
    if expands_policy and is_name(model.get("policy")):
        # Without class_path: a subclass of PolicyLoader that an earlier file names stays.
        found["policy"] = {"init_args": {"name": model["policy"]}}
    return found


def is_name(policy: Any) -> bool:
    """True for a policy given as text that is not the class itself."""
    return isinstance(policy, str) and bool(policy) and policy.rpartition(".")[2] != "PolicyLoader"


def has_policy_settings(trees: Iterable[Mapping[str, Any]]) -> bool:
    """True if something below `model.policy` is set."""
    return any(isinstance(value_at(tree, ("model", "policy")), Mapping) for tree in trees)


# -------------------------------------------------------------------------------------------------------- types of keys


@dataclass(frozen=True)
class Key:
    """A key of the parser."""

    hint: Any
    """Its type."""

    default: Any
    help: str


def members(hint: Any) -> list[Any]:
    """The types of a union, or the type itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def settings_class(hint: Any, default: Any = None) -> Any:
    """The class of the object whose settings stand below a key, also of a list's entries; None if it is to be named.

    That is a dataclass, the class of the default, or a class of the package that has no others below it.
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
    return next((kind for kind in own if not kind.__subclasses__() and not getattr(kind, "_is_protocol", False)), None)


def arguments(kind: Any, hint: Any = None) -> dict[str, Any]:
    """The arguments of a class or function with their types, without those that a `Callable` is called with."""
    function = kind.__init__ if inspect.isclass(kind) else kind
    try:
        hints = get_type_hints(function)
    except NameError:  # of a name that is imported for type checkers alone
        hints = {}
    parameters = inspect.signature(function).parameters.values()
    names = [
        own.name for own in parameters if own.name != "self" and own.kind not in (own.VAR_KEYWORD, own.VAR_POSITIONAL)
    ]
    return {name: hints.get(name, Any) for name in names[num_call_arguments(hint) :]}


def num_call_arguments(hint: Any) -> int:
    """How many arguments a `Callable[[...], ...]` is called with: they are nobody's settings."""
    signatures = [get_args(kind)[:1] for kind in members(hint) if get_origin(kind) is Callable]
    return next((len(own[0]) for own in signatures if own and isinstance(own[0], list)), 0)


def named_classes(hint: Any) -> list[type]:
    """The classes that may be named for a key, the package's own first: those of its type and all below them."""

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
    """The keys of the object below a key, and of the objects among them: "model.policy.lora.rank"."""
    kind = settings_class(hint, default)
    for name, inner in arguments(kind, hint).items() if kind is not None else ():
        yield f"{key}.{name}"
        yield from nested_keys(f"{key}.{name}", inner)


def defaults_of_null(keys: Mapping[str, Key]) -> dict[str, dict[str, Any]]:
    """What null means where settings of a dataclass are expected: its defaults, by dotted key."""
    kinds = {key: kind for key, own in keys.items() for kind in members(own.hint) if dataclasses.is_dataclass(kind)}
    return {
        key: {
            field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
        }
        for key, kind in kinds.items()
    }
