"""Progress bar: phase, optimizer steps with rate and ETA, reward, completion length, sampling speed."""

from __future__ import annotations

import math
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from grpo_lightning.core.messages import LINE_SECONDS, Lines, redraws
from grpo_lightning.training.metrics import logged_this_step

SHOWN = {
    "reward": "reward/mean",
    "length": "rollout/length",
    "tokens/s": "rollout/tokens_per_second",
    "kl": "policy/kl",
}
"""Labels on the progress bar, and the metric that is shown after each label."""


class ProgressBar(TQDMProgressBar):
    """One bar for the entire run, in optimizer steps, with the current phase and GRPO's metrics.

    Metrics that the module logs with `prog_bar=True` are shown too. Validation, test and prediction have separate bars,
    which show how many tokens per completion are sampled so far. If the output is a file (e.g. in a SLURM job), a line
    is printed at the start, every minute and at the end, instead of a bar.

    Args:
        refresh_rate: Optimizer steps (or evaluation batches) between refreshes; 0 disables the bar.
        leave: Keep the bar on screen after training.
    """

    RUN_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, leave: bool = True) -> None:  # noqa: FBT001, FBT002 - a YAML key
        super().__init__(refresh_rate, leave=leave)
        self.phase = ""
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, *_: Any) -> None:
        """Start without a bar: other callbacks may evaluate first, and the bar must not count their time."""
        self._train_progress_bar = None
        self.phase, self.values = "", {}

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the bar with the first epoch; a resumed run continues at its step."""
        self.start(trainer)
        self.describe(trainer, "")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the bar of a run resumed within an epoch, for which Lightning does not call `on_train_epoch_start`."""
        self.start(trainer)

    def start(self, trainer: L.Trainer) -> None:
        """Create the bar, unless it already exists."""
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
        """Count a finished optimizer step and show its metrics."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        values = logged_this_step(trainer)
        if "rollout/length" in values:
            self.values = {}  # a new rollout: values of the previous rollout are not shown any more
        self.values |= values
        bar = self.train_progress_bar
        if self._should_update(trainer.global_step, bar.total or 0):
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            if redraws(sys.stdout):
                bar.n = trainer.global_step
                bar.refresh()
            else:
                bar.update(trainer.global_step - bar.n)  # refreshes once a minute
        if trainer.global_step == bar.total:
            bar.close()  # so that later output starts on a new line

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the bar, which covers the entire run."""

    def on_train_end(self, *_: Any) -> None:
        """Close the bar."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(self, *_: Any) -> None:
        """Close all bars, so that the error message starts on a new line."""
        for bar in (
            self._train_progress_bar,
            self._val_progress_bar,
            self._test_progress_bar,
            self._predict_progress_bar,
        ):
            if bar is not None:
                bar.close()

    def on_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Show the current phase of the training step."""
        self.phase = phase
        self.describe(trainer, phase)

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Show decoding progress: tokens sampled per completion, of at most `total`."""
        if done % 8 and done != total:
            return
        kind, bar = self.evaluation_bar(trainer)
        if bar is not None:
            bar.set_description(f"{kind} {done}/{total} tokens", refresh=redraws(sys.stdout))
        elif self.phase == "rollout":  # callbacks may sample too, outside of a training step
            self.describe(trainer, f"rollout {done}/{total}")

    def evaluation_bar(self, trainer: L.Trainer) -> tuple[str, Any]:
        """Name and bar of the running evaluation; no bar during training."""
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
        """Metrics on the bar: those of the last rollout and the last step, and those logged with `prog_bar=True`."""
        shown: dict[str, int | str | float | dict[str, float]] = {
            label: f"{float(self.values[name]):.3g}" for label, name in SHOWN.items() if name in self.values
        }
        return shown | trainer.progress_bar_metrics
