"""The memory of reward models, against the tensors of real ones."""

from __future__ import annotations

import pytest
import torch

from grpo_lightning.cli.plan.parts import ALWAYS
from grpo_lightning.cli.plan.reward_parts import reward_models_of, reward_parts
from grpo_lightning.rewards import ByMethod, Cosine, Format, LLMJudge, Reward, RewardModel, WeightedReward
from tests.cli.plan.real_shapes import reward_model_0_6b
from tests.tiny_models import tiny_classifier, tiny_tokenizer


def parts_of(*rewards: Reward):
    models, remarks = reward_models_of(WeightedReward(reward, name=f"r{i}") for i, reward in enumerate(rewards))
    assert remarks == []
    return reward_parts(models)


@pytest.fixture
def folder(tmp_path):
    tiny_classifier("qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_the_bytes_are_those_of_the_tensors(folder, dtype):
    reward = RewardModel(folder, dtype=dtype)
    (part,) = parts_of(reward)
    reward.connect(torch.device("cpu"))
    assert part.num_bytes == sum(weight.nbytes for weight in reward._loaded.parameters())
    assert (part.name, part.is_exact, part.place, part.moments) == ("reward r0", True, "device", ALWAYS)


def test_a_model_in_memory(folder):
    model = tiny_classifier("llama")
    (part,) = parts_of(RewardModel(model, tiny_tokenizer()))
    assert part.num_bytes == sum(weight.nbytes for weight in model.parameters())


def test_where_it_waits(folder):
    places = [{}, {"device": "cuda:1"}, {"device": "cpu"}, {"offload": True}]
    parts = parts_of(*(RewardModel(folder, **place) for place in places))
    assert [part.place for part in parts] == ["device", "device", "host", "host"]
    assert ["moves during its calls" in part.how for part in parts] == [False, False, False, True]


def test_a_published_size(tmp_path):
    reward_model_0_6b().save_pretrained(tmp_path)
    (part,) = parts_of(RewardModel(str(tmp_path)))
    assert (
        part.num_bytes == 2 * 596_050_944
    )  # the 596,049,920 of Qwen3 0.6B, whose head is tied, and 1,024 of the score


class Loads(Reward):
    def __call__(self, completions):
        return [0.0] * len(completions)

    def connect(self, device):
        self.model = device


class LoadsNothing(Loads):
    in_process = False


def test_what_cannot_be_counted_is_named():
    judge = LLMJudge("model", base_url="http://localhost:1/v1")
    rewards = [Format(), Loads(), LoadsNothing(), judge, ByMethod(), Cosine(), Cosine(accuracy=Loads())]
    models, remarks = reward_models_of(WeightedReward(reward, name=f"r{i}") for i, reward in enumerate(rewards))
    assert models == ()
    assert remarks == [f"what the reward {name} loads is not counted" for name in ("r1", "r6")]
