"""Proves that the calculator's quickstart learns, and that it learns from what the calculator says.

    python benchmarks/prove_tools.py --seeds 0 1 2            # three seeds and the four controls
    python benchmarks/prove_tools.py --seeds 0 1 2 --record   # also writes the outcome to benchmarks/proofs.json

The bars for every seed, on held-out sums: the accuracy of sampled answers is at most 0.30 before training and at least
0.80 after; that of greedy answers is at least 0.80 after; the fraction of answers that used the calculator rises by at
least 0.50; and a run takes at most 8 minutes (including the warm-up of the model). In the controls, the calculator
always says 0, the rewards are shuffled, the advantages have the opposite sign, or the learning rate is 0: the accuracy
then rises by less than 0.10. Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from controlled_runs import TRAINED, ControlledRuns, Runs
from prove_game import ShuffledRewards
from prove_reasoning_gym import FlippedAdvantages

from grpo_lightning.cli import main as run_cli
from grpo_lightning.module import GRPOLightningModule

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart_tools.yaml"
SUMMARY = "runs/quickstart_tools/version_0/summary.json"
NUMBERS = ["accuracy_before", "accuracy_after", "greedy_after", "tool_use_before", "tool_use_after"]


def calculator(expression: str) -> str:
    """Say 0, whatever the expression is.

    Args:
        expression: Not read.
    """
    return "0"


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it is reached."""
    trained = runs[TRAINED]
    bars = {
        "sampled before <= 0.30": max(run["accuracy_before"] for run in trained) <= 0.30,
        "sampled after >= 0.80": min(run["accuracy_after"] for run in trained) >= 0.80,
        "greedy after >= 0.80": min(run["greedy_after"] for run in trained) >= 0.80,
        "tool use: gain >= 0.50": min(run["tool_use_after"] - run["tool_use_before"] for run in trained) >= 0.50,
        "seconds <= 480": max(run["seconds"] for run in trained) <= 480,
    }
    for control, summaries in runs.items():
        if control != TRAINED:
            gains = [run["accuracy_after"] - run["accuracy_before"] for run in summaries]
            bars[f"{control}: gain < 0.10"] = max(gains) < 0.10
    return bars


def quickstart(module_class: type[GRPOLightningModule], seed: int, *flags: str) -> None:
    """Run the recipe with the module of a control, and add the tool use of sampled answers to the summary."""
    run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={seed}", *flags], module_class)
    path = Path(SUMMARY)
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary |= {f"tool_use_{when}": summary[when]["sampled"]["tool_use"] for when in ("before", "after")}
    path.write_text(json.dumps(summary), encoding="utf-8")


PROOF = ControlledRuns(
    name="tools",
    controls={
        TRAINED: partial(quickstart, GRPOLightningModule),
        "a calculator that says 0": lambda seed: quickstart(
            GRPOLightningModule, seed, "--model.environment.init_args.tools=[prove_tools.calculator]"
        ),
        "shuffled rewards": partial(quickstart, ShuffledRewards),
        "flipped advantages": partial(quickstart, FlippedAdvantages),
        "learning rate 0": lambda seed: quickstart(GRPOLightningModule, seed, "--model.optimizer.init_args.lr=0"),
    },
    summary=SUMMARY,
    numbers=[*NUMBERS, "seconds"],
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(PROOF.main(__doc__))
