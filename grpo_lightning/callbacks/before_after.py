"""What training changed: held-out prompts answered before and after, as a table, samples and a summary file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from grpo_lightning.data.source import PromptBatch, as_prompt_batch
from grpo_lightning.evaluation import Evaluation, means
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.seeding import run_seed


class BeforeAfter(L.Callback):
    """Evaluates on the validation prompts when training starts and ends, sampled and greedy.

    Prints a table and sample completions, and writes `summary.json`: seed, `<metric>_before`, `<metric>_after`
    (sampled), greedy_before, greedy_after, problems, steps, seconds (since the process started), and every number of
    the table.

    Args:
        metric: The reward that is the headline; "reward" is the weighted total.
        num_samples: Completions shown of each.
        dirpath: Folder of `summary.json`; null is the logger's.
    """

    def __init__(self, metric: str = "reward", num_samples: int = 3, dirpath: str | None = None) -> None:
        self.metric = metric
        self.num_samples = num_samples
        self.dirpath = dirpath
        self.before: dict[str, dict[str, float]] | None = None
        self.samples: dict[str, list[tuple[str, str]]] = {}
        self.num_problems = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate before training; a resumed run keeps what was measured then, a `fast_dev_run` measures nothing."""
        if self.before is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.before = self.measure(trainer, pl_module, "before")
            if self.metric not in self.before["sampled"]:
                raise ValueError(
                    f"BeforeAfter: there is no metric {self.metric!r}; "
                    f"choose among {', '.join(self.before['sampled'])}."
                )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate again, show both, and write the summary."""
        if self.before is None:
            return
        assert isinstance(pl_module, GRPOLightningModule)
        after = self.measure(trainer, pl_module, "after")
        self.show(self.before, after)
        when = {"before": self.before, "after": after}
        summary = {
            "seed": run_seed(pl_module.seed),
            **{f"{self.metric}_{name}": values["sampled"].get(self.metric) for name, values in when.items()},
            **{f"greedy_{name}": values["greedy"].get(self.metric) for name, values in when.items()},
            "problems": self.num_problems,
            "steps": trainer.global_step,
            "seconds": round(time.time() - psutil.Process().create_time(), 1),
            **when,
        }
        self.write(Path(self.dirpath or trainer.log_dir or trainer.default_root_dir) / "summary.json", summary)

    def batches(self, trainer: L.Trainer) -> list[PromptBatch]:
        """The validation prompts: all of the data module's, whatever limits validation has; or of the loader given.

        Raises:
            ValueError: If there are none.
        """
        datamodule = getattr(trainer, "datamodule", None)
        loader = trainer.val_dataloaders if datamodule is None else datamodule.val_dataloader()
        batches = [as_prompt_batch(batch) for batch in loader or []]
        if not batches:
            raise ValueError("BeforeAfter needs validation prompts: set data.val_datasets, or remove the callback.")
        return batches

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, when: str) -> dict[str, dict[str, float]]:
        """Means of every reward, the length and the truncated share, of sampled and of greedy completions."""
        assert isinstance(pl_module, GRPOLightningModule)
        batches = self.batches(trainer)
        evaluations = {
            name: [pl_module.evaluate(batch.prompts, is_greedy=name == "greedy") for batch in batches]
            for name in ("sampled", "greedy")
        }
        self.num_problems = sum(map(len, batches))
        self.samples[when] = samples(evaluations["greedy"][0], self.num_samples)
        return {name: means(of_batches) for name, of_batches in evaluations.items()}

    @rank_zero_only
    def show(self, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> None:
        """Print the table and the samples."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Held-out prompts before and after training")
        table.add_column("")
        for name in ("sampled", "greedy"):
            for when in ("before", "after"):
                table.add_column(f"{name} {when}", justify="right")
        for key in before["sampled"]:
            cells = [values[name].get(key) for name in ("sampled", "greedy") for values in (before, after)]
            table.add_row(key, *("-" if cell is None else f"{cell:.3f}" for cell in cells))
        console = Console()
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
        """What was measured before training."""
        return {"before": self.before, "samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it over a resume."""
        self.before, self.samples = state_dict["before"], state_dict["samples"]


def samples(evaluation: Evaluation, count: int) -> list[tuple[str, str]]:
    """(prompt, completion) of the first prompts."""
    groups = evaluation.groups[:count]
    return [(str(group.prompt.content), group.completions[0].text) for group in groups]
