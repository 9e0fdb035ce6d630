"""A run logs a summary at its end."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from grpo_lightning.callbacks import BeforeAfter, RunSummary
from grpo_lightning.callbacks import run_summary as summaries
from grpo_lightning.callbacks.run_summary import places
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.training.signals import GracefulStop
from tests.helpers.module_runs import PROMPTS, fit, make_module, make_source, make_trainer
from tests.marks import SLOW


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(summaries, "draws_bars", lambda: True)


class Rollouts(L.Callback):
    """Counts tokens, and notes the mean rewards."""

    def __init__(self):
        self.tokens, self.rewards = 0, []

    def on_rollout(self, trainer, module, rollout):
        self.tokens += sum(len(completion.token_ids) for group in rollout.groups for completion in group.completions)
        self.rewards.append(float(rollout.rewards.mean()))


def summary(output):
    """The rows of the summary, by label; "" has the title."""
    lines = output[re.search(r"^(Finished|Stopped) at", output, re.MULTILINE).start() :].splitlines()
    rows, label = {"": lines[0]}, ""
    for line in lines[1:]:
        label = line[2:15].strip() or label
        rows[label] = f"{rows[label]} {line[15:]}" if label in rows else line[15:]
    return rows


@SLOW
def test_steps_rewards_tokens_and_time(capsys):
    rollouts = Rollouts()
    fit(make_module(length=5), batch_size=4, max_steps=20, max_epochs=-1, callbacks=[RunSummary(), rollouts])
    rows = summary(capsys.readouterr().out)
    assert re.fullmatch(r"Finished at step 20: 20 steps in \d:\d\d", rows[""])
    first, last = sum(rollouts.rewards[:2]) / 2, sum(rollouts.rewards[-2:]) / 2
    assert rows["reward"].startswith(f"{first:#.3g} → {last:#.3g} (first and last 2 rollouts)  ")
    assert re.fullmatch("[▁▂▃▄▅▆▇█]{20}", rows["reward"].rpartition(" ")[2])
    assert rows["tokens"].startswith(f"{rollouts.tokens:,} sampled, ")
    assert {"rollout", "update", "other"} <= {*re.findall(r"(\w+) \d+ %", rows["time"])}


def test_a_cycle_of_several_updates_is_counted_once(capsys):
    rollouts = Rollouts()
    module = make_module(length=5, num_iterations=2)
    fit(module, batch_size=4, max_steps=4, max_epochs=-1, callbacks=[RunSummary(), rollouts])
    rows = summary(capsys.readouterr().out)
    assert rows["tokens"].startswith(f"{rollouts.tokens:,} sampled, ")
    assert "(first and last rollout)" in rows["reward"]


def test_gradient_accumulation_counts_optimizer_steps(capsys):
    fit(make_module(length=2), batch_size=2, max_steps=2, accumulate_grad_batches=2, callbacks=[RunSummary()])
    assert "Finished at step 2: 2 steps in" in capsys.readouterr().out


@SLOW
def test_a_resumed_run_counts_its_own_steps(capsys, tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
    resumed = {"max_epochs": -1, "ckpt_path": str(tmp_path / "last.ckpt")}
    fit(make_module(length=2), batch_size=4, max_steps=5, callbacks=[RunSummary()], **resumed)
    rows = summary(capsys.readouterr().out)
    assert rows[""].startswith("Finished at step 5: 3 steps in")
    assert rows["resumed"] == "at step 2; this is about the steps since"


def test_held_out_prompts_before_and_after(capsys):
    module = make_module(length=3)
    before_after = BeforeAfter(dirpath=".")
    trainer = make_trainer(max_steps=1, num_sanity_val_steps=0, callbacks=[RunSummary(), before_after])
    trainer.fit(module, make_source(module), PromptSource(PROMPTS, 8))
    ends = [
        f"{before_after.before[kind]['reward']:#.3g} → {before_after.after[kind]['reward']:#.3g} {kind}"
        for kind in ("sampled", "greedy")
    ]
    output = capsys.readouterr().out
    assert summary(output)["held out"] == f"reward {', '.join(ends)}"
    assert output.index("Summary: ") < output.index("Finished at step 1"), "the summary is the end"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_stopped_says_so_and_one_that_fails_leaves_the_word_to_its_error(capsys, raised):
    class Stop(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 2:
                raise raised

    with pytest.raises((SystemExit, raised)):
        fit(make_module(length=2), batch_size=4, max_steps=4, max_epochs=-1, callbacks=[RunSummary(), Stop()])
    output = capsys.readouterr().out
    assert ("Stopped at step 2: 2 steps in" in output) == (raised is KeyboardInterrupt)
    assert "Finished" not in output


def test_a_run_without_a_step_has_no_summary(capsys):
    class Stop(L.Callback):
        def on_train_batch_start(self, *_):
            raise KeyboardInterrupt

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(make_module(length=2), max_steps=4, callbacks=[RunSummary(), Stop()])
    fit(make_module(length=2), fast_dev_run=True, callbacks=[RunSummary()])
    assert "steps in" not in capsys.readouterr().out


def test_only_one_rank_prints(capsys):
    callback = RunSummary()
    callback.folder = Path()
    trainer = SimpleNamespace(global_step=3, fast_dev_run=False, is_global_zero=False, interrupted=False)
    callback.teardown(trainer, None, "fit")
    assert not capsys.readouterr().out


def test_the_lines_fit_80_columns(capsys):
    callback = RunSummary()
    callback.rewards = [-0.123456] * 100
    callback.tokens = 123456789.0
    callback.seconds = {
        f"time/{name}": 10.0 for name in ("rollout", "reward", "ref_logprobs", "old_logprobs", "update")
    }
    callback.folder = Path()
    trainer = SimpleNamespace(
        global_step=100,
        fast_dev_run=False,
        is_global_zero=True,
        interrupted=False,
        callbacks=[],
        checkpoint_callbacks=[],
    )
    callback.teardown(trainer, None, "fit")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    assert re.search(r"old_logprobs \d+ %", "\n".join(lines))


def test_asynchronous_sampling_is_no_phase_of_its_own():
    """It runs in the background: tokens per second are those of `time/sampling`, and the shares leave it out."""
    callback = RunSummary()
    callback.latest = {"rollout/tokens_per_second": 50.0, "time/sampling": 8.0, "time/rollout": 1.0, "time/update": 6.0}
    callback.count()
    rows = dict(callback.costs(10.0))
    assert rows["tokens"] == "400 sampled, 50 per second of sampling"
    assert rows["time"].replace("\N{NO-BREAK SPACE}", " ") == "update 60 %, rollout 10 %, other 30 %"


def test_where_things_are(tmp_path):
    folder = tmp_path / "runs" / "mine" / "version_0"
    folder.mkdir(parents=True)
    trainer = SimpleNamespace(callbacks=[], checkpoint_callbacks=[])
    none = ("checkpoint", "none (trainer.enable_checkpointing is false)")
    assert [*places(trainer, folder)] == [("run folder", "runs/mine/version_0"), none]
    for name in ("completions.jsonl", "metrics.csv", "curves.png"):
        (folder / name).touch()
    saved = ModelCheckpoint()
    saved.best_model_path = str(folder / "last.ckpt")
    trainer.callbacks = trainer.checkpoint_callbacks = [saved, ModelCheckpoint()]
    assert "checkpoint" not in dict(places(trainer, folder)), "the file is not there"
    Path(saved.best_model_path).touch()
    assert dict(places(trainer, folder)) == {
        "run folder": "runs/mine/version_0",
        "completions": "runs/mine/version_0/completions.jsonl",
        "curves": "runs/mine/version_0/curves.png",
        "metrics": "runs/mine/version_0/metrics.csv",
        "checkpoint": "runs/mine/version_0/last.ckpt",
        "report": "grpo-lightning report runs/mine/version_0",
    }
    stop = GracefulStop(folder)
    stop.checkpoint = folder / "stopped-step=5.ckpt"
    trainer.callbacks = [stop]
    assert dict(places(trainer, folder))["checkpoint"] == "runs/mine/version_0/stopped-step=5.ckpt"
    (folder / "report.html").touch()
    assert dict(places(trainer, folder))["report"] == "runs/mine/version_0/report.html"


@pytest.mark.parametrize("is_written", [False, True])
def test_a_report_from_before_the_run_resumed_is_not_named(tmp_path, capsys, is_written):
    """It lacks the steps since then."""
    path = tmp_path / "report.html"
    for file in (path, tmp_path / "metrics.csv"):
        file.touch()
    os.utime(path, (1e9, 1e9))
    writing = LambdaCallback(on_fit_end=lambda *_: path.touch() if is_written else None)
    fit(make_module(length=2), max_steps=1, default_root_dir=tmp_path, callbacks=[RunSummary(), writing])
    report = summary(capsys.readouterr().out)["report"]
    assert report == ("report.html" if is_written else "grpo-lightning report .")


def test_the_command_of_the_report_is_quoted(tmp_path):
    folder = tmp_path / "my runs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").touch()
    trainer = SimpleNamespace(callbacks=[], checkpoint_callbacks=[])
    assert dict(places(trainer, folder))["report"] == "grpo-lightning report 'my runs/version_0'"
