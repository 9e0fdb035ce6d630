"""Learning curves as a picture, for whoever does not open a dashboard."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class LearningCurves(L.Callback):
    """Draws metrics over optimizer steps into `curves.png` in the run's folder when training ends.

    Args:
        metrics: One panel each; those never logged are left out.
        smoothing: Steps of the running mean drawn over the points.
        dirpath: Folder; null is the logger's.
    """

    def __init__(
        self,
        metrics: list[str] | None = None,
        smoothing: int = 10,
        dirpath: str | None = None,
    ) -> None:
        if smoothing < 1:
            raise ValueError(f"smoothing must be at least 1 step, got {smoothing}.")
        self.metrics = metrics or ["reward/mean", "rollout/length", "policy/entropy", "policy/kl"]
        self.smoothing = smoothing
        self.dirpath = dirpath
        self.history: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the metrics of a finished optimizer step."""
        for name in self.metrics:
            value, points = trainer.callback_metrics.get(name), self.history[name]
            if value is not None and (not points or points[-1][0] < trainer.global_step):
                points.append((trainer.global_step, float(value)))

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw what was noted."""
        drawn = [name for name in self.metrics if self.history[name]]
        if not drawn:
            return
        from matplotlib.figure import Figure  # without pyplot: no display, no global state

        figure = Figure(figsize=(4 * len(drawn), 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            steps, values = zip(*self.history[name], strict=True)
            axes.plot(steps, values, ".", markersize=3, alpha=0.4)
            axes.plot(steps, running_mean(list(values), self.smoothing))
            axes.set(title=name, xlabel="optimizer step")
            axes.grid(alpha=0.3)
        path = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir) / "curves.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        print(f"Curves: {path}")  # noqa: T201 - the result people look for

    def state_dict(self) -> dict[str, Any]:
        """The points so far: a resumed run draws the whole curve."""
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these points."""
        self.history = defaultdict(
            list, {name: [tuple(p) for p in points] for name, points in state_dict["history"].items()}
        )


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and the `width` - 1 before it, fewer at the start."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]
