"""Arguments of the grounding quickstart: another task, another model, another warm-up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from grpo_lightning.demo import grounding
from grpo_lightning.demo.grounding import (
    GroundingModel,
    GroundingQuickstart,
    GroundingRecipe,
    GroundingWarmUp,
    build_model,
    build_processor,
    build_tokenizer,
)
from grpo_lightning.demo.grounding_scenes import COLORS, SceneTask
from tests.arguments.registry import case
from tests.marks import SLOW

TASK: dict[str, Any] = {"num_cells": 4, "sides": (1, 2), "num_train": 3, "num_heldout": 2}
MODEL = {"hidden_size": 16, "num_layers": 1, "num_vision_layers": 1, "num_heads": 1}
WARM_UP: dict[str, Any] = {
    "batch_size": 4,
    "num_tower_images": 4,
    "num_tower_steps": 2,
    "num_images": 3,
    "num_worked_steps": 2,
    "num_lazy_steps": 2,
}


@case(
    SceneTask,
    *("num_cells", "cell_size", "gap", "sides", "num_things", "num_heldout_pairs", "heldout_boxes_share", "seed"),
    *("num_train", "num_heldout"),
)
def test_task(tmp_path):
    def facts(**changed: Any) -> dict[str, Any]:
        task = SceneTask(**TASK | changed)
        (scene,) = itertools.islice(task.scenes("test"), 1)
        colors = COLORS.values()
        pixels = np.asarray(task.picture(scene)).reshape(-1, 3).tolist()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        task.write(folder)
        return {
            "size": task.size,
            "box": task.pixels((0, 0, 1, 1)),
            "num_boxes": len(task.boxes),
            "num_things": len({tuple(pixel) for pixel in pixels} & set(colors)),
            "num_heldout_pairs": len(task.heldout_pairs),
            "num_heldout_boxes": len(task.heldout_boxes),
            "scene": scene,
            "rows": [len((folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "heldout")],
        }

    plain = facts()
    # sides of 1 and 2: four and three places; a tenth of 49 boxes
    assert (plain["size"], plain["box"]) == (56, [1, 1, 13, 13])
    assert (plain["num_boxes"], plain["num_things"], plain["num_heldout_pairs"]) == (49, 3, 4)
    assert (plain["num_heldout_boxes"], plain["rows"]) == (5, [3, 2])
    assert facts(num_cells=6)["size"] == 84
    assert facts(cell_size=20)["box"] == [1, 1, 19, 19]
    assert facts(gap=2)["box"] == [2, 2, 12, 12]
    assert facts(sides=(1,))["num_boxes"] == 16
    assert facts(num_things=2)["num_things"] == 2
    assert facts(num_heldout_pairs=2)["num_heldout_pairs"] == 2
    assert facts(heldout_boxes_share=0.2)["num_heldout_boxes"] == 10
    assert facts(num_train=4)["rows"] == [4, 2]
    assert facts(num_heldout=3)["rows"] == [3, 3]
    assert facts(seed=1)["scene"] != plain["scene"]


@case(GroundingModel, "hidden_size", "num_layers", "num_vision_layers", "num_heads", "initializer_range")
def test_model():
    task = SceneTask(**TASK)
    tokenizer = build_tokenizer(task)

    def facts(**changed: Any) -> dict[str, Any]:
        model = build_model(task, tokenizer, GroundingModel(**MODEL | changed)).model
        layers = model.language_model.layers
        return {
            "hidden_size": layers[0].mlp.gate_proj.in_features,
            "num_layers": len(layers),
            "num_vision_layers": len(model.visual.blocks),
            "num_heads": layers[0].self_attn.q_proj.out_features // layers[0].self_attn.head_dim,
            "spread": [
                layers[0].mlp.gate_proj.weight.std().item(),
                model.visual.blocks[0].mlp.up_proj.weight.std().item(),
            ],
        }

    plain = facts()
    assert {name: plain[name] for name in MODEL} == MODEL
    for name, other in {"hidden_size": 32, "num_layers": 2, "num_vision_layers": 2}.items():
        assert facts(**{name: other})[name] == other
    assert facts(hidden_size=32, num_heads=2)["num_heads"] == 2
    assert facts(initializer_range=0.24)["spread"] == pytest.approx([2 * spread for spread in plain["spread"]])


Steps = list[tuple[int, int]]
"""Batch and lazy rows of every step of the language model."""


class Taught:
    """Records the steps of a warm-up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
        task = SceneTask(**TASK)
        processor = build_processor(task, build_tokenizer(task))
        model = build_model(task, processor.tokenizer, GroundingModel(**MODEL))
        self.steps: Steps = []
        self.num_images: list[int] = []
        self.tower_batches: list[int] = []
        loss, labels, features = (
            grounding._Corpus.loss,
            grounding.labels_of,
            grounding.features_of,
        )

        def note_loss(habits: Any, batch_size: int, num_lazy: int) -> torch.Tensor:
            self.num_images.append(len(habits.features))
            self.steps.append((batch_size, num_lazy))
            return loss(habits, batch_size, num_lazy)

        def note_images(scenes: Any, task: SceneTask) -> torch.Tensor:
            self.num_images.append(len(scenes))
            return labels(scenes, task)

        def note_batch(model: Any, task: SceneTask, patches: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.tower_batches.append(len(patches))
            return features(model, task, patches)

        towers, words = model.model.visual.patch_embed.proj.weight, model.lm_head.weight
        before = towers.detach().clone(), words.detach().clone()
        with monkeypatch.context() as patch:
            patch.setattr(grounding._Corpus, "loss", note_loss)
            patch.setattr(grounding, "labels_of", note_images)
            patch.setattr(grounding, "features_of", note_batch)
            settings = GroundingWarmUp(**WARM_UP | changed)
            grounding.warm_up(model, processor, task, settings, show_progress=False)
        self.tower_moved = (towers.detach() - before[0]).abs().max().item()
        self.words_moved = (words.detach() - before[1]).abs().max().item()
        self.words = words.detach()


@SLOW
@case(
    GroundingWarmUp,
    *("batch_size", "num_tower_images", "num_tower_steps", "num_images", "num_worked_steps", "num_lazy_steps"),
    *("lazy_share_of_worked", "lazy_share"),
)
def test_the_steps_of_a_warm_up(monkeypatch):
    plain = Taught(monkeypatch)
    assert plain.steps == [(4, 0), (4, 0), (4, 3), (4, 3)]
    assert plain.tower_batches == [4, 4]
    assert plain.num_images == [4, 3, 3, 3, 3]
    larger = Taught(monkeypatch, batch_size=8)
    assert (larger.steps[0], larger.tower_batches) == ((8, 1), [8, 8])
    assert Taught(monkeypatch, num_tower_images=6).num_images[0] == 6
    assert Taught(monkeypatch, num_tower_steps=3).tower_batches == [4, 4, 4]
    assert Taught(monkeypatch, num_images=5).num_images[1:] == [5, 5, 5, 5]
    assert Taught(monkeypatch, num_worked_steps=1).steps == [(4, 0), (4, 3), (4, 3)]
    assert Taught(monkeypatch, num_lazy_steps=1).steps == [(4, 0), (4, 0), (4, 3)]
    assert Taught(monkeypatch, lazy_share_of_worked=0.25).steps == [(4, 1), (4, 1), (4, 3), (4, 3)]
    assert Taught(monkeypatch, lazy_share=0.5).steps == [(4, 0), (4, 0), (4, 2), (4, 2)]


@SLOW
@case(
    GroundingWarmUp,
    *("learning_rate", "lazy_learning_rate", "num_ramp_steps", "held_share", "beta2"),
)
def test_how_far_a_warm_up_goes(monkeypatch):
    one = {"num_tower_steps": 1, "num_worked_steps": 1, "num_lazy_steps": 0, "num_ramp_steps": 1}

    def tower(**changed: Any) -> float:
        return Taught(monkeypatch, **one | changed).tower_moved

    def words(**changed: Any) -> float:
        return Taught(monkeypatch, **one | changed).words_moved

    # Adam's first step is the learning rate long.
    assert tower() == pytest.approx(6e-3, rel=2e-2)
    assert tower(learning_rate=1e-3) == pytest.approx(1e-3, rel=2e-2)
    assert tower(num_ramp_steps=3) == pytest.approx(2e-3, rel=2e-2)
    assert words() == pytest.approx(6e-3, rel=2e-2)
    assert words(learning_rate=1e-3) == pytest.approx(1e-3, rel=2e-2)
    lazy = {"num_worked_steps": 0, "num_lazy_steps": 1}
    assert words(**lazy, lazy_learning_rate=5e-4) == pytest.approx(5e-4, rel=2e-2)
    assert words(**lazy, lazy_learning_rate=1e-3) == pytest.approx(1e-3, rel=2e-2)
    more = one | {"num_worked_steps": 4}
    plain = Taught(monkeypatch, **more).words
    assert not torch.equal(plain, Taught(monkeypatch, **more, held_share=1.0).words)
    assert not torch.equal(plain, Taught(monkeypatch, **more, beta2=0.5).words)


@SLOW
@case(GroundingRecipe, "task", "model", "warm_up")
def test_recipe(tmp_path):
    plain = GroundingRecipe(SceneTask(**TASK), GroundingModel(**MODEL), GroundingWarmUp(**WARM_UP))

    def built(recipe: GroundingRecipe) -> tuple[int, int, float]:
        """(Rows to train on, size, a weight)."""
        files = recipe.prepare(0, tmp_path, show_progress=False)
        model = AutoModelForImageTextToText.from_pretrained(files.model)
        num_rows = len(files.train.read_text().splitlines())
        return num_rows, model.config.text_config.hidden_size, model.lm_head.weight.sum().item()

    first = built(plain)
    assert first[:2] == (3, 16)
    assert built(replace(plain, task=replace(plain.task, num_train=4)))[:2] == (4, 16)
    assert built(replace(plain, model=replace(plain.model, hidden_size=32)))[:2] == (3, 32)
    other = built(replace(plain, warm_up=replace(plain.warm_up, learning_rate=1e-2)))
    assert other[:2] == (3, 16)
    assert other[2] != first[2]


@case(GroundingQuickstart, "folder", "num_threads")
def test_quickstart(tmp_path, monkeypatch):
    recipe = GroundingRecipe(SceneTask(**TASK), GroundingModel(**MODEL), GroundingWarmUp(**WARM_UP))
    files = recipe.prepare(0, tmp_path / "cache", show_progress=False)
    threads: list[int] = []
    monkeypatch.setattr(GroundingQuickstart, "recipe", staticmethod(lambda: recipe))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("one", "two"):
        GroundingQuickstart(str(tmp_path / name))()
        assert (tmp_path / name / "train.jsonl").read_text() == files.train.read_text()
    GroundingQuickstart(str(tmp_path / "one"), num_threads=2)()
    assert threads == [1, 1, 2]
