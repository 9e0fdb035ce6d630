"""Help of each command on one screen, without importing torch.

Names, defaults and descriptions of settings are read from the source files. `cli.app` formats the text of `--help-all`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.core.log_messages import nearest

ALL = "--help-all"

DESCRIPTIONS = {
    "fit": (
        "Train. Outputs go to runs/<run_name>/version_<N>. Without trainer.max_epochs, max_steps or max_time a run has "
        "one epoch. --ckpt_path auto resumes from the newest usable checkpoint of runs/<run_name> and continues in its "
        "folder, or starts a new run if there is no checkpoint; it also searches the folders in which the recipe saves "
        "checkpoints. --ckpt_path FILE resumes in a new folder; FILE may also be the folder of a run, for its newest "
        "checkpoint. Settings come from the command line, never from the checkpoint. A job that SLURM has requeued "
        "resumes as with auto. By default, checkpoints are written at the end of every epoch and every 15 minutes, and "
        "the newest of each kind is kept. A ModelCheckpoint in trainer.callbacks replaces both kinds. If it keeps the "
        "best by a metric, it replaces only the first kind. A checkpoint is also written at the end of the run, and "
        "when Ctrl-C, SIGTERM or SIGHUP stops the run after the current step. "
        "--help-all model.objective shows the settings of one object, --model.scheduler.help=Cosine those of a class."
    ),
    "validate": "Evaluate on data.val_datasets. --ckpt_path takes a file, or auto: the newest of runs/<run_name>.",
    "test": "Evaluate as validate does, logged as test/... --ckpt_path takes a file, or auto.",
    "predict": "Write completions to the prompts of the data. --ckpt_path takes a file, or auto.",
}
"""Description of each command. The short help shows only the first sentence."""

EXAMPLES = {
    "fit": "--config quickstart --seed_everything=1",
    "validate": "--config recipe.yaml --ckpt_path auto",
    "test": "--config recipe.yaml --ckpt_path runs/recipe",
    "predict": "--config recipe.yaml --ckpt_path runs/recipe",
}
"""Arguments of each command's example."""

CONFIG = "A file, or the name of a recipe. A later --config overrides earlier ones."
RUN_NAME = "Outputs go to runs/<run_name>/version_<N>; null uses the name of the first --config."
CKPT_PATH = {
    True: "auto: the newest checkpoint of this run, or a new run; or a checkpoint, or a run's folder (its newest one).",
    False: "auto: the newest checkpoint of this run; or a checkpoint, or a run's folder. Null: the untrained policy.",
}
"""Two help texts of --ckpt_path: for `fit`, and for the other commands."""

REPLACED = {
    "help": "Show the settings that most runs set, and exit. --help-all shows all, --help-all KEY those below a key.",
    "trainer.max_epochs": "Stop after this many epochs. Defaults to 1 if max_steps and max_time are not set either.",
    "trainer.strategy": "auto, ddp, fsdp2, zero1, zero2, zero3 or zero3_offload; or a strategy by its class.",
    "trainer.precision": "32-true, bf16-mixed, 16-mixed or bf16-true. Null is 32-true.",
}
"""Help texts by key, which replace those of Lightning and the parser."""


class Group(NamedTuple):
    """Settings below one key."""

    key: str
    """Dotted key, e.g. "model.sampling"."""

    path: str
    """Import path of the class whose arguments these settings are."""

    shown: tuple[str, ...] = ()
    """Names of the settings in the short help."""

    title: str = ""
    """Text next to the key in the group's heading; if it is "", the description in the docstring is used."""


MODULE = "grpo_lightning.module.GRPOLightningModule"
DATA = "grpo_lightning.data.datamodule.PromptDataModule"
POLICY = "grpo_lightning.policy.settings.PolicySettings"
SAMPLING = "grpo_lightning.core.types.SamplingParams"
ENGINE = "grpo_lightning.rollout.local_engine.LocalEngine"
CONVERSATION = "grpo_lightning.rollout.conversations.ConversationSettings"
VALIDATION = "grpo_lightning.training.validation.Validation"
TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
LIGHTNINGS = "Settings of Lightning's Trainer."

TRAINING_GROUPS = (
    Group("data", DATA, ("datasets", "val_datasets", "batch_size")),
    Group("model", MODULE, ("rewards", "num_generations", "environment")),
    Group("model.policy", POLICY, ("lora", "dtype")),
    Group("model.sampling", SAMPLING, ("max_completion_length", "temperature")),
    Group("model.objective", "grpo_lightning.objective.Objective", ("beta", "scale")),
    Group("model.optimizer", "grpo_lightning.optimizers.AdamW", ("lr",)),
    Group("model.scheduler", "grpo_lightning.schedules.Schedule"),
    Group("model.engine", ENGINE),
    Group("model.dynamic_sampling", "grpo_lightning.rollout.dynamic_sampling.DynamicSampling"),
    Group("model.conversation", CONVERSATION),
    Group("model.validation", VALIDATION),
    Group("trainer", TRAINER, ("max_steps", "devices", "strategy", "precision"), LIGHTNINGS),
)
EVALUATION_GROUPS = (
    Group("data", DATA, ("val_datasets", "test_datasets", "val_batch_size")),
    Group("model", MODULE, ("rewards", "environment")),
    Group("model.policy", POLICY, ("attention", "max_pixels")),
    Group("model.sampling", SAMPLING, ("max_completion_length",)),
    Group("model.validation", VALIDATION, ("num_generations", "sampling", "greedy", "success", "pass_at")),
    Group("model.engine", ENGINE),
    Group("model.conversation", CONVERSATION),
    Group("trainer", TRAINER, ("devices", "strategy", "precision"), LIGHTNINGS),
)
GROUPS = {
    "fit": TRAINING_GROUPS,
    "validate": EVALUATION_GROUPS,
    "test": EVALUATION_GROUPS,
    "predict": EVALUATION_GROUPS,
}
"""Groups of the short help by command, in order. A group without shown settings takes one line."""


def command_parser(command: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Make the argument parser of a command.

    The help ends with `examples`. The function puts "grpo-lightning" in front of each example.
    """
    lines = [f"  grpo-lightning {example}" for example in examples]
    return argparse.ArgumentParser(
        prog=f"grpo-lightning {command}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.fill(description, WIDTHS[0] - 1),
        epilog="\n".join(["example:" if len(lines) == 1 else "examples:", *lines]),
    )


def usage(command: str) -> str:
    """Usage of a command, on one line."""
    return f"grpo-lightning {command} --config RECIPE [--config ...] [--KEY=VALUE ...]"


def asks_for_short_help(args: Sequence[str]) -> bool:
    """True if the arguments of a command request the help on one screen."""
    return bool({"-h", "--help"} & {*args})


def asked_key(args: Sequence[str]) -> str | None:
    """The key whose settings `--help-all` prints: "" for all keys, None without the flag."""
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag == ALL:
            following = args[i + 1] if not equals and i + 1 < len(args) else value
            return following if not following.startswith("-") else ""
    return None


def settings_below(text: str, key: str) -> str:
    """Find the entries of a key, and of all keys below this key, in the full help `text`.

    Raises:
        ConfigurationError: If there is no such key.
    """
    entries = {}
    for entry in re.split(r"^(?=  --)", text, flags=re.MULTILINE):
        if flag := re.match(r"  --([\w.]+)", entry):
            entries[flag[1]] = entry.partition("\n\n")[0].rstrip()  # without the title of the next group
    found = [entry for name, entry in entries.items() if name == key or name.startswith(f"{key}.")]
    if not found:
        near = nearest(key, entries) or [name for name in entries if name.endswith(f".{key}")]
        hint = f"Did you mean {' or '.join(near)}?" if near else f"{ALL} without a key prints all."
        raise ConfigurationError(f"{ALL}: there is no key {key}. {hint}")
    return "\n".join(found)


# ------------------------------------------------------------------------------------------------------- on one screen

WIDTHS = range(80, 121)
"""Minimum and maximum width of the help, in columns."""

FIRST_SENTENCE = re.compile(r"(?<=[.!?])\s")
CLAUSES = re.compile(r" \(|[;:,] ")
LEAST = 12
"""Minimum number of characters that must remain when a sentence is cut at the end of a clause."""


def short_help(command: str, module_class: type | None = None) -> str:
    """Help of a command on one screen, with the settings that `module_class` adds."""
    width = min(max(shutil.get_terminal_size().columns, WIDTHS[0]), WIDTHS[-1])
    name = f"grpo-lightning {command}"
    flags = [
        ("-c, --config RECIPE", CONFIG),
        ("--run_name NAME", RUN_NAME),
        ("--ckpt_path PATH", CKPT_PATH[command == "fit"]),
    ]
    groups = GROUPS[command]
    settings = {group.path: read_settings(group.path) for group in groups}
    added = added_settings(module_class, settings[MODULE])
    column = 2 + max(len(shown) for shown in [*(shown for group in groups for shown in group.shown), *added])
    lines = [
        f"usage: {usage(command)}",
        f"  e.g. {name} {EXAMPLES[command]}",
        f"{FIRST_SENTENCE.split(DESCRIPTIONS[command])[0]} What most runs set:",
        *(f"  {flag:21}{brief(text, width - 23)}" for flag, text in flags),
    ]
    for group in groups:
        lines.append(heading(group, settings, width))
        for setting in (settings[group.path].by_name[name] for name in group.shown):
            text = REPLACED.get(f"{group.key}.{setting.name}", setting.text)
            lines.append(row(setting, text, column, width))
        lines += [row(setting, setting.text, column, width) for setting in added.values() if group.key == "model"]
    return "\n".join([*lines, "", *more(name)])


def heading(group: Group, settings: dict[str, Settings], width: int) -> str:
    """Heading of a group, with its key and a description."""
    name = group.key.partition(".")[2]
    text = group.title or (settings[MODULE].by_name[name].text if name else settings[group.path].summary)
    return f"{emphasize(group.key)}  {brief(text, width - len(group.key) - 2)}"


def row(setting: Setting, text: str, column: int, width: int) -> str:
    """Row of a setting, with its name, default and description."""
    default = "required" if setting.default is None else setting.default
    return f"  {setting.name:{column}}{default:10}{brief(text, width - column - 12)}".rstrip()


def more(name: str) -> list[str]:
    """Lines that say how to show more."""
    texts = {
        "Set one": "--model.sampling.temperature=0.8 (any recipe key is a flag)",
        "All settings": f"{name} {ALL}, or {ALL} model.policy",
        "Those of a class": f"{name} --model.scheduler.help=Cosine",
        "Those of a recipe": f"{name} --config quickstart --print_config",
        "Recipes": "grpo-lightning recipes list",
    }
    return [f"{title:18}{text}" for title, text in texts.items()]


def first_sentence(text: str) -> str:
    """First sentence of a description, on one line."""
    return FIRST_SENTENCE.split(" ".join(text.split()), maxsplit=1)[0]


def brief(text: str, width: int) -> str:
    """Return the first sentence of a description, or as many clauses or words as `width` allows."""
    sentence = first_sentence(text)
    if len(sentence) <= width:
        return sentence
    ends = [match for match in CLAUSES.finditer(sentence) if LEAST <= match.start() <= width - len(", ...")]
    if not ends:
        return textwrap.shorten(sentence, width, placeholder="...")
    return f"{sentence[: ends[-1].start()]}{', ...' if ends[-1][0] == ', ' else '.'}"


def emphasize(text: str) -> str:
    """Make text bold in a terminal, unless NO_COLOR is set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if is_plain else f"\x1b[1m{text}\x1b[0m"


# ------------------------------------------------------------------------------------------------------ from the source


class Setting(NamedTuple):
    """One setting, as the source declares it."""

    name: str
    default: str | None
    """The default as written in YAML; None if the setting is required."""

    text: str
    """Description in the docstring."""


class Settings(NamedTuple):
    """A class and its settings, as the source declares them."""

    summary: str
    """First line of the docstring of the class."""

    by_name: dict[str, Setting]


def read_settings(path: str) -> Settings:
    """Read the settings of a class from its source file, without importing it."""
    module, _, name = path.rpartition(".")
    parts = ast.parse(source(module)).body
    owner = next(part for part in parts if isinstance(part, ast.ClassDef) and part.name == name)
    functions = {part.name: part for part in owner.body if isinstance(part, ast.FunctionDef)}
    constructor = functions.get("__init__")
    own = ast.get_docstring(owner) or ""
    of_constructor = ast.get_docstring(constructor) or "" if constructor else ""
    texts = argument_texts(own) | argument_texts(of_constructor)
    found = fields(owner) if constructor is None else arguments(constructor)
    settings = {name: Setting(name, default, text or texts.get(name, "")) for name, default, text in found}
    return Settings((own or of_constructor).partition("\n")[0], settings)


def source(module: str) -> str:
    """Source of a module, without importing it."""
    top, *names = module.split(".")
    spec = find_spec(top)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*names).with_suffix(".py").read_text(encoding="utf-8")


def fields(owner: ast.ClassDef) -> Iterator[tuple[str, str | None, str]]:
    """Name, default and description of the fields of a dataclass."""
    for part, below in zip(owner.body, [*owner.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = str(below.value.value) if is_text else ""  # type: ignore[union-attr]
            yield part.target.id, None if part.value is None else in_yaml(part.value), text


def arguments(constructor: ast.FunctionDef) -> Iterator[tuple[str, str | None, str]]:
    """Name, default and description of the arguments of a constructor. The description is always ""."""
    given = constructor.args
    positional = given.args[1:]  # without self
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    pairs = [*zip(positional, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    for argument, default in pairs:
        yield argument.arg, None if default is None else in_yaml(default), ""


def in_yaml(node: ast.expr) -> str:
    """Format a default as in YAML.

    A complex expression becomes "".
    """
    if isinstance(node, ast.Call):  # field(default_factory=dict)
        made = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "default_factory"]
        return {"dict": "{}", "list": "[]"}.get(made[0], "") if made else ""
    if not isinstance(node, ast.Constant):
        return ast.unparse(node) if isinstance(node, ast.Name | ast.UnaryOp) else ""
    return {"None": "null", "True": "true", "False": "false"}.get(str(node.value), str(node.value))


def argument_texts(docstring: str) -> dict[str, str]:
    """Descriptions of the arguments in the section `Args` of a docstring, by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    parts = re.split(r"^(\w+): ", textwrap.dedent(section[1]), flags=re.MULTILINE) if section else []
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def added_settings(module_class: type | None, known: Settings) -> dict[str, Setting]:
    """Settings that a subclass of the module adds to its constructor."""
    if module_class is None:
        return {}
    texts = argument_texts(inspect.getdoc(module_class) or "")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: Setting(
            name,
            None if own.default is own.empty else in_yaml(ast.parse(repr(own.default), mode="eval").body),
            texts.get(name, ""),
        )
        for name, own in inspect.signature(module_class).parameters.items()
        if own.kind not in kinds and name not in known.by_name
    }
