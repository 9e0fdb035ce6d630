"""The progress bar: phase, rate and ETA, reward, length, speed."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

SHOWN = {
    "reward": "reward/mean",
    "length": "rollout/length",
    "tokens/s": "rollout/tokens_per_second",
    "kl": "policy/kl",
}
"""Label on the bar, and the metric it shows."""


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with the phase of the step in front and GRPO's numbers behind.

    Args:
        refresh_rate: Micro-steps between refreshes; 0 shows nothing.
        leave: Keep the bars of finished epochs.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:  # noqa: FBT001, FBT002 - a YAML key
        super().__init__(refresh_rate, leave=leave)
        self.is_training = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start Lightning's bar."""
        super().on_train_start(trainer, pl_module)
        self.is_training = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close it."""
        self.is_training = False
        super().on_train_end(trainer, pl_module)

    def on_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Show what the step is doing."""
        self.describe(trainer, phase)

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Show how far a rollout is: tokens drawn per completion, of at most `total`."""
        if done % 8 == 0 or done == total:
            self.describe(trainer, f"rollout {done}/{total}")

    def describe(self, trainer: L.Trainer, text: str) -> None:
        """Put a text in front of the bar."""
        if self.is_enabled and self.is_training and not trainer.evaluating:
            self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch} {text:14}")

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The numbers behind the bar: the last ones of every kind."""
        values = trainer.callback_metrics
        return {label: f"{float(values[name]):.3g}" for label, name in SHOWN.items() if name in values}
