"""Proves that dynamic sampling reaches plain GRPO's accuracy with at most two thirds of the trained tokens.

    python benchmarks/prove_dapo.py            # seeds 0 1 2
    python benchmarks/prove_dapo.py --record   # also writes the outcome to benchmarks/proofs.json

The task is that of the quickstart, but for 35 % of the prompts every completion is right and for another 35 % every
completion is wrong, so 70 % of the groups have no gradient. Plain GRPO (`recipes/objectives/grpo.yaml`) trains for 100
steps of 4 prompts x 8 completions. Its accuracy is the mean of the last five validations, on held-out prompts of the
ordinary kind. DAPO's loss alone, and DAPO with dynamic sampling, train with the same batch size, learning rate and
number of completions until the mean of five validations reaches that accuracy. The trained tokens are those of all
completions in the trained rollouts, including the zero-variance groups among them.

The bar: for every seed, DAPO needs at most two thirds of plain GRPO's tokens. Exit code 1 if it does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from proofs import record
from rich.console import Console
from rich.table import Table

from grpo_lightning import GRPOLightningModule, Objective, PromptSource, SamplingParams, Validation
from grpo_lightning.core.log_messages import show_messages
from grpo_lightning.demo.arithmetic import DemoRecipe
from grpo_lightning.optimizers import AdamW
from grpo_lightning.rewards import ExactMatch, RewardWorkers
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling

SHARE_SETTLED = 0.7
RECIPES = Path(__file__).parents[1] / "recipes" / "objectives"
RUNS = {"GRPO": ("grpo", False), "DAPO's loss alone": ("dapo", False), "DAPO": ("dapo", True)}
"""By name of a run: the recipe fragment of the objective, and whether dynamic sampling is on."""


class SettledOrExact:
    """The reward in the row's column `settled`, if there is one; otherwise 1 for the right answer."""

    def __init__(self) -> None:
        self.exact = ExactMatch(extract="answer_tag")

    def __call__(self, completions: list[Any], answer: list[str], settled: list[float | None]) -> list[float | None]:
        """Score. Returns: [B]."""
        exact = self.exact(completions=completions, answer=answer)
        return [value if given is None else given for value, given in zip(exact, settled, strict=True)]


class Curve(L.Callback):
    """Records accuracy and trained tokens; stops the run once the accuracy reaches `target`."""

    def __init__(self, target: float) -> None:
        self.target, self.tokens, self.accuracies = target, 0, []

    @property
    def accuracy(self) -> float:
        """The mean of the last five validations; 0 before five validations."""
        return statistics.fmean(self.accuracies[-5:]) if len(self.accuracies) >= 5 else 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Add the tokens of a rollout: every rollout is trained on for one step."""
        self.tokens += sum(counts.num_tokens for counts in pl_module.run.cycle.counts)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the accuracy, and stop the run if the target is reached."""
        self.accuracies.append(float(trainer.callback_metrics["val/reward"]))
        trainer.should_stop = self.accuracy >= self.target


def rows_of(path: Path, seed: int, share_settled: float) -> list[dict[str, Any]]:
    """Read the rows of a file, and make a part of them always right or always wrong, in equal numbers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    draw = random.Random(seed)
    draw.shuffle(rows)
    num_settled = round(share_settled * len(rows))
    for number, row in enumerate(rows):
        row["settled"] = None if number >= num_settled else float(number % 2)
    return rows


def run(kind: str, seed: int, options: argparse.Namespace, target: float) -> dict[str, Any]:
    """Train until the target accuracy or the last step. Returns: the accuracy, trained tokens and steps."""
    fragment, is_dynamic = RUNS[kind]
    files = DemoRecipe().prepare(seed)
    objective = yaml.safe_load((RECIPES / f"{fragment}.yaml").read_text())["model"]["objective"]
    module = GRPOLightningModule(
        str(files.model),
        rewards=[SettledOrExact()],
        reward_workers=RewardWorkers(num_workers=0),  # comparing strings takes no time
        sampling=SamplingParams(max_completion_length=48),
        objective=Objective(**objective),
        dynamic_sampling=DynamicSampling(options.rounds) if is_dynamic else None,
        validation=Validation(greedy=False),
        optimizer=functools.partial(AdamW, lr=options.lr),
        num_generations=options.num_generations,
        seed=seed,
    )
    curve = Curve(target)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=options.every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[curve],
    )
    train = PromptSource(
        rows_of(files.train, seed, SHARE_SETTLED), options.batch_size, seed=seed, takes_more=is_dynamic
    )
    held_out = PromptSource(rows_of(files.heldout, seed, 0.0)[:200], 200, shuffle=False)
    trainer.fit(module, train, held_out)
    return {
        "seed": seed,
        "accuracy": round(curve.accuracy, 4),
        "tokens": curve.tokens,
        "steps": trainer.global_step,
        "is_reached": curve.accuracy >= target,
    }


def main() -> int:
    """Run everything, print the table, check the bar. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="max_resample_times")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--every", type=int, default=2, help="optimizer steps from one validation to the next")
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    show_messages()
    console = Console(width=110)
    table = Table("seed", "accuracy", *(f"{kind}: tokens (steps)" for kind in RUNS), "share")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RUNS}
    for seed in options.seeds:
        target = float("inf")
        for kind, done in runs.items():
            console.print(f"running: {kind}, seed {seed}")
            done.append(run(kind, seed, options, target))
            target = done[-1]["accuracy"] if kind == "GRPO" else target
        share = runs["DAPO"][-1]["tokens"] / runs["GRPO"][-1]["tokens"]
        cells = [f"{done[-1]['tokens']:,} ({done[-1]['steps']})" for done in runs.values()]
        table.add_row(str(seed), f"{target:.3f}", *cells, f"{share:.2f}")
    pairs = list(zip(runs["DAPO"], runs["GRPO"], strict=True))
    bars = {
        "DAPO comes to plain GRPO's accuracy, every seed": all(dapo["is_reached"] for dapo, _ in pairs),
        "for at most 2/3 of its tokens": all(dapo["tokens"] <= 2 / 3 * grpo["tokens"] for dapo, grpo in pairs),
    }
    console.print(table)
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        record("dapo", {"runs": runs, "bars": bars})
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
