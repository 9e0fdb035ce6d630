"""Learning curves: what was logged is what is drawn, over a resume as well."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.image import imread

from grpo_lightning.callbacks import LearningCurves
from grpo_lightning.callbacks.curves import running_mean
from tests.module_runs import History, fit, make_module


def test_points_are_the_steps_and_the_picture_shows_them(tmp_path, capsys):
    names = ["reward/mean", "rollout/length", "never/logged"]
    curves, history = LearningCurves(names, dirpath=str(tmp_path / "new")), History()
    fit(make_module(), max_steps=3, callbacks=[curves, history], accumulate_grad_batches=2)
    for name in names[:2]:
        assert curves.history[name] == list(zip([1, 2, 3], history.of(name), strict=True))
        assert len(set(history.of(name))) > 1
    assert not curves.history["never/logged"]
    path = tmp_path / "new" / "curves.png"
    picture = imread(path)
    assert picture.shape == (384, 2 * 480, 4)  # two panels: what was never logged has none
    for panel in (picture[:, :480], picture[:, 480:]):
        assert len(torch.tensor(panel).view(-1, 4).unique(dim=0)) > 20
    assert capsys.readouterr().out == f"Curves: {path}\n"


def test_nothing_logged_nothing_drawn(tmp_path):
    fit(make_module(), max_steps=1, callbacks=[LearningCurves(["never/logged"], dirpath=str(tmp_path))])
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_draws_the_whole_curve(tmp_path):
    def train(max_steps, ckpt_path=None):
        curves = LearningCurves(["reward/mean"], dirpath=str(tmp_path))
        saving = ModelCheckpoint(tmp_path, filename="last")
        options = {"callbacks": [curves, saving], "enable_checkpointing": True, "max_steps": max_steps}
        fit(make_module(length=3), ckpt_path=ckpt_path, **options)
        return curves.history["reward/mean"]

    first = train(2)
    whole = train(4, str(tmp_path / "last.ckpt"))
    assert [step for step, _ in whole] == [1, 2, 3, 4]
    assert whole[:2] == first


def test_state_survives_a_file(tmp_path):
    curves = LearningCurves(["a"])
    curves.history["a"] += [(1, 0.5), (4, 0.25)]
    torch.save(curves.state_dict(), tmp_path / "state.pt")
    restored = LearningCurves(["a", "b"])
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.history["a"] == [(1, 0.5), (4, 0.25)]
    restored.history["b"].append((5, 1.0))  # a metric that is new goes on like the others


def test_running_mean_by_hand():
    assert running_mean([4.0, 2.0, 6.0, 0.0], 2) == [4.0, 3.0, 4.0, 3.0]
    assert running_mean([4.0, 2.0, 6.0], 10) == [4.0, 3.0, 4.0]
    assert running_mean([4.0, 2.0], 1) == [4.0, 2.0]
    assert running_mean([], 3) == []


def test_smoothing_below_one_is_refused():
    with pytest.raises(ValueError, match="smoothing must be at least 1 step, got 0"):
        LearningCurves(smoothing=0)
