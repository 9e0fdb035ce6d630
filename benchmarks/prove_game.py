"""Proves that the number game's quickstart learns, and that it learns from what the environment says.

    python benchmarks/prove_game.py --seeds 0 1 2            # three seeds and the four controls
    python benchmarks/prove_game.py --seeds 0 1 2 --record   # also writes the outcome to benchmarks/proofs.json

The bars for every seed, on held-out games: the fraction of games in which the digit is found is at most 0.40 before
training and at least 0.80 after, for sampled guesses; at least 0.80 for greedy ones; and a run takes at most 8 minutes
(including the warm-up of the model). Whoever hears nothing finds at most four of ten digits. In the controls, higher
and lower sound the same, the rewards are shuffled, the advantages have the opposite sign, or the learning rate is 0:
the fraction after training is then below 0.48, which is 0.40 and twice the standard error of 200 games. Exit code 1 if
a bar does not hold.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from controlled_runs import TRAINED, ControlledRuns, Runs
from prove_reasoning_gym import FlippedAdvantages

from grpo_lightning.cli import main as run_cli
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart_game.yaml"
NUMBERS = ["environment_reward_before", "environment_reward_after", "greedy_before", "greedy_after"]


class ShuffledRewards(GRPOLightningModule):
    """The rewards are those of other completions of the rollout."""

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Shuffle the rewards, then compute the advantages."""
        assert rollout.rewards is not None
        generator = torch.Generator().manual_seed(self.run.rollout_index)
        order = torch.randperm(rollout.rewards.numel(), generator=generator)
        rollout.rewards = rollout.rewards.flatten()[order].view_as(rollout.rewards)
        return super().compute_advantages(rollout)


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it is reached."""
    trained = runs[TRAINED]
    bars = {
        "sampled before <= 0.40": max(run["environment_reward_before"] for run in trained) <= 0.40,
        "sampled after >= 0.80": min(run["environment_reward_after"] for run in trained) >= 0.80,
        "greedy after >= 0.80": min(run["greedy_after"] for run in trained) >= 0.80,
        "seconds <= 480": max(run["seconds"] for run in trained) <= 480,
    }
    for control, summaries in runs.items():
        if control != TRAINED:
            bars[f"{control}: after < 0.48"] = max(run["environment_reward_after"] for run in summaries) < 0.48
    return bars


def quickstart(module_class: type[GRPOLightningModule], seed: int, *flags: str) -> None:
    """Run the recipe with the module of a control."""
    run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={seed}", *flags], module_class)


PROOF = ControlledRuns(
    name="game",
    controls={
        TRAINED: partial(quickstart, GRPOLightningModule),
        "blank observations": lambda seed: quickstart(
            GRPOLightningModule,
            seed,
            "--model.environment.init_args.higher=x",
            "--model.environment.init_args.lower=x",
        ),
        "shuffled rewards": partial(quickstart, ShuffledRewards),
        "flipped advantages": partial(quickstart, FlippedAdvantages),
        "learning rate 0": lambda seed: quickstart(GRPOLightningModule, seed, "--model.optimizer.init_args.lr=0"),
    },
    summary="runs/quickstart_game/version_0/summary.json",
    numbers=[*NUMBERS, "seconds"],
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(PROOF.main(__doc__))
