"""Runs that resume on another number of ranks: `python -m tests.distributed.elastic FOLDER LEG`.

Two epochs over seven prompts, four prompts per rollout, two updates per rollout, two iterations, a KL to a reference
that moves, AdamW, a cosine schedule and clipping. Each leg of a run has its own number of ranks, and ends after some
optimizer steps; a checkpoint is saved after each step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.reference import SyncReference
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.schedules import Cosine
from tests.distributed import harness, vision
from tests.distributed.resume import FAMILY, PROMPTS, SEEN
from tests.distributed.runs import STRATEGIES
from tests.distributed.steps import whole_weights
from tests.helpers.light_rewards import capitals, of_some, vowel_share

PROMPTS_PER_ROLLOUT = 4
STEPS_PER_CYCLE = 4


@dataclass
class Leg:
    """A part of a run: on how many ranks, and after how many optimizer steps of the run it ends (0: at the end)."""

    num_ranks: int
    until: int = 0
    strategy: str = "ddp"
    ranks_per_group: int = 1
    accumulate: int = 2
    subject: str = "text"
    """`text` or `images`; with `further`, prompts that teach nothing are replaced."""

    prompts_per_rollout: int = PROMPTS_PER_ROLLOUT
    name: str = "run"
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy."""


class Ended(Exception):  # noqa: N818 - no error
    """The end of a leg."""


class Notes(L.Callback):
    """The prompts and completions of every rollout, the metrics of every optimizer step; ends the leg."""

    def __init__(self, until: int) -> None:
        self.until, self.last = until, 0
        self.rollouts: list[Any] = []
        self.steps: dict[int, dict[str, float]] = {}
        self.weights: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.last = trainer.global_step

    def on_rollout(self, trainer: L.Trainer, module: Any, rollout: Any) -> None:
        own = [(str(g.prompt.content), [c.token_ids for c in g.completions]) for g in rollout.groups]
        self.rollouts.append(ranks.interleave(module.teams.gather_from_firsts(own)))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > self.last:
            self.last = trainer.global_step
            names = ("policy/loss", "policy/kl", "policy/grad_norm")
            metrics = trainer.callback_metrics
            self.steps[trainer.global_step] = {name: float(metrics[name]) for name in names if name in metrics}
            self.steps[trainer.global_step] |= {
                "lr": trainer.optimizers[0].param_groups[0]["lr"], "epoch": trainer.current_epoch
            }  # fmt: skip

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self.until and trainer.global_step >= self.until:
            raise Ended

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.weights = whole_weights(pl_module)


def train(folder: Path, leg: Leg) -> Notes:
    """One leg, from the newest checkpoint of the run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    has_images, takes_more = "images" in leg.subject, "further" in leg.subject
    reward = capitals if has_images else vowel_share
    module = GRPOLightningModule(
        PolicyLoader(str(folder / (FAMILY if has_images else "policy")), **leg.policy),
        rewards=[functools.partial(of_some, reward) if takes_more else reward],
        sampling=SamplingParams(max_completion_length=6),
        objective=Objective(beta=0.04),
        optimizer=functools.partial(AdamW, lr=3e-3),
        scheduler=functools.partial(Cosine, warmup_ratio=0.1),
        sync_reference=SyncReference(every_n_steps=5, mixup_alpha=0.6),
        dynamic_sampling=DynamicSampling(2) if takes_more else None,
        num_generations=4,
        ranks_per_group=leg.ranks_per_group,
        num_iterations=2,
        updates_per_rollout=2,
        seed=0,
    )
    notes = Notes(leg.until)
    checkpoints = folder / leg.name
    saving = ModelCheckpoint(
        checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=leg.num_ranks,
        strategy="auto" if leg.num_ranks == 1 and leg.strategy == "ddp" else STRATEGIES[leg.strategy](),
        max_epochs=-1 if takes_more else 2,
        max_steps=16 if takes_more else -1,
        accumulate_grad_batches=leg.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, notes],
    )
    seen = [vision.with_files(parts, folder, index) for index, parts in enumerate(SEEN)]
    source = PromptSource(
        (seen if has_images else PROMPTS) * (3 if takes_more else 1),
        leg.prompts_per_rollout * leg.ranks_per_group // leg.num_ranks,
        cycle=module.cycle_length(leg.accumulate),
        takes_more=takes_more,
        ranks_per_group=leg.ranks_per_group,
    )
    found = {int(path.stem.removeprefix("step=")): path for path in checkpoints.glob("step=*.ckpt")}
    with contextlib.suppress(Ended):
        trainer.fit(module, source, ckpt_path=found[max(found)] if found else None)
    return notes


def main(folder: str, *legs: str) -> None:
    """The legs of these ranks; what they were is written to a file of each."""
    torch.set_num_threads(1)
    for text in legs:
        leg = Leg(**json.loads(text))
        try:
            notes = train(Path(folder), leg)
            written = {"rollouts": notes.rollouts, "steps": notes.steps, "weights": notes.weights}
        except ValueError as error:
            written = {"error": str(error)}
        if ranks.rank() == 0:
            torch.save(written, Path(folder) / f"{leg.name}-{leg.until}.pt")
        ranks.gather_objects(None)


def run_legs(folder: Path, *legs: Leg) -> list[dict[str, Any]]:
    """Run legs on as many ranks each; consecutive legs on the same ranks share a process group.

    Returns:
        The rollouts, metrics by optimizer step, and weights of every leg, or its error.
    """
    for leg in legs:
        harness.run_ranks("tests.distributed.elastic", folder, json.dumps(asdict(leg)), world_size=leg.num_ranks)
    return [torch.load(folder / f"{leg.name}-{leg.until}.pt") for leg in legs]


if __name__ == "__main__":
    main(*sys.argv[1:])
