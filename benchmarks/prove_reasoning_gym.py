"""Proves that the quickstart on reasoning-gym learns its three tasks, and that it learns because of GRPO.

    python benchmarks/prove_reasoning_gym.py            # seeds 0 to 7 and the three controls
    python benchmarks/prove_reasoning_gym.py --record   # also writes the outcome to benchmarks/proofs.json

The bars for every seed, on held-out questions: the mean verifier score of sampled answers is at most 0.35 before
training and at least 0.80 after; the mean score of greedy answers is at least 0.80 after; the score of each task rises
by at least 0.30; and a run takes at most 4 minutes (including the warm-up of the model). In the controls, rewards are
random, the advantages have the opposite sign, or the learning rate is 0: the mean score then rises by less than 0.10.
Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from controlled_runs import TRAINED, ControlledRuns, Runs

from grpo_lightning.cli import main as run_cli
from grpo_lightning.demo.reasoning_gym import TASKS
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart_reasoning_gym.yaml"
SUMMARY = "runs/quickstart_reasoning_gym/version_0/summary.json"
MEANS = ["reasoning_gym_before", "reasoning_gym_after", "greedy_before", "greedy_after"]
BY_TASK = [f"{task}_{when}" for task in TASKS for when in ("before", "after")]


class RandomValues(GRPOLightningModule):
    """Rewards are random numbers."""

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Replace the rewards by random numbers, then compute the advantages."""
        assert rollout.rewards is not None
        generator = torch.Generator().manual_seed(self.run.rollout_index)
        rollout.rewards = torch.rand(rollout.rewards.shape, generator=generator)
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

    def every(name: str) -> Sequence[float]:
        return [summary[name] for summary in runs[TRAINED]]

    bars = {
        "sampled before <= 0.35": max(every("reasoning_gym_before")) <= 0.35,
        "sampled after >= 0.80": min(every("reasoning_gym_after")) >= 0.80,
        "greedy after >= 0.80": min(every("greedy_after")) >= 0.80,
        "seconds <= 240": max(every("seconds")) <= 240,
    }
    for task in TASKS:
        pairs = zip(every(f"{task}_before"), every(f"{task}_after"), strict=True)
        bars[f"{task}: gain >= 0.30"] = min(after - before for before, after in pairs) >= 0.30
    for control, summaries in runs.items():
        if control != TRAINED:
            gains = [summary["reasoning_gym_after"] - summary["reasoning_gym_before"] for summary in summaries]
            bars[f"{control}: gain < 0.10"] = max(gains) < 0.10
    return bars


def quickstart(module_class: type[GRPOLightningModule], seed: int, *flags: str) -> None:
    """Run the recipe with the module of a control, and add the numbers of each task to the summary."""
    run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={seed}", *flags], module_class)
    path = Path(SUMMARY)
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(summary | by_task(summary)), encoding="utf-8")


def by_task(summary: dict[str, Any]) -> dict[str, float]:
    """The mean score of each task's sampled answers, before and after training."""
    return {
        f"{task}_{when}": summary[when]["sampled"][f"source/{task}/reasoning_gym"]
        for task in TASKS
        for when in ("before", "after")
    }


PROOF = ControlledRuns(
    name="reasoning_gym",
    controls={
        TRAINED: partial(quickstart, GRPOLightningModule),
        "random values": partial(quickstart, RandomValues),
        "flipped advantages": partial(quickstart, FlippedAdvantages),
        "learning rate 0": lambda seed: quickstart(GRPOLightningModule, seed, "--model.optimizer.init_args.lr=0"),
    },
    summary=SUMMARY,
    numbers=[*MEANS, "seconds"],
    verdicts=verdicts,
    also_recorded=["seed", *BY_TASK],
)

if __name__ == "__main__":
    sys.exit(PROOF.main(__doc__))
