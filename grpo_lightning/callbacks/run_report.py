"""A callback that writes the report of a run when the run ends."""

from __future__ import annotations

import logging

import lightning as L

from grpo_lightning.callbacks.run_record import RunRecord
from grpo_lightning.report import read_run, write_report

log = logging.getLogger(__name__)


class RunReport(RunRecord):
    """Writes `report.html` in the run's folder when the run ends, even if it ends with an error.

    The page is that of `grpo-lightning report`. The page shows what `CompletionLog`, `BeforeAfter` and the logger of
    `metrics.csv` have written into the folder. The callback also writes `run.json`, as `RunRecord` does.

    Args:
        max_completions: Maximum number of completions with texts in the page. If a run has more, the page contains only
            every n-th rollout, with the smallest n that keeps this limit.
        dirpath: Folder of the run's files and of the report; null is the run's folder.
    """

    def __init__(self, max_completions: int = 20_000, dirpath: str | None = None) -> None:
        if max_completions < 1:
            raise ValueError(f"max_completions must be at least 1, got {max_completions}.")
        super().__init__(dirpath)
        self.max_completions = max_completions

    def write(self, trainer: L.Trainer, status: str) -> None:
        """Write the record, and the report if the run has ended."""
        super().write(trainer, status)
        if status == "running" or self.folder is None or not trainer.is_global_zero:
            return
        try:
            path = write_report(
                [read_run(self.folder, max_completions=self.max_completions)], self.folder / "report.html"
            )
        except Exception as error:  # noqa: BLE001 - a run that has trained for days must not fail at its report
            log.warning("The report of the run was not written: %s", error)
        else:
            print(f"Report: {path}")  # noqa: T201 - the result people look for
