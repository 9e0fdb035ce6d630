"""Summary at the end of a training run."""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.text import Text

from grpo_lightning.callbacks.before_after import BeforeAfter
from grpo_lightning.callbacks.progress import REWARD, clock, draws_bars
from grpo_lightning.callbacks.step_metrics import StepMetrics
from grpo_lightning.callbacks.trend import sparkline
from grpo_lightning.core.files import run_folder
from grpo_lightning.training.metrics import logged_this_step
from grpo_lightning.training.signals import GracefulStop

ENDS = 20
"""Maximum number of rollouts at each end of a run over which rewards are averaged."""

NO_BREAK = "\N{NO-BREAK SPACE}"

NOT_A_PHASE = "time/sampling"
"""Time of asynchronous sampling, which runs at the same time as the phases."""

COUNTED = (REWARD, "rollout/tokens_per_second")
"""Metrics that the summary needs, besides those of time."""

FILES = {
    "completions": "completions.jsonl",
    "curves": "curves.png",
    "metrics": "metrics.csv",
}
"""Files of the run's folder that the summary names, by label."""


class RunSummary(StepMetrics):
    """Prints a summary when a training run ends or is stopped by a signal. `fit` adds this callback by default.

    The summary shows the mean reward over the first k rollouts, and the mean reward over the last k rollouts. k is a
    tenth of the number of rollouts, but at least 1 and at most 20. Tokens are counted over all ranks. The time of a
    phase is the time of the slowest rank. The time "other" is the rest of the run (loading, evaluation, checkpoints).
    In a resumed run, rewards, counts and times are those of the steps since the run was resumed.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the previous run."""
        self.folder: Path | None = None
        self.started = time.monotonic()
        self.started_at = time.time()
        """The time of day at which the run started or resumed."""
        self.first_step = 0
        self.step = -1
        self.latest: dict[str, float] = {}
        """Metrics that the step in progress has logged so far."""
        self.seconds: dict[str, float] = {}
        self.tokens = 0.0
        self.rewards: list[float] = []

    def on_fit_start(self, *_: Any) -> None:
        """Start the clock."""
        self.reset()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember the folder of the run, and the step at which it starts."""
        self.folder = run_folder(trainer, None)
        self.first_step = self.step = trainer.global_step

    def note(self, trainer: L.Trainer) -> None:
        """Record what the last finished step has logged."""
        if trainer.global_step != self.step:
            self.count()
            self.step = trainer.global_step
        values = logged_this_step(trainer)
        self.latest |= {name: float(values[name]) for name in values if name.startswith("time/") or name in COUNTED}

    def count(self) -> None:
        """Add the latest step to the totals."""
        values, self.latest = self.latest, {}
        for name, value in values.items():
            if name.startswith("time/"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        sampling = values.get("time/sampling", values.get("time/rollout", 0.0))
        self.tokens += values.get("rollout/tokens_per_second", 0.0) * sampling
        if REWARD in values:
            self.rewards.append(values[REWARD])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print the summary of a finished run, after the output of other callbacks."""
        if stage == "fit":
            self.show(trainer, "Stopped" if trainer.interrupted else "Finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Print the summary if a signal, and not an error, has stopped the run."""
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self.note(trainer)
            self.show(trainer, "Stopped")

    def show(self, trainer: L.Trainer, how: str) -> None:
        """Print the summary on rank 0, once."""
        self.count()
        num_steps = trainer.global_step - self.first_step
        if self.folder is None or num_steps < 1 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.is_global_zero:
            seconds = time.monotonic() - self.started
            console = Console(highlight=False)
            steps = f"{num_steps} steps" if num_steps > 1 else "1 step"
            title = f"{how} at step {trainer.global_step}: {steps} in {clock(seconds)}"
            lines = [Text(), Text(title, "bold")]
            resumed = [("resumed", f"at step {self.first_step}; this is about the steps since")] * bool(self.first_step)
            found = places(trainer, self.folder, self.started_at)
            for label, text in [*resumed, *self.results(trainer), *self.costs(seconds), *found]:
                parts = textwrap.wrap(text, max(console.width, 80) - 15, break_long_words=False, break_on_hyphens=False)
                for i, part in enumerate(parts):
                    lines.append(Text.assemble(("" if i else f"  {label}").ljust(15), part.replace(NO_BREAK, " ")))
                    lines[-1].stylize("cyan", 0, 15)
            console.print(Text("\n").join(lines), soft_wrap=True)
        self.folder = None

    def results(self, trainer: L.Trainer) -> Iterator[tuple[str, str]]:
        """Rewards in training, and those of `BeforeAfter`."""
        arrow = "→" if draws_bars() else "->"
        if len(self.rewards) > 1:
            k = min(max(len(self.rewards) // 10, 1), ENDS)
            line = f"  {sparkline(self.rewards, 20)}" if draws_bars() else ""
            ends = f"{fmean(self.rewards[:k]):#.3g} {arrow} {fmean(self.rewards[-k:]):#.3g}"
            which = f"{k} rollouts" if k > 1 else "rollout"
            yield "reward", f"{ends} (first and last {which}){line}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BeforeAfter) and callback.before and callback.after:
                name = callback.metric
                kinds = [
                    f"{before[name]:#.3g} {arrow} {callback.after[kind][name]:#.3g} {kind}"
                    for kind, before in callback.before.items()
                    if name in before and name in callback.after[kind]
                ]
                if kinds:
                    yield "held out", f"{name} {', '.join(kinds)}"

    def costs(self, seconds: float) -> Iterator[tuple[str, str]]:
        """Tokens and time."""
        sampling = self.seconds.get("time/sampling", self.seconds.get("time/rollout", 0.0))
        if self.tokens and sampling:
            yield "tokens", f"{self.tokens:,.0f} sampled, {self.tokens / sampling:,.0f} per second of sampling"
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        phases = {name.removeprefix("time/"): own for name, own in longest if name != NOT_A_PHASE}
        phases["other"] = max(seconds - sum(phases.values()), 0.0)
        shares = {name: round(100 * own / seconds) for name, own in phases.items()}
        yield "time", ", ".join(f"{name} {share}{NO_BREAK}%" for name, share in shares.items() if share > 1)


def places(trainer: L.Trainer, folder: Path, started_at: float = 0.0) -> Iterator[tuple[str, str]]:
    """For each result of a run, yield a label and the path of the result.

    If the report is missing, its path is replaced by the command that creates a report. The same applies to a report
    that is older than `started_at`, because such a report lacks the latest steps.
    """
    folder = relative_path(folder)
    if folder.is_dir():
        yield "run folder", str(folder)
    for label, name in FILES.items():
        if (folder / name).is_file():
            yield label, str(folder / name)
    checkpoints = dict.fromkeys(filter(None, map(last_checkpoint, trainer.callbacks)))  # type: ignore[attr-defined]
    for path in checkpoints:
        yield "checkpoint", str(relative_path(path))
    if not checkpoints and not trainer.checkpoint_callbacks:
        yield "checkpoint", "none (trainer.enable_checkpointing is false)"
    report = folder / "report.html"
    if report.is_file() and report.stat().st_mtime >= started_at:
        yield "report", str(report)
    elif (folder / FILES["metrics"]).is_file():
        yield "report", f"grpo-lightning report {shlex.quote(str(folder))}"


def last_checkpoint(callback: L.Callback) -> Path | None:
    """Return the best checkpoint of a callback, or its last checkpoint if the callback monitors no metric.

    The result is None if the callback has saved no checkpoint, or if the checkpoint has been deleted.
    """
    if isinstance(callback, GracefulStop):
        return callback.checkpoint
    path = (callback.best_model_path or callback.last_model_path) if isinstance(callback, ModelCheckpoint) else ""
    return Path(path) if path and Path(path).exists() else None


def relative_path(path: Path) -> Path:
    """Make a path relative to the current folder if the path is inside this folder."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
