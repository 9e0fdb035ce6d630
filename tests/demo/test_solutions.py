"""How the three tasks of the quickstart on reasoning-gym are worked out."""

import pytest

pytest.importorskip("reasoning_gym")

from grpo_lightning.data.reasoning_gym import entries
from grpo_lightning.demo.reasoning_gym import PHRASES, TASKS, build_tokenizer, hasty, steps, worked


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
    assert worked(task, entry) == f"<think>{written}</think><answer>x</answer>"
    assert hasty(entry) == "<answer>x</answer>"


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
        answered = worked(task, entry)
        assert tokenizer.decode(tokenizer.encode(answered)) == answered
        assert len(tokenizer.encode(answered)) < 40  # the recipe's limit
    assert not [phrase for phrase in PHRASES if len(tokenizer.encode(phrase)) != 1]
