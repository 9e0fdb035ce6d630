"""Arguments of the demo: another task, another model, another warm-up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from grpo_lightning.demo import arithmetic
from grpo_lightning.demo.arithmetic import (
    DemoModel,
    DemoRecipe,
    DemoTask,
    Quickstart,
    WarmUp,
    build_model,
    build_tokenizer,
)
from tests.arguments.registry import case

TASK = {"num_digits": 4, "num_warm_up": 20, "num_train": 10, "num_heldout": 5}
MODEL = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}
WARM_UP = {"batch_size": 4, "target_loss": 100.0, "max_worked_steps": 4, "num_short_steps": 2}


@case(DemoTask, "num_digits", "modulus", "num_warm_up", "num_train", "num_heldout", "seed")
def test_task(tmp_path):
    def facts(**changed: Any) -> dict[str, Any]:
        task = DemoTask(**TASK | changed)
        split = task.split()
        task.write(tmp_path)
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        return {
            "num_digits": len(rows[0]["prompt"]) - 1,
            "modulus": 1 + max(int(row["answer"]) for row in rows),
            "num_warm_up": len(split.warm_up),
            "num_train": len(rows),
            "num_heldout": len((tmp_path / "heldout.jsonl").read_text().splitlines()),
        }

    plain = facts()
    assert plain == TASK | {"modulus": 6}
    for name, other in {"num_digits": 5, "num_warm_up": 30, "num_train": 11, "num_heldout": 6}.items():
        assert facts(**{name: other}) == plain | {name: other}
    assert facts(modulus=3)["modulus"] == 3
    assert DemoTask(**TASK, seed=1).split() != DemoTask(**TASK).split()


@case(DemoModel, "hidden_size", "intermediate_size", "num_layers", "num_heads", "initializer_range")
def test_model():
    def facts(**changed: Any) -> dict[str, Any]:
        model = build_model(build_tokenizer(), DemoModel(**MODEL | changed))
        layer = model.model.layers[0]
        return {
            "hidden_size": layer.mlp.gate_proj.in_features,
            "intermediate_size": layer.mlp.gate_proj.out_features,
            "num_layers": len(model.model.layers),
            "num_heads": layer.self_attn.q_proj.out_features // layer.self_attn.head_dim,
            "spread": layer.mlp.gate_proj.weight.std().item(),
        }

    plain = facts()
    assert {name: plain[name] for name in MODEL} == MODEL
    for name, other in {"hidden_size": 32, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}.items():
        assert facts(**{name: other})[name] == other
    assert facts(initializer_range=0.24)["spread"] == pytest.approx(2 * plain["spread"])


Steps = list[tuple[int, int]]
"""Batch and short rows of every step."""


def warmed_up(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[Steps, torch.Tensor]:
    """(The steps, how far the weights of a layer moved)."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, DemoModel(**MODEL))
    weight = model.model.layers[0].mlp.gate_proj.weight
    before, steps, loss = weight.detach().clone(), [], arithmetic._Corpus.loss

    def note(corpus: Any, model: Any, num_short: int) -> torch.Tensor:
        steps.append((corpus.batch_size, num_short))
        return loss(corpus, model, num_short)

    with monkeypatch.context() as patch:
        patch.setattr(arithmetic._Corpus, "loss", note)
        arithmetic.warm_up(model, tokenizer, DemoTask(**TASK), WarmUp(**WARM_UP | changed), show_progress=False)
    return steps, (weight.detach() - before).abs()


@case(WarmUp, "batch_size", "num_short_steps", "short_share", "target_loss", "max_worked_steps")
def test_the_steps_of_a_warm_up(monkeypatch):
    def steps(**changed: Any) -> Steps:
        return warmed_up(monkeypatch, **changed)[0]

    assert steps() == [(4, 0), (4, 3), (4, 3)]
    assert steps(batch_size=8) == [(8, 0), (8, 7), (8, 7)]
    assert steps(num_short_steps=3) == [(4, 0), (4, 3), (4, 3), (4, 3)]
    assert steps(short_share=0.5) == [(4, 0), (4, 2), (4, 2)]
    for most in (4, 2):
        with pytest.raises(RuntimeError, match=f"after {most} steps and should be -1.0"):
            steps(target_loss=-1.0, max_worked_steps=most)


@case(WarmUp, "learning_rate", "num_ramp_steps", "beta2")
def test_how_far_a_warm_up_goes(monkeypatch):
    def moved(**changed: Any) -> torch.Tensor:
        return warmed_up(monkeypatch, **{"num_short_steps": 0, "num_ramp_steps": 1} | changed)[1]

    assert moved().max().item() == pytest.approx(5e-3, rel=1e-2)  # Adam's first step
    assert moved(learning_rate=1e-2).max().item() == pytest.approx(1e-2, rel=1e-2)
    assert moved(num_ramp_steps=5).max().item() == pytest.approx(1e-3, rel=1e-2)
    assert not torch.equal(moved(num_short_steps=3), moved(num_short_steps=3, beta2=0.5))


@case(DemoRecipe, "task", "model", "warm_up")
def test_recipe(tmp_path):
    task, model, warm_up = DemoTask(**TASK), DemoModel(**MODEL), WarmUp(**WARM_UP)

    def built(recipe: DemoRecipe) -> tuple[int, int, float]:
        """(Rows to train on, size, a weight)."""
        files = recipe.prepare(0, tmp_path, show_progress=False)
        policy = Qwen2ForCausalLM.from_pretrained(files.model)
        num_rows = len(files.train.read_text().splitlines())
        return num_rows, policy.config.hidden_size, policy.lm_head.weight.sum().item()

    plain = built(DemoRecipe(task, model, warm_up))
    assert plain[:2] == (10, 16)
    assert built(DemoRecipe(replace(task, num_train=12), model, warm_up))[:2] == (12, 16)
    assert built(DemoRecipe(task, replace(model, hidden_size=32), warm_up))[:2] == (10, 32)
    other = built(DemoRecipe(task, model, replace(warm_up, learning_rate=1e-2)))
    assert other[:2] == (10, 16)
    assert other[2] != plain[2]


@case(Quickstart, "folder", "num_threads")
def test_quickstart(tmp_path, monkeypatch):
    recipe = DemoRecipe(DemoTask(**TASK), DemoModel(**MODEL), WarmUp(**WARM_UP))
    files = recipe.prepare(0, tmp_path / "cache", show_progress=False)
    threads: list[int] = []
    monkeypatch.setattr(Quickstart, "recipe", staticmethod(lambda: recipe))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("one", "two"):
        Quickstart(str(tmp_path / name))()
        assert (tmp_path / name / "train.jsonl").read_text() == files.train.read_text()
    Quickstart(str(tmp_path / "one"), num_threads=2)()
    assert threads == [1, 1, 2]
