"""Learning curves as a picture, for whoever does not open a dashboard."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.core.files import atomic_write, run_folder
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.step_callbacks import logged_this_step

HEADINGS = {
    "reward/mean": ("Reward", ""),
    "reward/std": ("Spread of rewards within groups", ""),
    "reward/zero_variance_groups": ("Groups of equal rewards", "share"),
    "reward/not_scorable": ("Completions that cannot be scored", "share"),
    "rollout/length": ("Completion length", "tokens"),
    "rollout/truncated": ("Truncated completions", "share"),
    "rollout/tokens_per_second": ("Sampling speed", "tokens per second"),
    "policy/entropy": ("Entropy of the policy", "nats per token"),
    "policy/kl": ("KL from the reference", "nats per token"),
    "policy/loss": ("Loss", ""),
    "policy/grad_norm": ("Gradient norm", ""),
    "policy/lr": ("Learning rate", ""),
    "policy/clip_fraction": ("Clipped tokens", "share"),
}
"""Title and unit of a panel, by metric."""

MAX_COLUMNS = 3


class LearningCurves(L.Callback):
    """Draws metrics over optimizer steps into `curves.png` in the run's folder, and held-out values as diamonds.

    It is drawn while the run goes on, when it ends, and when it is interrupted. Steps are those of the loggers.

    Args:
        metrics: One panel each; those never logged are left out. Null: the reward, every reward by name, the length,
            and entropy and KL.
        smoothing: The line through the points is the mean of up to so many values, as many before as after each step
            (an even number counts as the odd one below).
        every_n_steps: Optimizer steps between two drawings.
        dirpath: Folder; null is the run's.
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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the panels."""
        assert isinstance(pl_module, GRPOLightningModule)
        self.path = run_folder(trainer, self.dirpath) / "curves.png"
        if not self.metrics:
            rewards = [f"reward/{name}" for name in pl_module.reward_set.names]
            self.names = ["reward/mean", *rewards, "rollout/length", "policy/entropy", "policy/kl"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what the last optimizer step logged after the callbacks had their turn (`time/update`)."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.note(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the metrics of a finished optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.note(trainer)
            if trainer.global_step % self.every_n_steps == 0:
                self.draw(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what the last step of the epoch logged late: Lightning forgets it with the epoch."""
        self.note(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the held-out values."""
        if not trainer.sanity_checking:
            for name in {*self.names, *map(held_out, self.names)}:
                if name.startswith("val/") and name in trainer.callback_metrics:
                    self.add(name, trainer.global_step - 1, float(trainer.callback_metrics[name]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the whole run."""
        self.draw(trainer, is_last=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Draw what there is: an interrupted run has curves too."""
        self.draw(trainer, is_last=True)

    def note(self, trainer: L.Trainer) -> None:
        """Add the values that the last finished optimizer step logged itself."""
        values = logged_this_step(trainer)
        for name in self.names:
            if name in values:
                self.add(name, trainer.global_step - 1, float(values[name]))

    def add(self, name: str, step: int, value: float) -> None:
        """Add a point, once."""
        points = self.history[name]
        if not points or points[-1][0] < step:
            points.append((step, value))

    def panels(self) -> dict[str, str]:
        """Titles of the panels by metric. What has the same points as another (a lone reward) is in its title."""
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
        """Draw the history on rank 0, by an atomic write: the file can be looked at at any time."""
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
        """One metric: its points, their running mean, and the held-out values."""
        if name != held_out(name):
            steps, values = zip(*self.history[name], strict=True)
            axes.plot(steps, values, ".", color="tab:blue", markersize=4, alpha=0.35, label="logged value")
            mean = centred_mean(list(values), self.smoothing)
            axes.plot(steps, mean, color="tab:blue", label=f"centred mean of up to {self.smoothing} values")
        if points := self.history.get(held_out(name)):
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, "D", color="tab:orange", markersize=5, label="held-out prompts")
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="optimizer step", ylabel=heading(name)[1])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)

    def state_dict(self) -> dict[str, Any]:
        """The points so far: a resumed run draws the whole curve."""
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these points."""
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
    """The validation metric that belongs to a training metric."""
    kind, _, rest = name.partition("/")
    if kind == "val":
        return name
    return "val/reward" if name == "reward/mean" else f"val/{rest}" if kind in ("reward", "rollout") else ""


def centred_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and as many before as after it, `width` in all, fewer near both ends.

    With the same number on both sides a straight line stays what it is: the mean is never late, on short runs neither.
    """
    half, last = (width - 1) // 2, len(values) - 1
    sides = [min(half, i, last - i) for i in range(len(values))]
    return [sum(values[i - n : i + n + 1]) / (2 * n + 1) for i, n in enumerate(sides)]
