"""Proves that the quickstart learns, and that it is GRPO that does it.

    python benchmarks/prove_learning.py            # seeds 0 1 2 and the three controls
    python benchmarks/prove_learning.py --record   # and writes the outcome into benchmarks/proofs.json

The bars: mean over the seeds, sampled accuracy at most 0.40 before and at least 0.90 after, greedy at most 0.50 and at
least 0.90, every run at most 8 minutes (the model's warm-up included). With rewards shuffled inside each group, with
the advantage's sign flipped, or with learning rate 0, accuracy gains less than 0.05. Exit code 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from proofs import record
from rich.console import Console
from rich.table import Table
from torch import Tensor

from grpo_lightning.cli import main as run_cli
from grpo_lightning.module import GRPOLightningModule

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


class ShuffledRewards(GRPOLightningModule):
    """Rewards land on the wrong completions of their group."""

    def compare(self, rewards: Tensor) -> Tensor:
        """Shuffle each group, then compare."""
        generator = torch.Generator().manual_seed(self.rollout_index)
        return super().compare(torch.stack([row[torch.randperm(len(row), generator=generator)] for row in rewards]))


class FlippedAdvantages(GRPOLightningModule):
    """The worst completions are reinforced."""

    def compare(self, rewards: Tensor) -> Tensor:
        """Compare, then turn the sign around."""
        return -super().compare(rewards)


CONTROLS: dict[str, tuple[type[GRPOLightningModule], list[str]]] = {
    "trained": (GRPOLightningModule, []),
    "shuffled rewards": (ShuffledRewards, []),
    "flipped advantages": (FlippedAdvantages, []),
    "learning rate 0": (GRPOLightningModule, ["--model.optimizer.init_args.lr=0"]),
}


def run(control: str, seed: int) -> dict[str, float]:
    """One quickstart in its own process and folder, with an empty cache: its summary."""
    with tempfile.TemporaryDirectory() as folder:
        child = [sys.executable, str(Path(__file__).resolve()), "--child", control, "--seeds", str(seed)]
        environment = os.environ | {"GRPO_LIGHTNING_CACHE": str(Path(folder) / "cache")}
        result = subprocess.run(child, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{control}, seed {seed}, failed:\n{result.stderr[-3000:]}")
        summary: dict[str, float] = json.loads((Path(folder) / "runs/quickstart/version_0/summary.json").read_text())
        return summary


def verdicts(runs: dict[str, list[dict[str, float]]]) -> dict[str, bool]:
    """Every bar, and whether it holds."""

    def mean(name: str) -> float:
        return sum(summary[name] for summary in runs["trained"]) / len(runs["trained"])

    bars = {
        "sampled before <= 0.40": mean("accuracy_before") <= 0.40,
        "sampled after >= 0.90": mean("accuracy_after") >= 0.90,
        "greedy before <= 0.50": mean("greedy_before") <= 0.50,
        "greedy after >= 0.90": mean("greedy_after") >= 0.90,
        "seconds <= 480": all(summary["seconds"] <= 480 for summary in runs["trained"]),
    }
    for control, summaries in runs.items():
        if control != "trained":
            gains = [
                summary[after] - summary[before]
                for summary in summaries
                for before, after in (("accuracy_before", "accuracy_after"), ("greedy_before", "greedy_after"))
            ]
            bars[f"{control}: gain < 0.05"] = max(gains) < 0.05
    return bars


def main() -> int:
    """Run everything, print the table, check the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    parser.add_argument("--child", choices=CONTROLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        module_class, flags = CONTROLS[options.child]
        run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={options.seeds[0]}", *flags], module_class)
        return 0

    names = ["accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "seconds"]
    table = Table("run", "seed", *names)
    runs: dict[str, list[dict[str, float]]] = {control: [] for control in CONTROLS}
    console = Console()
    for control in CONTROLS:
        for seed in options.seeds if control == "trained" else options.control_seeds:
            console.print(f"running: {control}, seed {seed}")
            summary = run(control, seed)
            runs[control].append({name: summary[name] for name in ["seed", *names]})
            table.add_row(control, str(seed), *(f"{summary[name]:.3f}" for name in names))
    bars = verdicts(runs)
    console.print(table)
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        record("learning", {"runs": runs, "bars": bars})
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
