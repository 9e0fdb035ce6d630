"""Where a setting came from: recipes named on the command line are found, read and checked before they are parsed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.cli import recipes
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.core import unique_keys

CONFIG_FLAGS = ("--config", "-c")
SETTINGS_FILES = (".yaml", ".yml", ".json")


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
            for key in reversed(flag.removeprefix("--").split(".")):
                tree = {key: tree}
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
