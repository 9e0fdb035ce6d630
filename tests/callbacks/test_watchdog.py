"""Rollouts that hang: in Python, which the watchdog interrupts, and in a call that no signal interrupts."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks import watchdog
from grpo_lightning.callbacks.watchdog import EXIT_STATUS, StallInterrupt, Watchdog
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers.module_runs import PROMPTS, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.helpers.paths import ROOT
from tests.marks import SLOW


class Hangs(LocalEngine):
    """Samples the probe and two rollouts, then reports one decoding step and hangs."""

    def __init__(self, hang):
        super().__init__()
        self.hang, self.num_calls = hang, 0

    def generate(self, prompts, num_generations, sampling, seeds, progress=None, *args, **kwargs):
        self.num_calls += 1
        if self.num_calls == 4:
            progress(1, sampling.max_completion_length)
            try:
                self.hang()
            except Exception:  # noqa: BLE001 - as engines and rewards may do
                pytest.fail("the interrupt is an Exception")
        return super().generate(prompts, num_generations, sampling, seeds, progress, *args, **kwargs)


def wait_for_ever():
    threading.Event().wait(60)


def run(folder, *callbacks, engine=None, max_steps=4, **options):
    module = make_module(length=3, num_generations=2, **{} if engine is None else {"engine": engine})
    saves = ModelCheckpoint(folder, every_n_train_steps=1000)
    fit(module, batch_size=2, max_steps=max_steps, callbacks=[saves, *callbacks], enable_checkpointing=True, **options)
    return module


@SLOW
@pytest.mark.parametrize("hang", [wait_for_ever, lambda: time.sleep(60)])
def test_a_rollout_that_hangs_ends_with_a_checkpoint_from_which_the_run_goes_on(tmp_path, caplog, capfd, hang):
    before = signal.getsignal(signal.SIGUSR2)
    started = time.monotonic()
    with pytest.raises(StallInterrupt, match=r"Rank 0: the rollout before step 3 has made no progress for \d+ seconds"):
        run(tmp_path / "broken", Watchdog(2.0), engine=Hangs(hang))
    assert time.monotonic() - started < 30
    assert signal.getsignal(signal.SIGUSR2) == before
    assert "has made no progress" in caplog.text
    stacks = capfd.readouterr().err
    assert "in generate" in stacks
    assert "test_watchdog.py" in stacks
    path = tmp_path / "broken" / "stalled-step=2.ckpt"
    assert f"Saved {path}" in caplog.text
    resumed = run(tmp_path / "broken", ckpt_path=str(path))
    assert are_equal(weights_of(resumed), weights_of(run(tmp_path / "whole")))


@SLOW
def test_a_validation_that_hangs_ends_the_run_without_a_checkpoint(tmp_path, caplog):
    module = make_module(length=3, num_generations=2, engine=Hangs(wait_for_ever))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    source = make_source(module, PROMPTS, batch_size=2, accumulate=1, shuffle=True)
    rows = PromptSource(PROMPTS[:1], 1, shuffle=False)
    options = {"num_sanity_val_steps": 0, "val_check_interval": 2, "enable_checkpointing": True}
    runner = make_trainer(max_steps=4, callbacks=[saves, Watchdog(2.0)], **options)
    message = r"Rank 0: the rollout of an evaluation after step 2 has made no progress for \d+ seconds"
    with pytest.raises(StallInterrupt, match=message):
        runner.fit(module, source, rows)
    assert "a run that stalls in an evaluation saves none" in caplog.text
    assert not list(tmp_path.iterdir())


def test_in_an_evaluation_the_rollout_begins_after_the_update_of_the_weights():
    """The update may wait for an asynchronous rollout, which reports its progress to nobody."""
    events = []

    class Records(LocalEngine):
        def sync_weights(self, policy):
            events.append("update")
            super().sync_weights(policy)

    class Phases(L.Callback):
        def on_evaluation_phase(self, trainer, phase):
            events.append(phase)

    module = make_module(length=3, engine=Records())
    make_trainer(callbacks=[Phases()]).validate(module, PromptSource(PROMPTS[:1], 1, shuffle=False), verbose=False)
    assert [event for event, _ in itertools.groupby(events)][-3:] == ["update", "rollout", "reward"]


BLOCKED = """
import ctypes, sys
from grpo_lightning.callbacks.watchdog import Watchdog
from tests.callbacks.test_watchdog import Hangs, run

def deadlock():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

run(sys.argv[1], Watchdog(2.0, 0.5), engine=Hangs(deadlock))
"""


@SLOW
def test_a_rollout_that_no_signal_interrupts_ends_with_a_status_and_the_stacks(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == EXIT_STATUS, ended.stderr
    assert "Rank 0: the rollout before step 3 has made no progress" in ended.stderr
    assert "in deadlock" in ended.stderr
    assert "the main thread does not react" in ended.stderr


@SLOW
def test_progress_and_other_phases_keep_the_run_alive(monkeypatch):
    callback, ended = Watchdog(0.5), []
    monkeypatch.setattr(callback, "end", lambda *_: ended.append(callback.phase))
    callback.on_train_start(trainer(), None)
    callback.on_phase(None, "rollout")
    for done in range(10):
        time.sleep(0.1)
        callback.on_decode(None, done, 10)
    for phase in ("reward", "update"):
        callback.on_phase(None, phase)
        time.sleep(0.7)
    for phase in ("reward", "rollout"):  # before its first decoding step, a rank may wait for the other ranks
        callback.on_evaluation_phase(None, phase)
        time.sleep(0.7)
    callback.on_rollout()
    time.sleep(0.7)
    assert ended == []
    callback.on_phase(None, "rollout")
    time.sleep(1.0)
    assert ended == ["rollout"]
    callback.on_train_end()


def trainer():
    return SimpleNamespace(global_step=4, strategy=SimpleNamespace(launcher=None), checkpoint_callback=None)


def test_with_several_ranks_no_rank_saves_alone(monkeypatch, caplog):
    monkeypatch.setattr(watchdog.ranks, "world_size", lambda: 2)
    Watchdog(dirpath="x").on_exception(trainer(), None, StallInterrupt("stalled"))  # would raise an AttributeError
    assert "Resume the run from its newest checkpoint" in caplog.text


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert str(Watchdog(dirpath="~/mine").folder(trainer())) == "/me/mine"


def test_other_signals_and_errors_are_none_of_its_business(caplog):
    callback = Watchdog()
    callback.on_train_start(trainer(), None)
    signal.raise_signal(signal.SIGUSR2)
    assert "SIGUSR2 is ignored" in caplog.text
    callback.on_exception(trainer(), None, ValueError())
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_signal_of_slurm_is_not_taken():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    own = signal.getsignal(signal.SIGUSR2)
    try:
        callback = Watchdog()
        callback.on_train_start(trainer(), None)
        assert signal.getsignal(signal.SIGUSR2) == own
        assert signal.getsignal(signal.SIGUSR1) == callback.interrupt
        callback.on_train_end()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_null_turns_it_off():
    threads = threading.active_count()
    callback = Watchdog(stall_seconds=None)
    callback.on_train_start(trainer(), None)
    assert (callback.old_handler, threading.active_count()) == (None, threads)


@pytest.mark.parametrize("settings", [{"stall_seconds": 0}, {"grace_seconds": -1}])
def test_values_that_make_no_sense_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"Watchdog\.{name} must be above 0.*, got {settings[name]}"):
        Watchdog(**settings)


def test_the_command_line_watches_unless_the_recipe_has_a_watchdog_of_its_own():
    from jsonargparse import Namespace

    from grpo_lightning.cli.runs import default_callbacks

    settings = Namespace(trainer=Namespace(), ckpt_path=None)
    (default,) = [each for each in default_callbacks("fit", settings, []) if isinstance(each, Watchdog)]
    assert default.stall_seconds == 1800
    assert not [each for each in default_callbacks("validate", settings, []) if isinstance(each, Watchdog)]
    own = [Watchdog(None)]
    assert not [each for each in default_callbacks("fit", settings, own) if isinstance(each, Watchdog)]


@SLOW
def test_without_anybody_who_catches_it_the_message_is_printed():
    start = "from grpo_lightning.callbacks.watchdog import StallInterrupt; raise StallInterrupt('Rank 0: no progress.')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", start]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "Rank 0: no progress.\n")
