"""The completions of `predict`, as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.callbacks.run_files import append_lines, rank_file


class WritePredictions(L.Callback):
    """Writes `predictions.jsonl` (rank r > 0: `predictions.rank<r>.jsonl`) into the run's folder.

    A line per completion: source, prompt_index, prompt, completion, length (tokens), finish_reason, reward, rewards (by
    name) and columns (of the data row). null stands for "not scorable". Lines are written batch by batch: an
    interrupted run leaves what it had. A file of an earlier run is replaced.

    Args:
        dirpath: Folder; null is the run's.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.path: Path | None = None
        self.num_lines = 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin an empty file."""
        self.path = rank_file(trainer, self.dirpath, "predictions")
        self.path.write_bytes(b"")
        self.num_lines = 0

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write a batch.

        Raises:
            TypeError: If `predict_step` gave no list of records.
        """
        if not isinstance(outputs, Sequence) or not all(isinstance(record, Mapping) for record in outputs):
            raise TypeError(
                f"WritePredictions needs a predict_step that returns a list of records (dicts), got "
                f"{type(outputs).__name__}: {outputs!r:.80}."
            )
        assert self.path is not None
        append_lines(self.path, outputs)
        self.num_lines += len(outputs)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say where the file is."""
        print(f"Predictions: {self.path} ({self.num_lines} completions)")  # noqa: T201 - the result people look for
