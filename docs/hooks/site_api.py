"""Reference of the Python API: one page per topic, from the docstrings.

Raises a `ValueError` for a public name that has no docstring.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import griffe

FOLDER = "reference/api"
"""Folder of the pages, in the sources of the site."""

PACKAGE = "grpo_lightning"

PUBLIC = (
    PACKAGE,
    f"{PACKAGE}.callbacks",
    f"{PACKAGE}.environments",
    f"{PACKAGE}.functional",
    f"{PACKAGE}.report",
    f"{PACKAGE}.rewards",
)
"""Modules whose `__all__` is public: each of these names is on a page."""


@dataclass(frozen=True)
class Topic:
    """A page of the reference."""

    name: str
    title: str
    intro: str
    names: tuple[str, ...]
    """Import paths below `grpo_lightning`. A package stands for all names in its `__all__`, and `module:` for all
    public classes and functions that the module defines."""

    @property
    def path(self) -> str:
        """Path in the sources of the site."""
        return f"{FOLDER}/{self.name}.md"


TOPICS = [
    Topic("module", "Module", "The algorithm, as a LightningModule.", ("module.GRPOLightningModule", "cli.main.main")),
    Topic(
        "data",
        "Data",
        "From rows to prompts.",
        (
            "data.datamodule.PromptDataModule",
            "data.dataset_entry.DatasetEntry",
            "data.prompt_source.PromptSource",
            "data.templates.PromptTemplate",
            "data.reasoning_gym.ReasoningGymTasks",
            "demo.number_games.NumberGames",
        ),
    ),
    Topic("rewards", "Rewards", "Functions and classes that score completions.", ("rewards",)),
    Topic(
        "environments", "Environments", "Games and tools in which a policy acts over several turns.", ("environments",)
    ),
    Topic(
        "engines",
        "Engines and rollouts",
        "Engines sample the completions of a rollout; the steps of the algorithm pass the rollout on.",
        (
            "rollout.engine.RolloutEngine",
            "rollout.engine.Turns",
            "rollout.local_engine.LocalEngine",
            "rollout.vllm.vllm_engine.VLLMEngine",
            "rollout.groups.Rollout",
            "rollout.dynamic_sampling.DynamicSampling",
            "rollout.conversations.ConversationSettings",
        ),
    ),
    Topic(
        "policy",
        "Policy",
        "Loading, adapters and the reference.",
        (
            "policy.loading.PolicyLoader",
            "policy.settings.PolicySettings",
            "policy.loading.Policy",
            "policy.lora.LoRA",
            "policy.reference.SyncReference",
            "policy.completion_logprobs.Scorer",
        ),
    ),
    Topic("objective", "Objective", "The loss.", ("objective.Objective", "objective.ObjectiveTerms")),
    Topic("functional", "Functional", "The mathematics: tensors in, tensors out.", ("functional",)),
    Topic(
        "optimizers",
        "Optimizers and schedules",
        "Classes that a recipe names; any class of torch works as well.",
        ("module:optimizers", "module:schedules"),
    ),
    Topic(
        "evaluation",
        "Validation",
        "How completions are evaluated.",
        (
            "training.validation.Validation",
            "training.validation.Evaluation",
            "grounding.RECAccuracy",
            "grounding.MeanIoU",
            "grounding.BoxMetric",
        ),
    ),
    Topic(
        "strategies",
        "Strategies",
        "How weights, gradients and optimizer states are divided among devices.",
        ("training.strategies.FSDP2Strategy", "training.strategies.GRPODeepSpeedStrategy"),
    ),
    Topic("callbacks", "Callbacks", "Progress, logs, pictures, checkpoints and exports of a run.", ("callbacks",)),
    Topic("report", "Report", "The page that `grpo-lightning report` writes.", ("report",)),
    Topic(
        "types",
        "Records",
        "Records that the steps of the algorithm pass on.",
        (
            "core.types.Prompt",
            "core.types.Completion",
            "core.types.Turn",
            "core.types.Group",
            "core.types.MicroBatch",
            "core.types.SamplingParams",
            "core.types.ImageView",
            "core.images.ImageRef",
        ),
    ),
]


def identifiers(topic: Topic) -> Iterator[str]:
    """Full import paths of a topic's names, at the place of their definition."""
    for name in topic.names:
        if name.startswith("module:"):
            yield from defined_names(f"{PACKAGE}.{name.removeprefix('module:')}")
        elif name[0].islower() and "." not in name:
            yield from public_names(f"{PACKAGE}.{name}").values()
        else:
            yield f"{PACKAGE}.{name}"


def defined_names(module: str) -> Iterator[str]:
    """Public classes and functions that a module defines, in the order of the file."""
    for name, value in vars(importlib.import_module(module)).items():
        if getattr(value, "__module__", None) == module and not name.startswith("_"):
            yield f"{module}.{name}"


def public_names(module: str) -> dict[str, str]:
    """Names in a module's `__all__`, each with the import path of its definition."""
    home = importlib.import_module(module)
    return {name: definition(home, name) for name in home.__all__ if name != "__version__"}


def definition(home: Any, name: str) -> str:
    """Import path at which a public name is defined: an alias of a type has none, and is looked up in `_HOMES`."""
    value = getattr(home, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{home.__name__}.{home._HOMES[name]}.{name}"


def pages() -> dict[str, str]:
    """Content of the pages as Markdown, by path.

    Raises:
        ValueError: If a public name has no docstring, or is on no page; the message lists all of them.
    """
    found = {topic: list(identifiers(topic)) for topic in TOPICS}
    if problems := undocumented_names(found):
        raise ValueError("\n".join(problems))
    return {topic.path: page_text(topic, names) for topic, names in found.items()}


def page_text(topic: Topic, names: list[str]) -> str:
    """Content of a page."""
    return f"# {topic.title}\n\n{topic.intro}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def undocumented_names(found: dict[Topic, list[str]]) -> list[str]:
    """Public names without a docstring, and those on no page."""
    documented = {name for names in found.values() for name in names}
    package = source()
    missing = [f"{name} has no docstring." for name in sorted(documented) if not has_docstring(package, name)]
    public = {path: module for module in PUBLIC for path in public_names(module).values()}
    return missing + [
        f"{path} is public (in `{module}.__all__`), and on no page: add it to TOPICS in docs/hooks/site_api.py."
        for path, module in public.items()
        if path not in documented
    ]


@cache
def source() -> Any:
    """The package as its source has it: aliases of types have their docstrings only there."""
    return griffe.load(PACKAGE, docstring_parser="google")


def has_docstring(package: Any, name: str) -> bool:
    """True if the source has a docstring for a name."""
    docstring = package[name.removeprefix(f"{PACKAGE}.")].docstring
    return docstring is not None and bool(docstring.value.strip())
