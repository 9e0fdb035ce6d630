"""A weight that is trained for a part of a run only: `python -m tests.distributed.unfrozen STRATEGY FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from tests.distributed.runs import STRATEGIES, num_ranks
from tests.distributed.steps import whole_weights
from tests.helpers.light_rewards import vowel_share
from tests.helpers.module_runs import PROMPTS, make_source, make_trainer
from tests.helpers.unfrozen import AllInOptimizer, TrainBetween

STEPS = 4


class Whole(L.Callback):
    """Gathers the weights at the end of the run."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = {name: weight.clone() for name, weight in whole_weights(pl_module).items()}


def train(
    strategy: str, folder: Path, checkpoints: Path, steps: int, ckpt_path: Path | None = None
) -> dict[str, Tensor]:
    """Train up to a step, from the start or from a checkpoint; returns the whole weights."""
    module = AllInOptimizer(
        PolicyLoader(str(folder / "policy"), freeze_layers=1),
        [vowel_share],
        sampling=SamplingParams(max_completion_length=6),
        objective=Objective(beta=0.0),
        num_generations=4,
        seed=0,
    )
    whole = Whole()
    saving = ModelCheckpoint(checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        devices=num_ranks(),
        strategy=STRATEGIES[strategy](),
        max_steps=steps,
        callbacks=[TrainBetween(), saving, whole],
        enable_checkpointing=True,
    )
    source = make_source(module, PROMPTS, batch_size=2, shuffle=False)
    trainer.fit(module, source, ckpt_path=ckpt_path)
    return whole.weights


def main(strategy: str, folder: str) -> None:
    """Train without a break, and resumed twice; rank 0 saves the weights of both runs."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    where = Path(folder)
    unbroken = train(strategy, where, where / "unbroken", STEPS)
    train(strategy, where, where / "broken", 2)
    train(strategy, where, where / "broken", 3, where / "broken" / "step=2.ckpt")
    resumed = train(strategy, where, where / "broken", STEPS, where / "broken" / "step=3.ckpt")
    if ranks.rank() == 0:
        torch.save({"unbroken": unbroken, "resumed": resumed}, where / "weights.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
