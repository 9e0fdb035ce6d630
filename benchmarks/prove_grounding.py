"""Proves that the grounding quickstart learns to point, and that it learns this from the images.

    python benchmarks/prove_grounding.py            # seeds 0 to 7 and the two controls
    python benchmarks/prove_grounding.py --record   # also writes the outcome to benchmarks/proofs.json

The bars for every seed: the mean IoU over held-out images is at most 0.35 before training and at least 0.80 after, for
sampled and for greedy answers, and a run takes at most 10 minutes (including the drawing of the images and the warm-up
of the model). The held-out questions combine colors and shapes, and ask for boxes, that appear in no image of the
warm-up or the training. After training, the mean IoU exceeds by at least 0.05 what answering with the nearest training
box would reach. In the controls, all images are blank, or the boxes of the training data are shuffled between the
images: the mean IoU then stays below 0.35. Exit code 1 if a bar does not hold.
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
from grpo_lightning.demo.build import FINGERPRINT
from grpo_lightning.demo.grounding import GroundingQuickstart
from grpo_lightning.demo.grounding_scenes import SceneTask
from grpo_lightning.functional.boxes import iou

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart_grounding.yaml"
NUMBERS = ["iou_before", "iou_after", "greedy_before", "greedy_after", "seconds"]


class BlankImages(GroundingQuickstart):
    """The same questions about blank images."""

    def __call__(self) -> None:
        """Build the data, then make every image blank."""
        super().__call__()
        for path in (self.folder / "images").glob("*.png"):
            with Image.open(path) as image:
                size = image.size
            Image.new("RGB", size, (127, 127, 127)).save(path)
        (self.folder / FINGERPRINT).write_text("blank images")  # otherwise a later run would use these images


class ShuffledBoxes(GroundingQuickstart):
    """The boxes of the training data are shuffled between the images."""

    def __call__(self) -> None:
        """Build the data, then shuffle the boxes of the training data; the held-out boxes stay."""
        super().__call__()
        path = self.folder / "train.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        boxes = [row["solution"] for row in rows]
        random.Random(0).shuffle(boxes)
        shuffled = [row | {"solution": box} for row, box in zip(rows, boxes, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in shuffled), encoding="utf-8")
        (self.folder / FINGERPRINT).write_text("shuffled boxes")


CONTROLS: dict[str, type[GroundingQuickstart]] = {
    TRAINED: GroundingQuickstart,
    "blank images": BlankImages,
    "shuffled boxes": ShuffledBoxes,
}


def nearest_known(seed: int) -> float:
    """Mean IoU of answering every held-out question with the best training box."""
    task = SceneTask(seed=seed)
    known = [task.pixels(box) for box in task.boxes if box not in task.heldout_boxes]
    scenes = itertools.islice(task.scenes("heldout", is_heldout=True), task.num_heldout)
    right = [task.pixels(scene[0].cells) for scene in scenes]
    return iou(torch.tensor(right)[:, None].double(), torch.tensor(known).double()).amax(dim=1).mean().item()


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it is reached."""
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
    """Run the recipe with the data of a control."""
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
