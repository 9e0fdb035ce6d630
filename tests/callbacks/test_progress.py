"""The bar says what a step is doing and how far it is."""

import re
import sys
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from grpo_lightning.callbacks import ProgressBar
from grpo_lightning.data.source import PromptSource
from grpo_lightning.objective import Objective
from tests.module_runs import PROMPTS, fit, make_module, make_source, make_trainer


@pytest.fixture
def shown(monkeypatch):
    """The texts in front of the bar, as they change."""
    texts = []
    monkeypatch.setattr(Tqdm, "set_description", lambda self, text="", refresh=True: texts.append(text.rstrip()))
    return texts


def phases(texts):
    """The texts of ours, repeats left out: Lightning sets "Epoch 0" and "Training" itself."""
    words = [text.split(" ", 2)[2] for text in texts if text.startswith("Epoch ") and text.count(" ") > 1]
    return [word for i, word in enumerate(words) if i == 0 or words[i - 1] != word]


def test_the_phases_of_a_step(shown):
    module = make_module(length=9, objective=Objective(beta=0.1), updates_per_rollout=2)
    module.loader.model.generation_config.eos_token_id = None
    module.loader.tokenizer.eos_token = None
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert phases(shown) == [
        "rollout",
        "rollout 8/9",
        "rollout 9/9",
        "reward",
        "ref_logprobs",
        "reward",
        "old_logprobs",
        "update",
    ]


def test_the_epoch_is_in_front(shown):
    fit(make_module(length=1), batch_size=8, max_epochs=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert {text.split(" rollout")[0] for text in shown if "rollout" in text} == {"Epoch 0", "Epoch 1"}


def test_evaluations_have_bars_of_their_own(shown):
    module = make_module(length=3)
    trainer = make_trainer(max_epochs=1, enable_progress_bar=True, callbacks=[ProgressBar()], num_sanity_val_steps=1)
    trainer.fit(module, make_source(module, batch_size=8), PromptSource(PROMPTS, 8))
    assert "val/reward" in trainer.callback_metrics
    assert phases(shown) == ["rollout", "rollout 3/3", "reward", "update"]
    assert [text for text in shown if "tokens" in text] == ["Sanity Checking 3/3 tokens"] * 2 + [
        "Validation 3/3 tokens"
    ] * 2  # sampled and greedy
    for run, kind in ((trainer.validate, "Validation"), (trainer.test, "Testing"), (trainer.predict, "Predicting")):
        shown.clear()
        run(module, PromptSource(PROMPTS, 8))
        assert f"{kind} 3/3 tokens" in shown
        assert not phases(shown)


def test_what_others_draw_is_no_rollout(shown):
    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.evaluate(pl_module.trainer.train_dataloader.prompts[:2], is_greedy=True)

        on_train_end = on_train_start

    fit(make_module(length=3), batch_size=8, max_steps=1, enable_progress_bar=True, callbacks=[Before(), ProgressBar()])
    assert phases(shown) == ["rollout", "rollout 3/3", "reward", "update"]


def test_a_bar_that_is_off_shows_nothing(shown):
    fit(make_module(length=1), max_steps=1, enable_progress_bar=True, callbacks=[ProgressBar(refresh_rate=0)])
    assert not phases(shown)


class Bars(L.Callback):
    """Notes how far the bar is at the end of every micro-step."""

    def __init__(self, bar) -> None:
        self.bar, self.seen = bar, []

    def on_train_batch_end(self, *args):
        bar = self.bar.train_progress_bar
        self.seen.append((bar.n, bar.total, bar.initial))


def steps_shown(**options):
    bar = ProgressBar()
    bars = Bars(bar)
    options = {"batch_size": 4, "enable_progress_bar": True, "callbacks": [bar, bars]} | options
    fit(make_module(length=2), **options)
    return bars.seen


def test_the_bar_counts_the_optimizer_steps_of_the_run():
    """Over epochs (of two steps) and micro-batches: the ETA is that of the run."""
    assert steps_shown(max_steps=3, max_epochs=-1) == [(1, 3, 0), (2, 3, 0), (3, 3, 0)]
    assert steps_shown(max_epochs=2) == [(1, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    assert steps_shown(max_steps=2, max_epochs=-1, accumulate_grad_batches=2) == [
        (0, 2, 0),
        (1, 2, 0),
        (1, 2, 0),
        (2, 2, 0),
    ]


def test_a_resumed_run_goes_on_at_its_step(tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
    assert steps_shown(max_steps=4, max_epochs=-1, ckpt_path=str(tmp_path / "last.ckpt")) == [(3, 4, 2), (4, 4, 2)]


def test_a_run_resumed_inside_an_epoch_goes_on_at_its_step(tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    assert steps_shown(max_steps=3, max_epochs=-1, ckpt_path=str(tmp_path / "last.ckpt")) == [(2, 3, 1), (3, 3, 1)]


def test_the_clock_starts_with_the_first_step():
    """An evaluation at the start, counted as training, would make the ETA of the first steps absurd."""
    bar, started = ProgressBar(), []

    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            started.append(bar._train_progress_bar)

    fit(make_module(length=2), batch_size=4, max_steps=1, enable_progress_bar=True, callbacks=[bar, Before()])
    assert started == [None]
    assert bar.train_progress_bar.n == 1


def test_the_numbers_behind_the_bar():
    bar = ProgressBar()
    metrics = {"reward/mean": 0.12345, "rollout/length": 48.0, "rollout/tokens_per_second": 12345.6, "policy/kl": 2e-5}
    bar.values = {name: torch.tensor(value) for name, value in metrics.items()} | {"time/update": torch.tensor(1.0)}
    trainer = SimpleNamespace(progress_bar_metrics={"mine": 3.0})
    want = {"reward": "0.123", "length": "48", "tokens/s": "1.23e+04", "kl": "2e-05", "mine": 3.0}
    assert bar.get_metrics(trainer, None) == want
    del bar.values["policy/kl"]
    assert "kl" not in bar.get_metrics(trainer, None)


@pytest.fixture
def numbers(monkeypatch):
    """What was shown behind the bar, step by step."""
    seen = []
    monkeypatch.setattr(Tqdm, "set_postfix", lambda self, values=None, **_: seen.append(dict(values)))
    return seen


def test_the_numbers_reach_the_bar_and_stay_over_a_cycle(numbers):
    module = make_module(length=2, num_iterations=2)
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert len(numbers) == 2
    for label in ("reward", "length", "tokens/s"):
        assert numbers[1][label] == numbers[0][label]


def test_a_rollout_without_a_reward_does_not_show_the_last_one(numbers):
    def sometimes(completions, trainer_state):
        return [1.0 if trainer_state.global_step == 0 else None for _ in completions]

    module = make_module(length=2, rewards=[sometimes])
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert [shown.get("reward") for shown in numbers] == ["1", None]
    assert "length" in numbers[1]


def test_the_line_has_steps_rate_and_numbers(capsys):
    fit(make_module(length=2), max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    output = "".join(capsys.readouterr())
    assert "2/2 [" in output
    assert re.search(r"(step/s|s/step), reward=\S+, length=2, tokens/s=", output)


def test_what_is_printed_at_the_end_has_its_own_line(capsys):
    class Last(L.Callback):
        def on_train_end(self, *args):
            sys.stdout.write("The end")

    fit(make_module(length=2), max_steps=2, enable_progress_bar=True, callbacks=[Last(), ProgressBar()])
    before = "".join(capsys.readouterr()).partition("The end")[0]
    assert before.endswith("\n")


def test_an_error_begins_on_a_line_of_its_own():
    bar = ProgressBar()
    closed = []
    for kind in ("train", "val", "test", "predict"):
        setattr(bar, f"_{kind}_progress_bar", SimpleNamespace(close=lambda kind=kind: closed.append(kind)))
    bar._test_progress_bar = None
    bar.on_exception(None, None, ValueError("wrong"))
    assert closed == ["train", "val", "predict"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_file_gets_few_lines_whole_ones(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    fit(make_module(length=9), batch_size=4, max_steps=6, enable_progress_bar=True, callbacks=[ProgressBar()])
    drawn = capsys.readouterr().out
    if is_terminal:
        assert drawn.count("\r") > 20
        return
    assert "\r" not in drawn
    lines = [line for line in drawn.splitlines() if "step" in line]
    assert len(lines) <= 3  # the start and the end: the run takes no minute
    assert re.search(r" 6/6 \[.*reward=\S+, length=", lines[-1])
