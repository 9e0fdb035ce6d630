"""Proves that the grounding quickstart learns to point, and that it learns it from the images.

    python benchmarks/prove_grounding.py            # seeds 0 to 7 and the two controls
    python benchmarks/prove_grounding.py --record   # and writes the outcome into benchmarks/proofs.json

The bars, for every seed: mean IoU over held-out images at most 0.35 before and at least 0.80 after, of sampled and of
greedy answers, in at most 10 minutes (images and the model's warm-up included). Held-out questions name colours with
shapes, and ask for boxes, that no image of the warm-up or the training has; after training, answers are nearer to these
than any box that was trained on, by 0.05 of IoU. With all images blank, or with the boxes of the training data
shuffled between the images, mean IoU stays below 0.35. Exit code 1 if one does not hold.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from functools import partial
from pathlib import Path

import torch
from controlled_runs import TRAINED, ControlledRuns, Runs
from PIL import Image

from grpo_lightning.cli import main as run_cli
from grpo_lightning.demo.build import RECIPE
from grpo_lightning.demo.grounding import GroundingQuickstart
from grpo_lightning.demo.scenes import SceneTask
from grpo_lightning.functional.boxes import iou

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart_grounding.yaml"
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
        (self.folder / RECIPE).write_text("blank images")  # whoever comes next shall not take it for the task


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
        (self.folder / RECIPE).write_text("shuffled boxes")


CONTROLS: dict[str, type[GroundingQuickstart]] = {
    TRAINED: GroundingQuickstart,
    "blank images": BlankImages,
    "shuffled boxes": ShuffledBoxes,
}


def nearest_known(seed: int) -> float:
    """What only saying boxes of the training would reach: mean IoU of the right boxes and the ones nearest to them."""
    task = SceneTask(seed=seed)
    known = [task.pixels(box) for box in task.boxes if box not in task.heldout_boxes]
    scenes = itertools.islice(task.scenes("heldout", is_heldout=True), task.num_heldout)
    right = [task.pixels(scene[0].cells) for scene in scenes]
    return iou(torch.tensor(right)[:, None].double(), torch.tensor(known).double()).amax(dim=1).mean().item()


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it holds."""
    trained = runs[TRAINED]
    bars = {
        "before <= 0.35": all(max(one["iou_before"], one["greedy_before"]) <= 0.35 for one in trained),
        "after >= 0.80": all(min(one["iou_after"], one["greedy_after"]) >= 0.80 for one in trained),
        "after >= 0.05 above the nearest known box": all(
            min(one["iou_after"], one["greedy_after"]) >= nearest_known(int(one["seed"])) + 0.05 for one in trained
        ),
        "seconds <= 600": all(one["seconds"] <= 600 for one in trained),
    }
    for control, summaries in runs.items():
        if control != TRAINED:
            highest = max(one[name] for one in summaries for name in NUMBERS[:4])
            bars[f"{control}: IoU < 0.35"] = highest < 0.35
    return bars


def quickstart(control: type[GroundingQuickstart], seed: int) -> None:
    """Run the recipe with other data."""
    prepare = f"{Path(__file__).stem}.{control.__name__}"
    run_cli(["fit", "--config", str(QUICKSTART), f"--seed_everything={seed}", f"--data.prepare={prepare}"])


PROOF = ControlledRuns(
    name="grounding",
    controls={name: partial(quickstart, control) for name, control in CONTROLS.items()},
    summary="runs/quickstart_grounding/version_0/summary.json",
    numbers=NUMBERS,
    verdicts=verdicts,
    also_recorded=["seed", "images"],
)

if __name__ == "__main__":
    sys.exit(PROOF.main(__doc__))
