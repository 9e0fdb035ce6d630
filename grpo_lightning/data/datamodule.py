"""The data module: a YAML mixture in, a prompt source out."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L

from grpo_lightning.data.mixture import DatasetEntry, load_mixture
from grpo_lightning.data.source import PromptSource
from grpo_lightning.seeding import run_seed
from grpo_lightning.types import Prompt


class PromptDataModule(L.LightningDataModule):
    """Prompts from a mixture of JSON and JSONL files.

    Args:
        datasets: The mixture to train on: entries, or the path of a YAML file with the key `datasets`.
        val_datasets: The mixture to validate on; null for no validation.
        batch_size: Prompts per rank and rollout. It alone sets how much an update trains on.
        val_batch_size: Prompts per rank and validation step; null takes `batch_size`.
        shuffle: A new order every epoch.
        seed: Of the order and of `random:N`; null takes `seed_everything`.
        prepare: Called once per machine before the files are read: to download or build them.
    """

    def __init__(
        self,
        datasets: list[DatasetEntry] | str,
        val_datasets: list[DatasetEntry] | str | None = None,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - a YAML key
        seed: int | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "val_batch_size": val_batch_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}.")
        self.datasets = datasets
        self.val_datasets = val_datasets
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.prepare = prepare
        self.train_prompts: list[Prompt] | None = None
        self.val_prompts: list[Prompt] | None = None

    def prepare_data(self) -> None:
        """Download or build the files."""
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Read the files; a bad row stops the run here, before any weights are loaded."""
        if self.train_prompts is None and stage in (None, "fit"):
            self.train_prompts = load_mixture(self.datasets, seed=run_seed(self.seed))
        if self.val_prompts is None and self.val_datasets is not None:
            self.val_prompts = load_mixture(self.val_datasets, seed=run_seed(self.seed))

    def train_dataloader(self) -> PromptSource:
        """The training prompts, each cycle's as often as the module's cycle has micro-steps."""
        trainer = self.trainer
        assert self.train_prompts is not None
        assert trainer is not None
        return PromptSource(
            self.train_prompts,
            self.batch_size,
            cycle=trainer.lightning_module.cycle_length(trainer.accumulate_grad_batches),  # type: ignore[operator]
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]
            seed=run_seed(self.seed),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )

    def val_dataloader(self) -> PromptSource | list[Prompt]:
        """The validation prompts, once, in the order of the files."""
        if self.val_prompts is None:
            return []
        assert self.trainer is not None
        return PromptSource(
            self.val_prompts,
            self.val_batch_size,
            shuffle=False,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
