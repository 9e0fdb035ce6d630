"""A run in which a callback trains a frozen weight, and freezes it again."""

from __future__ import annotations

from typing import Any

import lightning as L

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.optimizers import AdamW


class AllInOptimizer(GRPOLightningModule):
    """Gives frozen weights to the optimizer, too, so that a callback can train them for a part of the run."""

    def configure_optimizers(self) -> Any:
        return AdamW(self.policy.parameters(), lr=3e-3)


class TrainBetween(L.Callback):
    """Trains the embeddings, which are frozen at the start, in the second optimizer step only."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.policy.get_input_embeddings().requires_grad_(trainer.global_step == 1)
