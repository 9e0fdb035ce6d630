"""Proves that the grounding quickstart learns to point, and that it learns it from the images.

    python benchmarks/prove_grounding.py            # seeds 0 1 2 and the two controls
    python benchmarks/prove_grounding.py --record   # and writes the outcome into benchmarks/proofs.json

The bars, for every seed: mean IoU over held-out images at most 0.35 before and at least 0.70 after, of sampled and of
greedy answers, in at most 10 minutes (images and the model's warm-up included). Held-out questions name colours with
shapes, and ask for boxes, that no other image has. With all images blank, or with the boxes of the training data
shuffled between the images, mean IoU stays below 0.35. Exit code 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from proofs import record
from rich.console import Console
from rich.table import Table

from grpo_lightning.cli import main as run_cli
from grpo_lightning.demo.grounding import GroundingQuickstart

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart_grounding.yaml"
NUMBERS = ["iou_before", "iou_after", "greedy_before", "greedy_after", "seconds"]


class BlankImages(GroundingQuickstart):
    """The same questions about images of one colour."""

    def __call__(self) -> None:
        """Build, then wipe every image."""
        super().__call__()
        for path in (self.folder / "images").glob("*.png"):
            with Image.open(path) as image:
                size = image.size
            Image.new("RGB", size, (127, 127, 127)).save(path)


class ShuffledBoxes(GroundingQuickstart):
    """The right boxes of the training data belong to other images."""

    def __call__(self) -> None:
        """Build, then shuffle the boxes that are trained on; those that are evaluated on stay."""
        super().__call__()
        path = self.folder / "train.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        boxes = [row["solution"] for row in rows]
        random.Random(0).shuffle(boxes)
        shuffled = [row | {"solution": box} for row, box in zip(rows, boxes, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in shuffled), encoding="utf-8")


CONTROLS: dict[str, type[GroundingQuickstart]] = {
    "trained": GroundingQuickstart,
    "blank images": BlankImages,
    "shuffled boxes": ShuffledBoxes,
}


def run(control: str, seed: int) -> dict[str, float]:
    """One quickstart in its own process and folder, with an empty cache: its summary."""
    with tempfile.TemporaryDirectory() as folder:
        child = [sys.executable, str(Path(__file__).resolve()), "--child", control, "--seeds", str(seed)]
        environment = os.environ | {"GRPO_LIGHTNING_CACHE": str(Path(folder) / "cache")}
        result = subprocess.run(child, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{control}, seed {seed}, failed:\n{result.stderr[-3000:]}")
        path = Path(folder) / "runs/quickstart_grounding/version_0/summary.json"
        summary: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return summary


def verdicts(runs: dict[str, list[dict[str, float]]]) -> dict[str, bool]:
    """Every bar, and whether it holds."""
    trained = runs["trained"]
    bars = {
        "before <= 0.35": all(max(one["iou_before"], one["greedy_before"]) <= 0.35 for one in trained),
        "after >= 0.70": all(min(one["iou_after"], one["greedy_after"]) >= 0.70 for one in trained),
        "seconds <= 600": all(one["seconds"] <= 600 for one in trained),
    }
    for control, summaries in runs.items():
        if control != "trained":
            highest = max(one[name] for one in summaries for name in NUMBERS[:4])
            bars[f"{control}: IoU < 0.35"] = highest < 0.35
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
        prepare = f"--data.prepare={CONTROLS[options.child].__module__}.{CONTROLS[options.child].__name__}"
        flags = [f"--seed_everything={options.seeds[0]}", prepare.replace("__main__", Path(__file__).stem)]
        run_cli(["fit", "--config", str(RECIPE), *flags])
        return 0

    table = Table("run", "seed", *NUMBERS)
    runs: dict[str, list[dict[str, float]]] = {control: [] for control in CONTROLS}
    console = Console(width=max(100, Console().width))  # the table, whole, in a file too
    for control in CONTROLS:
        for seed in options.seeds if control == "trained" else options.control_seeds:
            console.print(f"running: {control}, seed {seed}")
            summary = run(control, seed)
            runs[control].append({name: summary[name] for name in ["seed", "images", *NUMBERS]})
            table.add_row(control, str(seed), *(f"{summary[name]:.3f}" for name in NUMBERS))
    bars = verdicts(runs)
    console.print(table)
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        record("grounding", {"runs": runs, "bars": bars})
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
