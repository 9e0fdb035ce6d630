"""Runs of a quickstart on several seeds, and with controls that must not learn, for the proofs of learning."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proofs import record
from rich.console import Console
from rich.table import Table

Summary = dict[str, float]
Runs = dict[str, list[Summary]]
"""Summaries of the runs, by the name of the control."""

TRAINED = "trained"
"""Name of the runs without a control."""


@dataclass(frozen=True)
class ControlledRuns:
    """A proof of learning: its runs, and the bars that they have to reach."""

    name: str
    """Name of the entry in `proofs.json`."""

    controls: Mapping[str, Callable[[int], None]]
    """Functions by name; each runs the quickstart once in the current folder with a given seed. Includes those of
    `learning`."""

    summary: str
    """Path of the summary that a run writes."""

    numbers: Sequence[str]
    """Numbers of the summary that the table shows."""

    verdicts: Callable[[Runs], dict[str, bool]]
    """Returns every bar, and whether it is reached."""

    learning: Sequence[str] = (TRAINED,)
    """Names of the runs that have to learn. The other runs are controls, with seeds of their own."""

    seeds: Sequence[int] = range(8)
    """Default seeds of the runs that have to learn."""

    control_seeds: Sequence[int] = (0,)
    """Default seeds of every control."""

    also_recorded: Sequence[str] = ("seed",)
    """Further numbers of the summary that are written to `proofs.json`."""

    def main(self, description: str | None) -> int:
        """Run everything, print the table, check the bars. Returns: the exit code, 1 if a bar is not reached."""
        formatter = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
        parser.add_argument("--seeds", type=int, nargs="+", default=[*self.seeds])
        parser.add_argument("--control-seeds", type=int, nargs="+", default=[*self.control_seeds])
        parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
        parser.add_argument("--child", choices=self.controls, help=argparse.SUPPRESS)
        options = parser.parse_args()
        if options.child:
            self.controls[options.child](options.seeds[0])
            return 0

        console = Console(width=max(140, Console().width))  # wide enough for the table, also if the output is a file
        table = Table("run", "seed", *self.numbers)
        runs: Runs = {control: [] for control in self.controls}
        for control in self.controls:
            for seed in options.seeds if control in self.learning else options.control_seeds:
                console.print(f"running: {control}, seed {seed}")
                summary = self.run(control, seed)
                runs[control].append({name: summary[name] for name in [*self.also_recorded, *self.numbers]})
                table.add_row(control, str(seed), *(f"{summary[name]:.4g}" for name in self.numbers))
        spreads = {name: self.spread(runs[name]) for name in self.learning}
        for name, spread in spreads.items():
            for kind, numbers in spread.items():
                table.add_row(f"{name}, {kind}", "", *(f"{numbers[number]:.4g}" for number in self.numbers))
        bars = self.verdicts(runs)
        console.print(table)
        for bar, holds in bars.items():
            console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
        if options.record:
            outcome = spreads if len(spreads) > 1 else spreads[self.learning[0]]
            record(self.name, {"runs": runs, "spread": outcome, "bars": bars})
        return 0 if all(bars.values()) else 1

    def spread(self, learned: Sequence[Summary]) -> dict[str, Summary]:
        """Mean, minimum and maximum of every number over the seeds: the bars must be reached with any seed."""
        values = {name: [summary[name] for summary in learned] for name in self.numbers}
        kinds = {"mean": statistics.fmean, "least": min, "greatest": max}
        return {kind: {name: reduce(some) for name, some in values.items()} for kind, reduce in kinds.items()}

    def run(self, control: str, seed: int) -> Summary:
        """Run a quickstart in a process and folder of its own, with an empty cache. Returns: its summary."""
        with tempfile.TemporaryDirectory() as folder:
            child = [sys.executable, str(Path(sys.argv[0]).resolve()), "--child", control, "--seeds", str(seed)]
            environment = os.environ | {"GRPO_LIGHTNING_CACHE": str(Path(folder) / "cache")}
            result = subprocess.run(child, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(f"{control}, seed {seed}, failed:\n{result.stderr[-3000:]}")
            summary: Summary = json.loads((Path(folder) / self.summary).read_text(encoding="utf-8"))
            return summary
