"""Learning curves: what was logged is what is drawn, over a resume as well."""

import csv
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from grpo_lightning.callbacks import LearningCurves
from grpo_lightning.callbacks.learning_curves import centered_mean, heading, held_out
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from tests.helpers.module_runs import PROMPTS, History, fit, make_module, make_source, make_trainer, vowel_share
from tests.marks import SLOW, few

ORANGE = np.array(to_rgb("tab:orange"))
"""The color of held-out values."""


def panels_of(path, rows, columns):
    """The picture of a panel, by its place."""
    picture = imread(path)
    height, width = picture.shape[0] - 48, picture.shape[1]  # 0.4 inch for the legend
    assert (height, width) == (rows * 360, columns * 504)
    return [
        picture[row * 360 : (row + 1) * 360, column * 504 : (column + 1) * 504]
        for row in range(rows)
        for column in range(columns)
    ]


def colors(panel):
    return len(np.unique((255 * panel).astype(np.uint8).copy().view(np.uint32)))


@SLOW
def test_points_are_the_steps_and_the_picture_shows_them(tmp_path, capsys):
    names = ["reward/mean", "rollout/length", "never/logged", "reward/mean"]
    curves, history = LearningCurves(names, dirpath=str(tmp_path / "new")), History()
    fit(make_module(), max_steps=3, callbacks=[curves, history], accumulate_grad_batches=2)
    for name in names[:2]:
        assert curves.history[name] == list(zip([0, 1, 2], history.of(name), strict=True))
        assert len(set(history.of(name))) > 1
    assert not curves.history["never/logged"]
    path = tmp_path / "new" / "curves.png"
    assert all(colors(panel) > 20 for panel in panels_of(path, 1, 2))  # what was never logged has no panel
    assert capsys.readouterr().out == f"Curves: {path}\n"


@SLOW
def test_points_are_those_of_the_loggers(tmp_path):
    """Values that a step does not log itself are no points: a rollout's, in later updates; a rewardless rollout's."""

    def sometimes(completions, trainer_state):
        return [0.5 if trainer_state.global_step < 2 else None for _ in completions]

    curves = LearningCurves(["reward/mean", "rollout/length", "time/update"], dirpath=str(tmp_path / "curves"))
    logger = CSVLogger(tmp_path, name="log", version=0, flush_logs_every_n_steps=1)
    module = make_module(rewards=[sometimes], updates_per_rollout=2)
    fit(module, batch_size=4, max_steps=4, max_epochs=-1, callbacks=[curves], logger=logger, log_every_n_steps=1)
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in curves.names:
        assert curves.history[name] == [(int(row["step"]), float(row[name])) for row in rows if row[name]]
    assert [step for step, _ in curves.history["reward/mean"]] == [0]
    assert [step for step, _ in curves.history["rollout/length"]] == [0, 2]
    assert [step for step, _ in curves.history["time/update"]] == [0, 1, 2, 3]


def num_vowels(completions):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


@SLOW
def test_panels_are_chosen_by_what_the_run_has(tmp_path):
    module = make_module(rewards=[num_vowels, vowel_share], objective=Objective(beta=0.1))
    curves = LearningCurves(dirpath=str(tmp_path))
    trainer = make_trainer(max_steps=2, callbacks=[curves], num_sanity_val_steps=1)
    trainer.fit(module, make_source(module), PromptSource(PROMPTS, 8))
    assert curves.panels() == {
        "reward/mean": "Reward",
        "reward/num_vowels": "Reward: num_vowels",
        "reward/vowel_share": "Reward: vowel_share",
        "rollout/length": "Completion length",
        "policy/entropy": "Entropy of the policy",
        "policy/kl": "KL from the reference",
    }
    for name in ("val/reward", "val/num_vowels", "val/length"):
        assert curves.history[name] == [(1, float(trainer.callback_metrics[name]))]
    panels = panels_of(tmp_path / "curves.png", 2, 3)
    assert all(colors(panel) > 20 for panel in panels)
    orange = [bool((abs(panel[..., :3] - ORANGE).max(axis=-1) < 0.01).any()) for panel in panels]
    assert orange == [True, True, True, True, False, False]


@SLOW
def test_a_lone_reward_has_no_second_panel(tmp_path):
    curves = LearningCurves(dirpath=str(tmp_path))
    fit(make_module(rewards=[num_vowels]), max_steps=2, callbacks=[curves])
    assert list(curves.panels()) == ["reward/mean", "rollout/length", "policy/entropy"]
    assert curves.panels()["reward/mean"] == "Reward = num_vowels"


@few(1)
@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (4, 2, 2), (5, 2, 3), (7, 3, 3)])
def test_places_without_a_metric_are_empty(tmp_path, count, rows, columns):
    curves = LearningCurves()
    curves.path, curves.names = tmp_path / "curves.png", [f"reward/{place}" for place in range(count)]
    for place, name in enumerate(curves.names):
        curves.history[name] = [(step, place + step * step) for step in range(9)]
    curves.draw(SimpleNamespace(is_global_zero=True))
    shown = [colors(panel[:280]) > 20 for panel in panels_of(tmp_path / "curves.png", rows, columns)]
    assert shown == [True] * count + [False] * (rows * columns - count)


def test_other_ranks_draw_nothing(tmp_path):
    curves = LearningCurves(["a"])
    curves.path, curves.history["a"] = tmp_path / "curves.png", [(0, 1.0)]
    curves.draw(SimpleNamespace(is_global_zero=False))
    assert not list(tmp_path.iterdir())


class Stop(L.Callback):
    """Raises after so many steps, having looked at whether there is a picture."""

    def __init__(self, path, steps, error) -> None:
        self.path, self.steps, self.error, self.seen = path, steps, error, []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(self.path.exists())
        if trainer.global_step == self.steps:
            raise self.error


@SLOW
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_run_has_its_curves(tmp_path, error):
    stop = Stop(tmp_path / "curves.png", 3, error)
    with pytest.raises((SystemExit, type(error))):
        fit(make_module(), max_steps=9, callbacks=[LearningCurves(dirpath=str(tmp_path)), stop])
    assert stop.seen == [False] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


@SLOW
def test_a_running_job_can_be_looked_at(tmp_path):
    stop = Stop(tmp_path / "curves.png", -1, None)
    curves = LearningCurves(["reward/mean"], every_n_steps=2, dirpath=str(tmp_path))
    fit(make_module(), max_steps=4, callbacks=[curves, stop], max_epochs=-1)
    assert stop.seen == [False, True, True, True]


def test_headings():
    assert heading("rollout/length") == ("Completion length", "tokens")
    assert heading("time/old_logprobs") == ("Time of old logprobs", "seconds")
    assert heading("reward/accuracy") == ("Reward: accuracy", "")
    assert heading("mine") == ("mine", "")


def test_nothing_logged_nothing_drawn(tmp_path):
    fit(make_module(), max_steps=1, callbacks=[LearningCurves(["never/logged"], dirpath=str(tmp_path))])
    assert not list(tmp_path.iterdir())


@SLOW
def test_a_resumed_run_draws_the_whole_curve(tmp_path):
    def train(max_steps, ckpt_path=None):
        curves = LearningCurves(["reward/mean"], dirpath=str(tmp_path))
        saving = ModelCheckpoint(tmp_path, filename="last")
        options = {"callbacks": [curves, saving], "enable_checkpointing": True, "max_steps": max_steps}
        fit(make_module(length=3), ckpt_path=ckpt_path, **options)
        return curves.history["reward/mean"]

    first = train(2)
    whole = train(4, str(tmp_path / "last.ckpt"))
    assert [step for step, _ in whole] == [0, 1, 2, 3]
    assert whole[:2] == first


@SLOW
def test_a_second_run_with_the_same_callback_starts_anew(tmp_path):
    curves, history = LearningCurves(["reward/mean"], dirpath=str(tmp_path)), History()
    fit(make_module(length=2), max_steps=2, callbacks=[curves])
    fit(make_module(length=3), max_steps=1, callbacks=[curves, history])
    assert curves.history["reward/mean"] == [(0, history.of("reward/mean")[0])]


def test_state_survives_a_file(tmp_path):
    curves = LearningCurves(["a"])
    curves.history["a"] += [(1, 0.5), (4, 0.25)]
    torch.save(curves.state_dict(), tmp_path / "state.pt")
    restored = LearningCurves(["a", "b"])
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.history["a"] == [(1, 0.5), (4, 0.25)]
    restored.history["b"].append((5, 1.0))  # a metric that is new goes on like the others


def test_held_out_values_by_name():
    assert held_out("reward/mean") == "val/reward"
    assert held_out("reward/accuracy") == "val/accuracy"
    assert held_out("rollout/length") == "val/length"
    assert held_out("val/reward") == "val/reward"
    assert held_out("policy/kl") == ""


def test_centered_mean_by_hand():
    assert centered_mean([4.0, 2.0, 6.0, 1.0, 0.0], 3) == [4.0, 4.0, 3.0, 7 / 3, 0.0]
    assert centered_mean([4.0, 2.0, 6.0, 1.0, 0.0], 11) == [4.0, 4.0, 13 / 5, 7 / 3, 0.0]
    assert centered_mean([4.0, 2.0, 6.0], 2) == centered_mean([4.0, 2.0, 6.0], 1) == [4.0, 2.0, 6.0]
    assert centered_mean([], 3) == []


@pytest.mark.parametrize("num_values", [2, 5, 40])
def test_the_smoothed_line_is_not_late(num_values):
    """A reward that rises step by step: a mean of the values before it would lie below the points all the way."""
    rising = [0.5 * step for step in range(num_values)]
    assert centered_mean(rising, 11) == pytest.approx(rising)


@pytest.mark.parametrize("name", ["smoothing", "every_n_steps"])
def test_less_than_one_step_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        LearningCurves(**{name: 0})


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
def test_a_fast_dev_run_draws_only_into_a_given_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(make_module(length=2), fast_dev_run=1, callbacks=[LearningCurves()])
    assert not list(tmp_path.iterdir())
    fit(make_module(length=2), fast_dev_run=1, callbacks=[LearningCurves(dirpath="there")])
    assert (tmp_path / "there" / "curves.png").exists()
