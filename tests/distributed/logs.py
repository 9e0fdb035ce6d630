"""Logs, evaluations and files, on one rank or two: `python -m tests.distributed.logs FOLDER`.

The completions follow from the prompts alone, so that all of it is the same on any number of ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from grpo_lightning.callbacks import BeforeAfter, CompletionLog, LearningCurves, RunRecord, WritePredictions
from grpo_lightning.core import ranks
from grpo_lightning.core.types import Completion, Prompt, SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import WeightedReward
from grpo_lightning.training.validation import Validation
from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

BATCH = 4
"""Prompts per rollout, over all ranks."""

TEXTS = ["one", "two of them", "3", "number four is", "five", "the sixth of all", "7!", "eight", "last"]
# Nine prompts: of two ranks, the second has none of the last rollout. What `rare` applies to, the first rank alone has.
PROMPTS = [
    Prompt(
        text,
        {"odd": i % 2},
        index=i,
        source="right" if i % 2 else "left",
        rewards=["letters", "fails", "rare"] if i == 2 else ["letters", "fails"],
    )
    for i, text in enumerate(TEXTS)
]


class ByPrompt:
    """Completions that the prompt says, some of them truncated."""

    def connect(self, policy: Any, tokenizer: Any, *others: Any) -> None:
        self.tokenizer = tokenizer

    def sync_weights(self, policy: Any) -> None:
        pass

    def generate(self, prompts: list[list[int]], num_generations: int, *others: Any) -> list[list[Completion]]:
        return [[self.completion(prompt, number) for number in range(num_generations)] for prompt in prompts]

    def completion(self, prompt: list[int], number: int) -> Completion:
        generator = torch.Generator().manual_seed(sum(prompt) * 100 + number)
        ids = torch.randint(2, 97, (2 + (sum(prompt) + 3 * number) % 7,), generator=generator).tolist()
        reason = "length" if (len(ids) + number) % 3 == 0 else "stop"
        return Completion(ids, [-1.0] * len(ids), reason, self.tokenizer.decode(ids))


def letters(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
    log_extra("note", [object.__new__(type("Local", (), {"__repr__": lambda self: "x"})) for _ in completions])
    log_metric("seen", 2.0)
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]


def fails(completions: list[str], odd: list[int]) -> list[float | None]:
    """NaN for the prompts at odd places, which the second of two ranks has."""
    return [float("nan") if is_odd else float(len(text)) for text, is_odd in zip(completions, odd, strict=True)]


def rare(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Steps(L.Callback):
    """The metrics of every optimizer step, in the order they were logged in."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class ReadOnRankZero(L.Callback):
    """Reads a validation metric on rank 0 only, and sends it to the other ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        value = float(trainer.callback_metrics["val/letters"]) if trainer.is_global_zero else None
        self.values.append(trainer.strategy.broadcast(value))


def make_module() -> GRPOLightningModule:
    return GRPOLightningModule(
        tiny_model("qwen2", **SMALL),
        rewards=[
            letters,
            WeightedReward(fails, weight=0.1, on_error="none"),
            WeightedReward(rare, weight=0.5),
        ],
        tokenizer=tiny_tokenizer(),
        engine=ByPrompt(),
        sampling=SamplingParams(max_completion_length=10),
        objective=Objective(beta=0.0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        validation=Validation(num_generations=2, greedy=True),
        num_generations=4,
        seed=0,
    )


def make_trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=ranks_of_run(),
        strategy="ddp" if ranks_of_run() > 1 else "auto",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def ranks_of_run() -> int:
    return int(sys.argv[2])


def source(prompts: list[Prompt] = PROMPTS, **options: Any) -> PromptSource:
    """Says nothing of ranks: the process group is asked."""
    return PromptSource(prompts, BATCH // ranks_of_run(), shuffle=False, **options)


def train(folder: Path) -> dict[str, Any]:
    """An epoch, with the callbacks that write and those that monitor."""
    steps, reader = Steps(), ReadOnRankZero()
    stopping = EarlyStopping("val/letters", patience=1, min_delta=10.0)
    callbacks = [
        steps,
        CompletionLog(dirpath=str(folder), token_logprobs=True),
        RunRecord(dirpath=str(folder)),
        BeforeAfter("letters", num_samples=3, dirpath=str(folder)),
        LearningCurves(dirpath=str(folder)),
        stopping,
        reader,
    ]
    trainer = make_trainer(folder, *callbacks, max_epochs=5, num_sanity_val_steps=0)
    trainer.fit(make_module(), source(), source(PROMPTS[:5]))
    return {
        "steps": steps.steps,
        "names": [list(step) for step in steps.steps],
        "best": float(stopping.best_score),
        "epochs": trainer.current_epoch,
        "read": reader.values,
        "monitored": {name: float(value) for name, value in trainer.callback_metrics.items() if "val/" in name},
    }


def validate(folder: Path) -> dict[str, float]:
    """All prompts; of a batch, the second rank may have none."""
    trainer = make_trainer(folder)
    trainer.validate(make_module(), source(), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def predict(folder: Path) -> dict[str, Any]:
    """From a source; and from a loader of Lightning's kind, which has more batches on one rank than on the other."""
    for name, loader in {
        "source": source(),
        "loader": DataLoader(PROMPTS, batch_size=2, collate_fn=list),
    }.items():
        callback = WritePredictions(str(folder / name))
        make_trainer(folder, callback).predict(make_module(), loader, return_predictions=False)
    return {"num_lines": callback.num_lines}


def main(folder: str, world_size: str) -> None:
    """Run everything, and write what came out on this rank."""
    torch.set_num_threads(1)
    place = Path(folder) / f"of{world_size}"
    found = {case.__name__: case(place / case.__name__) for case in (train, validate, predict)}
    (Path(folder) / f"of{world_size}-{ranks.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
