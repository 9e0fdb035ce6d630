"""The progress bar: phase, steps of the run with rate and ETA, reward, length, speed."""

from __future__ import annotations

import math
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from grpo_lightning.core.messages import LINE_SECONDS, Lines, redraws
from grpo_lightning.training.step_callbacks import logged_this_step

SHOWN = {
    "reward": "reward/mean",
    "length": "rollout/length",
    "tokens/s": "rollout/tokens_per_second",
    "kl": "policy/kl",
}
"""Label on the bar, and the metric it shows."""


class ProgressBar(TQDMProgressBar):
    """One bar for the whole run, in optimizer steps: what the step is doing in front, GRPO's numbers behind.

    What the module logs with `prog_bar=True` is shown too. Validation, test and prediction have bars of their own, with
    the tokens drawn so far. In a file (a SLURM job), the bar of the run is a line at the start, one a minute
    and one at the end.

    Args:
        refresh_rate: Optimizer steps (or batches of an evaluation) between refreshes; 0 shows nothing.
        leave: Keep the bar when the training is over.
    """

    RUN_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, leave: bool = True) -> None:  # noqa: FBT001, FBT002 - a YAML key
        super().__init__(refresh_rate, leave=leave)
        self.phase = ""
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, *_: Any) -> None:
        """Begin without a bar: other callbacks may evaluate first, and that is no training time."""
        self._train_progress_bar = None
        self.phase, self.values = "", {}

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the bar with the first epoch; a resumed run goes on at its step."""
        self.start(trainer)
        self.describe(trainer, "")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start it here where a run is resumed inside an epoch: Lightning does not begin that one again."""
        self.start(trainer)

    def start(self, trainer: L.Trainer) -> None:
        """Make the bar if there is none yet."""
        if self._train_progress_bar is None:
            steps = trainer.estimated_stepping_batches
            where: dict[str, Any] = {"file": sys.stdout}
            if not redraws(sys.stdout):
                where = {"file": Lines("stdout"), "mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS}
            self.train_progress_bar = Tqdm(
                desc=self.train_description,
                total=int(steps) if 0 <= steps < math.inf else None,
                initial=trainer.global_step,
                unit="step",
                disable=self.is_disabled,
                leave=self._leave,
                dynamic_ncols=True,
                smoothing=0,
                bar_format=self.RUN_FORMAT,
                **where,
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a finished optimizer step and show its numbers."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        values = logged_this_step(trainer)
        if "rollout/length" in values:
            self.values = {}  # a new rollout: what it has no value for (a reward) is not that of the one before
        self.values |= values
        bar = self.train_progress_bar
        if self._should_update(trainer.global_step, bar.total or 0):
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            if redraws(sys.stdout):
                bar.n = trainer.global_step
                bar.refresh()
            else:
                bar.update(trainer.global_step - bar.n)  # draws once a minute
        if trainer.global_step == bar.total:
            bar.close()  # what others print when the run ends begins on a line of its own

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the bar: it is that of the run."""

    def on_train_end(self, *_: Any) -> None:
        """Close the bar."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(self, *_: Any) -> None:
        """Close whichever bar is shown: what is said about the error begins on a line of its own."""
        for bar in (
            self._train_progress_bar,
            self._val_progress_bar,
            self._test_progress_bar,
            self._predict_progress_bar,
        ):
            if bar is not None:
                bar.close()

    def on_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Show what the step is doing."""
        self.phase = phase
        self.describe(trainer, phase)

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Show how far completions are: tokens drawn, of at most `total`."""
        if done % 8 and done != total:
            return
        kind, bar = self.evaluation_bar(trainer)
        if bar is not None:
            bar.set_description(f"{kind} {done}/{total} tokens", refresh=redraws(sys.stdout))
        elif self.phase == "rollout":  # others draw too, outside of a step
            self.describe(trainer, f"rollout {done}/{total}")

    def evaluation_bar(self, trainer: L.Trainer) -> tuple[str, Any]:
        """Name and bar of the evaluation that is going on; no bar while training."""
        if trainer.sanity_checking:
            return self.sanity_check_description, self._val_progress_bar
        if trainer.validating:
            return self.validation_description, self._val_progress_bar
        if trainer.testing:
            return self.test_description, self._test_progress_bar
        if trainer.predicting:
            return self.predict_description, self._predict_progress_bar
        return "", None

    def describe(self, trainer: L.Trainer, text: str) -> None:
        """Put a text in front of the bar."""
        if self.is_enabled and self._train_progress_bar is not None and trainer.training:
            self.train_progress_bar.set_description(
                f"Epoch {trainer.current_epoch} {text:14}", refresh=redraws(sys.stdout)
            )

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The numbers behind the bar: of the last rollout, of the last step, and what is logged for the bar."""
        shown: dict[str, int | str | float | dict[str, float]] = {
            label: f"{float(self.values[name]):.3g}" for label, name in SHOWN.items() if name in self.values
        }
        return shown | trainer.progress_bar_metrics
