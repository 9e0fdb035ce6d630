from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import Cosine, Length, Reward, RewardSet, SoftOverlong, WeightedReward

# --- Length


def lengths(reward: Reward, *tokens: int) -> list[float | None]:
    values: list[float | None] = reward(
        completion_ids=[[7] * count for count in tokens], completions=[""] * len(tokens)
    )
    return values


def test_length_by_hand():
    assert lengths(Length(max_tokens=10, falloff_tokens=4), 0, 9, 10, 11, 13, 14, 99) == [1, 1, 1, 0.75, 0.25, 0, 0]
    assert lengths(Length(min_tokens=4, falloff_tokens=4), 0, 1, 3, 4, 99) == [0, 0.25, 0.75, 1, 1]
    assert lengths(Length(min_tokens=10, max_tokens=10, falloff_tokens=10), 0, 5, 10, 15, 20) == [0, 0.5, 1, 0.5, 0]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 30))
def test_length_is_a_flat_top_with_straight_sides(low: int, width: int, falloff: int):
    rewards = [r for r in lengths(Length(low, low + width, falloff), *range(80)) if r is not None]
    assert len(rewards) == 80
    assert [count for count, reward in enumerate(rewards) if reward == 1] == list(range(low, low + width + 1))
    assert all(0 <= reward <= 1 for reward in rewards)
    steps = [abs(after - before) for before, after in itertools.pairwise(rewards)]
    assert all(step == pytest.approx(1 / falloff) or step == 0 for step in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "1 to every completion"),
        ({"min_tokens": -1}, "0 <= min_tokens <= max_tokens, got -1 and None"),
        ({"min_tokens": 5, "max_tokens": 4}, "got 5 and 4"),
        ({"max_tokens": 4, "falloff_tokens": 0}, "falloff_tokens must be at least 1, got 0"),
    ],
)
def test_length_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Length(**settings)


def test_length_does_not_take_the_logs_word_for_tokens():
    assert Length(max_tokens=4).name == "length_reward"


# --- SoftOverlong


def test_soft_overlong_by_hand():
    # 1000 - 200 = 800 tokens are free, then -1/200 for each, and -1 from 1000 on.
    punish = SoftOverlong(cache_length=200, max_length=1000)
    assert lengths(punish, 0, 799, 800, 801, 900, 1000, 1001, 1200, 100_000) == [0, 0, 0, -0.005, -0.5, -1, -1, -1, -1]


def test_soft_overlong_takes_the_limit_of_the_run():
    groups = [Group(Prompt("p"), [1], [Completion([7] * count, [0.0] * count, "length") for count in (80, 90, 120)])]
    scores = RewardSet([SoftOverlong(cache_length=20)]).score(groups, max_completion_length=100)
    assert scores.total.tolist() == [[0, -0.5, -1]]
    own = RewardSet([SoftOverlong(cache_length=20, max_length=120)]).score(groups, max_completion_length=100)
    assert own.total.tolist() == [[0, 0, -1]]


@given(st.integers(1, 50), st.integers(1, 50))
def test_soft_overlong_equals_the_peer(cache: int, free: int):
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=cache + free, soft_punish_cache=cache)
    ours = SoftOverlong(cache, cache + free)
    assert lengths(ours, *range(120)) == pytest.approx(theirs(completion_ids=[[7] * count for count in range(120)]))


@given(st.integers(1, 50), st.integers(1, 50))
def test_length_is_the_soft_overlong_punishment_plus_one(cache: int, free: int):
    punished = [value + 1 for value in lengths(SoftOverlong(cache, cache + free), *range(120)) if value is not None]
    assert lengths(Length(max_tokens=free, falloff_tokens=cache), *range(120)) == pytest.approx(punished)


@pytest.mark.parametrize("settings", [{"cache_length": 0}, {"cache_length": 9, "max_length": 9}])
def test_soft_overlong_settings_are_checked(settings: dict[str, int]):
    with pytest.raises(ValueError, match=r"0 < cache_length < max_length \(tokens\), got"):
        SoftOverlong(**settings)


def test_soft_overlong_without_a_limit_is_an_error():
    with pytest.raises(ValueError, match=r"SoftOverlong needs max_length: it is None, .* no max_completion_length"):
        lengths(SoftOverlong(cache_length=9), 3)
    with pytest.raises(ValueError, match="cache_length 9 must be below the run's max_completion_length, 9 tokens"):
        SoftOverlong(cache_length=9)(completion_ids=[[1]], max_completion_length=9)


# --- Cosine


def given_accuracy(completions: list[str], accuracy: list[float | None]) -> list[float | None]:
    return accuracy


def cosine(tokens: int, accuracy: float | None, **settings: Any) -> float | None:
    reward = Cosine(accuracy=given_accuracy, **settings)
    (value,) = reward(completions=[""], completion_ids=[[7] * tokens], max_completion_length=100, accuracy=[accuracy])  # type: ignore[misc]
    return value


def test_cosine_by_hand():
    half = math.cos(math.pi / 4)  # a quarter of the way: cos(pi / 4)
    assert [cosine(tokens, 1.0) for tokens in (0, 25, 50, 100)] == pytest.approx(
        [1, 0.5 + 0.25 * (1 + half), 0.75, 0.5]
    )
    assert [cosine(tokens, 0.0) for tokens in (0, 25, 50, 100)] == pytest.approx(
        [-0.5, -0.25 * (1 + half), -0.25, 0.0], abs=1e-12
    )
    assert cosine(50, None) is None
    assert cosine(50, 0.99) == pytest.approx(-0.25)  # right is 1 and more
    assert cosine(50, 2.0) == pytest.approx(0.75)
    assert math.isnan(cosine(50, math.nan) or 0)  # left to the failure policy


def test_cosine_does_not_rise_again_beyond_the_limit():
    assert [cosine(tokens, 1.0) for tokens in (100, 101, 150, 200, 100_000)] == pytest.approx([0.5] * 5)
    assert [cosine(tokens, 0.0) for tokens in (100, 150, 200)] == pytest.approx([0.0] * 3, abs=1e-12)


@pytest.mark.parametrize("answer", ["3", "4"])
def test_cosine_equals_the_peer(answer: str):
    rewards = pytest.importorskip("trl.rewards")
    values = {"min_value_wrong": -0.5, "max_value_wrong": 0.0, "min_value_correct": 0.5, "max_value_correct": 1.0}
    batch: dict[str, Any] = {
        "completions": [[{"role": "assistant", "content": rf"$\boxed{{{answer}}}$"}]] * 13,
        "completion_ids": [[7] * count for count in range(0, 130, 10)],
        "solution": ["3"] * 13,
    }
    theirs = rewards.get_cosine_scaled_reward(max_len=100, **values)(**batch)
    assert Cosine(max_len=100)(**batch) == pytest.approx(theirs)


def test_cosine_with_other_values():
    settings = {
        "min_len_correct": 3.0,
        "max_len_correct": 1.0,
        "min_len_wrong": -4.0,
        "max_len_wrong": -2.0,
        "max_len": 10,
    }
    assert [cosine(tokens, 1.0, **settings) for tokens in (0, 5, 10)] == pytest.approx([3, 2, 1])
    assert [cosine(tokens, 0.0, **settings) for tokens in (0, 5, 10)] == pytest.approx([-4, -3, -2])


@given(st.lists(st.integers(0, 300), min_size=2, max_size=8), st.sampled_from([0.0, 1.0]))
def test_cosine_is_monotone(tokens: list[int], accuracy: float):
    values = [cosine(count, accuracy) or 0.0 for count in sorted(tokens)]
    rises = [after - before for before, after in itertools.pairwise(values)]
    assert all(rise <= 1e-12 if accuracy else rise >= -1e-12 for rise in rises)


def test_cosine_asks_for_what_its_accuracy_needs():
    reward = Cosine(accuracy=given_accuracy)
    assert reward.required_columns == ("accuracy",)
    assert Cosine().required_columns == ("solution",)
    with pytest.raises(ValueError, match=r"'cosine' needs the data column 'solution'"):
        RewardSet([Cosine()]).validate_prompts([Prompt("p", columns={"answer": None})])


def test_cosine_around_accuracy_in_a_set():
    completions = [Completion([7] * 50, [0.0] * 50, "stop", text) for text in ("<answer>1/2</answer>", "2")]
    groups = [Group(Prompt("p", columns={"solution": "0.5"}), [1], completions)]
    scores = RewardSet([Cosine()]).score(groups, max_completion_length=100)
    assert scores.total[0].tolist() == pytest.approx([0.75, -0.25])


def test_cosine_waits_for_an_async_accuracy():
    async def later(completions: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    groups = [Group(Prompt("p"), [1], [Completion([7] * 50, [0.0] * 50, "stop", "a")])]
    scores = RewardSet([Cosine(accuracy=later)]).score(groups, max_completion_length=100)
    assert scores.total.tolist() == [[0.75]]


def of_groups(completions: Any) -> Any: ...


of_groups.per_group = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_len": 0}, "max_len must be at least 1 token, got 0"),
        ({"max_len_wrong": math.inf}, r"must be finite, got \(1.0, 0.5\) and \(-0.5, inf\)"),
        ({"accuracy": of_groups}, "'of_groups' takes whole groups"),
        ({"accuracy": WeightedReward(given_accuracy, weight=2)}, "'given_accuracy' inside Cosine has its own weight"),
        ({"accuracy": WeightedReward(given_accuracy, on_error="none")}, "inside Cosine has its own weight or on_error"),
    ],
)
def test_cosine_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Cosine(**settings)


def test_cosine_without_a_limit_is_an_error():
    with pytest.raises(ValueError, match="Cosine needs max_len: it is None"):
        Cosine(accuracy=given_accuracy)(completions=[""], completion_ids=[[1]], accuracy=[1.0])


@pytest.mark.parametrize("reward", [Length(1, 2, 3), SoftOverlong(3), Cosine(accuracy=given_accuracy, max_len=50)])
def test_rewards_are_picklable(reward: Any):
    again = pickle.loads(pickle.dumps(reward))
    arguments = {"completions": [""], "completion_ids": [[7] * 30], "max_completion_length": 99, "accuracy": [1.0]}
    assert again(**arguments) == reward(**arguments)
