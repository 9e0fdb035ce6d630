"""Rewards in the style of other projects run as their users have them: TRL, ms-swift, VLM-R1."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, Group, Prompt, PromptVision
from grpo_lightning.rewards import ByMethod, Cosine, RewardSet, Scores, WeightedReward
from grpo_lightning.rewards.base import TrainerState, _rename_reward

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


def test_trl_names_of_older_versions_and_its_state():
    def ids(completions_ids, trainer_state, **kwargs):
        assert trainer_state.is_world_process_zero
        return [float(len(ids) + trainer_state.global_step) for ids in completions_ids]

    state = TrainerState(7, 9, 2.5, 3, 2, 3, global_rank=0, world_size=1)
    assert RewardSet([ids]).score([group("abc", "")], trainer_state=state).total.tolist() == [[10, 7]]


def reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("name", ["reward", "length", "mean", "std"])
def test_a_function_with_a_name_of_the_logs_gets_another(name: str, caplog: pytest.LogCaptureFixture):
    _rename_reward.cache_clear()
    function = functools.partial(reward) if name == "reward" else types.FunctionType(reward.__code__, globals(), name)
    scores = [RewardSet([function]).score([group("abc", "")]) for _ in range(2)]
    assert [list(of_call.by_reward) for of_call in scores] == [[f"{name}_fn"]] * 2
    assert scores[0].total.tolist() == [[3, 0]]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"The reward {name!r} is called '{name}_fn' in logs and settings" in said[0]
    assert RewardSet([WeightedReward(function, name="brevity")]).names == ["brevity"]


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
    with pytest.raises(ValueError, match=r"pass an instance, MathORM\(\.\.\.\)"):
        WeightedReward(MathORM)


class Settings:
    """Arguments that ms-swift passes to the constructors of its rewards."""

    cosine_min_len_value_wrong, cosine_max_len_value_wrong = -0.5, 0.0
    cosine_min_len_value_correct, cosine_max_len_value_correct = 1.0, 0.5
    cosine_max_len = 4
    soft_max_length, soft_cache_length = 4, 2


class EndsRight(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(text.endswith(right)) for text, right in zip(completions, solution, strict=True)]


class TokenCosine(ORM):
    """Reads token ids as the cosine reward of ms-swift does, and asks another reward itself."""

    def __init__(self, args=None, accuracy_orm=None):
        super().__init__(args)
        self.accuracy_orm = accuracy_orm or EndsRight()

    def __call__(self, completions, solution, **kwargs):
        settings, right = self.args, self.accuracy_orm(completions, solution, **kwargs)
        values = []
        for ids, accuracy in zip(kwargs.get("response_token_ids"), right, strict=True):
            length = sum(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids)
            wrong = (settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong)
            correct = (settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct)
            start, end = correct if accuracy >= 1.0 else wrong
            values.append(end + (start - end) * (1 + math.cos(math.pi * length / settings.cosine_max_len)) / 2)
        return values


class TokenOverlong(ORM):
    """Reads token ids as the soft overlong reward of ms-swift does."""

    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        assert args.soft_cache_length < args.soft_max_length

    def __call__(self, completions, **kwargs):
        allowed = self.args.soft_max_length - self.args.soft_cache_length
        return [min((allowed - len(ids)) / self.args.soft_cache_length, 0) for ids in kwargs.get("response_token_ids")]


class FirstArgument(ORM):
    """ms-swift gives the completions by position."""

    def __call__(self, infer_requests, solution, **kwargs):
        texts = [r if isinstance(r, str) else r["messages"][-1]["content"] for r in infer_requests]
        return [float(text == right) for text, right in zip(texts, solution, strict=True)]


class OfTheRollout(ORM):
    def __call__(
        self, completions, messages, finish_reason, is_truncated, request_id, prompt_id, trainer_state, **kwargs
    ):
        assert kwargs["rollout_infos"] == [{}] * len(completions)
        assert [chat[-1] for chat in messages] == [{"role": "assistant", "content": text} for text in completions]
        assert all(chat[0]["role"] == "user" for chat in messages)
        assert is_truncated == [reason == "length" for reason in finish_reason]
        assert len(set(request_id)) == len(completions) > len(set(prompt_id))
        return [float(truncated) for truncated in is_truncated]


@pytest.mark.parametrize("content", ["What is 1 + 1?", CHAT])
def test_ms_swift_rewards_that_read_what_a_rollout_is(content: Any):
    batch = group("2", "= 2", "= 3", content=content, solution="2")
    assert score(TokenOverlong(Settings), batch).total.tolist() == [[0, -0.5, -0.5]]
    assert score(FirstArgument(), batch).total.tolist() == [[1, 0, 0]]
    assert WeightedReward(FirstArgument()).required_columns == ("solution",)
    assert WeightedReward(OfTheRollout()).required_columns == ()
    truncated = dataclasses.replace(batch.completions[2], finish_reason="length")
    cut_off = dataclasses.replace(batch, completions=[*batch.completions[:2], truncated])
    assert score(OfTheRollout(), cut_off).total.tolist() == [[0, 0, 1]]


def test_the_cosine_reward_of_ms_swift_is_ours():
    batch = group("2", "= 2", "= 3", "2 = 3", solution="2")
    ours = Cosine(max_len=4, accuracy=EndsRight())
    assert torch.allclose(score(TokenCosine(Settings), batch).total[:, :3], score(ours, batch).total[:, :3])


@pytest.mark.parametrize("around", [lambda orm: Cosine(accuracy=orm), lambda orm: ByMethod({"default": orm})])
def test_a_reward_of_ms_swift_inside_another(around: Any):
    assert not score(around(TokenCosine(Settings)), group("2", "= 2", solution="2")).total.isnan().any()


def test_a_data_column_has_its_own_values():
    def reads(completions, messages, is_truncated, **kwargs):
        return [float(chat == "own" and not cut) for chat, cut in zip(messages, is_truncated, strict=True)]

    assert score(reads, group("2", messages="own")).total.tolist() == [[1]]


class LastMessage(ORM):
    """Compares the last message of the chat with the solution."""

    def __call__(self, completions, messages, solution, **kwargs):
        assert kwargs["finish_reason"] == ["stop"] * len(completions)
        return [float(chat[-1]["content"] == right) for chat, right in zip(messages, solution, strict=True)]


@pytest.mark.parametrize(
    "around", [lambda orm: orm, lambda orm: Cosine(0.9, 0.9, 0, accuracy=orm), lambda orm: ByMethod({"default": orm})]
)
def test_the_rollout_comes_before_data_columns_in_rewards_of_ms_swift(around: Any, caplog: pytest.LogCaptureFixture):
    gold = [*CHAT, {"role": "assistant", "content": "2"}]
    batch = group("2", "3", content=CHAT, solution="2", messages=gold, finish_reason="own")
    rewards = RewardSet([around(LastMessage())])
    rewards.validate_prompts([batch.prompt])
    right, wrong = rewards.score([batch], max_completion_length=64).total[0].tolist()
    assert right > 0 == wrong
    assert not caplog.records


def test_a_column_in_place_of_the_completions_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    def reads(completions, messages, problem, **kwargs):
        return [0.0 for _ in messages]

    rewards = RewardSet([reads])
    for _ in range(2):
        rewards.validate_prompts([group("2", messages="own", problem="own", turns=1).prompt])
    assert [record.getMessage() for record in caplog.records] == [
        "Reward 'reads': its argument 'messages' is the data column of this name, and does not describe the "
        "completions. To score the completions, drop the column (columns: {messages: null}) or rename it."
    ]


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


def debug_reward(completions, solution, **kwargs):
    """Check the columns that VLM-R1's rewards read for their debug log and for the size of an image."""
    path, problem, grid = (kwargs.get(name)[0] for name in ("image_path", "problem", "image_grid_thw"))
    is_right = path == ["/images/a.jpg"] and problem == "Where?" and int(grid[2] * 14) == 84
    return [float(is_right) for _ in completions]


def test_vlm_r1_reads_paths_and_questions():
    content = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}]
    of_text = group("2", content=content, solution="2")
    prompt = dataclasses.replace(of_text.prompt, images=[ImageRef(Path("/images/a.jpg"))])
    vision = PromptVision({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])})
    batch = dataclasses.replace(of_text, prompt=prompt, vision=vision)
    assert score(debug_reward, batch).total.tolist() == [[1]]

    def without(image_path, images, image_grid_thw):
        return [float(image_path == image_grid_thw == [None] and images == [[]])]

    assert score(without, of_text).total == 1


def test_vlm_r1():
    texts = ["<think>a</think><answer>[1, 2, 3, 4]</answer>", "[1, 2, 3, 4]", "<think>a</think><answer>[1, 2]</answer>"]
    batch = group(*texts, content=CHAT, solution="<answer> [1, 2, 3, 4] </answer>")
    scores = RewardSet([iou_reward, format_reward]).score([batch])
    assert scores.by_reward["iou_reward"].tolist() == [[1, 1, 0]]
    assert scores.by_reward["format_reward"].tolist() == [[1, 0, 1]]
    as_text = group(*texts, solution="<answer> [1, 2, 3, 4] </answer>")
    assert score(iou_reward, as_text, completions_as="messages").total.tolist() == [[1, 1, 0]]
