"""Short runs that back the rows of docs/lightning.md, by the name of the row: what its cases share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.module_runs import (
    PROMPTS,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)

CASES: dict[str, Callable[[Path], None]] = {}


def case(*names: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register what backs the rows of these names."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES.update(dict.fromkeys(names, function))
        return function

    return register


def run(*used: L.Callback, val: bool = False, ckpt_path: Any = None, **options: Any) -> tuple[Any, L.Trainer]:
    """A short run of two cycles; keywords of the module are `module`, all others the trainer's."""
    module = make_module(**options.pop("module", {}))
    trainer = make_trainer(callbacks=list(used), **({"max_epochs": 1, "num_sanity_val_steps": 0} | options))
    source = make_source(module, accumulate=trainer.accumulate_grad_batches)
    loaders = (source, PromptSource(PROMPTS[:3], 1, shuffle=False)) if val else (source,)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return module, trainer


@functools.cache
def plain_weights(max_epochs: int = 1) -> dict[str, torch.Tensor]:
    """The weights that the short run ends with."""
    return weights_of(run(max_epochs=max_epochs)[0])


class Count(L.Callback):
    """Counts validation batches by epoch, and steps."""

    def __init__(self) -> None:
        self.validations: list[int] = []
        self.batches = 0

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.validations.append(trainer.global_step)

    def on_validation_batch_start(self, *_: Any) -> None:
        self.batches += 1
