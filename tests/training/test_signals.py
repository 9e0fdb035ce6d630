"""Runs that a signal (SLURM, Ctrl-C, SIGTERM) or an error ends: their checkpoint, and the last weights if resumed."""

import json
import logging
import os
import pty
import runpy
import select
import signal
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.plugins.environments import SLURMEnvironment

from grpo_lightning.cli import main
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training import signals
from grpo_lightning.training.signals import SIGNALS, GracefulStop
from tests.helpers.module_runs import are_equal, fit, make_module, weights_of
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW

# --------------------------------------------------------------------------------------------------------------- SLURM


@pytest.fixture
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


class Signaled(L.Callback):
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


@SLOW
def test_the_checkpoint_is_that_of_a_whole_step_and_the_run_goes_on_from_it(job):
    with pytest.raises(SystemExit):
        run(Signaled())
    assert (job / "asked.txt").read_text() == "requeue 77\n"
    assert [path.name for path in (job / "root").iterdir()] == ["hpc_ckpt_1.ckpt"]
    resumed, trainer = run()  # Lightning finds it
    assert trainer.ckpt_path == str(job / "root" / "hpc_ckpt_1.ckpt") or trainer.ckpt_path.endswith("hpc_ckpt_1.ckpt")
    whole, _ = run(default_root_dir="elsewhere")
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_a_run_that_is_over_is_not_done_again(job):
    run(Signaled(step=3))
    assert not (job / "asked.txt").exists()


def test_another_signal_may_be_asked_for(job):
    with pytest.raises(SystemExit):
        run(Signaled(signum=signal.SIGUSR2), plugin=SLURMEnvironment(requeue_signal=signal.SIGUSR2))
    assert (job / "asked.txt").exists()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("kind", ["no auto-requeue", "no SLURM"])
def test_without_a_handler_of_lightnings_nothing_is_taken(monkeypatch, kind):
    if kind == "no SLURM":
        monkeypatch.delenv("SLURM_NTASKS")
    before = signal.getsignal(signal.SIGUSR1)

    class Look(L.Callback):
        def on_train_batch_end(self, *args):
            assert signal.getsignal(signal.SIGUSR1) == before

    run(Look(), plugin=SLURMEnvironment(auto_requeue=False) if kind == "no auto-requeue" else None, max_steps=1)


# ----------------------------------------------------------------------------------------------------- Ctrl-C, SIGTERM


STEPS = 6
# Sends itself the signals in the middle of its third step: the second of two micro-batches is still to come.
REWARDS = """
import os, signal

calls = 0

def lengths(completions):
    global calls
    calls += 1
    if calls == 3:
        for signum in os.environ.get("SEND", "").split():
            os.kill(os.getpid(), int(signum))
    return [float(len(set(text))) for text in completions]

lengths.in_process = True  # the signal is for the run
"""


@pytest.fixture
def folder(tmp_path):
    """A recipe with its model, data and reward."""
    tiny_model("qwen2", hidden_size=32, intermediate_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "interrupting.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(16)))
    recipe = {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": STEPS,
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "data": {"datasets": [{"json_path": "rows.jsonl"}], "batch_size": 2},
        "model": {
            "policy": "policy",
            "rewards": ["interrupting.lengths"],
            "num_generations": 4,
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}},
            "sampling": {"max_completion_length": 8},
        },
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def command_line(folder, *flags, send=()):
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["SEND"] = " ".join(str(int(signum)) for signum in send)
    start = "from grpo_lightning.cli import entry_point; entry_point()"
    command = [sys.executable, "-W", "ignore", "-c", start, "fit", "--config", "r.yaml", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def newest_checkpoint(folder):
    (path,) = (folder / "checkpoints").glob(f"epoch=*-step={STEPS}.ckpt")
    return torch.load(path, map_location="cpu", weights_only=True)


def newest_weights(folder):
    return newest_checkpoint(folder)["state_dict"]


@pytest.fixture
def one_thread():
    """As a started command line has: the same sums, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@SLOW
@pytest.mark.usefixtures("one_thread")
def test_a_stopped_run_goes_on_to_the_weights_of_an_unbroken_one(folder, monkeypatch):
    # `timeout` and `make` also send it twice.
    stopped = command_line(folder, "--run_name=broken", send=[signal.SIGINT, signal.SIGINT])
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr.count("stopping after this step") == 1
    assert stopped.stderr.splitlines()[-1].endswith("; resume with the same command and --ckpt_path auto.")
    broken = folder / "runs" / "broken" / "version_0"
    (path,) = (broken / "checkpoints").glob("*.ckpt")
    assert path.name.startswith("stopped-step=")
    step = int(path.stem.partition("=")[2])
    assert 0 < step < STEPS
    assert f"Stopped at step {step};" in stopped.stderr
    # Nothing is sent to these: they run in this process, which has imported everything.
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    main(["fit", "--config", "r.yaml", "--run_name=broken", "--ckpt_path", "auto"])
    main(["fit", "--config", "r.yaml", "--run_name=whole"])
    expected, got = newest_weights(folder / "runs" / "whole" / "version_0"), newest_weights(broken)
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


@pytest.mark.slow
def test_sigterm_stops_a_run_too_and_without_checkpoints_nothing_is_promised(folder):
    stopped = command_line(folder, "--trainer.enable_checkpointing=false", send=[signal.SIGTERM])
    assert stopped.returncode == 143, stopped.stderr
    assert "Stopped at step" in stopped.stderr
    assert "ckpt_path" not in stopped.stderr
    assert not list(folder.rglob("*.ckpt"))


class SingleProcess:
    """Attributes of a Trainer that the callback reads when a signal arrives."""

    strategy = type("Strategy", (), {"launcher": None})()
    is_global_zero = True
    global_step = 0


@pytest.fixture
def interruptible():
    """Jobs in the background of a shell ignore Ctrl-C, and `nohup` SIGHUP, and so would the tests that they run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for signum, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(signum, handler)


@pytest.mark.usefixtures("interruptible")
def test_the_second_signal_is_handled_as_ever(tmp_path, capfd, monkeypatch):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    assert signal.getsignal(signal.SIGINT) == callback.receive
    signal.raise_signal(signal.SIGINT)
    message = "Ctrl-C: stopping after this step; Ctrl-C again stops at once without saving a checkpoint."
    assert message in capfd.readouterr().err
    assert callback.exit_code == 130
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("signum", SIGNALS)
def test_two_signals_at_once_are_one(tmp_path, capfd, signum):
    """`timeout` and `make` send a signal to the process and to its group."""
    before = [signal.getsignal(signum) for signum in SIGNALS]
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    for _ in range(3):
        signal.raise_signal(signum)
    assert capfd.readouterr().err.count("stopping after this step") == 1
    callback.on_train_end(None, None)
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_later_sigterm_or_sighup_is_ignored(tmp_path, monkeypatch, capfd, first, second):
    """When a user logs out, systemd sends both."""
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    signal.raise_signal(first)
    signal.raise_signal(second)
    assert capfd.readouterr().err.count("stopping after this step") == 1
    assert callback.exit_code == 128 + first
    callback.on_train_end(None, None)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_sighup_that_somebody_else_handles_is_left_alone(tmp_path, handler):
    """For example `nohup`."""
    before = signal.signal(signal.SIGHUP, handler)
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    signal.raise_signal(signal.SIGHUP)
    callback.on_train_end(None, None)
    assert callback.received is None
    assert signal.signal(signal.SIGHUP, before) == handler


def test_windows_has_no_sighup(monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")
    assert runpy.run_path(signals.__file__)["SIGNALS"] == (signal.SIGINT, signal.SIGTERM)


# In its third call, in whichever worker that is, waits until the terminal is closed.
WAITING = """
import itertools, pathlib, time

def lengths(completions):
    for number in itertools.count():
        try:
            pathlib.Path(f"call-{number}").mkdir()
            break
        except FileExistsError:
            continue
    if number == 2:
        pathlib.Path("reached").touch()
        while not pathlib.Path("closed").exists():
            time.sleep(0.05)
    print("a line on a terminal that is closed", flush=True)
    return [float(len(set(text))) for text in completions]

lengths.in_process = IN_PROCESS
"""

ON_TERMINAL = """
import fcntl, os, signal, subprocess, sys, termios

signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv.pop(1) == "piped":  # as in `fit ... 2>&1 | tee log`: the reader of the pipe ends with the terminal
    reader = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    os.dup2(reader.stdin.fileno(), 1)
    os.dup2(reader.stdin.fileno(), 2)
from grpo_lightning.cli import entry_point
entry_point()
"""


@SLOW
@pytest.mark.parametrize("output", ["terminal", "piped"])
@pytest.mark.parametrize("in_process", [True, False])
def test_a_run_whose_terminal_is_closed_saves_a_checkpoint(folder, output, in_process):
    (folder / "interrupting.py").write_text(WAITING.replace("IN_PROCESS", str(in_process)))
    terminal, end = pty.openpty()
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    flags = ["fit", "--config", "r.yaml", "--trainer.enable_progress_bar=true"]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ON_TERMINAL, output, *flags],
        cwd=folder,
        env=environment,
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    read_until(folder / "reached", terminal)
    os.close(terminal)
    (folder / "closed").touch()
    assert process.wait(120) == 129
    (path,) = folder.rglob("*.ckpt")
    assert 0 < int(path.stem.removeprefix("stopped-step=")) < STEPS


def read_until(path, terminal):
    """Until a file exists, read what the process writes to its terminal, so that it never waits for a reader."""
    while not path.exists():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)


@pytest.mark.usefixtures("interruptible")
def test_another_signal_is_no_copy(tmp_path):
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_after_a_second_ctrl_c_the_last_message_names_the_newest_checkpoint(
    folder, monkeypatch, caplog, has_checkpoint
):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "interrupting", raising=False)
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    monkeypatch.setenv("SEND", " ".join([str(int(signal.SIGINT))] * 2))
    command = ["fit", "--config", "r.yaml"]
    if has_checkpoint:
        saving = {"class_path": "NewestCheckpoints", "init_args": {"save_steps": 1, "save_total_limit": 1}}
        command.append(f"--trainer.callbacks+={json.dumps(saving)}")
    caplog.set_level(logging.INFO, logger="grpo_lightning")
    with pytest.raises(SystemExit):
        main(command)
    newest = "runs/r/version_0/checkpoints/step=2.ckpt"
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.ckpt")] == [newest] * has_checkpoint
    found = "This run has no checkpoint."
    if has_checkpoint:
        found = f"The newest checkpoint is {newest}. Resume with the same command and --ckpt_path auto."
    assert caplog.messages[-1] == f"Stopped at step 2 without saving a checkpoint. {found}"


@pytest.mark.parametrize("end", ["on_train_end", "on_exception"])
def test_the_handlers_are_put_back_and_other_threads_take_none(tmp_path, end):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    callback = GracefulStop(tmp_path)
    thread = threading.Thread(target=callback.on_train_start, args=(SingleProcess(), None))
    thread.start()
    thread.join()
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    callback.on_train_start(SingleProcess(), None)
    assert [signal.getsignal(signum) for signum in SIGNALS] != before
    getattr(callback, end)(*(None,) * (2 if end == "on_train_end" else 3))
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


# --------------------------------------------------------------------------------------------------------------- errors


FAILING = """
import os

def lengths(completions, trainer_state):
    if trainer_state.global_step == 2 and "FAIL" in os.environ:
        raise KeyError("answer")
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_reward_failed_goes_on_to_the_weights_of_an_unbroken_one(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    (folder / "failing.py").write_text(FAILING)
    command = ["fit", "--config", "r.yaml", "--model.rewards=[failing.lengths]", "--model.reward_workers.num_workers=0"]
    caplog.set_level(logging.INFO, logger="grpo_lightning")
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(SystemExit):
        main([*command, "--run_name=broken"])
    monkeypatch.delenv("FAIL")
    broken = folder / "runs" / "broken" / "version_0"
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["stopped-step=2.ckpt"]
    saved = "runs/broken/version_0/checkpoints/stopped-step=2.ckpt"
    assert f"The end of that step is saved: {saved}. Fix the cause, and resume with the same command" in caplog.text
    main([*command, "--run_name=broken", "--ckpt_path", "auto"])
    main([*command, "--run_name=whole"])
    whole, resumed = newest_checkpoint(folder / "runs" / "whole" / "version_0"), newest_checkpoint(broken)
    assert are_equal(resumed["state_dict"], whole["state_dict"])
    moments = [[*checkpoint["optimizer_states"][0]["state"].values()] for checkpoint in (resumed, whole)]
    assert all(are_equal(one, other) for one, other in zip(*moments, strict=True))


class FailsAt(GRPOLightningModule):
    """Raises an error in one of the steps of the algorithm."""

    place: str
    step = 2

    def fail_at(self, place):
        if place == self.place and self.trainer.global_step == self.step:
            raise OSError(place)

    def sample(self, *args):
        self.fail_at("sample")
        return super().sample(*args)

    def update(self, micro_step):
        self.fail_at("update")
        return super().update(micro_step)

    def on_before_optimizer_step(self, optimizer):
        self.fail_at("optimizer")


@pytest.mark.parametrize(
    ("place", "step", "saved"),
    [
        ("sample", 2, ["stopped-step=2.ckpt"]),
        ("sample", 0, []),  # nothing was trained
        ("update", 2, []),
        ("optimizer", 2, []),
    ],
)
def test_an_error_before_the_update_saves_the_step_before_it(tmp_path, place, step, saved):
    module = make_module(FailsAt, length=3, num_generations=2)
    module.place, module.step = place, step
    with pytest.raises(OSError, match=place):
        fit(module, batch_size=2, max_steps=3, callbacks=[GracefulStop(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == saved


def test_an_error_on_one_of_several_ranks_saves_nothing(tmp_path):
    """Its save would wait for the other ranks forever."""
    callback = GracefulStop(tmp_path)
    callback.phase = "reward"
    ranks = {number: SimpleNamespace(world_size=number, global_step=2) for number in (1, 2)}
    assert {number: callback.can_save_after_error(trainer) for number, trainer in ranks.items()} == {1: True, 2: False}


def test_a_checkpoint_that_cannot_be_saved_leaves_the_error_of_the_run(tmp_path, caplog):
    (tmp_path / "file").touch()
    module = make_module(FailsAt, length=3, num_generations=2)
    module.place = "sample"
    with pytest.raises(OSError, match="sample"):
        fit(module, batch_size=2, max_steps=3, callbacks=[GracefulStop(tmp_path / "file")])
    assert "The steps since the last checkpoint are lost, because no checkpoint of step 2 could be saved" in caplog.text
