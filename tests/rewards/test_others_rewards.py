"""Rewards in the style of other projects run as their users have them: TRL, ms-swift, VLM-R1."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from grpo_lightning.rewards import RewardSet, Scores, WeightedReward
from grpo_lightning.types import Completion, Group, Prompt

CHAT = [{"role": "user", "content": "What is 1 + 1?"}]


def group(*texts: str, content: Any = "What is 1 + 1?", **columns: Any) -> Group:
    completions = [Completion([ord(char) for char in text], [0.0] * len(text), "stop", text) for text in texts]
    return Group(Prompt(content, columns=columns), [1], completions)


def score(reward: Any, *groups: Group, **settings: Any) -> Scores:
    return RewardSet([WeightedReward(reward, **settings)]).score(groups, max_completion_length=64)


# --- TRL


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def reward_answer(prompts, completions, ground_truth, **kwargs):
    matches = [re.search(r"= (\d+)", completion) for completion in completions]
    return [
        1.0 if match and match.group(1) == truth else 0.0 for match, truth in zip(matches, ground_truth, strict=True)
    ]


def reward_conversation(prompts, completions, **kwargs):
    questions = [prompt[-1]["content"] for prompt in prompts]
    answers = [completion[0]["content"] for completion in completions]
    return [float(answer != question) for question, answer in zip(questions, answers, strict=True)]


def reward_ids(completion_ids, trainer_state=None, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def reward_for_math(completions, task, **kwargs):
    return [float("2" in text) if kind == "math" else None for text, kind in zip(completions, task, strict=True)]


async def reward_async(completions, **kwargs):
    async def ask(text: str) -> float:
        await asyncio.sleep(0)
        return float(len(text))

    return await asyncio.gather(*(ask(text) for text in completions))


class Judge:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.__name__ = "judge"

    def __call__(self, prompts, completions, **kwargs):
        return [self.factor * len(text) for text in completions]


def reward_logs(completions, answer, log_extra=None, log_metric=None, **kwargs):
    values = [float(a == text) for text, a in zip(completions, answer, strict=True)]
    if log_extra:
        log_extra("golden_answer", list(answer))
    if log_metric:
        log_metric("accuracy", sum(values) / len(values))
    return values


def test_trl_text():
    assert score(reward_len, group("a" * 20, "a" * 15)).total.tolist() == [[0, -5]]
    assert score(reward_answer, group("1 + 1 = 2", "= 3", ground_truth="2")).total.tolist() == [[1, 0]]
    assert score(reward_ids, group("abc", "")).total.tolist() == [[3, 0]]
    assert score(reward_async, group("abc", "")).total.tolist() == [[3, 0]]
    scores = score(Judge(2.0), group("abc", ""))
    assert scores.total.tolist() == [[6, 0]]
    assert list(scores.by_reward) == ["judge"]


def test_trl_conversations():
    assert score(reward_conversation, group("2", "What is 1 + 1?", content=CHAT)).total.tolist() == [[1, 0]]
    # Written for chats, used on text prompts: the form can be asked for.
    text = score(
        lambda completions: [len(c[0]["content"]) for c in completions], group("2"), completions_as="messages", name="f"
    )
    assert text.total.tolist() == [[1]]


def test_trl_several_tasks():
    scores = score(reward_for_math, group("2", "3", task="math"), group("2", "3", task="code"))
    assert scores.by_reward["reward_for_math"][0].tolist() == [1, 0]
    assert scores.by_reward["reward_for_math"][1].isnan().all()


def test_trl_logs():
    scores = score(reward_logs, group("2", "3", answer="2"))
    assert scores.total.tolist() == [[1, 0]]
    assert scores.extras == {"golden_answer": ["2", "2"]}
    assert scores.metrics == {"accuracy": 0.5}


# --- ms-swift: classes derived from ORM always get text


class ORM:
    def __init__(self, args=None, **kwargs):
        self.args = args


class AsyncORM:
    def __init__(self, args=None, **kwargs):
        self.args = args


class MathORM(ORM):
    def __call__(self, completions, solution, **kwargs) -> list[float]:
        return [
            1.0 if content.strip().endswith(sol) else 0.0 for content, sol in zip(completions, solution, strict=True)
        ]


class LengthORM(ORM):
    def __init__(self, args=None, limit=2):
        super().__init__(args)
        self.limit = limit

    def __call__(self, completions, **kwargs):
        return [1.0 if len(completion) <= self.limit else 0.0 for completion in completions]


class JudgeORM(AsyncORM):
    async def __call__(self, completions, solution, **kwargs):
        await asyncio.sleep(0)
        return [float(completion == sol) for completion, sol in zip(completions, solution, strict=True)]


@pytest.mark.parametrize("content", ["What is 1 + 1?", CHAT])
def test_ms_swift(content: Any):
    batch = group("it is 2", "2", content=content, solution="2")
    assert score(MathORM(), batch).total.tolist() == [[1, 1]]
    assert score(LengthORM(limit=2), batch).total.tolist() == [[0, 1]]
    assert score(JudgeORM(), batch).total.tolist() == [[0, 1]]
    assert list(score(MathORM(), batch).by_reward) == ["math_orm"]
    assert WeightedReward(MathORM()).required_columns == ("solution",)
    with pytest.raises(ValueError, match=r"give an instance, MathORM\(\.\.\.\)"):
        WeightedReward(MathORM)


def test_the_form_asked_for_beats_the_class():
    class Chats(ORM):
        def __call__(self, completions, **kwargs):
            return [float(len(completion[0]["content"])) for completion in completions]

    assert score(Chats(), group("abc", content=CHAT), completions_as="messages").total.tolist() == [[3]]
    assert score(Chats(), group("abc", content=CHAT), completions_as="auto", on_error="none").total.isnan().all()


# --- VLM-R1: message lists, solutions with answer tags


def iou_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol in zip(contents, solution, strict=True):
        truth = json.loads(re.findall(r"<answer>(.*?)</answer>", sol, re.DOTALL)[-1])
        found = re.search(r"\[(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\]", content)
        rewards.append(1.0 if found and [int(number) for number in found.groups()] == truth else 0.0)
    return rewards


def format_reward(completions, **kwargs):
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.fullmatch(pattern, content, re.DOTALL) else 0.0 for content in contents]


def test_vlm_r1():
    texts = ["<think>a</think><answer>[1, 2, 3, 4]</answer>", "[1, 2, 3, 4]", "<think>a</think><answer>[1, 2]</answer>"]
    batch = group(*texts, content=CHAT, solution="<answer> [1, 2, 3, 4] </answer>")
    scores = RewardSet([iou_reward, format_reward]).score([batch])
    assert scores.by_reward["iou_reward"].tolist() == [[1, 1, 0]]
    assert scores.by_reward["format_reward"].tolist() == [[1, 0, 1]]
    as_text = group(*texts, solution="<answer> [1, 2, 3, 4] </answer>")
    assert score(iou_reward, as_text, completions_as="messages").total.tolist() == [[1, 1, 0]]
