"""Proves that the quickstart learns, and that it learns because of GRPO.

    python benchmarks/prove_learning.py            # seeds 0 to 7, and the three controls with seeds 0 to 2
    python benchmarks/prove_learning.py --record   # also writes the outcome to benchmarks/proofs.json

The bars for the mean over the seeds: the sampled accuracy is at most 0.40 before training and at least 0.90 after, the
greedy accuracy at most 0.50 before and at least 0.90 after. The bar for every seed: the sampled accuracy is at least
0.80 after training, in at most 8 minutes (including the warm-up of the model). In the controls, rewards are shuffled
inside each group, the advantages have the opposite sign, or the learning rate is 0: sampled and greedy accuracy then
rise by less than 0.05 in the mean over the seeds (the standard error of a greedy accuracy over 256 prompts is 0.03).
Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from controlled_runs import TRAINED, ControlledRuns, Runs

from grpo_lightning.cli import main as run_cli
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout, per_completion

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


class ShuffledRewards(GRPOLightningModule):
    """Rewards are shuffled inside each group."""

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Shuffle the rewards within each group, then compute the advantages."""
        generator = torch.Generator().manual_seed(self.run.rollout_index)
        rewards = per_completion(rollout.rewards, rollout.groups, name="rewards", verb="score_rewards")
        rollout.rewards = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in rewards])
        return super().compute_advantages(rollout)


class FlippedAdvantages(GRPOLightningModule):
    """Advantages have the opposite sign."""

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Compute the advantages, then change their sign."""
        rollout = super().compute_advantages(rollout)
        assert rollout.advantages is not None
        rollout.advantages = -rollout.advantages
        return rollout


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it is reached."""

    def mean(name: str) -> float:
        return sum(summary[name] for summary in runs[TRAINED]) / len(runs[TRAINED])

    bars = {
        "sampled before <= 0.40": mean("accuracy_before") <= 0.40,
        "sampled after >= 0.90": mean("accuracy_after") >= 0.90,
        "sampled after >= 0.80 with every seed": min(run["accuracy_after"] for run in runs[TRAINED]) >= 0.80,
        "greedy before <= 0.50": mean("greedy_before") <= 0.50,
        "greedy after >= 0.90": mean("greedy_after") >= 0.90,
        "seconds <= 480": all(summary["seconds"] <= 480 for summary in runs[TRAINED]),
    }
    for control, summaries in runs.items():
        if control != TRAINED:
            gains = [
                statistics.fmean(summary[f"{kind}_after"] - summary[f"{kind}_before"] for summary in summaries)
                for kind in ("accuracy", "greedy")
            ]
            bars[f"{control}: gain < 0.05"] = max(gains) < 0.05
    return bars


def quickstart(module_class: type[GRPOLightningModule], seed: int, *flags: str) -> None:
    """Run the recipe with the module of a control."""
    run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={seed}", *flags], module_class)


PROOF = ControlledRuns(
    name="learning",
    controls={
        TRAINED: partial(quickstart, GRPOLightningModule),
        "shuffled rewards": partial(quickstart, ShuffledRewards),
        "flipped advantages": partial(quickstart, FlippedAdvantages),
        "learning rate 0": lambda seed: quickstart(GRPOLightningModule, seed, "--model.optimizer.init_args.lr=0"),
    },
    summary="runs/quickstart/version_0/summary.json",
    numbers=["accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "seconds"],
    verdicts=verdicts,
    control_seeds=range(3),
)

if __name__ == "__main__":
    sys.exit(PROOF.main(__doc__))
