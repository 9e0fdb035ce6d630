"""The quickstart on reasoning-gym: its questions, its model, and that GRPO improves it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.cli import main
from grpo_lightning.data.reasoning_gym import entries
from grpo_lightning.demo import reasoning_gym as demo
from grpo_lightning.demo.reasoning_gym import (
    NOT_TRAINED_ON,
    PHRASES,
    TASKS,
    GymRecipe,
    ReasoningGymQuickstart,
    build_tokenizer,
    hasty_completion,
    pad,
    steps,
    worked_completion,
)
from tests.helpers.paths import RECIPES
from tests.marks import SLOW

pytest.importorskip("reasoning_gym")

RECIPE = RECIPES / "quickstart_reasoning_gym.yaml"
SIZES = {"num_warm_up": 30, "num_train": 6, "num_heldout": 2, "batch_size": 4}
TINY = GymRecipe(**SIZES, target_loss=100.0, num_decay_steps=1, num_hasty_steps=2)


@SLOW
def test_no_held_out_question_is_in_another_set():
    recipe = GymRecipe()
    for task in TASKS:
        questions = [{entry["question"] for entry in part[task]} for part in (recipe.warm_up, recipe.train)]
        heldout = [entry["question"] for entry in recipe.heldout[task]]
        assert len(set(heldout)) == len(heldout) == recipe.num_heldout
        assert not set(heldout) & (questions[0] | questions[1])


@SLOW
def test_too_few_questions_are_refused(monkeypatch: pytest.MonkeyPatch):
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    monkeypatch.setattr(demo, "TASKS", {"chain_sum": digits})
    with pytest.raises(ValueError, match=r"chain_sum has only [0-9]+ of 80 new questions: lower num_warm_up"):
        _ = GymRecipe().heldout


def test_padding_by_hand():
    ids, targets = pad([([1, 2], [3]), ([4], [5, 6, 7])], pad_token_id=0)
    no = NOT_TRAINED_ON
    assert ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert targets.tolist() == [[no, no, 3, no], [no, 5, 6, 7]]


def test_it_is_built_once(tmp_path: Path):
    folder = TINY.prepare(0, tmp_path, show_progress=False).folder
    assert TINY.prepare(0, tmp_path, show_progress=False).folder == folder
    assert TINY.prepare(1, tmp_path, show_progress=False).folder != folder
    assert sorted(path.name for path in folder.iterdir()) == ["heldout", "model", "recipe.json", "train"]
    model, tokenizer = (auto.from_pretrained(folder / "model") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer)
    assert len(tokenizer.encode("Spell this word backward (example: sun -> nus): sun")) == 4


def test_worked_completions_that_are_not_learned_are_an_error(tmp_path: Path):
    recipe = GymRecipe(**SIZES, target_loss=0.0, max_worked_steps=2)
    with pytest.raises(RuntimeError, match=r"their loss is [0-9.]+ after 2 steps and should be 0.0. Choose another"):
        recipe.prepare(0, tmp_path, show_progress=False)


@pytest.mark.slow
def test_grpo_improves_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The recipe with one of its tasks, shortened: from below 0.5 to above 0.7 in less than a minute."""
    short: dict[str, Any] = {"num_warm_up": 1500, "num_train": 300, "num_heldout": 24}
    short |= {"target_loss": 0.05, "num_decay_steps": 60, "num_hasty_steps": 60}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(demo, "TASKS", {"spell_backward": TASKS["spell_backward"]})
    monkeypatch.setattr(ReasoningGymQuickstart, "recipe", staticmethod(lambda: GymRecipe(**short)))
    task = "runs/quickstart_reasoning_gym/task"
    files = {name: json.dumps([{"json_path": f"{task}/{name}/spell_backward.jsonl"}]) for name in ("train", "heldout")}
    flags = [f"--data.datasets={files['train']}", f"--data.val_datasets={files['heldout']}", "--trainer.max_steps=25"]
    main(["fit", "--config", str(RECIPE), *flags, "--data.batch_size=12", "--seed_everything=0"])
    summary = json.loads((tmp_path / "runs/quickstart_reasoning_gym/version_0/summary.json").read_text())
    assert summary["reasoning_gym_before"] < 0.5
    assert summary["reasoning_gym_after"] > 0.7


pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(
    ("task", "question", "written"),
    [
        ("chain_sum", "State the answer: 8 - 0 + 7 =", "8-0=8+7=15"),
        ("chain_sum", "State the answer: 0 - 9 - 9 =", "0-9=-9-9=-18"),
        ("number_filtering", "Keep all numbers larger than 3 in this list: ['0', '4', '3']\nReturn", "0<n 4>y 3=n"),
        ("number_filtering", "Remove all numbers smaller than 3 in this list: ['0', '4', '3']\nReturn", "0<n 4>y 3=y"),
        ("spell_backward", "Spell this word backward (example: sun -> nus): Brush", "B r u s h"),
    ],
)
def test_steps_by_hand(task, question, written):
    entry = {"question": question, "answer": "x", "metadata": {}}
    assert steps(task, entry) == written
    assert worked_completion(task, entry) == f"<think>{written}</think><answer>x</answer>"
    assert hasty_completion(entry) == "<answer>x</answer>"


def test_the_last_running_sum_is_the_answer():
    for entry in entries("chain_sum", TASKS["chain_sum"], 0, range(200)):
        assert steps("chain_sum", entry).rpartition("=")[2] == entry["answer"]


def test_the_marked_numbers_are_the_answer():
    for entry in entries("number_filtering", TASKS["number_filtering"], 0, range(200)):
        marked = steps("number_filtering", entry).split()
        kept = [number[:-2] for number in marked if number.endswith("y")]
        assert str(kept) == entry["answer"]


@pytest.mark.parametrize("task", TASKS)
def test_what_questions_share_is_one_token(task):
    tokenizer = build_tokenizer()
    for entry in entries(task, TASKS[task], 0, range(20)):
        ids = tokenizer.encode(entry["question"])
        assert len(ids) <= 25
        assert tokenizer.decode(ids) == entry["question"]
        answered = worked_completion(task, entry)
        assert tokenizer.decode(tokenizer.encode(answered)) == answered
        assert len(tokenizer.encode(answered)) < 40  # the recipe's limit
    assert not [phrase for phrase in PHRASES if len(tokenizer.encode(phrase)) != 1]
