"""`make prove-grounding`: its controls, and its bars by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import versus_trl
from grpo_lightning.demo import grounding
from grpo_lightning.demo.grounding import GroundingModel, GroundingRecipe, GroundingWarmUp
from grpo_lightning.demo.grounding_scenes import SceneTask
from tests.marks import SLOW

TINY = GroundingRecipe(
    SceneTask(num_cells=4, sides=(1, 2), num_train=8, num_heldout=2),
    GroundingModel(hidden_size=16, num_layers=1, num_vision_layers=1, num_heads=1),
    GroundingWarmUp(
        batch_size=4, num_tower_images=4, num_tower_steps=1, num_images=3, num_worked_steps=1, num_lazy_steps=1
    ),
)


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; it imports its neighbors."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_grounding")


@pytest.fixture
def folders(prove: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the folder of the data that each control trains on."""
    monkeypatch.setattr(grounding.GroundingQuickstart, "recipe", staticmethod(lambda: TINY))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for name, quickstart in prove.CONTROLS.items():
        quickstart(str(tmp_path / name))()
    return {name: tmp_path / name for name in prove.CONTROLS}


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_blank_images_are_of_one_color_and_nothing_else_differs(folders: dict[str, Path]):
    blank, trained = folders["blank images"], folders["trained"]
    for path in (trained / "images").iterdir():
        with Image.open(blank / "images" / path.name) as wiped, Image.open(path) as image:
            assert wiped.size == image.size
            assert len(np.unique(np.asarray(wiped))) == 1 < len(np.unique(np.asarray(image)))
    for name in ("train.jsonl", "heldout.jsonl"):
        assert rows(blank / name) == rows(trained / name)


def test_shuffled_boxes_are_those_of_other_images(folders: dict[str, Path]):
    shuffled, trained = rows(folders["shuffled boxes"] / "train.jsonl"), rows(folders["trained"] / "train.jsonl")
    boxes = [[row.pop("solution") for row in some] for some in (shuffled, trained)]
    assert shuffled == trained
    assert boxes[0] != boxes[1]
    assert sorted(boxes[0]) == sorted(boxes[1])
    assert rows(folders["shuffled boxes"] / "heldout.jsonl") == rows(folders["trained"] / "heldout.jsonl")


def test_the_bars_by_hand(prove: Any, monkeypatch: pytest.MonkeyPatch):
    def summary(before: float, after: float, seconds: float = 300.0) -> dict[str, float]:
        return {"seed": 0, **dict(zip(prove.NUMBERS, (before, after, before, after, seconds), strict=True))}

    monkeypatch.setattr(prove, "nearest_known", lambda seed: 0.6)
    good = {"trained": [summary(0.2, 0.9), summary(0.35, 0.8)], "blank images": [summary(0.1, 0.34)]}
    assert all(prove.verdicts(good).values())
    for changed, bar in (
        ({"trained": [summary(0.36, 0.8)]}, "before <= 0.35"),
        ({"trained": [summary(0.2, 0.8), summary(0.2, 0.79)]}, "after >= 0.80"),
        ({"trained": [summary(0.2, 0.8, 601.0)]}, "seconds <= 600"),
        ({"blank images": [summary(0.1, 0.35)]}, "blank images: IoU < 0.35"),
    ):
        assert [name for name, holds in prove.verdicts(good | changed).items() if not holds] == [bar]
    monkeypatch.setattr(prove, "nearest_known", lambda seed: 0.76)
    failing = [name for name, holds in prove.verdicts(good).items() if not holds]
    assert failing == ["after >= 0.05 above the nearest known box"]


@SLOW
def test_the_nearest_known_box_is_none_that_is_held_out(prove: Any):
    """Every held-out box is missed, and the others are close: 0.72 of IoU."""
    assert prove.nearest_known(0) == pytest.approx(0.7209, abs=1e-4)
