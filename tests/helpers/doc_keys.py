"""Names on a page that are settings, classes or arguments of this package."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import lightning as L

from grpo_lightning import optimizers, schedules
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rewards import RewardWorkers
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from grpo_lightning.training.validation import Validation

SCHEDULES = [
    kind for kind in vars(schedules).values() if inspect.isclass(kind) and issubclass(kind, schedules.Schedule)
]
SETTINGS: dict[str, list[Any]] = {
    "trainer": [L.Trainer],
    "data": [PromptDataModule],
    "data.datasets": [DatasetEntry],
    "data.val_datasets": [DatasetEntry],
    "model": [GRPOLightningModule],
    "model.conversation": [ConversationSettings],
    "model.dynamic_sampling": [DynamicSampling],
    "model.engine": [LocalEngine, VLLMEngine],
    "model.objective": [Objective],
    "model.optimizer": [optimizers.AdamW],
    "model.policy": [PolicyLoader],
    "model.policy.lora": [LoRA],
    "model.reward_workers": [RewardWorkers],
    "model.sampling": [SamplingParams],
    "model.scheduler": SCHEDULES,
    "model.sync_reference": [SyncReference],
    "model.validation": [Validation],
}
"""Where the settings below a key are defined."""

TOP = {"run_name", "seed_everything", "ckpt_path"}
CLASSES = (
    "grpo_lightning",
    "grpo_lightning.rewards",
    "grpo_lightning.environments",
    "grpo_lightning.callbacks",
    "grpo_lightning.optimizers",
    "grpo_lightning.schedules",
    "grpo_lightning.training.strategies",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.plugins.io",
)
"""Where a class named on a page can be."""


def class_named(name: str) -> Any:
    """The class of a name as pages and recipes use it; None if there is none."""
    return next((found for home in CLASSES if (found := getattr(importlib.import_module(home), name, None))), None)


def arguments(kind: Any) -> set[str]:
    """Return the names of a class's constructor arguments."""
    return set(inspect.signature(kind).parameters)


def problem(name: str) -> str | None:
    """Return the error in a key (`model.objective.beta`) or a class (`Cosine.max_len`); None if it exists."""
    if name in TOP or name in SETTINGS:
        return None
    group, _, key = name.rpartition(".")
    if group in SETTINGS:
        is_there = any(key in arguments(kind) for kind in SETTINGS[group])
        return None if is_there else f"there is no setting {name}"
    kind = class_named(group or name)
    if kind is None:
        return f"there is no setting or class {name}"
    return None if not group or key in arguments(kind) else f"{group} has no argument {key}"


def keys_in(text: str) -> set[str]:
    """The settings a text names between backticks; the short `objective.beta` stands for `model.objective.beta`."""
    found = set(re.findall(r"`((?:data|model|trainer|objective|policy|sampling)\.[a-z_.]+)(?:: [^`]*)?`", text))
    names = {name if name.split(".")[0] in ("data", "model", "trainer") else f"model.{name}" for name in found}
    return {name for name in names if not name.endswith(".py")}
