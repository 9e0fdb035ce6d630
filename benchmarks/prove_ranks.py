"""Proves on two CPU ranks that killed runs resume exactly, and that training equals training on one device.

    python benchmarks/prove_ranks.py                       # all parts, about half an hour on two cores
    python benchmarks/prove_ranks.py --parts resume --seed 1
    python benchmarks/prove_ranks.py --record              # also writes the outcome to benchmarks/proofs.json

resume: a tiny Qwen2 (tests/distributed/resume.py) is killed by SIGKILL, on one rank or on all ranks, at a random place
of a random micro-step, and resumes from the newest checkpoint. It must end with the weights of the uninterrupted run,
bit for bit. DDP and ZeRO-3 run `--runs` times each; ZeRO-2, FSDP2 and LoRA under ZeRO-3 run once.
learning: the quickstart under ZeRO-3, with every weight sharded, must reach a sampled and a greedy accuracy of 0.90.
equality: twenty steps of the quickstart on one device, and on two ranks under DDP, FSDP2 and ZeRO-3, must have the same
completions and the same mean reward in every step, and the same weights up to rounding (1e-5 of a tensor's norm).
Exit code 1 if a part fails. Without --record only the quickstart's model remains, in its cache.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from proofs import record
from rich.console import Console
from rich.table import Table
from torch import Tensor

from grpo_lightning.cli import main as run_cli
from grpo_lightning.module import GRPOLightningModule

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_phase")
BATCH_SIZE = 16
"""Prompts per step over all ranks, as in the recipe."""

STRATEGIES: dict[str, list[str]] = {
    "one device": [],
    "ddp": ["--trainer.strategy=ddp"],
    "fsdp2": ["--trainer.strategy=fsdp2"],
    # ZeRO-3 with every weight sharded: by default, weights as small as these stay unsharded.
    "zero3": [
        "--trainer.strategy=grpo_lightning.GRPODeepSpeedStrategy",
        "--trainer.strategy.init_args.stage3_param_persistence_threshold=0",
    ],
}
STEPS = 20
TOLERANCE = 1e-5
"""Allowed difference of a weight tensor after `STEPS` steps of AdamW, relative to its norm."""


class Kept(GRPOLightningModule):
    """The quickstart's module, which saves its full weights when training ends."""

    def on_train_end(self) -> None:
        """Gather the weights on all ranks, and save them on rank 0."""
        weights = {name: self.sharding.whole(weight).cpu().clone() for name, weight in self.policy.named_parameters()}
        if self.trainer.is_global_zero:
            torch.save(weights, "weights.pt")


def quickstart(folder: Path, strategy: str, *flags: str) -> Path:
    """Run the quickstart in new processes. Returns: its folder. The prompts per step do not depend on the strategy."""
    devices = 1 if strategy == "one device" else 2
    child = [sys.executable, str(Path(__file__).resolve()), "--child", "fit", "--config", str(RECIPE)]
    child += [f"--trainer.devices={devices}", f"--data.batch_size={BATCH_SIZE // devices}", *STRATEGIES[strategy]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*child, *flags], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=3000
    )
    if result.returncode:
        raise RuntimeError(f"The quickstart under {strategy} failed:\n{result.stderr[-3000:]}")
    return folder / "runs" / "quickstart" / "version_0"


# ---------------------------------------------------------------------------------------------------------- the parts


def prove_resume(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """Kill and resume runs, case by case."""
    from tests.distributed.resume import MICRO_STEPS, kill_and_resume

    chooser = random.Random(options.seed)
    lora = {"lora": {"rank": 4}}
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ("ddp", "zero3") for _ in range(options.runs)]
    cases += [("zero2", {}), ("fsdp2", {}), ("zero3", lora)]
    table = Table(
        "strategy", f"killed at micro-step (of {MICRO_STEPS}), in", "rank", "went on from", "weights", "difference"
    )
    runs = []
    for number, (strategy, settings) in enumerate(cases, start=1):
        kill = {
            "micro_step": chooser.randrange(1, MICRO_STEPS - 1),
            "hook": chooser.choice(HOOKS),
            "rank": None if number % 2 else chooser.choice([0, 1]),  # alternately all ranks and one rank
        }
        with tempfile.TemporaryDirectory() as folder:
            outcome = kill_and_resume(strategy, Path(folder), settings=settings, **kill)
        name = f"{strategy}, LoRA" if settings else strategy
        runs.append({"strategy": name, **kill, **outcome})
        said = "equal" if outcome["equal"] else "DIFFER"
        table.add_row(
            name,
            f"{kill['micro_step']} {kill['hook']}",
            "all" if kill["rank"] is None else str(kill["rank"]),
            outcome["went on from"] or "the start",
            said,
            f"{outcome['difference']:g}",
        )
        console.print(f"run {number} of {len(cases)}, {name}: {said}")
    console.print(table)
    return {"runs": runs}, all(run["equal"] for run in runs)


def prove_learning(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """Run the quickstart under ZeRO-3 and check its accuracy."""
    names = ["accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "steps", "seconds"]
    table = Table("strategy", "seed", *names)
    with tempfile.TemporaryDirectory() as folder:
        run = quickstart(Path(folder), "zero3", f"--seed_everything={options.seed}")
        summary = json.loads((run / "summary.json").read_text())
    table.add_row("zero3", str(options.seed), *(f"{summary[name]:.3f}" for name in names))
    console.print(table)
    holds = summary["accuracy_after"] >= 0.90 and summary["greedy_after"] >= 0.90
    return {"strategy": "zero3", "seed": options.seed, **{name: summary[name] for name in names}}, holds


def prove_equality(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """Compare twenty steps on one device and on two ranks."""
    flags = (f"--seed_everything={options.seed}", f"--trainer.max_steps={STEPS}", "--trainer.callbacks=[]")
    found = {}
    for strategy in STRATEGIES:
        console.print(f"running: {STEPS} steps, {strategy}")
        with tempfile.TemporaryDirectory() as folder:
            found[strategy] = Trained(Path(folder), quickstart(Path(folder), strategy, *flags))
    one = found.pop("one device")
    table = Table(
        "two ranks against one device", f"steps (of {STEPS}) with equal completions", "rewards", "weights differ by"
    )
    outcomes, holds = {}, True
    for strategy, two in found.items():
        outcome = two.against(one)
        outcomes[strategy] = outcome
        holds &= outcome["steps_with_equal_rewards"] == STEPS and outcome["weights"] <= TOLERANCE
        table.add_row(
            strategy,
            str(outcome["steps_with_equal_completions"]),
            f"equal in {outcome['steps_with_equal_rewards']}",
            f"{outcome['weights']:.1e}",
        )
    console.print(table)
    return {"seed": options.seed, "steps": STEPS, **outcomes}, holds


class Trained:
    """Completions, rewards and final weights of a short run.

    Args:
        folder: The working folder of the run.
        run: The run's output folder.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        lines = [json.loads(line) for line in (run / "completions.jsonl").read_text("utf-8").splitlines()]
        self.completions = [
            [(line["prompt"], line["completion"]) for line in step]
            for _, step in groupby(lines, key=lambda line: line["step"])
        ]
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            self.rewards = [float(row["reward/mean"]) for row in csv.DictReader(file) if row["reward/mean"]]
        self.weights: dict[str, Tensor] = torch.load(folder / "weights.pt", weights_only=True)

    def against(self, one: Trained) -> dict[str, Any]:
        """Compare with another run: equal steps, and the largest difference of a tensor relative to its norm."""
        assert len(one.rewards) == len(self.rewards) == len(one.completions) == len(self.completions) == STEPS
        assert one.weights.keys() == self.weights.keys()
        return {
            "steps_with_equal_completions": sum(
                map(list.__eq__, map(sorted, one.completions), map(sorted, self.completions))
            ),
            "steps_with_equal_rewards": sum(abs(a - b) < 1e-6 for a, b in zip(one.rewards, self.rewards, strict=True)),
            "weights": max(
                float((self.weights[name] - value).norm() / value.norm()) for name, value in one.weights.items()
            ),
        }


PARTS: dict[str, Callable[[argparse.Namespace, Console], tuple[dict[str, Any], bool]]] = {
    "resume": prove_resume,
    "learning": prove_learning,
    "equality": prove_equality,
}


def main() -> int:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=3, help="of resume, under DDP and under ZeRO-3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    options = parser.parse_args()
    console, holds = Console(), {}
    for name in options.parts:
        outcome, holds[name] = PARTS[name](options, console)
        console.print(f"{'holds' if holds[name] else 'FAILS'}: {name}")
        if options.record:
            record(f"ranks_{name}", {**outcome, "holds": holds[name]})
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_cli(sys.argv[2:], Kept)
    else:
        sys.exit(main())
