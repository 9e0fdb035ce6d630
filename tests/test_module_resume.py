"""Killed and resumed, a run ends with the weights of the unbroken one, bit for bit."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from grpo_lightning.data.source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.schedules import AdamW, Cosine
from tests.module_runs import SMALL, History, are_equal, make_module, make_source, make_trainer, weights_of
from tests.tiny_models import tiny_model

PROMPTS = [f"question {i} {'.' * i}" for i in range(5)]
CYCLE = 8
EPOCH = 2 * CYCLE  # two cycles, of three and two prompts
RUN = 3 * EPOCH


class Killed(Exception):
    """Stands in for SIGKILL: nothing of ours may run any more."""


class KillAt(L.Callback):
    """Ends the process, or raises, at a micro-step (counted over the run, from 1) in a hook."""

    def __init__(self, micro_step: int, hook: str = "on_train_batch_end", *, for_real: bool = False) -> None:
        self.micro_step, self.for_real = micro_step, for_real
        setattr(self, hook, self.strike)

    def strike(self, trainer, *args) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.micro_step:
            if self.for_real:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed


def two_updates(**options):
    """Every part of a cycle: two updates of two micro-batches, twice, with a reference and a schedule."""
    settings = {
        "objective": Objective(beta=0.04),
        "num_iterations": 2,
        "updates_per_rollout": 2,
        "num_generations": 3,
        "length": 5,
        "scheduler": Cosine,
    }
    return make_module(**(settings | options))


def train(folder, *callbacks, resume=False, module=None, prompts=PROMPTS, shuffle=True, **trainer):
    """One run that saves after every optimizer step; with `resume` it goes on from the newest checkpoint."""
    module = module or two_updates()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"max_epochs": RUN // EPOCH, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    runner = make_trainer(callbacks=[*callbacks, saving], enable_checkpointing=True, **(settings | trainer))
    source = make_source(module, prompts, batch_size=3, accumulate=runner.accumulate_grad_batches, shuffle=shuffle)
    runner.fit(module, source, ckpt_path=newest(folder) if resume else None)
    return module


def newest(folder):
    """The checkpoint after the most optimizer steps; None if there is none yet."""
    found = {int(re.search(r"step=(\d+)", path.stem)[1]): path for path in Path(folder).glob("*.ckpt")}
    return str(found[max(found)]) if found else None


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    history = History()
    module = train(tmp_path_factory.mktemp("unbroken"), history)
    assert len(history.steps) == RUN // 2
    return weights_of(module), history.steps


@pytest.mark.parametrize(
    ("micro_step", "hook"),
    [
        pytest.param(1, "on_after_backward", id="before any checkpoint"),
        pytest.param(3, "on_train_batch_end", id="inside an accumulation window"),
        pytest.param(4, "on_before_optimizer_step", id="between backward and step"),
        pytest.param(6, "on_train_batch_start", id="after the first iteration began"),
        pytest.param(CYCLE, "on_train_batch_end", id="at a cycle's end, not saved"),
        pytest.param(CYCLE + 1, "on_train_batch_start", id="at a cycle's end, saved"),
        pytest.param(CYCLE + 5, "on_after_backward", id="inside a cycle of fewer prompts"),
        pytest.param(EPOCH, "on_train_epoch_end", id="at the epoch's end"),
        pytest.param(EPOCH + 1, "on_train_batch_start", id="at the start of epoch 2"),
        pytest.param(EPOCH + 7, "on_after_backward", id="in epoch 2"),
        pytest.param(2 * EPOCH + CYCLE, "on_train_batch_end", id="in epoch 3"),
        pytest.param(RUN, "on_train_batch_end", id="at the last step"),
    ],
)
def test_a_killed_run_resumes_exactly(unbroken, tmp_path, micro_step, hook):
    with pytest.raises(Killed):
        train(tmp_path, KillAt(micro_step, hook))
    history = History()
    resumed = train(tmp_path, history, resume=True)
    want_weights, want_steps = unbroken
    assert are_equal(weights_of(resumed), want_weights)
    for name in ("policy/loss", "policy/kl", "policy/grad_norm"):
        assert history.steps[-1][name] == want_steps[-1][name]


def test_killed_again_and_again(unbroken, tmp_path):
    for micro_step in (5, 11, 12, 30):
        with pytest.raises(Killed):
            train(tmp_path, KillAt(micro_step, "on_after_backward"), resume=True)
    assert are_equal(weights_of(train(tmp_path, resume=True)), unbroken[0])
