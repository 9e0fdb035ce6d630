"""Writes the completions of `predict` as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.core.files import append_lines, is_writing, json_line, run_file
from grpo_lightning.core.ranks import gather_objects, interleave
from grpo_lightning.data.batch import as_prompt_batch


class WritePredictions(L.Callback):
    """Writes the completions of all ranks to `predictions.jsonl` in the run's folder, in the order of the prompts.

    Each completion is one line with these fields:

    - `source`, `prompt_index`, `prompt`, `completion` and `finish_reason`;
    - `row`: file and line of the data row;
    - `length`: number of tokens of the completion;
    - `reward`: the total reward, or null if the completion is not scorable;
    - `rewards`: the rewards by name;
    - `columns`: the columns of the data row;
    - `turns` (only in conversations): role, text and number of tokens of each turn, and for a turn of the policy also
      its finish reason and its reward.

    Lines are written batch by batch. With several ranks and a loader that is not a `PromptSource`, all lines are
    written at the end. A file of an earlier run is replaced.

    Args:
        dirpath: Output folder; null is the run's folder. With null, a `fast_dev_run` writes nothing.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.path: Path | None = None
        self.num_lines = 0
        self.waiting: list[list[str]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create an empty file."""
        self.path = None
        if not is_writing(trainer, self.dirpath):
            return
        self.path = run_file(trainer, self.dirpath, "predictions.jsonl")
        if trainer.is_global_zero:
            self.path.write_bytes(b"")
        self.num_lines, self.waiting = 0, []

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
            TypeError: If `predict_step` did not return a list of records.
        """
        if self.path is None:
            return
        if not isinstance(outputs, Sequence) or not all(isinstance(record, Mapping) for record in outputs):
            raise TypeError(
                f"WritePredictions needs a predict_step that returns a list of records (dicts), got "
                f"{type(outputs).__name__}: {outputs!r:.80}."
            )
        prompts = as_prompt_batch(batch)
        self.waiting += by_prompt(outputs, len(prompts))
        # Gathering hangs if a rank has fewer batches than other ranks. Only a PromptSource has equally many batches on
        # every rank.
        if trainer.world_size == 1 or prompts.is_from_source:
            self.write(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the remaining records, and print the path."""
        if self.path is None:
            return
        self.write(trainer)
        if trainer.is_global_zero:
            print(f"Predictions: {self.path} ({self.num_lines} completions)")  # noqa: T201 - the result people look for

    def write(self, trainer: L.Trainer) -> None:
        """Write the pending records of all ranks. Collective: call it on every rank."""
        lines = [line for group in interleave(gather_objects(self.waiting)) for line in group]
        self.waiting = []
        self.num_lines += len(lines)
        if trainer.is_global_zero:
            assert self.path is not None
            append_lines(self.path, lines)


def by_prompt(records: Sequence[Mapping[str, Any]], num_prompts: int) -> list[list[str]]:
    """JSON lines of a batch, with one list per prompt.

    If the number of records is not a multiple of `num_prompts`, all lines are in one list.
    """
    lines = [json_line(record) for record in records]
    size = len(lines) // num_prompts if num_prompts and len(lines) % num_prompts == 0 else len(lines)
    return [lines[start : start + size] for start in range(0, len(lines), size)] if size else []
