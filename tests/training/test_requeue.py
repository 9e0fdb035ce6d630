"""SLURM's signal is answered between optimizer steps, by all ranks at once."""

import os
import signal
import stat

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from grpo_lightning.module import GRPOLightningModule
from tests.module_runs import are_equal, fit, make_module, weights_of


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch):
    """A job of one task, with a `scontrol` that notes what it is asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> asked.txt\n')
    (tmp_path / "scontrol").chmod(stat.S_IRWXU)
    settings = {"JOB_ID": "77", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


class Signalled(L.Callback):
    """Sends SLURM's signal before the second micro-batch of a step, and notes where the run was when it ended."""

    def __init__(self, step=1, signum=signal.SIGUSR1):
        self.step, self.signum = step, signum
        self.is_sent = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and batch_idx % 2 == 1 and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.signum)


def run(*callbacks, plugin=None, **options):
    module = make_module(GRPOLightningModule, length=3, num_generations=2)
    flags = {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 2, "default_root_dir": "root"} | options
    plugins = {} if plugin is None else {"plugins": [plugin]}
    trainer = fit(module, batch_size=2, callbacks=list(callbacks), **flags, **plugins)
    return module, trainer


def test_the_checkpoint_is_that_of_a_whole_step_and_the_run_goes_on_from_it(job):
    with pytest.raises(SystemExit):
        run(Signalled())
    assert (job / "asked.txt").read_text() == "requeue 77\n"
    assert [path.name for path in (job / "root").iterdir()] == ["hpc_ckpt_1.ckpt"]
    resumed, trainer = run()  # Lightning finds it
    assert trainer.ckpt_path == str(job / "root" / "hpc_ckpt_1.ckpt") or trainer.ckpt_path.endswith("hpc_ckpt_1.ckpt")
    whole, _ = run(default_root_dir="elsewhere")
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_a_run_that_is_over_is_not_done_again(job):
    run(Signalled(step=3))
    assert not (job / "asked.txt").exists()


def test_another_signal_may_be_asked_for(job):
    with pytest.raises(SystemExit):
        run(Signalled(signum=signal.SIGUSR2), plugin=SLURMEnvironment(requeue_signal=signal.SIGUSR2))
    assert (job / "asked.txt").exists()


@pytest.mark.parametrize("kind", ["no auto-requeue", "no SLURM"])
def test_without_a_handler_of_lightnings_nothing_is_taken(monkeypatch, kind):
    if kind == "no SLURM":
        monkeypatch.delenv("SLURM_NTASKS")
    before = signal.getsignal(signal.SIGUSR1)

    class Look(L.Callback):
        def on_train_batch_end(self, *args):
            assert signal.getsignal(signal.SIGUSR1) == before

    run(Look(), plugin=SLURMEnvironment(auto_requeue=False) if kind == "no auto-requeue" else None, max_steps=1)
