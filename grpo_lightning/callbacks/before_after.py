"""Evaluation on held-out prompts before and after training."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.text import Text

import grpo_lightning
from grpo_lightning.core.files import run_folder
from grpo_lightning.core.in_place_line import InPlaceLine
from grpo_lightning.core.ranks import gather_objects, interleave
from grpo_lightning.core.seeding import run_seed
from grpo_lightning.data.batch import as_prompt_batch
from grpo_lightning.data.shuffling import known_prompts
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards.base import prompt_text
from grpo_lightning.training.lightning_internals import keep_order
from grpo_lightning.training.validation import Evaluation, evaluation_tables

WIDE = 100
"""Minimum width of a terminal, in columns, for a value and its interval on one line."""

Numbers = dict[str, dict[str, float]]
"""Metrics by kind of completion ("sampled", "greedy") and name."""


class BeforeAfter(L.Callback):
    """Evaluates the validation prompts before and after training, with the settings of `model.validation`.

    After training, it prints a table and sample completions, and writes `summary.json`:

    - `seed`, `metric`, `num_prompts`, `images` (number of images in the prompts) and `steps` (optimizer steps);
    - `<metric>_before`, `<metric>_after`: values of the headline metric for sampled completions, or null;
    - `greedy_before`, `greedy_after`: values of this metric for greedy completions, or null;
    - `seconds`: time since this package was imported;
    - `before`, `after`: all numbers of the table, by kind of completion (`sampled`, `greedy`) and name.

    Args:
        metric: Headline metric: the name of a reward, "reward" (the weighted total), "pass@8", ...
        num_samples: Number of prompts that are printed with a completion, for each of the two evaluations. 0 prints
            none.
        dirpath: Folder of `summary.json`; null is the run's folder.
    """

    def __init__(self, metric: str = "reward", num_samples: int = 3, dirpath: str | None = None) -> None:
        if num_samples < 0:
            raise ValueError(f"num_samples must be 0 (none) or positive, got {num_samples}.")
        self.metric = metric
        self.num_samples = num_samples
        self.dirpath = dirpath
        self.before: Numbers | None = None
        self.samples: dict[str, list[tuple[str, str]]] = {}
        self.num_prompts = 0
        self.num_images = 0
        self.after: Numbers | None = None
        self.progress: Progress | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """At the start of a run, forget all results. After this hook, Lightning loads the results of a resumed run."""
        if stage == "fit" and trainer.global_step == 0:
            self.before, self.after, self.samples = None, None, {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate before training.

        A resumed run keeps the earlier results. A `fast_dev_run` never evaluates.
        """
        if self.before is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.before = self.measure(trainer, pl_module, "before")
            if self.metric not in self.before["sampled"]:
                choices = [name for name in self.before["sampled"] if not is_bound(name)]
                raise ValueError(f"BeforeAfter.metric must be one of {', '.join(choices)}, got {self.metric!r}.")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate again, print both results, and write the summary."""
        if self.before is None:
            return
        assert isinstance(pl_module, GRPOLightningModule)
        folder = run_folder(trainer, self.dirpath)
        after = self.after = self.measure(trainer, pl_module, "after")
        self.show(self.before, after)
        when = {"before": self.before, "after": after}
        summary = {
            "seed": run_seed(pl_module.seed),
            "metric": self.metric,
            **{f"{self.metric}_{name}": numbers["sampled"].get(self.metric) for name, numbers in when.items()},
            **{f"greedy_{name}": numbers.get("greedy", {}).get(self.metric) for name, numbers in when.items()},
            "num_prompts": self.num_prompts,
            "images": self.num_images,
            "steps": trainer.global_step,
            "seconds": round(time.time() - grpo_lightning.IMPORTED_AT, 1),
            **when,
        }
        self.write(folder / "summary.json", summary)

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Show how many decoding steps are done."""
        if self.progress is not None and (done % 8 == 0 or done == total):
            self.progress.tokens = f"token {done}/{total}"
            self.progress.show()

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, when: str) -> Numbers:
        """Evaluate the validation prompts of all ranks.

        Raises:
            ValueError: If there are no validation prompts.
        """
        assert isinstance(pl_module, GRPOLightningModule)
        loader = validation_loader(trainer)
        batches = [as_prompt_batch(batch) for batch in loader]
        if not batches:
            raise ValueError("BeforeAfter needs validation prompts: set data.val_datasets, or remove the callback.")
        num_images = sum(len(prompt.images) for batch in batches for prompt in batch.prompts)
        sizes = torch.tensor([sum(map(len, batches)), num_images], device=pl_module.device)
        self.num_prompts, self.num_images = map(int, trainer.strategy.reduce(sizes, reduce_op="sum"))
        sources = sorted({prompt.source for prompt in known_prompts(getattr(loader, "prompts", ()))})
        tables = evaluation_tables(pl_module.reward_set, pl_module.validation, sources, pl_module.device)
        with self.shown(trainer, f"Evaluating {when} training", len(tables) * len(batches)) as progress:
            for kind, table in tables.items():
                self.samples[when] = []
                for batch in batches:
                    evaluation = pl_module.evaluate(batch.prompts, is_greedy=kind == "greedy")
                    table.update(evaluation)
                    self.samples[when] += samples(evaluation, self.num_samples - len(self.samples[when]))
                    progress.count()
        self.samples[when] = interleave(gather_objects(self.samples[when]))[: self.num_samples]
        return {kind: table.compute() for kind, table in tables.items()}

    @contextlib.contextmanager
    def shown(self, trainer: L.Trainer, title: str, num_batches: int) -> Iterator[Progress]:
        """Show a line of progress on rank 0, if the trainer's progress bar is on."""
        trainer_bar = trainer.progress_bar_callback
        is_off = trainer_bar is None or getattr(trainer_bar, "is_disabled", False)
        self.progress = Progress(title, num_batches, is_on=not is_off and trainer.is_global_zero)
        self.progress.show()
        try:
            yield self.progress
        finally:
            self.progress.line.close(is_kept=False)
            self.progress = None

    @rank_zero_only
    def show(self, before: Numbers, after: Numbers) -> None:
        """Print the table and the samples."""
        from rich.console import Console
        from rich.table import Table

        console = Console()
        between = " " if console.width >= WIDE else "\n"
        table = Table(title=f"{self.num_prompts} held-out prompts before and after training")
        table.add_column("")
        for kind in before:
            for when in ("before", "after"):
                table.add_column(f"{kind} {when}", justify="right")
        names = dict.fromkeys(name for numbers in (before, after) for kind in numbers.values() for name in kind)
        for name in names:
            if not is_bound(name):
                cells = (cell(numbers[kind], name, between) for kind in before for numbers in (before, after))
                table.add_row(name, *cells)
        console.print(table)
        for when, pairs in self.samples.items():
            for prompt, completion in pairs:
                console.print(Text(f"{when:>6}  {prompt}  ->  {completion}"))

    @rank_zero_only
    def write(self, path: Path, summary: dict[str, Any]) -> None:
        """Write the summary."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print(f"Summary: {path}")  # noqa: T201 - the result people look for

    def state_dict(self) -> dict[str, Any]:
        """The results from before training."""
        return {"before": self.before, "samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the results from before training."""
        self.before, self.samples = state_dict["before"], state_dict["samples"]


class Progress:
    """Status line of an evaluation."""

    def __init__(self, title: str, num_batches: int, *, is_on: bool) -> None:
        self.title, self.num_batches, self.is_on = title, num_batches, is_on
        self.done, self.tokens = 0, ""
        self.line = InPlaceLine()

    def count(self) -> None:
        """Count a finished batch."""
        self.done, self.tokens = self.done + 1, ""
        self.show(is_due=True)

    def show(self, *, is_due: bool = False) -> None:
        """Show the line."""
        if self.is_on:
            self.line.show(self.text, is_due=is_due)

    def text(self, width: int | None) -> Text:
        """Format the line."""
        return Text(f"{self.title}: {self.done}/{self.num_batches} batches  {self.tokens}".rstrip())


def validation_loader(trainer: L.Trainer) -> Any:
    """Return the data module's loader of validation prompts, to which `limit_val_batches` does not apply.

    Without a data module, return the trainer's loader. If the returned loader is a `PromptSource`, its
    shuffling is turned off.
    """
    datamodule = getattr(trainer, "datamodule", None)
    loader = trainer.val_dataloaders if datamodule is None else datamodule.val_dataloader()
    loader = [] if loader is None else loader
    keep_order(loader)
    return loader


def samples(evaluation: Evaluation, count: int) -> list[tuple[str, str]]:
    """Return the first `count` prompts, each with its first completion."""
    texts = [prompt_text(group.prompt.content) for group in evaluation.groups[:count]]
    return [(text, group.completions[0].text) for text, group in zip(texts, evaluation.groups, strict=False)]


def cell(numbers: dict[str, float], name: str, between: str = " ") -> str:
    """Format the value of a metric for a table cell, with four significant digits.

    If the metric has a confidence interval, the interval is added after the value, with the argument `between` as the
    separator. If the metric has no value, the cell is "-".
    """
    if name not in numbers:
        return "-"
    bounds = [numbers.get(f"{name}/{end}") for end in ("low", "high")]
    interval = "" if None in bounds else f"{between}[{bounds[0]:.2f}, {bounds[1]:.2f}]"
    return f"{numbers[name]:#.4g}".rstrip(".") + interval


def is_bound(name: str) -> bool:
    """True for a bound of a confidence interval."""
    return name.endswith(("/low", "/high"))
