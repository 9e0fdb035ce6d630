"""A run that a signal stops: its exit code, its checkpoint, and the weights it ends with when it goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

from grpo_lightning.cli.interrupt import SIGNALS, GracefulStop
from tests.tiny_models import tiny_model, tiny_tokenizer

STEPS = 6
# Sends itself the signal in the middle of its third step: the second of two micro-batches is still to come.
REWARDS = """
import os, signal

calls = 0

def lengths(completions):
    global calls
    calls += 1
    if calls == 3 and "SEND" in os.environ:
        os.kill(os.getpid(), int(os.environ["SEND"]))
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


def fit(folder, *flags, send=None):
    environment = {name: value for name, value in os.environ.items() if name != "SEND"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {} if send is None else {"SEND": str(int(send))}
    start = "from grpo_lightning.cli import entry_point; entry_point()"
    command = [sys.executable, "-W", "ignore", "-c", start, "fit", "--config", "r.yaml", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def newest_weights(folder):
    (path,) = (folder / "checkpoints").glob(f"epoch=*-step={STEPS}.ckpt")
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]


def test_a_stopped_run_goes_on_to_the_weights_of_an_unbroken_one(folder):
    stopped = fit(folder, "--run_name=broken", send=signal.SIGINT)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr.count("stopping after this step") == 1
    assert stopped.stderr.splitlines()[-1].endswith("; go on by the same command with --ckpt_path auto.")
    broken = folder / "runs" / "broken" / "version_0"
    (path,) = (broken / "checkpoints").glob("*.ckpt")
    assert path.name.startswith("stopped-step=")
    step = int(path.stem.partition("=")[2])
    assert 0 < step < STEPS
    assert f"Stopped at step {step};" in stopped.stderr
    resumed = fit(folder, "--run_name=broken", "--ckpt_path", "auto")
    assert resumed.returncode == 0, resumed.stderr
    unbroken = fit(folder, "--run_name=whole")
    assert unbroken.returncode == 0, unbroken.stderr
    expected, got = newest_weights(folder / "runs" / "whole" / "version_0"), newest_weights(broken)
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_sigterm_stops_a_run_too_and_without_checkpoints_nothing_is_promised(folder):
    stopped = fit(folder, "--trainer.enable_checkpointing=false", send=signal.SIGTERM)
    assert stopped.returncode == 143, stopped.stderr
    assert "Stopped at step" in stopped.stderr
    assert "ckpt_path" not in stopped.stderr
    assert not list(folder.rglob("*.ckpt"))


class SingleProcess:
    """What the callback asks of a Trainer when a signal comes."""

    strategy = type("Strategy", (), {"launcher": None})()
    is_global_zero = True


@pytest.fixture
def interruptible():
    """A shell's background jobs ignore Ctrl-C, and so would the tests that one of them runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_second_signal_is_handled_as_ever(tmp_path, capfd):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    callback = GracefulStop(tmp_path)
    callback.on_train_start(SingleProcess(), None)
    assert signal.getsignal(signal.SIGINT) == callback.receive
    signal.raise_signal(signal.SIGINT)
    assert "Ctrl-C: stopping after this step; Ctrl-C again stops at once." in capfd.readouterr().err
    assert callback.exit_code == 130
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


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
