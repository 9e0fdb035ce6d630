"""Arguments of the callbacks: other files, other pictures, other tables, another bar."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.axes import Axes

from grpo_lightning.callbacks import (
    BeforeAfter,
    CompletionLog,
    ExportPolicy,
    LearningCurves,
    NewestCheckpoints,
    ProgressBar,
    RunRecord,
    RunReport,
    Watchdog,
    WritePredictions,
)
from grpo_lightning.callbacks.watchdog import StallInterrupt
from grpo_lightning.core.in_place_line import InPlaceLine
from grpo_lightning.core.types import Prompt
from tests.arguments.registry import case, case_of_each
from tests.helpers.module_runs import fit, make_module, make_source, make_trainer
from tests.marks import SLOW, few


def run(callback: Any, steps: int = 2) -> None:
    """Two steps on eight prompts, which are held-out ones too."""
    module = make_module(length=3, num_generations=2)
    runner = make_trainer(max_steps=steps, num_sanity_val_steps=0, callbacks=[callback])
    runner.fit(module, make_source(module, shuffle=False), make_source(module, batch_size=2, shuffle=False))


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary that `BeforeAfter` wrote."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@few(2, slow=True)
@case_of_each([BeforeAfter, CompletionLog, LearningCurves, RunRecord, RunReport], "dirpath")
def test_dirpath(owner, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        run(owner(dirpath=str(folder)))
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] != []


@SLOW
@case(Watchdog, "stall_seconds", "grace_seconds", "dirpath")
def test_the_watchdog(tmp_path, monkeypatch):
    """How long it waits for progress and for the main thread, and where the checkpoint of a stalled run is."""
    paths, exits = [], []
    trainer = SimpleNamespace(
        global_step=1,
        checkpoint_callback=SimpleNamespace(dirpath="own"),
        save_checkpoint=lambda path: paths.append(str(path.parent)),
        strategy=SimpleNamespace(launcher=None),
    )
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: None)

    def seconds_to_exit(**settings: float) -> float:
        callback = Watchdog(**{"stall_seconds": 0.2, "grace_seconds": 0.2} | settings)  # type: ignore[arg-type]
        callback.on_train_start(trainer, None)  # type: ignore[arg-type]
        callback.on_phase(trainer, "rollout")  # type: ignore[arg-type]
        started, before = time.monotonic(), len(exits)
        while len(exits) == before and time.monotonic() < started + 20:
            time.sleep(0.01)
        callback.rest()
        return time.monotonic() - started

    for settings in ({}, {"stall_seconds": 1.5}, {"grace_seconds": 1.5}):
        assert (seconds_to_exit(**settings) > 1.5) == bool(settings)
    for dirpath in (None, str(tmp_path)):
        Watchdog(dirpath=dirpath).on_exception(trainer, None, StallInterrupt())  # type: ignore[arg-type]
    assert paths == ["own", str(tmp_path)]


def checkpoints(callback: Any) -> dict[str, bool]:
    """The checkpoints of four steps, and whether each has the optimizer."""
    fit(make_module(length=2, num_generations=2), max_steps=4, callbacks=[callback], enable_checkpointing=True)
    folder = Path(callback.dirpath)
    return {path.stem: "optimizer_states" in torch.load(path, weights_only=True) for path in folder.glob("*.ckpt")}


@SLOW
@case(NewestCheckpoints, "save_steps", "save_total_limit", "save_only_model", "dirpath")
def test_newest_checkpoints(tmp_path):
    def folder(name: str) -> str:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return str(tmp_path / name)

    assert checkpoints(NewestCheckpoints(2, 1, dirpath=folder("a"))) == {"step=4": True}
    assert checkpoints(NewestCheckpoints(2, 2, dirpath=folder("a"))) == {"step=2": True, "step=4": True}
    assert checkpoints(NewestCheckpoints(3, 2, dirpath=folder("a"))) == {"step=3": True, "step=4": True}
    assert checkpoints(NewestCheckpoints(2, 1, True, dirpath=folder("a"))) == {"step=4": False}
    assert checkpoints(NewestCheckpoints(2, 1, dirpath=folder("b"))) == {"step=4": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@case(WritePredictions, "dirpath")
def test_dirpath_of_predictions(tmp_path):
    for name in ("one", "two"):
        module = make_module(length=2)
        callback = WritePredictions(dirpath=str(tmp_path / name))
        make_trainer(callbacks=[callback]).predict(module, make_source(module), return_predictions=False)
        assert len((tmp_path / name / "predictions.jsonl").read_text().splitlines()) == 8


@SLOW
@case(BeforeAfter, "metric", "num_samples")
def test_before_after(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder = str(tmp_path)
    shown = {}
    for metric, num_samples in (("reward", 1), ("length", 1), ("reward", 3)):
        run(BeforeAfter(metric, num_samples, folder))
        shown[metric, num_samples] = capsys.readouterr().out.count("  ->  ")
        found = summary(tmp_path)
        assert found["metric"] == metric
        assert found[f"{metric}_after"] == found["after"]["sampled"][metric]
    assert shown == {("reward", 1): 2, ("length", 1): 2, ("reward", 3): 6}


@SLOW
@case(CompletionLog, "every_n_rollouts")
def test_every_n_rollouts(tmp_path):
    for every, rollouts in ((1, [0, 1, 2]), (2, [0, 2])):
        run(CompletionLog(every, dirpath=str(tmp_path)), steps=3)
        lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
        assert sorted({line["rollout"] for line in lines}) == rollouts


@SLOW
@case(CompletionLog, "token_logprobs")
def test_token_logprobs(tmp_path):
    for is_on in (False, True):
        run(CompletionLog(token_logprobs=is_on, dirpath=str(tmp_path)))
        assert (tmp_path / "tokens.jsonl").exists() == is_on


@SLOW
@case(RunReport, "max_completions")
def test_max_completions(tmp_path):
    """Two rollouts of 8 completions, of which the report has both or the last."""
    log = CompletionLog(dirpath=str(tmp_path))
    for limit, number in ((100, 16), (8, 8)):
        report = RunReport(limit, str(tmp_path))
        module = make_module(length=3, num_generations=2)
        fit(module, max_steps=2, callbacks=[log, report])
        (data,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text())
        assert len(json.loads(data)["runs"][0]["columns"]["reward"]) == number


class Wandb(WandbLogger):
    """Notes how many rows its tables have."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.sizes.append(len(data))


class Board(TensorBoardLogger):
    """Notes the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @property
    def experiment(self):
        return SimpleNamespace(add_text=lambda tag, text, step: self.texts.append(text))


@case(CompletionLog, "max_rows", "num_samples")
def test_tables_of_the_loggers():
    line = {"step": 0, "rollout": 0, "rewards": {}, "length": 1, "prompt": "p", "completion": "c"}
    lines = [line | {"reward": float(number)} for number in range(8)]
    wandb, board = Wandb(), Board()
    for settings in ({"max_rows": 8, "num_samples": 1}, {"max_rows": 3, "num_samples": 1}, {"max_rows": 8}):
        CompletionLog(**settings).show([wandb, board], lines, [Prompt("p")] * 8)
    assert wandb.sizes == [8, 3, 8]
    assert [text.count("| best ") for text in board.texts] == [1, 1, 3]


# ------------------------------------------------------------------------------------------------------------- curves


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> tuple[list[int], list[str], list[float]]:
    """Plot three steps with rewards 0, 1, 4: (steps at which it was drawn, panels, the smoothed reward)."""
    steps: list[int] = []
    draw, plot = LearningCurves.draw, Axes.plot
    means: list[list[float]] = []

    def note_draw(self: LearningCurves, trainer: Any, *, is_last: bool = False) -> None:
        steps.append(trainer.global_step)
        if is_last:
            draw(self, trainer)

    def note_plot(self: Axes, x: Any, y: Any, *args: Any, **options: Any) -> Any:
        if options.get("label", "").startswith("centered mean of"):
            means.append(list(y))
        return plot(self, x, y, *args, **options)

    def growing(completions, trainer_state):
        return [float(trainer_state.global_step) ** 2 for _ in completions]

    curves = LearningCurves(dirpath=str(tmp_path), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(LearningCurves, "draw", note_draw)
        patch.setattr(Axes, "plot", note_plot)
        fit(make_module(length=2, rewards=[growing]), max_steps=3, callbacks=[curves])
    return steps, list(curves.panels()), means[0]


@SLOW
@case(LearningCurves, "metrics", "smoothing", "every_n_steps")
def test_curves(tmp_path, monkeypatch):
    found = functools.partial(drawn, monkeypatch, tmp_path)
    assert found(metrics=["reward/mean"]) == ([3], ["reward/mean"], [0, pytest.approx(5 / 3), 4])
    assert found(metrics=["reward/mean", "rollout/length"])[1] == ["reward/mean", "rollout/length"]
    assert found(metrics=["reward/mean"], smoothing=1)[2] == [0, 1, 4]
    assert found(metrics=["reward/mean"], every_n_steps=1)[0] == [1, 2, 3, 3]


# ------------------------------------------------------------------------------------------------------------- the bar


@SLOW
@case(ProgressBar, "refresh_rate")
def test_refresh_rate(monkeypatch):
    for rate, times in ((1, 4), (2, 2)):
        shown: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(InPlaceLine, "show", lambda self, _, *, is_due=False, shown=shown: shown.append(is_due))
            bar = ProgressBar(refresh_rate=rate)
            fit(make_module(length=1), max_steps=4, enable_progress_bar=True, callbacks=[bar])
        assert sum(shown) == 1 + times  # the start, and each step that is due


@SLOW
@case(ProgressBar, "leave")
def test_leave(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for leave in (True, False):
        bar = ProgressBar(leave=leave)
        fit(make_module(length=1), max_steps=1, enable_progress_bar=True, callbacks=[bar])
        after = capsys.readouterr().out.rpartition("1/1")[2]
        assert ("\x1b[2K" in after) != leave  # erases the line


@SLOW
@case(ExportPolicy, "folder", "every_n_steps")
def test_what_is_exported(tmp_path):
    found = []
    for folder, every_n_steps in (("one", None), ("two", None), ("one", 1)):
        run(ExportPolicy(str(tmp_path / "run" / folder), every_n_steps))
        files = (tmp_path / "run").rglob("model.safetensors")
        found.append(sorted(str(file.parent.relative_to(tmp_path / "run")) for file in files))
        shutil.rmtree(tmp_path / "run")
    assert found == [["one"], ["two"], ["one", "one/step-1", "one/step-2"]]
