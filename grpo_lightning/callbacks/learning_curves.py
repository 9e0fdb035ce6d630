"""Draws learning curves into a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.callbacks.step_metrics import StepMetrics
from grpo_lightning.core.files import atomic_write, is_writing, run_folder
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.metrics import logged_this_step

HEADINGS = {
    "reward/mean": ("Reward", ""),
    "reward/std": ("Std of rewards within groups", ""),
    "reward/zero_variance_groups": ("Zero-variance groups", "fraction"),
    "reward/not_scorable": ("Completions that cannot be scored", "fraction"),
    "rollout/length": ("Completion length", "tokens"),
    "rollout/truncated": ("Truncated completions", "fraction"),
    "rollout/tokens_per_second": ("Sampling speed", "tokens per second"),
    "policy/entropy": ("Entropy of the policy", "nats per token"),
    "policy/kl": ("KL from the reference", "nats per token"),
    "policy/loss": ("Loss", ""),
    "policy/grad_norm": ("Gradient norm", ""),
    "policy/lr": ("Learning rate", ""),
    "policy/clip_fraction": ("Clipped tokens", "fraction"),
}
"""Title and unit of a panel, by metric."""

MAX_COLUMNS = 3


class LearningCurves(StepMetrics):
    """Plots metrics over optimizer steps into `curves.png` in the run's folder.

    Diamonds are validation values. Steps are numbered as in the loggers.

    Args:
        metrics: Names of the metrics. Each metric has a panel, but metrics with equal values share a panel. Metrics
            that are never logged have no panel. With null, the metrics are the total reward, each reward, the
            completion length, the entropy and the KL.
        smoothing: Number of values in the window of the centered moving average (an even number is reduced by 1).
        every_n_steps: Optimizer steps between two updates of the picture.
        dirpath: Output folder; null is the run's folder.
    """

    def __init__(
        self,
        metrics: list[str] | None = None,
        smoothing: int = 11,
        every_n_steps: int = 50,
        dirpath: str | None = None,
    ) -> None:
        for name, value in {"smoothing": smoothing, "every_n_steps": every_n_steps}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.metrics = metrics
        self.names = list(dict.fromkeys(metrics or []))
        self.smoothing = smoothing
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self.path: Path | None = None
        self.history: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """At the start of a run, forget all points. After this hook, Lightning loads the points of a resumed run."""
        if stage == "fit" and trainer.global_step == 0:
            self.history = defaultdict(list)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the panels."""
        assert isinstance(pl_module, GRPOLightningModule)
        self.path = run_folder(trainer, self.dirpath) / "curves.png" if is_writing(trainer, self.dirpath) else None
        if not self.metrics:
            rewards = [f"reward/{name}" for name in pl_module.reward_set.names]
            self.names = ["reward/mean", *rewards, "rollout/length", "policy/entropy", "policy/kl"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the metrics of a finished optimizer step, and draw every `every_n_steps` steps."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and trainer.global_step % self.every_n_steps == 0:
            self.draw(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation values."""
        if not trainer.sanity_checking:
            for name in {*self.names, *map(held_out, self.names)}:
                if name.startswith("val/") and name in trainer.callback_metrics:
                    self.add(name, trainer.global_step - 1, float(trainer.callback_metrics[name]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the complete run."""
        self.draw(trainer, is_last=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Draw the curves of an interrupted run."""
        self.draw(trainer, is_last=True)

    def note(self, trainer: L.Trainer) -> None:
        """Record the values that the last finished optimizer step logged."""
        values = logged_this_step(trainer)
        for name in self.names:
            if name in values:
                self.add(name, trainer.global_step - 1, float(values[name]))

    def add(self, name: str, step: int, value: float) -> None:
        """Add a point, unless the metric has one at this step or later."""
        points = self.history[name]
        if not points or points[-1][0] < step:
            points.append((step, value))

    def panels(self) -> dict[str, str]:
        """Panel titles by metric. Metrics with equal points share a panel."""
        titles: dict[str, str] = {}
        for name in self.names:
            if points := self.history[name]:
                twin = next((other for other in titles if self.history[other] == points), None)
                if twin is None:
                    titles[name] = heading(name)[0]
                else:
                    titles[twin] += f" = {name.partition('/')[2]}"
        return titles

    def draw(self, trainer: L.Trainer, *, is_last: bool = False) -> None:
        """Draw the history on rank 0, with an atomic write."""
        panels = self.panels()
        if self.path is None or not panels or not trainer.is_global_zero:
            return
        from matplotlib.figure import Figure  # without pyplot: no display, no global state

        rows = math.ceil(len(panels) / MAX_COLUMNS)
        columns = math.ceil(len(panels) / rows)
        figure = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.4), layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        legend: dict[str, Any] = {}
        for axes, (name, title) in zip(places, panels.items(), strict=False):
            self.draw_panel(axes, name, title)
            legend |= {line.get_label(): line for line in axes.get_lines()}
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
        with atomic_write(self.path) as unfinished:
            figure.savefig(unfinished, dpi=120, format="png")
        if is_last:
            print(f"Curves: {self.path}")  # noqa: T201 - the result people look for

    def draw_panel(self, axes: Any, name: str, title: str) -> None:
        """Draw the logged values of a metric, their moving average, and its validation values."""
        if name != held_out(name):
            steps, values = zip(*self.history[name], strict=True)
            axes.plot(steps, values, ".", color="tab:blue", markersize=4, alpha=0.35, label="logged value")
            mean = centered_mean(list(values), self.smoothing)
            axes.plot(steps, mean, color="tab:blue", label=f"centered mean of up to {self.smoothing} values")
        if points := self.history.get(held_out(name)):
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, "D", color="tab:orange", markersize=5, label="held-out prompts")
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="optimizer step", ylabel=heading(name)[1])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)

    def state_dict(self) -> dict[str, Any]:
        """The points so far."""
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the points."""
        self.history = defaultdict(
            list, {name: [tuple(p) for p in points] for name, points in state_dict["history"].items()}
        )


def heading(name: str) -> tuple[str, str]:
    """Title and unit of a metric's panel."""
    if name in HEADINGS:
        return HEADINGS[name]
    kind, _, rest = name.partition("/")
    words = rest.replace("_", " ")
    if kind == "reward":
        return f"Reward: {rest}", ""
    if kind == "time":
        return f"Time of {words}", "seconds"
    return name, ""


def held_out(name: str) -> str:
    """Name of the validation metric that corresponds to a training metric; "" if there is none."""
    kind, _, rest = name.partition("/")
    if kind == "val":
        return name
    return "val/reward" if name == "reward/mean" else f"val/{rest}" if kind in ("reward", "rollout") else ""


def centered_mean(values: list[float], width: int) -> list[float]:
    """Centered moving average over `width` values.

    The window has fewer values near the ends, and is always symmetric, so that the average does not lag.
    """
    half, last = (width - 1) // 2, len(values) - 1
    sides = [min(half, i, last - i) for i in range(len(values))]
    return [sum(values[i - n : i + n + 1]) / (2 * n + 1) for i, n in enumerate(sides)]
