"""Arguments of the number game's and the calculator's demo."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from grpo_lightning.demo import guessing, tool_use
from grpo_lightning.demo.arithmetic import DemoModel, build_model, build_tokenizer
from grpo_lightning.demo.guessing import GuessingGame, GuessingRecipe, GuessingTask, GuessingWarmUp
from grpo_lightning.demo.number_games import NumberGames
from grpo_lightning.demo.tool_use import CHAT_TEMPLATE, CalculatorSums, ToolRecipe, ToolTask, ToolWarmUp
from grpo_lightning.environments import calculator
from grpo_lightning.environments.tools import tool_schemas
from tests.arguments.registry import case

MODEL = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}


def rows(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@case(GuessingTask, "num_digits", "num_guesses", "num_train", "num_heldout", "seed")
def test_games(tmp_path):
    def facts(**changed: Any) -> dict[str, Any]:
        task = GuessingTask(**{"num_train": 20, "num_heldout": 10} | changed)
        task.write(tmp_path)
        train = [row["number"] for row in rows(tmp_path / "train.jsonl")]
        return {
            "num_digits": 1 + max(train),
            "num_guesses": task.random_game(random.Random(0)).count("<eos>"),
            "num_train": len(train),
            "num_heldout": len(rows(tmp_path / "heldout.jsonl")),
            "order": train,
        }

    plain = facts()
    for name, other in {"num_digits": 5, "num_guesses": 3, "num_train": 21, "num_heldout": 11}.items():
        assert facts(**{name: other})[name] == other != plain[name]
    assert facts(seed=1)["order"] != plain["order"]


@case(NumberGames, "folder", "size", "heldout_size", "num_numbers", "num_ranges", "seed")
def test_games_in_words(tmp_path):
    def facts(folder: str = "games", **changed: Any) -> dict[str, Any]:
        NumberGames(str(tmp_path / folder), **{"size": 40, "heldout_size": 10, "seed": 0} | changed)()
        train = rows(tmp_path / folder / "train.jsonl")
        ranges = [[int(part) for part in row["question"].rstrip(".").split() if part.isdigit()] for row in train]
        return {
            "size": len(train),
            "heldout_size": len(rows(tmp_path / folder / "heldout.jsonl")),
            "num_numbers": {last - first + 1 for first, last in ranges},
            "num_ranges": {first for first, _ in ranges} <= {1, 2},
            "games": train,
        }

    plain = facts()
    for name, other, found in (
        ("size", 41, 41),
        ("heldout_size", 11, 11),
        ("num_numbers", 50, {50}),
        ("num_ranges", 2, True),
    ):
        assert facts(**{name: other})[name] == found != plain[name]
    assert facts(seed=1)["games"] != plain["games"]
    assert facts("elsewhere") == plain


@case(ToolTask, "num_terms", "least", "num_train", "num_heldout", "seed")
def test_sums(tmp_path):
    def facts(**changed: Any) -> dict[str, Any]:
        task = ToolTask(**{"num_train": 20, "num_heldout": 10} | changed)
        task.write(tmp_path)
        train = rows(tmp_path / "train.jsonl")
        terms = [[int(term) for term in row["question"][:-1].split("+")] for row in train]
        assert [row["answer"] for row in train] == [str(sum(each)) for each in terms]
        return {
            "num_terms": len(terms[0]),
            "least": min(map(min, terms)) >= 90,
            "num_train": len(train),
            "num_heldout": len(rows(tmp_path / "heldout.jsonl")),
            "terms": terms,
        }

    plain = facts()
    for name, other in {"num_terms": 2, "num_train": 21, "num_heldout": 11}.items():
        assert facts(**{name: other})[name] == other != plain[name]
    assert facts(least=90)["least"]
    assert not plain["least"]
    assert facts(seed=1)["terms"] != plain["terms"]


def test_the_warm_up_has_the_prompts_of_the_chat_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    task, terms = ToolTask(), [45, 67, 89]
    chat = [{"role": "user", "content": task.question(terms)}]
    settings = {"tools": tool_schemas([calculator]), "tokenize": False}
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, **settings) == task.prompt(terms)
    call, answer, total = (text for text, _ in task.answer_with_call(terms))
    chat += [
        {"role": "assistant", "content": call.removesuffix("<eos>")},
        {"role": "tool", "content": "201"},
        {"role": "assistant", "content": total.removesuffix("<eos>")},
    ]
    assert tokenizer.apply_chat_template(chat, **settings) == task.prompt(terms) + call + answer + total


def moved(learn: Any, task: Any, warm_up: Any) -> torch.Tensor:
    """How far a warm-up moves the weights of a layer."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, DemoModel(**MODEL))
    weight = model.model.layers[0].mlp.gate_proj.weight
    before = weight.detach().clone()
    learn(model, tokenizer, task, warm_up, show_progress=False)
    return (weight.detach() - before).abs()


@case(GuessingWarmUp, "num_steps", "batch_size", "learning_rate")
def test_the_warm_up_of_the_game():
    def far(**changed: Any) -> torch.Tensor:
        settings = {"num_steps": 1, "batch_size": 2} | changed
        return moved(guessing.learn_the_form, GuessingTask(), GuessingWarmUp(**settings))

    assert far().max().item() == pytest.approx(3e-3, rel=1e-2)  # Adam's first step
    assert far(learning_rate=1e-2).max().item() == pytest.approx(1e-2, rel=1e-2)
    assert far(num_steps=3).max() > far().max()
    assert not torch.equal(far(batch_size=4), far())


CALLS = {"batch_size": 4, "target_loss": 100.0, "max_call_steps": 3, "num_guess_steps": 1, "num_ramp_steps": 1}


@case(ToolWarmUp, "batch_size", "learning_rate", "beta2", "num_ramp_steps", "num_guess_steps", "guess_share")
def test_the_warm_up_of_the_calculator():
    def far(**changed: Any) -> torch.Tensor:
        return moved(tool_use.learn_both_kinds, ToolTask(), ToolWarmUp(**CALLS | changed))

    plain = far()
    assert far(num_guess_steps=0).max().item() == pytest.approx(5e-3, rel=1e-2)  # Adam's first step
    for name, other in {
        "batch_size": 8,
        "learning_rate": 1e-2,
        "beta2": 0.5,
        "num_ramp_steps": 5,
        "num_guess_steps": 2,
        "guess_share": 0.5,
    }.items():
        assert not torch.equal(far(**{name: other}), plain), name


@case(ToolWarmUp, "target_loss", "max_call_steps")
def test_calls_that_are_not_learned():
    for most in (2, 3):
        with pytest.raises(RuntimeError, match=rf"after {most} steps and should be -1\."):
            moved(
                tool_use.learn_both_kinds, ToolTask(), ToolWarmUp(**CALLS | {"target_loss": -1, "max_call_steps": most})
            )
    moved(tool_use.learn_both_kinds, ToolTask(), ToolWarmUp(**CALLS | {"max_call_steps": 3}))


def check_recipe(kind: Any, task: Any, warm_up: Any, tmp_path: Any) -> None:
    """Task, model and warm-up reach what is built."""
    model = DemoModel(**MODEL)

    def built(recipe: Any) -> tuple[int, int, float]:
        files = recipe.prepare(0, tmp_path, show_progress=False)
        policy = Qwen2ForCausalLM.from_pretrained(files.model)
        return len(rows(files.train)), policy.config.hidden_size, policy.lm_head.weight.sum().item()

    plain = built(kind(task, model, warm_up))
    assert built(kind(replace(task, num_train=12), model, warm_up))[0] == 12 != plain[0]
    assert built(kind(task, replace(model, hidden_size=32), warm_up))[1] == 32 != plain[1]
    assert built(kind(task, model, replace(warm_up, learning_rate=1e-2)))[2] != plain[2]


@case(GuessingRecipe, "task", "model", "warm_up")
def test_the_recipe_of_the_game(tmp_path):
    task = GuessingTask(num_train=10, num_heldout=5)
    check_recipe(GuessingRecipe, task, GuessingWarmUp(num_steps=2, batch_size=2), tmp_path)


@case(ToolRecipe, "task", "model", "warm_up")
def test_the_recipe_of_the_calculator(tmp_path):
    check_recipe(ToolRecipe, ToolTask(num_train=10, num_heldout=5), ToolWarmUp(**CALLS), tmp_path)


def check_prepare(kind: Any, recipe: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder gets the files, with the threads that were asked for."""
    threads: list[int] = []
    monkeypatch.setattr(kind, "recipe", staticmethod(lambda: recipe))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("one", "two"):
        kind(str(tmp_path / name))()
        assert (tmp_path / name / "train.jsonl").exists()
    kind(str(tmp_path / "one"), num_threads=2)()
    assert threads == [1, 1, 2]


@case(GuessingGame, "folder", "num_threads")
def test_the_game_is_prepared(tmp_path, monkeypatch):
    task, warm_up = GuessingTask(num_train=10, num_heldout=5), GuessingWarmUp(num_steps=1, batch_size=2)
    check_prepare(GuessingGame, GuessingRecipe(task, DemoModel(**MODEL), warm_up), tmp_path, monkeypatch)


@case(CalculatorSums, "folder", "num_threads")
def test_the_sums_are_prepared(tmp_path, monkeypatch):
    recipe = ToolRecipe(ToolTask(num_train=10, num_heldout=5), DemoModel(**MODEL), ToolWarmUp(**CALLS))
    check_prepare(CalculatorSums, recipe, tmp_path, monkeypatch)
