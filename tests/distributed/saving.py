"""The files of runs on several ranks: checkpoints, exported policies, evaluations from checkpoints.

python -m tests.distributed.saving STRATEGY FOLDER
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from grpo_lightning.callbacks.export_policy import ExportPolicy
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.optimizers import AdamW
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.training.validation import Validation
from tests.distributed.runs import STRATEGIES, ranks_of
from tests.distributed.steps import LORA
from tests.helpers.light_rewards import vowel_share
from tests.helpers.module_runs import PROMPTS

IDS = torch.arange(2, 42).view(2, 20)
KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora": LORA}, "frozen": {"freeze_layers": 1}}
KINDS["copies"] = {"lora": LORA | {"use_rslora": True, "modules_to_save": ["embed_tokens", "lm_head"]}}


def make(folder: Path, kind: str) -> GRPOLightningModule:
    """A policy that is trained as the kind says."""
    return GRPOLightningModule(
        PolicyLoader(str(folder / "policy"), **KINDS[kind]),
        rewards=[vowel_share],
        sampling=SamplingParams(max_completion_length=6),
        objective=Objective(beta=0.04),
        validation=Validation(num_generations=2, greedy=True),
        optimizer=functools.partial(AdamW, lr=1e-2),
        num_generations=4,
        seed=0,
    )


def trainer_of(strategy: str, **options: Any) -> L.Trainer:
    """A silent trainer."""
    return L.Trainer(
        accelerator="cpu",
        devices=ranks_of(strategy),
        strategy=STRATEGIES[strategy](),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def logprobs(module: Any) -> Tensor:
    """[2, 20, V] of fixed tokens, under the policy as it was trained; every rank takes part."""
    module.policy.eval()
    with torch.no_grad(), module.sharding.gathered(module.policy):
        return module.policy(input_ids=IDS).logits.log_softmax(-1).clone()


class Last(L.Callback):
    """The policy's log-probs when training ends."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.logprobs = logprobs(pl_module)


def run(strategy: str, folder: Path, kind: str) -> dict[str, Any]:
    """Train, save, and evaluate what was saved in a run of its own."""
    where = folder / strategy / kind
    module, last = make(folder, kind), Last()
    saving = ModelCheckpoint(where, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    alone = ModelCheckpoint(where / "weights", filename="{step}", every_n_train_steps=2, save_weights_only=True)
    trainer = trainer_of(
        strategy, max_steps=2, callbacks=[saving, alone, last, ExportPolicy(str(where / "at-the-end"))]
    )
    world_size = trainer.world_size
    trainer.fit(module, PromptSource(PROMPTS, 4 // world_size))
    checkpoint = saving.best_model_path
    (weights,) = (where / "weights").iterdir()
    results: dict[str, Any] = {"logprobs": last.logprobs, "checkpoint": checkpoint, "weights": str(weights)}
    # `test` with a checkpoint of the weights alone.
    for verb, path in (("validate", checkpoint), ("test", str(weights))):
        fresh, evaluator = make(folder, kind), trainer_of(strategy)
        source = PromptSource(PROMPTS, 4 // world_size, shuffle=False)
        (results[verb],) = getattr(evaluator, verb)(fresh, source, ckpt_path=path, verbose=False)
    return results


def main(strategy: str, folder: str, *kinds: str) -> None:
    """Run the kinds, all of them if none is named; rank 0 writes what came out."""
    torch.set_num_threads(1)
    for kind in kinds or KINDS:
        sys.stderr.write(f"kind {kind}\n")
        results = run(strategy, Path(folder), kind)
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            continue
        torch.save(results, Path(folder) / f"{strategy}-{kind}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
