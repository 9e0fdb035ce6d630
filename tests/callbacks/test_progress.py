"""The line says what a step is doing, how far the run is, and whether the reward rises."""

import re
import sys
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from grpo_lightning.callbacks import ProgressBar, progress
from grpo_lightning.callbacks.progress import Part, State, clock, laid_out, rate, text_of, training_text
from grpo_lightning.core.in_place_line import InPlaceLine
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from tests.helpers.module_runs import PROMPTS, fit, make_module, make_source, make_trainer
from tests.marks import SLOW


@pytest.fixture
def shown(monkeypatch):
    """The line in 200 columns, each time that it would be shown if time did not matter."""
    texts = []

    def show(self, render, *, is_due=False):
        texts.append(render(200).plain)

    monkeypatch.setattr(InPlaceLine, "show", show)
    monkeypatch.setattr(InPlaceLine, "close", lambda self, *, is_kept: None)
    return texts


def phases(texts):
    """The phases on the line, repeats left out."""
    words = [text[: progress.PHASE_WIDTH].strip() for text in texts if re.search(r"^.{14,}  \d+(/\d+)?  .*epoch", text)]
    words = [word for word in words if word and word != "finished"]
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
    assert shown[-1].startswith("finished        2/2  ")


def test_the_epoch_is_on_a_wide_line(shown):
    fit(make_module(length=1), batch_size=8, max_epochs=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert {match[0] for text in shown if (match := re.search(r"epoch \d", text))} == {"epoch 0", "epoch 1"}


def test_evaluations_have_a_line_of_their_own(shown):
    module = make_module(length=3)
    trainer = make_trainer(max_epochs=1, enable_progress_bar=True, callbacks=[ProgressBar()], num_sanity_val_steps=1)
    trainer.fit(module, make_source(module, batch_size=8), PromptSource(PROMPTS, 8))
    assert "val/reward" in trainer.callback_metrics
    assert phases(shown) == ["rollout", "rollout 3/3", "reward", "update"]
    assert [re.sub("  [━─]+", "", text) for text in shown if "tokens  " not in text and "3/3 tokens" in text] == [
        "sanity check  0/1 batches  3/3 tokens",
        "sanity check  0/1 batches  3/3 tokens",  # sampled and greedy
        "validation  0/1 batches  3/3 tokens",
        "validation  0/1 batches  3/3 tokens",
    ]
    for run, kind in ((trainer.validate, "validation"), (trainer.test, "test"), (trainer.predict, "predict")):
        shown.clear()
        run(module, PromptSource(PROMPTS, 8))
        assert [text for text in shown if re.fullmatch(rf"{kind}  0/1 batches  ─+  3/3 tokens", text)]
        assert re.fullmatch(rf"{kind}  1/1 batches  ━+", shown[-1])
        assert not phases(shown)


def test_what_others_draw_is_no_rollout(shown):
    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.evaluate(pl_module.trainer.train_dataloader.prompts[:2], is_greedy=True)

        on_train_end = on_train_start

    fit(make_module(length=3), batch_size=8, max_steps=1, enable_progress_bar=True, callbacks=[Before(), ProgressBar()])
    assert phases(shown) == ["rollout", "rollout 3/3", "reward", "update"]


def test_what_others_sample_after_an_evaluation_is_no_part_of_it(shown):
    class After(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            shown.clear()
            pl_module.evaluate(source.prompts[:2], is_greedy=True)

        on_test_end = on_predict_end = on_validation_end

    module, source = make_module(length=3), PromptSource(PROMPTS, 8)
    trainer = make_trainer(enable_progress_bar=True, callbacks=[ProgressBar(), After()])
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, source)
        assert not shown


@pytest.mark.parametrize("bar", [ProgressBar(refresh_rate=0), ProgressBar()])
def test_a_line_that_is_off_shows_nothing(shown, bar):
    if bar.refresh_rate:
        bar.disable()
    assert bar.is_disabled
    fit(make_module(length=1), max_steps=1, enable_progress_bar=True, callbacks=[bar])
    assert not shown
    bar.enable()
    assert bar.is_enabled == bool(bar.refresh_rate)


def steps_shown(shown, **options):
    """How far the line is at the end of every optimizer step."""
    shown.clear()
    options = {"batch_size": 4, "enable_progress_bar": True, "callbacks": [ProgressBar()]} | options
    fit(make_module(length=2), **options)
    steps = [re.search(r"^.{14,}?  (\d+/\d+)  ", text)[1] for text in shown]
    return list(dict.fromkeys(steps))


@SLOW
def test_the_line_counts_the_optimizer_steps_of_the_run(shown):
    """Over epochs (of two steps) and micro-batches: the ETA is that of the run."""
    assert steps_shown(shown, max_steps=3, max_epochs=-1) == ["0/3", "1/3", "2/3", "3/3"]
    assert steps_shown(shown, max_epochs=2) == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    assert steps_shown(shown, max_steps=2, max_epochs=-1, accumulate_grad_batches=2) == ["0/2", "1/2", "2/2"]


@SLOW
def test_a_resumed_run_goes_on_at_its_step(shown, tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=2).save_checkpoint(tmp_path / "last.ckpt")
    resumed = {"max_epochs": -1, "ckpt_path": str(tmp_path / "last.ckpt")}
    assert steps_shown(shown, max_steps=4, **resumed) == ["2/4", "3/4", "4/4"]


@SLOW
def test_a_run_resumed_inside_an_epoch_goes_on_at_its_step(shown, tmp_path):
    fit(make_module(length=2), batch_size=4, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    resumed = {"max_epochs": -1, "ckpt_path": str(tmp_path / "last.ckpt")}
    assert steps_shown(shown, max_steps=3, **resumed) == ["1/3", "2/3", "3/3"]


def test_the_clock_starts_with_the_first_step():
    """An evaluation at the start, counted as training, would make the ETA of the first steps absurd."""
    bar, started = ProgressBar(), []

    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            started.append(bar.started)

    fit(make_module(length=2), batch_size=4, max_steps=1, enable_progress_bar=True, callbacks=[bar, Before()])
    assert started == [None]
    assert bar.started is not None


def test_rate_and_eta_are_those_of_the_latest_steps(monkeypatch, shown):
    """100 steps of 1 second, then steps of 3 seconds: after 100 of these, the first ones do not count any more."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "logged_this_step", lambda trainer: {})
    bar = ProgressBar()
    trainer = SimpleNamespace(
        estimated_stepping_batches=400,
        max_epochs=-1,
        global_step=0,
        accumulate_grad_batches=1,
        training=True,
        current_epoch=0,
        progress_bar_metrics={},
        lightning_module=None,
        **dict.fromkeys(("sanity_checking", "validating", "testing", "predicting"), False),
    )
    bar.on_train_start()
    bar.start(trainer)
    for step in range(1, 201):
        now[0] += 1.0 if step <= 100 else 3.0
        trainer.global_step = step
        bar.on_train_batch_end(trainer, None, None, None, step - 1)
        if step == 100:
            assert "1.00 s/step  ETA 5:00" in shown[-1]
        if step == 150:
            assert "2.00 s/step  ETA 8:20" in shown[-1]
    assert "3.00 s/step  ETA 10:00" in shown[-1]
    assert "elapsed 6:40" in shown[-1]


def test_the_numbers_on_the_line():
    bar = ProgressBar()
    metrics = {"reward/mean": 0.12345, "rollout/length": 48.0, "rollout/tokens_per_second": 12345.6, "policy/kl": 2e-5}
    bar.values = metrics | {"time/update": 1.0}
    trainer = SimpleNamespace(progress_bar_metrics={"mine": 3.0})
    want = {"reward": "0.123", "length": "48", "tokens/s": "12,346", "kl": "2e-05", "mine": 3.0}
    assert bar.get_metrics(trainer, None) == want
    del bar.values["policy/kl"]
    assert "kl" not in bar.get_metrics(trainer, None)


@pytest.fixture
def numbers(monkeypatch, shown):
    """The metrics on the line after each step."""
    seen = {}
    original = ProgressBar.state

    def state(self, trainer):
        found = original(self, trainer)
        if self.phase in ("update", "finished") and found.step:
            seen[found.step] = dict(found.metrics)
        return found

    monkeypatch.setattr(ProgressBar, "state", state)
    return seen


def test_the_numbers_reach_the_line_and_stay_over_a_cycle(numbers):
    module = make_module(length=2, num_iterations=2)
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert [*numbers] == [1, 2]
    for label in ("reward", "length", "tokens/s"):
        assert numbers[2][label] == numbers[1][label]


def test_a_rollout_without_a_reward_does_not_show_the_last_one(numbers):
    def sometimes(completions, trainer_state):
        return [1.0 if trainer_state.global_step == 0 else None for _ in completions]

    module = make_module(length=2, rewards=[sometimes])
    fit(module, batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert [shown.get("reward") for shown in numbers.values()] == ["1.00", None]
    assert "length" in numbers[2]


@SLOW
def test_each_rollout_is_a_point_of_the_trend():
    bar = ProgressBar()
    module = make_module(length=2, num_iterations=2)
    fit(module, batch_size=4, max_steps=6, max_epochs=-1, enable_progress_bar=True, callbacks=[bar])
    assert len(bar.rewards) == 3
    fit(make_module(length=2), batch_size=4, max_steps=2, enable_progress_bar=True, callbacks=[bar])
    assert len(bar.rewards) == 2, "another run"


def test_what_is_printed_at_the_end_has_its_own_line(capsys):
    class Last(L.Callback):
        def on_train_end(self, *args):
            sys.stdout.write("The end")

    fit(make_module(length=2), max_steps=2, enable_progress_bar=True, callbacks=[Last(), ProgressBar()])
    before = "".join(capsys.readouterr()).partition("The end")[0]
    assert before.endswith("\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_error_begins_on_a_line_of_its_own(monkeypatch, capsys, is_terminal):
    def broken(completions):
        raise RuntimeError("broken")

    terminal(monkeypatch, is_terminal)
    with pytest.raises(RuntimeError, match="broken"):
        fit(make_module(rewards=[broken]), max_steps=2, enable_progress_bar=True, callbacks=[ProgressBar()])
    assert InPlaceLine.on_screen is None
    drawn = capsys.readouterr().out
    assert re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", drawn).endswith("\n")
    assert "0/2" in drawn


def terminal(monkeypatch, is_terminal):
    """Make stdout a terminal of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


@SLOW
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_file_gets_few_lines_whole_ones(monkeypatch, capsys, is_terminal):
    terminal(monkeypatch, is_terminal)
    fit(make_module(length=9), batch_size=4, max_steps=6, enable_progress_bar=True, callbacks=[ProgressBar()])
    drawn = capsys.readouterr().out
    if is_terminal:
        assert drawn.count("\r") >= 6
        return
    assert "\r" not in drawn
    assert "\x1b" not in drawn
    lines = [line for line in drawn.splitlines() if "step" in line]
    assert len(lines) <= 3  # the start and the end: the run takes no minute
    assert re.search(
        r"^step 6/6, finished, [\d.]+ (step/s|s/step), reward \S+( \(\w+\))?, length 9, tokens/s", lines[-1]
    )


# -------------------------------------------------------------------------------------------------------------- layout

STATE = State(
    phase="rollout 128/512",
    step=37,
    total=240,
    seconds_per_step=12.345,
    elapsed=456.7,
    epoch=1,
    metrics={"reward": "0.523", "length": "212", "tokens/s": "2,900", "kl": "0.00123", "mine": "7"},
    rewards=[i / 40 for i in range(37)],
)


@pytest.fixture
def unicode(monkeypatch):
    monkeypatch.setattr(progress, "draws_bars", lambda: True)


def test_the_line_of_80_columns(unicode):
    line = "rollout 128/512   37/240  ━━───────────  12.35 s/step  ETA 41:46  reward 0.523 ↑"
    assert training_text(STATE, 80).plain == line
    assert len(line) == 80
    shorter = STATE._replace(phase="rollout 24/48", step=37, total=100, seconds_per_step=1.25)
    line = "rollout 24/48    37/100  ━━──────  1.25 s/step  ETA 1:19  reward 0.523 ↑  ▁▂▄▅▇█"
    assert training_text(shorter, 80).plain == line


def test_the_line_of_200_columns(unicode):
    line = training_text(STATE, 200).plain
    assert len(line) <= 200
    for part in ("mine 7", "length 212", "tokens/s 2,900", "kl 0.00123", "epoch 1", "elapsed 7:37", "▁", "█", "↑"):
        assert part in line


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200, 300])
@pytest.mark.parametrize("total", [240, None])
@pytest.mark.parametrize("rewards", [[], [0.5] * 10, STATE.rewards])
def test_the_line_fits_and_shows_what_matters_first(unicode, width, total, rewards):
    line = training_text(STATE._replace(total=total, rewards=rewards), width).plain
    assert len(line) <= width
    wanted = [(40, "37"), (60, "reward 0.523"), (80, "12.35 s/step")]
    wanted += [(80, "ETA 41:46"), (100, "mine 7")] if total else []
    wanted += [(80, "↑")] if rewards is STATE.rewards else [(80, "→")] if rewards else []
    assert [part for least, part in wanted if width >= least and part not in line] == []


@pytest.mark.parametrize(
    ("rewards", "arrow", "word"),
    [([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "↑", "rising"), ([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "↓", "falling")],
)
def test_the_trend_of_the_reward_is_an_arrow_and_a_word_in_a_file(unicode, rewards, arrow, word):
    state = STATE._replace(rewards=rewards)
    assert f"reward 0.523 {arrow}" in training_text(state, 80).plain
    assert f"reward 0.523 ({word})" in training_text(state, None).plain


def test_a_stream_without_these_characters_gets_others(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="ascii"))
    line = training_text(STATE, 120).plain
    assert line.isascii()
    assert "#" in line
    assert "(rising)" in line


def test_a_line_of_a_file_is_text_without_a_bar(unicode):
    line = training_text(STATE, None)
    assert line.plain.startswith("step 37/240, rollout 128/512, 12.35 s/step, ETA 41:46, reward 0.523 (rising), mine 7")
    assert line.plain.isascii()
    assert not line.spans


def test_the_bar_takes_what_is_left(unicode):
    parts = [Part("one", 0), Part("two", 0), Part("three", 1), Part("four", 2)]
    assert laid_out(parts, 40, 0.5).plain == f"one  two  {'━' * 8}{'─' * 9}  three  four"
    assert laid_out(parts, 200, 1.0).plain == f"one  two  {'━' * 40}  three  four"
    assert laid_out(parts, 39, 0.5).plain == "one  two  three  four", "no bar on a narrow line"
    assert laid_out(parts, 22, None).plain == "one  two  three  four"
    assert laid_out(parts, 20, None).plain == "one  two  three"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (65.4, "1:05"), (3600 * 2 + 65, "2:01:05"), (86400 * 3 + 7260, "3d 02:01"), (59.7, "1:00")],
)
def test_a_duration(seconds, shown):
    assert clock(seconds) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(1.25, "1.25 s/step"), (0.5, "2.00 step/s"), (123.4, "123.4 s/step")])
def test_a_rate(seconds, shown):
    assert rate(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.12345, "0.123"),
        (48.0, "48"),
        (12345.6, "12,346"),
        ("x", "x"),
        (torch.tensor(2e-5), "2e-05"),
        (float("inf"), "inf"),
    ],
)
def test_a_number(value, shown):
    assert text_of(value) == shown
