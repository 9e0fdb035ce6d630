"""The checkpoints that a run keeps, and unusable ones: `python -m tests.distributed.kept STRATEGY FOLDER`.

Four steps in cycles of two, so that the third checkpoint is inside a cycle and the last one is not.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
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
from grpo_lightning.policy.lora import LoRA
from tests.distributed.runs import STRATEGIES
from tests.distributed.steps import whole_size
from tests.helpers.light_rewards import vowel_share
from tests.helpers.module_runs import PROMPTS
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

STEPS = 4
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
"""Large enough for the tensors to be most of a checkpoint."""

POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "frozen layers": {"freeze_layers": 1},
    "lora": {"lora": LoRA(rank=16)},
}


def save_policy(folder: Path) -> None:
    """The policy that all runs start from."""
    tiny_model("qwen2", **WIDE).save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")


def train(
    strategy: str,
    folder: Path,
    settings: dict[str, Any],
    *callbacks: L.Callback,
    ckpt_path: Path | None = None,
    prompts: int = 4,
) -> GRPOLightningModule:
    """All steps, or what is left of them after the checkpoint."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    devices = 1 if strategy == "one" else 2
    module = GRPOLightningModule(
        PolicyLoader(str(folder / "policy"), **settings),
        rewards=[vowel_share],
        sampling=SamplingParams(max_completion_length=6),
        objective=Objective(beta=0.0),
        optimizer=functools.partial(AdamW, lr=1e-3),
        num_generations=4,
        num_iterations=2,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES[strategy](),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, PromptSource(PROMPTS, prompts // devices, cycle=module.cycle_length(1)), ckpt_path=ckpt_path)
    return module


def savings(folder: Path) -> list[L.Callback]:
    """The last two checkpoints with a link to the newest, and the last one's weights alone."""
    return [
        ModelCheckpoint(
            folder / "whole",
            filename="{step}",
            every_n_train_steps=1,
            save_top_k=2,
            monitor="step",
            mode="max",
            save_last="link",
        ),
        ModelCheckpoint(folder / "weights", filename="{step}", every_n_train_steps=STEPS, save_weights_only=True),
    ]


def refusal(
    strategy: str, folder: Path, checkpoint: Path, settings: dict[str, Any] | None = None, prompts: int = 4
) -> str:
    """Return the error of a run that must not resume from a checkpoint."""
    try:
        train(strategy, folder, settings or {}, ckpt_path=checkpoint, prompts=prompts)
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cut(checkpoint: Path) -> str:
    """Halve a checkpoint, or the largest file of its folder, whose name is returned."""
    files = [checkpoint] if checkpoint.is_file() else [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest.name


def main(strategy: str, folder: str) -> None:
    """Train every policy, then try what must be refused."""
    torch.set_num_threads(1)
    where = Path(folder)
    numbers = {}
    for name, settings in POLICIES.items():
        module = train(strategy, where, settings, *savings(where / strategy / name))
        trained = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
        numbers[name] = sum(map(whole_size, trained))
    said = refusals(strategy, where, where / strategy / "all" / "whole" / f"step={STEPS - 1}.ckpt")
    (where / f"{strategy}-{ranks.rank()}.json").write_text(json.dumps({"trained": numbers, "said": said}))


def refusals(strategy: str, where: Path, inside: Path) -> dict[str, str]:
    """Return the errors of unusable checkpoints from inside a cycle; the last one stays damaged."""
    said = {}
    if strategy == "ddp":
        said["of one process"] = refusal(strategy, where, where / "one.ckpt", prompts=8)
    kept, aside = inside.with_name(f"{inside.name}.ranks"), where / f"{strategy}.ranks"
    on_one_rank(lambda: kept.rename(aside))
    said["without ranks' files"] = refusal(strategy, where, inside)
    on_one_rank(lambda: (aside.rename(kept), cut(inside)))
    said["half written"] = refusal(strategy, where, inside)
    return said


def on_one_rank(work: Any) -> None:
    """Do it on the first rank while the others wait."""
    ranks.gather_objects(None)
    if ranks.rank() == 0:
        work()
    ranks.gather_objects(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
