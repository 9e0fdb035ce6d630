"""Settings as written on the command line and in recipes, each with the file or flag that contains it.

This module imports neither torch nor Lightning, so that a wrong recipe name is reported immediately.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.cli import recipes
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.core import unique_keys
from grpo_lightning.core.log_messages import similar_file

CONFIG_FLAGS = ("--config", "-c")
SETTINGS_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """Settings from one file or flag."""

    where: str
    """Where the settings are given: "in recipe.yaml" or "on the command line"."""

    tree: dict[str, Any]
    """Nested settings, not validated."""

    is_flag: bool = False


def pairs(args: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Iterate over `--flag=value` and `--flag value` as (position, flag, value), with "" for a missing value."""
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if not flag.startswith("-"):
            continue
        if not equals and i + 1 < len(args) and not args[i + 1].startswith("--"):
            value = args[i + 1]
        yield i, flag, value


def split_short_flags(args: Sequence[str]) -> list[str]:
    """Split `-cFILE` into `-c FILE`."""
    split: list[str] = []
    for arg in args:
        is_joined = arg.startswith("-c") and len(arg) > len("-c") and arg[len("-c")] != "="
        split += ["-c", arg[len("-c") :]] if is_joined else [arg]
    return split


def find_configs(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace recipe names in the arguments by paths. Returns: the arguments, and a notice for each replaced name.

    Raises:
        ConfigurationError: If the value of a `--config` is neither a file nor the name of a recipe.
    """
    found, notices = list(args), []
    for i, flag, value in pairs(args):
        # The value may also be inline YAML: "{trainer: {max_steps: 1}}".
        if flag not in CONFIG_FLAGS or Path(value).is_file() or isinstance(load(value, flag), dict):
            continue
        if not value:
            raise ConfigurationError(f"{flag} needs a file or the name of a recipe. {recipes.unknown('')}")
        home = Path(os.path.expanduser(value))
        path = home if home.is_file() else recipes.find(value)
        if path is None:
            hint = similar_file(Path(value), SETTINGS_FILES).strip() or recipes.unknown(value)
            raise ConfigurationError(f"--config: there is no file {value} in {Path.cwd()}. {hint}")
        if "=" in args[i]:
            found[i] = f"{flag}={path}"
        else:
            found[i + 1] = str(path)
        if path != home:
            notices.append(
                f"Recipe {value}: {path} (`grpo-lightning recipes copy {value}` gives you a copy to change)."
            )
    return found, notices


def files_first(args: Sequence[str]) -> list[str]:
    """Move every `--config` to the front, after the command, so that all flags override all files."""
    moved: list[int] = []
    for i, flag, value in pairs(args):
        if flag in CONFIG_FLAGS:
            moved += range(i, i + 2 if value and "=" not in args[i] else i + 1)
    others = [arg for i, arg in enumerate(args) if i not in moved]
    return [*others[:1], *(args[i] for i in moved), *others[1:]]


def check_positions(args: Sequence[str]) -> None:
    """Check that every argument after the command is a flag or the value of a flag.

    Raises:
        ConfigurationError: If an argument is neither a flag nor a value.
    """
    values = {i + 1 for i, flag, value in pairs(args) if value and "=" not in args[i]}
    for i, arg in enumerate(args[1:], start=1):
        if arg.startswith("-") or i in values:
            continue
        is_config = Path(arg).suffix in (".yaml", ".yml") or Path(arg).is_file() or recipes.find(arg) is not None
        hint = f"write --config {arg}" if is_config else "settings are written --key=value"
        raise ConfigurationError(f"{arg!r} does not belong to a flag: {hint}.")


def check(args: Sequence[str]) -> None:
    """Check arguments, recipes and config files as far as is possible without a parser.

    Raises:
        ConfigurationError: For the same reasons as in `check_positions`, `find_configs` and `load`.
    """
    check_positions(args)
    found, _ = find_configs(args)
    for path in config_files(found):
        load(path.read_text(encoding="utf-8"), str(path), is_strict=True)


def config_files(args: Sequence[str]) -> list[Path]:
    """Files given by `--config`, in order."""
    return [Path(value) for _, flag, value in pairs(args) if flag in CONFIG_FLAGS and Path(value).is_file()]


def read(args: Sequence[str], settings_flags: Collection[str] = ()) -> list[Source]:
    """Read the settings of every `--config` and of every other flag, in order.

    Raises:
        ConfigurationError: If a file is empty or is not a YAML mapping, or contains a key twice.
    """
    sources = []
    for _, flag, value in pairs(args):
        if flag in CONFIG_FLAGS:
            is_file = Path(value).is_file()
            name = value if is_file else "--config"
            tree = load(Path(value).read_text(encoding="utf-8") if is_file else value, name, is_strict=True)
            if tree is None:
                raise ConfigurationError(
                    f"{name} is empty: it has no settings. Write settings (key: value) into the file, or remove "
                    f"--config {name}."
                )
            if not isinstance(tree, dict):
                raise ConfigurationError(
                    f"{name} must hold settings (key: value), got {type(tree).__name__}: {tree!r}."
                )
            sources.append(Source(f"in {name}", tree))
        elif flag.startswith("--"):
            is_file = flag in settings_flags and is_settings_file(value)
            tree = load_settings(value) if is_file else load(value, flag) if value else None
            tree = nest_value(flag.removeprefix("--").split("."), tree)
            sources.append(Source(f"in {value}" if is_file else "on the command line", tree, is_flag=not is_file))
    return sources


def nest_value(names: Iterable[str], value: Any) -> Any:
    """Build nested settings with one value at a dotted key."""
    for name in reversed(list(names)):
        value = {name: value}
    return value


def is_settings_file(value: str) -> bool:
    """True if the value of a flag is an existing YAML or JSON file."""
    return Path(value).suffix.lower() in SETTINGS_FILES and Path(value).is_file()


def load_settings(value: str) -> Any:
    """Load the settings in a flag's `value`, which is either YAML text or the path of a YAML or JSON file.

    Raises:
        ConfigurationError: For the same reasons as in `load`.
    """
    if is_settings_file(value):
        return load(Path(value).read_text(encoding="utf-8"), value, is_strict=True)
    return load(value, "the command line")


def load(text: str, name: str, *, is_strict: bool = False) -> Any:
    """Load YAML.

    If `is_strict` is false:

    - Text that is not valid YAML is returned unchanged.
    - Duplicate keys are allowed if the text begins with neither `[` nor `{`. Such text can be YAML by accident
      ("Rule: ...").

    Raises:
        ConfigurationError: If `is_strict` is true and the text is not valid YAML.
        ConfigurationError: If `is_strict` is true and a key occurs twice.
        ConfigurationError: If a key occurs twice in text that begins with `[` or `{`.
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
    """Complete a constructor's error message with the full key of the setting, and the setting's file or flag."""
    key = re.match(r"[A-Za-z_][\w.]*\w", message)
    if key is None:
        return message
    for source in reversed(list(sources)):
        for section in ("", "model.", "data."):
            if holds(source.tree, f"{section}{key[0]}".split(".")):
                return f"{source.where.removeprefix('in ')}: {section}{message}"
    return message


def holds(tree: Any, keys: Sequence[str]) -> bool:
    """True if nested settings have a value at a dotted key. The dotted key may leave out `init_args`."""
    if not keys:
        return True
    if not isinstance(tree, Mapping):
        return False
    below = tree.get(keys[0], tree.get(f"{keys[0]}+"))
    return (below is not None and holds(below, keys[1:])) or holds(tree.get("init_args"), keys)
