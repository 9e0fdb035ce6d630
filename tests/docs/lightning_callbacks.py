"""Runs that check the rows of docs/lightning.md about callbacks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger

from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.training.checks import REFUSED_CALLBACKS
from tests.helpers.lightning_rows import case, plain_weights, run
from tests.helpers.module_runs import (
    PROMPTS,
    History,
    are_equal,
    fit,
    make_module,
    make_trainer,
    weights_of,
)


@case("ModelCheckpoint")
def model_checkpoint(folder: Path) -> None:
    best = callbacks.ModelCheckpoint(folder, monitor="val/reward", mode="max")
    every = callbacks.ModelCheckpoint(folder / "all", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    _, trainer = run(best, every, val=True, max_epochs=2, accumulate_grad_batches=2, enable_checkpointing=True)
    assert best.best_model_score >= trainer.callback_metrics["val/reward"]
    assert sorted(path.stem for path in (folder / "all").iterdir()) == ["step=2", "step=4"]


class Fail(L.Callback):
    """Raises at the end of an optimizer step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise OSError("the disk is full")


class FailInside(L.Callback):
    """Raises inside an optimizer step, after its prompts were taken."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 1:
            raise OSError("the disk is full")


@case("OnExceptionCheckpoint")
def on_exception_checkpoint(folder: Path) -> None:
    with pytest.warns(UserWarning, match="ckpt_path"), pytest.raises(OSError, match="disk"):
        run(callbacks.OnExceptionCheckpoint(folder), Fail(), max_epochs=2, enable_checkpointing=True)
    resumed, _ = run(max_epochs=2, ckpt_path=folder / "on_exception.ckpt")
    assert are_equal(weights_of(resumed), plain_weights(2))
    with pytest.warns(UserWarning, match="ckpt_path"), pytest.raises(OSError, match="disk"):
        run(callbacks.OnExceptionCheckpoint(folder / "inside"), FailInside(), max_epochs=2, enable_checkpointing=True)
    resumed, _ = run(max_epochs=2, ckpt_path=folder / "inside" / "on_exception.ckpt")
    assert are_equal(weights_of(resumed), plain_weights(2))


class Weights(L.Callback):
    """The weights after every optimizer step, and those in use in every validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.steps.append(weights_of(pl_module))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.validated.append(weights_of(pl_module))


def is_mean(weights: dict[str, torch.Tensor], steps: list[dict[str, torch.Tensor]]) -> bool:
    """True if these are the mean of the others."""
    return all(
        torch.allclose(value, torch.stack([step[name] for step in steps]).mean(0), atol=1e-6)
        for name, value in weights.items()
    )


@case("WeightAveraging", "EMAWeightAveraging")
def weight_averaging(folder: Path) -> None:
    seen = Weights()
    with pytest.warns(UserWarning, match="WeightAveraging doesn't support sharding"):
        module, _ = run(callbacks.WeightAveraging(), seen, val=True, max_epochs=2)
    assert is_mean(weights_of(module), seen.steps)
    assert is_mean(seen.validated[0], seen.steps[:2])
    assert are_equal(seen.steps[-1], plain_weights(2))  # training itself is as it was
    with pytest.warns(UserWarning, match="WeightAveraging doesn't support sharding"):
        moving, _ = run(callbacks.EMAWeightAveraging(decay=0.5), max_epochs=2)
    assert not are_equal(weights_of(moving), seen.steps[-1])


REFUSED = {
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-3),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({1: 2}),
    "BatchSizeFinder": callbacks.BatchSizeFinder,
    "LearningRateFinder": callbacks.LearningRateFinder,
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(1),
}


@case(*REFUSED)
def refused(folder: Path) -> None:
    assert REFUSED.keys() == REFUSED_CALLBACKS.keys()
    for name, make in REFUSED.items():
        with pytest.raises(ValueError, match=f"{name} does not work with GRPO: "):
            run(make())


@case("SpikeDetection")
def spike_detection(folder: Path) -> None:
    losses = History()
    run(losses, module={"updates_per_rollout": 2})
    assert all(abs(loss) < 0.2 for loss in losses.of("policy/loss"))  # healthy, and about 0
    with pytest.raises(RuntimeError, match="Training spike detected"):
        run(callbacks.SpikeDetection(exclude_batches_path=str(folder / "skip.json")), module={"updates_per_rollout": 2})


class Embeddings(callbacks.BaseFinetuning):
    """Trains the embeddings from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.policy.get_input_embeddings())

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.policy.get_input_embeddings(), optimizer)


@case("BaseFinetuning")
def base_finetuning(folder: Path) -> None:
    with pytest.raises(AttributeError, match="policy"):
        run(Embeddings())
    seen, name = Weights(), "model.embed_tokens.weight"
    module = make_module()
    module.configure_model()
    before = weights_of(module)
    fit(module, max_epochs=2, callbacks=[Embeddings(), seen])
    first, second = seen.steps[1], seen.steps[3]
    assert torch.equal(first[name], before[name])
    assert not torch.equal(second[name], first[name])
    assert not are_equal(first, before)


@case("DeviceStatsMonitor")
def device_stats_monitor(folder: Path) -> None:
    logger = CSVLogger(folder)
    run(callbacks.DeviceStatsMonitor(cpu_stats=True), logger=logger, log_every_n_steps=1)
    assert "cpu_percent" in Path(logger.log_dir, "metrics.csv").read_text()


@case("ThroughputMonitor")
def throughput_monitor(folder: Path) -> None:
    logger, monitor = CSVLogger(folder), callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        run(monitor, logger=logger, log_every_n_steps=1, module={"num_iterations": 2})
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (name,) = [name for name in rows[0] if name.endswith("samples")]
    assert [row[name] for row in rows if row[name]][-1] == "16"  # 8 prompts, seen in two micro-steps each


@case("ModelSummary", "RichModelSummary")
def model_summaries(folder: Path) -> None:
    for kind in (callbacks.ModelSummary, callbacks.RichModelSummary):
        summary = kind(max_depth=2)
        _, trainer = run(summary, enable_model_summary=True)
        assert "policy" in str(summary._summary(trainer, trainer.lightning_module))


@case("TQDMProgressBar", "RichProgressBar")
def progress_bars(folder: Path) -> None:
    tqdm = callbacks.TQDMProgressBar()
    run(tqdm, enable_progress_bar=True, module={"num_iterations": 2})
    assert tqdm.train_progress_bar.total == 4  # micro-steps
    rich = callbacks.RichProgressBar()
    run(rich, enable_progress_bar=True)
    assert rich.train_progress_bar_id is not None


class Written(callbacks.BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.records: list[dict[str, Any]] = []

    def write_on_batch_end(self, trainer: L.Trainer, pl_module: Any, prediction: Any, *_: Any) -> None:
        self.records += prediction


@case("BasePredictionWriter")
def base_prediction_writer(folder: Path) -> None:
    writer = Written()
    with pytest.warns(UserWarning, match="Couldn't infer the batch indices"):
        make_trainer(callbacks=[writer]).predict(make_module(), PromptSource(PROMPTS[:3], 2, shuffle=False))
    assert [record["prompt"] for record in writer.records] == PROMPTS[:3]
