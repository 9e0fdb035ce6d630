"""Reference of every setting of `grpo-lightning fit`: type, default, unit, description and example.

Types and defaults come from the signatures, descriptions from the docstrings, and examples and units from
`examples.yaml`. A setting without a description or an example raises a `ValueError`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser
import jsonargparse
import lightning as L
import yaml

from grpo_lightning import callbacks, environments, optimizers, schedules
from grpo_lightning.cli import app, config
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.reasoning_gym import ReasoningGymTasks
from grpo_lightning.demo.number_games import NumberGames
from grpo_lightning.grounding import MeanIoU, RECAccuracy
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rewards import Plugin, RewardWorkers, WeightedReward
from grpo_lightning.rewards.registry import SHIPPED
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy
from grpo_lightning.training.validation import Validation

EXAMPLES = Path(__file__).with_name("examples.yaml")
FOLDER = "reference/settings"
"""Folder of the pages, in the sources of the site."""

LISTS = ("data.datasets", "model.rewards", "model.validation.metrics", "trainer.callbacks")
"""Keys that hold a list of objects."""

NAMED = {"grpo_lightning.rewards", "grpo_lightning.callbacks", "grpo_lightning.optimizers", "grpo_lightning.schedules"}
"""Modules whose classes a recipe names without their import path."""

COMMAND_TEXTS = {
    "config": (
        "A recipe: a YAML file, or the name of a recipe of the package (`grpo-lightning recipes list`). May be given "
        "several times."
    ),
    "seed_everything": (
        "Seed of the run: of sampling, of the order of the prompts and of random weights. `true` takes a random seed, "
        "`false` sets none."
    ),
    "weights_only": (
        "Whether to load only tensors and plain values of a checkpoint, which runs no code of the file. Null leaves "
        "the choice to Lightning."
    ),
}
"""Descriptions of keys that Lightning adds to the command."""

REQUIRED = "required"
"""Shown as the default of a setting without one."""


def nest(key: str, value: Any) -> dict[str, Any]:
    """Nested settings with one value, at a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@dataclass(frozen=True)
class Part:
    """The settings of one class."""

    key: str
    """Key of the object in a recipe: `model.objective`, or `model.rewards` for one of several classes."""

    kind: type

    is_named: bool = False
    """True if a recipe names the class by `class_path`."""

    num_passed: int = 0
    """Number of arguments at the beginning of the signature that the run passes, such as the optimizer's parameters."""

    @property
    def id(self) -> str:
        """Name in `examples.yaml`, and anchor of the section: the key, and the name of the class if it is named."""
        return f"{self.key}.{self.kind.__name__}" if self.is_named and self.key != "model.policy" else self.key

    @property
    def class_path(self) -> str:
        """The class as a recipe names it."""
        homes = (module for module in ("grpo_lightning", *sorted(NAMED), "grpo_lightning.environments"))
        home = next((home for home in homes if hasattr(module_of(home), self.kind.__name__)), self.kind.__module__)
        is_lightnings = self.key == "trainer.callbacks" and hasattr(L.pytorch.callbacks, self.kind.__name__)
        is_short = (home in NAMED and not is_lightnings) or self.key in ("model.engine", "model.policy")
        return self.kind.__name__ if is_short else f"{home}.{self.kind.__name__}"

    def tree(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a recipe that set these arguments."""
        found: Any = dict(arguments)
        if self.key == "model.policy.lora":
            return nest("model.policy", {"class_path": "PolicyLoader", "init_args": {"lora": found}})
        if self.is_named:
            found = {"class_path": self.class_path} | ({"init_args": found} if found else {})
        return nest(self.key, [found] if self.key in LISTS else found)


@dataclass(frozen=True)
class Setting:
    """An entry of the reference."""

    key: str
    """Full key, `model.objective.beta`; for a named class that of the class, `model.rewards.IoU.threshold`."""

    name: str
    type: str
    default: str
    unit: str | None
    text: str
    """Description, as Markdown."""

    example: str
    """YAML that sets it."""

    tree: dict[str, Any]
    """The settings of the example."""


@dataclass(frozen=True)
class Page:
    """A page of the reference."""

    name: str
    title: str
    intro: str
    parts: Sequence[Part]

    @property
    def path(self) -> str:
        """Path in the sources of the site."""
        return f"{FOLDER}/{self.name}.md"


def parts_of(key: str, *kinds: type, num_passed: int = 0) -> list[Part]:
    """Parts of several classes that a recipe can name at one key."""
    return [Part(key, kind, is_named=True, num_passed=num_passed) for kind in kinds]


def public_classes(module: Any, *, but: Sequence[str] = ()) -> list[type]:
    """Classes in `__all__` of a module, or those that it defines."""
    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if is_defined(v, module)]
    found = [getattr(module, name) for name in names if name not in but and not name.startswith("_")]
    return [kind for kind in found if inspect.isclass(kind)]


def is_defined(value: Any, module: Any) -> bool:
    """True for a class that a module defines."""
    return inspect.isclass(value) and value.__module__ == module.__name__


@cache
def module_of(name: str) -> Any:
    """The module of this name."""
    return import_module(name)


PAGES = [
    Page(
        "trainer",
        "Trainer",
        "The arguments of Lightning's [Trainer](https://lightning.ai/docs/pytorch/stable/common/trainer.html), with "
        "the defaults of `grpo-lightning fit`. [Lightning](../../lightning.md#trainer-arguments) states how each "
        "of them behaves in a GRPO run.",
        [Part("trainer", L.Trainer)],
    ),
    Page(
        "strategies",
        "Strategies",
        "`trainer.strategy` takes a name (`ddp`, `fsdp2`, `zero1`, `zero2`, `zero3`, `zero3_offload`), or one of these "
        "classes with arguments. [From one device to many](../../scale.md) compares them.",
        parts_of("trainer.strategy", FSDP2Strategy, GRPODeepSpeedStrategy),
    ),
    Page(
        "callbacks",
        "Callbacks",
        "Items of the list `trainer.callbacks`. All callbacks of Lightning work as well, with a few exceptions: see "
        "[Lightning](../../lightning.md#callbacks).",
        parts_of("trainer.callbacks", *public_classes(callbacks)),
    ),
    Page(
        "data",
        "Data",
        "Where prompts come from, and how a row becomes a prompt.",
        [
            Part("data", PromptDataModule),
            Part("data.datasets", DatasetEntry),
            *parts_of("data.prepare", ReasoningGymTasks, NumberGames),
        ],
    ),
    Page(
        "model",
        "Model",
        "The algorithm: what is sampled, scored and trained.",
        [
            Part("model", GRPOLightningModule),
            Part("model.reward_workers", RewardWorkers),
            Part("model.dynamic_sampling", DynamicSampling),
            Part("model.sync_reference", SyncReference),
        ],
    ),
    Page(
        "policy",
        "Policy and LoRA",
        "`model.policy` takes a name, or these settings.",
        [Part("model.policy", PolicyLoader, is_named=True), Part("model.policy.lora", LoRA)],
    ),
    Page(
        "sampling",
        "Sampling and validation",
        "How completions are sampled, in training and in validation.",
        [
            Part("model.sampling", SamplingParams),
            Part("model.validation", Validation),
            *parts_of("model.validation.metrics", RECAccuracy, MeanIoU),
        ],
    ),
    Page(
        "objective",
        "Objective",
        "The loss. `recipes/objectives/` has the settings of each paper; [GRPO, step by step](../../grpo.md) has the "
        "formulas.",
        [Part("model.objective", Objective)],
    ),
    Page(
        "engines",
        "Engines",
        "`model.engine` samples the completions: the policy itself (`LocalEngine`, the default), or "
        "[vLLM](../../vllm.md).",
        parts_of("model.engine", LocalEngine, VLLMEngine),
    ),
    Page(
        "environments",
        "Environments and conversations",
        "For completions of several turns: see [conversations](../../conversations.md).",
        [
            Part("model.conversation", ConversationSettings),
            *parts_of(
                "model.environment",
                *public_classes(environments, but=("Environment", "EnvironmentRunner", "Search", "Step")),
            ),
        ],
    ),
    Page(
        "optimizers",
        "Optimizers and schedules",
        "`model.optimizer` and `model.scheduler` take these classes, and any class of `torch.optim` and "
        "`torch.optim.lr_scheduler`.",
        parts_of("model.optimizer", *public_classes(optimizers), num_passed=1)
        + parts_of("model.scheduler", *public_classes(schedules, but=("Schedule",)), num_passed=1),
    ),
    Page(
        "rewards",
        "Rewards",
        "Items of the list `model.rewards`. A function is named by its import path (`my_rewards.brief`), a class by "
        "`class_path`, with its arguments in `init_args`. `WeightedReward` gives a reward a weight, a name, and what "
        "happens if it fails.",
        parts_of("model.rewards", WeightedReward, Plugin, *SHIPPED.values()),
    ),
]

COMMAND = Page(
    "index",
    "Settings",
    "Every setting of a recipe is a constructor argument. A key of a recipe is also a flag:\n\n"
    "```bash\n"
    "grpo-lightning fit --config my_run.yaml --model.objective.beta=0.01 --trainer.max_steps=200\n"
    "```\n\n"
    "Flags override files, and a later `--config` overrides an earlier one, key by key. A list replaces the list of an "
    "earlier file; `rewards+:` in a file and `--model.rewards+=...` append to it. An object that has several classes "
    "is written with `class_path` and `init_args`. The examples on these pages set one key each, and can be added to "
    "any recipe.",
    [],
)
"""Overview, with the settings of the command itself."""


# ---------------------------------------------------------------------------------------------------------- gathering


@cache
def examples() -> dict[str, dict[str, tuple[Any, str | None]]]:
    """Example and unit of every setting, by `Part.id` and name."""
    content = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    found: dict[str, dict[str, tuple[Any, str | None]]] = {}
    for part, settings in content.items():
        found[part] = {}
        for name, value in settings.items():
            short, _, unit = str(name).partition(" [")
            found[part][short] = (value, unit.removesuffix("]") or None)
    return found


@cache
def fit_keys() -> dict[str, config.Key]:
    """Keys of the parser of `grpo-lightning fit`."""
    recipe = "{model: {policy: p, rewards: [grpo_lightning.rewards.ExactMatch]}, data: {datasets: x.jsonl}}"
    return app.ParsedCLI.of(["--config", recipe, "--trainer.max_steps=1"]).subparser.keys()


@cache
def arguments_of(kind: type, num_passed: int = 0) -> dict[str, config.Key]:
    """Arguments of a class as the parser sees them."""
    parser = app.Parser(add_help=False)
    skip: set[Any] = {num_passed} if num_passed else set()
    # Reading them takes time, and only dataclasses have their descriptions there.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=dataclasses.is_dataclass(kind))
    try:
        parser.add_class_arguments(kind, "own", fail_untyped=False, skip=skip)
    finally:
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=False)
    keys = {key.removeprefix("own."): own for key, own in parser.keys().items() if key.startswith("own.")}
    named = dict.fromkeys(keys) if _takes_any(kind) else config.arguments(kind)
    return {name: own for name, own in keys.items() if name in named}


def _takes_any(kind: type) -> bool:
    """True for a class whose own constructor is `__new__`, or the one of a base: all keys of the parser are its own."""
    return "__init__" not in vars(kind)


def settings_of(part: Part) -> list[Setting]:
    """Entries of a class, in the order of its signature.

    Raises:
        ValueError: If a setting has no description, or no example.
    """
    if part.key == "trainer":
        known = {key.removeprefix("trainer."): own for key, own in fit_keys().items() if key.startswith("trainer.")}
    elif part.key in ("model", "data"):
        known = {
            name: fit_keys()[f"{part.key}.{name}"]
            for name in config.arguments(part.kind)
            if f"{part.key}.{name}" in fit_keys()
        }
    else:
        known = arguments_of(part.kind, part.num_passed)
    return [setting(part, name, own) for name, own in known.items()]


def command_settings() -> list[Setting]:
    """Entries of the keys of the command itself: `run_name`, `ckpt_path`, ..."""
    found = []
    for name, own in fit_keys().items():
        if "." in name or name in ("trainer", "model", "data"):
            continue
        value, unit = example_of("command", name)
        tree = {name: value}
        found.append(_entry(name, name, own, unit, f"--{name} {value}" if name == "config" else None, tree))
    return found


def setting(part: Part, name: str, own: config.Key) -> Setting:
    """One entry. Raises: ValueError if it has no description or example."""
    value, unit = example_of(part.id, name)
    arguments = value if isinstance(value, dict) and name in value else {name: value}
    return _entry(f"{part.id}.{name}", name, own, unit, None, part.tree(arguments), part.kind)


def example_of(part: str, name: str) -> tuple[Any, str | None]:
    """Example and unit of a setting. Raises: ValueError if `examples.yaml` has none."""
    try:
        return examples()[part][name]
    except KeyError:
        raise ValueError(
            f"{EXAMPLES.name} has no example of {part}.{name}: add the line `{name}: <value>` below `{part}`."
        ) from None


def _entry(
    key: str,
    name: str,
    own: config.Key,
    unit: str | None,
    example: str | None,
    tree: dict[str, Any],
    kind: type | None = None,
) -> Setting:
    text = COMMAND_TEXTS.get(key) or description(own.help or class_docs(kind).get(name, ""), kind, name)
    if not text:
        owner = kind.__name__ if kind else "the command"
        raise ValueError(f"{key} has no description: add a line to the docstring of {owner}.")
    kind_text = "path" if key == "config" else type_text(own.hint)
    default = REQUIRED if is_required(kind, name) else default_text(own.default)
    return Setting(key, name, kind_text, default, unit, text, example or yaml_line(tree), tree)


def is_required(kind: type | None, name: str) -> bool:
    """True if an argument of a class has no default."""
    argument = inspect.signature(kind).parameters.get(name) if kind else None
    return argument is not None and argument.default is argument.empty


def class_docs(kind: type | None) -> dict[str, str]:
    """Descriptions of the arguments of a class that is made by `__new__`, of which the parser has none."""
    parsed = docstring_parser.parse(inspect.getdoc(kind.__new__) or "" if kind else "")
    return {argument.arg_name: argument.description or "" for argument in parsed.params}


def description(text: str, kind: type | None, name: str) -> str:
    """Description of an argument as Markdown; one that refers to another class is completed by that class's."""
    plain = re.sub(r"\s*\((?:type|required|default)[^()]*(?:\([^()]*\)[^()]*)*\)\s*$", "", text or "").strip()
    plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)(?:\s*<[^>]*>)?`", r"`\1`", plain.replace("``", "`"))
    plain = re.sub(r"`([^`<]+?)\s*<(https?://[^>]+)>`_", r"[\1](\2)", plain)
    plain = re.sub(r"\s+", " ", re.sub(r"\bDefaults?(?: to|:)\s*(?:`[^`]*`|[\d.]+)\.?", "", plain)).strip()
    other = re.match(r"(?:As in|See) `(\w+)`(?:, (?P<more>[^.]+))?\.$", plain)
    if other is None or kind is None:
        return plain
    base = class_in_docstring(other[1], kind)
    rest = arguments_of(base)[name].help
    more = f" ({other['more']})" if other["more"] else ""
    return description(rest, base, name).rstrip(".") + more + "."


def class_in_docstring(name: str, kind: type) -> type:
    """A class that a docstring of `kind` refers to."""
    homes = [inspect.getmodule(base) for base in kind.__mro__[:-1]]
    return next(getattr(home, name) for home in [*homes, module_of("grpo_lightning.rewards")] if hasattr(home, name))


# ---------------------------------------------------------------------------------------------------------- as text

PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", list: "list", Any: "any"}


def type_text(hint: Any) -> str:
    """A type in the terms of YAML: `"a" or "b"`, `integer or null`, `list of text`."""
    if hint is None or hint is type(None):
        return "null"
    if hint in PLAIN:
        return PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{scalar_text(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(member) for member in inner))
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"list of {len(inner)} numbers"
    if inspect.isclass(origin) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        items = type_text(inner[0])
        return f"list of {f'({items})' if ' or ' in items else items}" if inner else "list"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "mapping"
    if origin is Callable:
        return "class or function"
    if inspect.isclass(hint):
        return "path" if issubclass(hint, Path) else f"`{hint.__name__}`"
    return "any"


def default_text(value: Any) -> str:
    """A default in YAML."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, list) and value and all(map(is_object, value)):
        return f"[{', '.join(item['class_path'].rpartition('.')[2] for item in value)}]"
    if is_object(value):
        return str(value["class_path"]).rpartition(".")[2]
    if inspect.isclass(value) or dataclasses.is_dataclass(value):
        return getattr(value, "__name__", type(value).__name__)
    return scalar_text(value)


def is_object(value: Any) -> bool:
    """True for the settings of an object of a named class."""
    return isinstance(value, Mapping) and "class_path" in value


def scalar_text(value: Any) -> str:
    """A value in YAML, on one line."""
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()


def yaml_line(tree: Mapping[str, Any]) -> str:
    """Settings as one line of YAML, or as a block if the line is long."""
    line = yaml.safe_dump(tree, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True).strip()
    if len(line) <= 100:
        return line.removeprefix("{").removesuffix("}")
    return yaml.safe_dump(tree, sort_keys=False, width=100, allow_unicode=True).strip()


# ------------------------------------------------------------------------------------------------------------- pages


def pages() -> dict[str, str]:
    """Content of the pages as Markdown, by path.

    Raises:
        ValueError: If a setting has no description or no example; the message names all of them.
    """
    found, problems = {}, []
    for page in [COMMAND, *PAGES]:
        try:
            found[page.path] = page_text(page)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def page_text(page: Page) -> str:
    """Content of a page."""
    text = f"# {page.title}\n\n{page.intro}\n\n"
    if page is COMMAND:
        rows = [f"| [{other.title}]({other.name}.md) | {keys_text(other)} |\n" for other in PAGES]
        text += f"| page | keys |\n|---|---|\n{''.join(rows)}\n## The command\n\n"
        return text + "".join(map(entry_text, command_settings()))
    sections, problems = [], []
    for part in page.parts:
        heading = "" if page.parts == [part] else f"## {heading_text(part)}\n\n{summary(part)}\n\n"
        try:
            level = 2 if page.parts == [part] else 3
            sections.append(heading + "".join(entry_text(entry, level) for entry in settings_of(part)))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return text + "".join(sections)


def keys_text(page: Page) -> str:
    """The keys that a page explains."""
    return ", ".join(dict.fromkeys(f"`{part.key}`" for part in page.parts))


def heading_text(part: Part) -> str:
    """Heading of the section of a class, with its anchor."""
    title = f"`{part.key}`" if part.id == part.key else part.kind.__name__
    return f"{title} {{ #{part.id} }}"


def summary(part: Part) -> str:
    """Beginning of a section: the first paragraph of the docstring, and the class."""
    first = inspect.cleandoc(part.kind.__doc__ or "").partition("\n\n")[0]
    where = f"Named as `class_path: {part.class_path}`."
    if part.key in LISTS:
        where = f"An item of the list `{part.key}`: `class_path: {part.class_path}`."
    if not part.is_named:
        where = f"The class [`{part.kind.__name__}`][{part.kind.__module__}.{part.kind.__qualname__}]."
    return f"{first}\n\n{where}"


def entry_text(entry: Setting, level: int = 3) -> str:
    """Markdown of an entry, with a heading of this level."""
    unit = f" · Unit: {entry.unit}" if entry.unit else ""
    default = entry.default if entry.default == REQUIRED else f"`{entry.default}`"
    language = "bash" if entry.example.startswith("--") else "yaml"
    return (
        f"{'#' * level} `{entry.name}` {{ #{entry.key} }}\n\n"
        f"{entry.text}\n\n"
        f"Type: {entry.type} · Default: {default}{unit}\n{{ .setting }}\n\n"
        f"```{language}\n{entry.example}\n```\n\n"
    )


def links() -> Iterator[tuple[str, str, str]]:
    """Names that other pages may link to: (name, path of the page, anchor)."""
    for page in PAGES:
        for part in page.parts:
            anchor = "" if page.parts == [part] else part.id
            yield part.id, page.path, anchor
            if part.is_named:
                yield part.kind.__name__, page.path, anchor
            for name in examples().get(part.id, {}):
                yield f"{part.id}.{name}", page.path, f"{part.id}.{name}"
                if part.is_named:
                    yield f"{part.kind.__name__}.{name}", page.path, f"{part.id}.{name}"
                    if part.key == "model.engine":
                        yield f"model.engine.{name}", page.path, f"{part.id}.{name}"
    for name in examples()["command"]:
        yield name, COMMAND.path, name
