"""Settings in a shorter form: `optimizer: AdamW`, `scheduler: {class_path: Cosine}`, `logger: true`.

In a list of data sets, `a.jsonl` is `{json_path: a.jsonl}`.

The parser finds a class by its name where there is one of that name. There are two AdamW: torch's and the one of
`grpo_lightning.optimizers`, which is meant here. A policy given by its name alone is `PolicyLoader` with that name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from grpo_lightning import optimizers, schedules
from grpo_lightning.cli.defaults import default_loggers
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.sources import load, load_settings, pairs
from grpo_lightning.data.entry import DatasetEntry
from grpo_lightning.rewards import registry  # noqa: F401 - the parser knows the names of loaded classes: the rewards

KEYS = {"optimizer": optimizers, "scheduler": schedules}
"""The settings of the module that take such names, and where the classes are."""

CLASS_FLAGS = {f"--model.{key}{end}" for key in KEYS for end in ("", ".class_path")}
POLICY_CLASS = "PolicyLoader"
MIXTURES = ("datasets", "val_datasets", "test_datasets")
MIXTURE_FLAGS = {f"--data.{key}{end}" for key in MIXTURES for end in ("", "+")}


def full_name(name: Any) -> Any:
    """The import path of an optimizer or schedule of ours; anything else as it is."""
    for home in KEYS.values() if isinstance(name, str) and name.isidentifier() else ():
        kind = getattr(home, name, None)
        if inspect.isclass(kind) and kind.__module__ == home.__name__:
            return f"{home.__name__}.{name}"
    return name


def in_flags(args: Sequence[str], *, expands_policy: bool = False) -> list[str]:
    """A command line with import paths in the place of names: `--model.optimizer=AdamW`.

    With `expands_policy`, `--model.policy=x` becomes `--model.policy.name=x`; settings, and files of them, stay.
    """
    full = list(args)
    for i, flag, value in pairs(args):
        key, new = flag, value
        if flag in CLASS_FLAGS:
            new = class_in_full(value)
        elif flag in MIXTURE_FLAGS:
            new = mixture_in_flag(flag, value)
        elif flag == "--trainer.logger" and value.lower() == "true":
            new = json.dumps(default_loggers())
        elif flag == "--model.policy" and expands_policy and is_name(value) and not has_settings(value):
            key = "--model.policy.name"
        if "=" in args[i]:
            full[i] = f"{key}={new}"
        elif (key, new) != (flag, value):
            full[i : i + 2] = [key, new]
    return full


def class_in_full(value: str) -> str:
    """The value of a flag that gives an optimizer or schedule: its name, or settings with its name as `class_path`."""
    given = load_settings(value)
    if not isinstance(given, dict) or full_name(given.get("class_path")) == given.get("class_path"):
        return str(full_name(value))
    return in_a_line(given | {"class_path": full_name(given["class_path"])})


def mixture_in_flag(flag: str, value: str) -> str:
    """The value of a flag that gives data sets, with entries in the place of paths."""
    is_appended = flag.endswith("+")
    given = load(value, flag)
    full = mixture_in_full(given, flag.removeprefix("--").removesuffix("+"), is_appended=is_appended)
    return value if full == given else in_a_line(full)


def in_a_line(settings: Any) -> str:
    """Settings as the value of a flag: YAML leaves text like 1e-5, a number to the parser, without quotes."""
    return yaml.safe_dump(settings, default_flow_style=True, width=float("inf"), sort_keys=False).strip()


def has_settings(value: str) -> bool:
    """True if the value of a flag is settings, or a file of them."""
    return isinstance(load_settings(value), dict)


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
        try:
            is_path = isinstance(item, str) and DatasetEntry.of(item, where=f"{key}, entry {number}")
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        found.append({"json_path": item} if is_path else item)
    return found


def model_in_full(model: Mapping[str, Any], *, expands_policy: bool) -> dict[str, Any]:
    """The section `model`, with import paths in the place of names."""
    found = dict(model)
    for key in KEYS:
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
    return isinstance(policy, str) and bool(policy) and policy.rpartition(".")[2] != POLICY_CLASS


def has_policy_settings(trees: Iterable[Mapping[str, Any]]) -> bool:
    """True if something below `model.policy` is set."""
    models = [tree.get("model") for tree in trees]
    return any(isinstance(model.get("policy"), Mapping) for model in models if isinstance(model, Mapping))
