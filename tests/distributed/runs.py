"""A small run on one rank or several: the strategies, the module, and how it is trained."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy
from tests.helpers.module_runs import make_source, make_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": lambda: "ddp",
    "zero1": lambda: GRPODeepSpeedStrategy(stage=1),
    "zero2": lambda: GRPODeepSpeedStrategy(stage=2),
    # A tiny model would stay whole under the default threshold, and the test would prove nothing.
    "zero3": lambda: GRPODeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
    "fsdp2": FSDP2Strategy,
    "fsdp2, one file": lambda: FSDP2Strategy(save_distributed_checkpoint=False),
    "hsdp": lambda: FSDP2Strategy(num_replicas=2),
    "hsdp, one file": lambda: FSDP2Strategy(num_replicas=2, save_distributed_checkpoint=False),
}
NUM_RANKS = {"one": 1, "hsdp": 4, "hsdp, one file": 4}
"""Ranks by strategy; the others run on two. With four, the two copies of hybrid sharding have two shards each."""


def ranks_of(strategy: str) -> int:
    """The ranks that a strategy is run on."""
    return NUM_RANKS.get(strategy, 2)


def make_module(
    policy: Any, rewards: list[Any], *, length: int, lr: float, ranks_per_group: int = 1, **options: Any
) -> GRPOLightningModule:
    """A module that trains with SGD, which shows the gradient as it is. One device has all completions of a prompt."""
    return GRPOLightningModule(
        policy,
        rewards,
        sampling=SamplingParams(max_completion_length=length),
        optimizer=functools.partial(torch.optim.SGD, lr=lr),
        ranks_per_group=min(num_ranks(), ranks_per_group),
        seed=0,
        **options,
    )


def fit(
    module: GRPOLightningModule,
    prompts: Sequence[Any],
    strategy: str,
    *,
    batch: int = 4,
    validation: PromptSource | None = None,
    **trainer: Any,
) -> None:
    """Train the module with `batch` prompts per rollout, over all ranks, in their order."""
    runner = make_trainer(devices=num_ranks(), strategy=STRATEGIES[strategy](), **trainer)
    source = make_source(
        module,
        prompts,
        batch_size=batch * module.ranks_per_group // num_ranks(),
        accumulate=runner.accumulate_grad_batches,
        shuffle=False,
        ranks_per_group=module.ranks_per_group,
    )
    runner.fit(module, source, validation)


def num_ranks() -> int:
    """Number of ranks, also before they have a process group."""
    return int(os.environ["WORLD_SIZE"])
