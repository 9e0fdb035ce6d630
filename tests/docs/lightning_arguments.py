"""Runs that check the rows of docs/lightning.md about arguments of the Trainer."""

from __future__ import annotations

import csv
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.lightning_rows import CASES, Count, case, plain_weights, run
from tests.helpers.module_runs import (
    PROMPTS,
    are_equal,
    fit,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)

HARMLESS: dict[str, dict[str, Any]] = {
    "accelerator": {"accelerator": "auto"},
    "devices": {"devices": "auto"},
    "num_nodes": {"num_nodes": 1},
    "benchmark": {"benchmark": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "model_registry": {"model_registry": "organization/model"},
}
"""Arguments that change nothing on one device; tests/distributed has several."""


def nothing_changes(flags: dict[str, Any]) -> Callable[[Path], None]:
    """The case of an argument that leaves the weights as they are."""

    def check(folder: Path) -> None:
        module, trainer = run(**({"max_epochs": 2} | flags))
        assert trainer.global_step == 4
        assert are_equal(weights_of(module), plain_weights(2))

    return check


CASES.update({name: nothing_changes(flags) for name, flags in HARMLESS.items()})


@case("strategy")
def strategy(folder: Path) -> None:
    for name in ("deepspeed_stage_2", "deepspeed_stage_3"):
        with pytest.raises(ValueError, match=r"divides the loss by accumulate_grad_batches twice\. .*zero3"):
            run(strategy=name)
    assert are_equal(weights_of(run(strategy=SingleDeviceStrategy("cpu"))[0]), plain_weights())
    try:
        assert are_equal(weights_of(run(strategy="ddp", devices=1)[0]), plain_weights())
    finally:
        torch.distributed.destroy_process_group()


@case("detect_anomaly")
def detect_anomaly(folder: Path) -> None:
    tiny = {"length": 2, "num_generations": 2}  # every operation keeps its stack trace
    modules = [run(module=tiny, limit_train_batches=1, detect_anomaly=value)[0] for value in (True, False)]
    assert are_equal(*map(weights_of, modules))
    with pytest.raises(RuntimeError, match="returned nan values"):
        run(NanGradient(), module=tiny, limit_train_batches=1, detect_anomaly=True)


class NanGradient(L.Callback):
    """Makes the first backward pass produce a nan."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * torch.nan)


@case("deterministic")
def deterministic(folder: Path) -> None:
    module, _ = run(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert are_equal(weights_of(module), plain_weights())


@case("precision")
def precision(folder: Path) -> None:
    for name, dtype in {"bf16-mixed": torch.float32, "64-true": torch.float64}.items():
        module, trainer = run(precision=name)
        assert {weight.dtype for weight in module.policy.parameters()} == {dtype}
        assert torch.isfinite(trainer.callback_metrics["policy/loss"])
    for name in ("bf16-true", "16-true"):  # at GRPO's learning rates 16-bit weights stay where they are
        with pytest.raises(ValueError, match=r"16 bits, .* updates at usual learning rates would be lost to rounding"):
            run(precision=name)


@case("max_time")
def max_time(folder: Path) -> None:
    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.15)
        return [float(len(text)) for text in completions]

    module, trainer = run(
        module={"rewards": [slow], "updates_per_rollout": 2},
        max_epochs=-1,
        max_time=datetime.timedelta(seconds=0.1),
        accumulate_grad_batches=2,
    )
    assert trainer.global_step == 1
    assert module.run.cycle.position == 2  # the whole step, of the cycle's four micro-steps


@case("min_epochs")
def min_epochs(folder: Path) -> None:
    def stopping() -> L.Callback:
        return callbacks.EarlyStopping("reward/mean", mode="max", stopping_threshold=0.0, check_on_train_epoch_end=True)

    assert run(stopping(), max_epochs=4)[1].current_epoch == 1
    assert run(stopping(), max_epochs=4, min_epochs=3)[1].current_epoch == 3


@case("limit_val_batches", "limit_test_batches", "limit_predict_batches")
def limits_of_evaluation(folder: Path) -> None:
    count, prompts = Count(), PromptSource(PROMPTS[:4], 1, shuffle=False)
    run(count, val=True, limit_val_batches=2)
    assert count.batches == 2
    trainer = make_trainer(limit_test_batches=1, limit_predict_batches=3)
    (metrics,) = trainer.test(make_module(), PromptSource(PROMPTS[:2], 1, shuffle=False), verbose=False)
    (one,) = make_trainer().test(make_module(), PromptSource(PROMPTS[:1], 1, shuffle=False), verbose=False)
    assert metrics == one
    assert len(trainer.predict(make_module(), prompts)) == 3


@case("check_val_every_n_epoch")
def check_val_every_n_epoch(folder: Path) -> None:
    count = Count()
    run(count, val=True, max_epochs=4, check_val_every_n_epoch=2)
    assert count.validations == [4, 8]


@case("num_sanity_val_steps")
def num_sanity_val_steps(folder: Path) -> None:
    count = Count()
    run(count, val=True, num_sanity_val_steps=2, limit_train_batches=0)
    assert count.batches == 2


@case("gradient_clip_algorithm")
def gradient_clip_algorithm(folder: Path) -> None:
    module = make_module(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    module.configure_model()
    before = weights_of(module)
    fit(module, max_steps=1, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    largest = max((weights - before[name]).abs().max().item() for name, weights in weights_of(module).items())
    assert largest == pytest.approx(1e-3, rel=1e-2)


@case("profiler")
def profiler(folder: Path) -> None:
    simple = SimpleProfiler()
    run(profiler=simple)
    assert len(simple.recorded_durations["run_training_batch"]) == 2


@case("logger", "log_every_n_steps")
def logger_and_its_interval(folder: Path) -> None:
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    module = {"num_iterations": 3}
    run(logger=logger, log_every_n_steps=3, max_epochs=2, accumulate_grad_batches=2, module=module)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # Every rollout, in the first of its three steps, and every third optimizer step, though a step has two micro-steps.
    assert [int(row["step"]) for row in rows if row.get("reward/mean")] == [0, 3, 6, 9]
    assert [int(row["step"]) for row in rows if row.get("policy/loss")] == [0, 2, 3, 5, 6, 8, 9, 11]


@case("enable_checkpointing", "default_root_dir")
def checkpoints_by_default(folder: Path) -> None:
    run(enable_checkpointing=True, default_root_dir=folder / "root")
    assert [path.name for path in (folder / "root").rglob("*.ckpt")] == ["epoch=0-step=2.ckpt"]
    run(enable_checkpointing=False, default_root_dir=folder / "other")
    assert not list((folder / "other").rglob("*.ckpt"))


@case("enable_progress_bar", "enable_model_summary")
def bar_and_summary(folder: Path) -> None:
    for is_on in (True, False):
        _, trainer = run(enable_progress_bar=is_on, enable_model_summary=is_on)
        assert (trainer.progress_bar_callback is not None) == is_on
        assert any(isinstance(callback, callbacks.ModelSummary) for callback in trainer.callbacks) == is_on


@case("callbacks", "LambdaCallback")
def callbacks_are_called(folder: Path) -> None:
    ends: list[int] = []
    run(callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, _: ends.append(trainer.global_step)), max_epochs=2)
    assert ends == [2, 4]


@case("plugins")
def plugins(folder: Path) -> None:
    saving = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module, _ = run(saving, enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    resumed, _ = run(ckpt_path=folder / "step=1.ckpt")
    assert are_equal(weights_of(resumed), weights_of(module))


@case("inference_mode")
def inference_mode(folder: Path) -> None:
    metrics = [run(val=True, inference_mode=value)[1].callback_metrics["val/reward"] for value in (True, False)]
    assert metrics[0] == metrics[1]


@case("barebones")
def barebones(folder: Path) -> None:
    module = make_module()
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, barebones=True)
    with pytest.warns(UserWarning, match="barebones"):
        trainer.fit(module, make_source(module))
    assert are_equal(weights_of(module), plain_weights())
    assert not trainer.callback_metrics


@case("enable_autolog_hparams")
def enable_autolog_hparams(folder: Path) -> None:
    for is_on in (True, False):
        logger = CSVLogger(folder, name=str(is_on))
        run(logger=logger, log_every_n_steps=1, enable_autolog_hparams=is_on, module={"num_generations": 3})
        file = Path(logger.log_dir, "hparams.yaml")
        assert ("num_generations: 3" in (file.read_text() if file.exists() else "")) == is_on
