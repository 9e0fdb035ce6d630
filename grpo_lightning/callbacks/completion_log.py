"""Every completion of every rollout: one JSON line each, and tables in the loggers that have them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.callbacks.completion_tables import CompletionTables
from grpo_lightning.callbacks.run_files import (
    append_lines,
    in_order_of_prompts,
    json_line,
    keep_rollouts_before,
    run_file,
)
from grpo_lightning.core.ranks import gather_objects
from grpo_lightning.core.types import Prompt
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.training.evaluation import Evaluation, records


class CompletionLog(L.Callback):
    """Writes `completions.jsonl`, with the completions of all ranks, into the run's folder.

    A line holds step, epoch, rollout, rank (the process that drew it), source, prompt_index, row (file and line, where
    its images and its answer are), prompt, completion, length (tokens), finish_reason, reward, rewards (by name),
    advantage, and what rewards gave to `log_extra`. null stands for "not scorable". `step` is the number of optimizer
    steps that were done when the rollout was drawn: the `step` under which the loggers have the rollout's metrics. The
    lines of a rollout are in the order of its prompts, whatever the number of ranks.

    Weights & Biases also gets a table of every rollout, and TensorBoard the best, the worst and a few others, with
    the images of their prompts. Of images there are those of rank 0 only.

    Args:
        every_n_rollouts: Write only every so many rollouts.
        max_rows: Completions in a table of Weights & Biases; the file always has all of them.
        num_samples: Best, worst and other completions in TensorBoard, of each; 0 shows none.
        dirpath: Folder; null is the run's.
    """

    def __init__(
        self, every_n_rollouts: int = 1, max_rows: int = 100, num_samples: int = 3, dirpath: str | None = None
    ) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts must be at least 1, got {every_n_rollouts}.")
        self.every_n_rollouts = every_n_rollouts
        self.tables = CompletionTables(max_rows, num_samples)
        self.dirpath = dirpath
        self.path: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the file; a run from the start replaces an old one, a resumed run goes on where its checkpoint was."""
        assert isinstance(pl_module, GRPOLightningModule)
        self.path = run_file(trainer, self.dirpath, "completions.jsonl")
        if not trainer.is_global_zero:
            return
        if trainer.global_step == 0:
            self.path.unlink(missing_ok=True)
        else:
            keep_rollouts_before(self.path, pl_module.run.rollout_index)
        self.tables.check(trainer.loggers, self.path)

    def on_rollout(self, trainer: L.Trainer, module: GRPOLightningModule, rollout: Rollout) -> None:
        """Write the rollout that a cycle begins with. The same on every rank: all gather at the same steps."""
        number = module.run.rollout_index - 1
        if number % self.every_n_rollouts == 0:
            when = {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "rollout": number,
                "rank": trainer.global_rank,
            }
            gathered = gather_objects(groups_of_lines(rollout, when))
            if trainer.is_global_zero:
                self.write(trainer, rollout, gathered)

    def write(self, trainer: L.Trainer, rollout: Rollout, ranks: list[list[list[str]]]) -> None:
        """Write the lines of a rollout, by rank and group, and show them."""
        assert self.path is not None
        written = [line for group in in_order_of_prompts(ranks) for line in group]
        append_lines(self.path, written)
        if written:
            of_ranks: list[list[list[Prompt | None]]] = [[[None] * len(group) for group in groups] for groups in ranks]
            of_ranks[0] = [[group.prompt for _ in group.completions] for group in rollout.groups]
            prompts = [prompt for group in in_order_of_prompts(of_ranks) for prompt in group]
            self.tables.show(trainer.loggers, [json.loads(line) for line in written], prompts)


def groups_of_lines(rollout: Rollout, when: Mapping[str, int]) -> list[list[str]]:
    """The lines of a rollout, group by group."""
    each = (json_line({**when, **line}) for line in lines(rollout))
    return [list(itertools.islice(each, len(group.completions))) for group in rollout.groups]


def lines(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """The completions of a scored and compared rollout, in order.

    A column from `log_extra` with the name of a field of ours, or of one of the tables, is written as `extra/<name>`.
    """
    groups, scores, advantages = rollout.groups, rollout.scores, rollout.advantages
    assert scores is not None
    assert advantages is not None
    completions = zip(records(Evaluation(groups, scores)), advantages.flatten().tolist(), strict=True)
    for row, (record, advantage) in enumerate(completions):
        del record["columns"]  # of the data, which prompt_index finds
        line = {**record, "advantage": advantage}
        taken = {"step", "epoch", "rollout", "rank", *line, *(f"rewards/{name}" for name in scores.by_reward)}
        extras = {column: values[row] for column, values in scores.extras.items()}
        yield line | {f"extra/{name}" if name in taken else name: value for name, value in extras.items()}
