"""A run that learns, on one rank or two: `python -m tests.distributed.learning STRATEGY FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grpo_lightning.core import ranks
from tests.distributed.runs import STRATEGIES
from tests.helpers.module_runs import History, make_module, make_source, make_trainer

STEPS = 30


def rewards(strategy: str, folder: Path) -> list[float]:
    """The mean reward of every step: of 4 prompts x 8 completions of 8 tokens each, over all ranks."""
    devices, history = 1 if strategy == "one" else 2, History()
    module = make_module(policy=str(folder / "policy"), length=8, num_generations=8)
    trainer = make_trainer(
        devices=devices, strategy=STRATEGIES[strategy](), max_steps=STEPS, max_epochs=-1, callbacks=[history]
    )
    trainer.fit(module, make_source(module, batch_size=4 // devices))
    return history.of("reward/mean")


def main(strategy: str, folder: str) -> None:
    """Learn, and write down the rewards."""
    torch.set_num_threads(1)
    found = rewards(strategy, Path(folder))
    if ranks.rank() == 0:
        Path(folder, f"rewards-{strategy}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
