from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_lightning.rewards import ExactMatch, Format, Length, RewardSet, WeightedReward
from grpo_lightning.rewards.reward_set import weighted_total
from grpo_lightning.types import Completion, Group, Prompt

NAN = math.nan


def group(*texts: str, content: Any = "question", index: int = 0, source: str = "", **columns: Any) -> Group:
    prompt = Prompt(content, columns, index, source)
    return Group(prompt, [1], [Completion([ord(c) for c in t], [0.0] * len(t), "stop", t) for t in texts])


def giving(*values: Any, name: str = "given") -> WeightedReward:
    return WeightedReward(Given(list(values)), name=name)


class Given:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __call__(self, completions: Any) -> Any:
        return self.values


def first(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def second(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    assert_close(actual, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


# --- the sum


def test_the_total_by_hand():
    scores = RewardSet([first, second], [0.5, 2.0]).score([group("a", "bb"), group("ccc", "")])
    close(scores.by_reward["first"], [[1, 2], [3, 0]])  # unweighted
    close(scores.by_reward["second"], [[1, 1], [1, 1]])
    close(scores.total, [[2.5, 3.0], [3.5, 2.0]])
    assert scores.total.dtype == scores.by_reward["first"].dtype == torch.float32
    assert list(scores.by_reward) == ["first", "second"]
    assert set(scores.failures.values()) == {0}
    assert set(scores.failures) == {
        f"{name}/{kind}"
        for name in ("first", "second")
        for kind in ("exception", "wrong_length", "invalid_value", "not_scorable")
    }


def test_none_by_hand():
    groups = [group("a", "b") for _ in range(4)]
    rewards = [giving(1, 2, None, None, 5, None, None, None, name="a"), giving(*[10.0] * 6, None, None, name="b")]
    scores = RewardSet(rewards).score(groups)
    # both; b alone, for a does not apply; the second is not scorable; none applies
    close(scores.total, [[11, 12], [10, 10], [15, NAN], [NAN, NAN]])
    close(scores.by_reward["a"], [[1, 2], [NAN, NAN], [5, NAN], [NAN, NAN]])
    assert scores.failures["a/not_scorable"] == 1
    assert scores.failures["b/not_scorable"] == 0


def test_a_reward_of_weight_zero_is_only_logged():
    scores = RewardSet([giving(1, None), second], [0, 1]).score([group("a", "b")])
    close(scores.total, [[1, 1]])
    close(scores.by_reward["given"], [[1, NAN]])
    only = RewardSet([giving(1, 2), giving(None, None, name="b")], [0, 1]).score([group("a", "b")])
    close(only.total, [[NAN, NAN]])


def loop_total(values: list[list[list[float | None]]], weights: list[float], n: int, g: int) -> float:
    total, count = 0.0, 0
    for layer, weight in zip(values, weights, strict=True):
        if weight == 0 or all(value is None for value in layer[n]):
            continue
        value = layer[n][g]
        if value is None:
            return NAN
        total, count = total + weight * value, count + 1
    return total if count else NAN


@given(st.data())
def test_the_total_equals_a_plain_loop(data: st.DataObject):
    num_rewards, num_groups, size = (data.draw(st.integers(1, 3)) for _ in range(3))
    value = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
    row = st.one_of(st.lists(value, min_size=size, max_size=size), st.just([None] * size))
    layer = st.lists(row, min_size=num_groups, max_size=num_groups)
    values = data.draw(st.lists(layer, min_size=num_rewards, max_size=num_rewards))
    weights = [data.draw(st.sampled_from([0.0, 1.0, -0.5])) for _ in range(num_rewards)]
    tensor = torch.tensor([[[NAN if v is None else v for v in r] for r in lay] for lay in values])
    expected = [[loop_total(values, weights, n, g) for g in range(size)] for n in range(num_groups)]
    close(weighted_total(tensor, torch.tensor(weights)), expected)


# --- making one


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, "at least one reward"),
        (first, None, "must be a list of at least one reward"),
        ([first, second], [1.0], "reward_weights has 1 entries and rewards has 2"),
        ([first], [1.0, 1.0], "reward_weights has 2 entries and rewards has 1"),
        ([first], [math.inf], "must be finite, got inf for 'first'"),
        ([first, second], [0, 0], "Every reward has weight 0"),
        ([WeightedReward(first, weight=0)], None, "Every reward has weight 0"),
        ([WeightedReward(first, weight=2)], [3], "'first' has the weight 2.0 and reward_weights gives it 3: keep one"),
        ([first, second, first], None, r"2 rewards are named 'first'.*WeightedReward\(reward, name=\.\.\.\)"),
        ([ExactMatch(), ExactMatch("b")], None, "2 rewards are named 'exact_match'"),
    ],
)
def test_what_does_not_fit_is_an_error(rewards: Any, weights: Any, message: str):
    with pytest.raises(ValueError, match=message):
        RewardSet(rewards, weights)


def test_weights_come_from_the_list_or_the_rewards():
    assert RewardSet([first, WeightedReward(second, weight=0.25)]).weights == [1.0, 0.25]
    assert RewardSet([first, second], [3, 0]).weights == [3.0, 0.0]
    assert RewardSet([first, WeightedReward(first, name="again")]).score([group("a")]).total.item() == 2


# --- columns


def needs_answer(completions: Any, answer: Any) -> list[float | None]:
    return [None if value is None else float(value) for value in answer]


def test_columns_are_checked_before_the_first_batch():
    rewards = RewardSet([needs_answer, ExactMatch("solution")])
    rewards.validate(["answer", "solution", "id"])
    with pytest.raises(ValueError, match=r"'needs_answer' needs the data column 'answer', .*have: solution, id"):
        rewards.validate(["solution", "id"])
    with pytest.raises(ValueError, match=r"'exact_match' needs the data column 'solution', .*have: answer"):
        rewards.validate(["answer"])
    with pytest.raises(ValueError, match="have: none"):
        rewards.validate([])
    with pytest.raises(ValueError, match=r"\['completions'\] have the names of arguments"):
        rewards.validate(["answer", "solution", "completions"])


@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_a_missing_column_is_an_error_whatever_the_policy(on_error: Any):
    rewards = RewardSet([WeightedReward(needs_answer, on_error=on_error)])
    with pytest.raises(ValueError, match=r"'needs_answer' needs the data column 'answer'"):
        rewards.score([group("a", id=1)])


def test_a_column_that_only_one_source_has_is_none_for_the_other():
    rewards = RewardSet([needs_answer, second])
    close(rewards.score([group("a", answer="5"), group("b", box=[1])]).total, [[6], [1]])
    with pytest.raises(ValueError, match="needs the data column"):
        rewards.score([group("b", box=[1])])
    rewards.validate(["answer", "box"])  # the whole mixture has it: a batch without is no mistake
    close(rewards.score([group("b", box=[1])]).total, [[1]])


# --- a batch


def test_groups_must_have_one_size():
    rewards = RewardSet([first])
    for groups in ([group("a"), group("a", "b")], [], [group()]):
        with pytest.raises(ValueError, match="the same number of completions, at least 1; got sizes"):
            rewards.score(groups)


def test_metrics_and_extras_of_all_rewards():
    def logs(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("seen", 1)
        log_metric("seen", 4)
        log_extra("shout", [text.upper() for text in completions])
        return [0.0] * len(completions)

    async def logs_too(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("seen", 7)
        for text in completions:
            log_extra("letters", [len(text)])
        return [0.0] * len(completions)

    scores = RewardSet([logs, logs_too]).score([group("a", "bb"), group("c", "dd")])
    assert scores.metrics == {"seen": 4.0}
    assert scores.extras == {"shout": ["A", "BB", "C", "DD"], "letters": [1, 2, 1, 2]}
    with pytest.raises(ValueError, match="Two rewards log_extra the column 'shout': rename it in 'b'"):
        RewardSet([logs, WeightedReward(logs, name="b")]).score([group("a")])


def test_a_set_is_picklable_before_and_after_use():
    rewards = RewardSet(
        [WeightedReward(first, weight=2, on_error="none"), ExactMatch(), Format(), Length(max_tokens=1)]
    )
    groups = [group("<answer>1</answer>", "bb", answer="1")]
    for _ in range(2):
        again = pickle.loads(pickle.dumps(rewards))
        assert_close(again.score(groups).total, rewards.score(groups).total)
        assert again.weights == rewards.weights


@pytest.mark.parametrize("content", ["question", [{"role": "user", "content": "question"}]])
def test_our_rewards_in_a_set(content: Any):
    rewards = RewardSet([ExactMatch(), Format(), Length(max_tokens=40, falloff_tokens=10)], [1, 0.5, 0.1])
    groups = [group("<think>2</think><answer>2</answer>", "<answer>2</answer>", "2" * 45, content=content, answer="2")]
    close(rewards.score(groups).total, [[1.6, 1.1, 0.05]])


@pytest.mark.parametrize("name", ["reward", "mean", "length", "truncated", "equal_groups"])
def test_a_reward_cannot_take_a_name_that_the_logs_use(name):
    with pytest.raises(ValueError, match=f"must not be named '{name}'"):
        RewardSet([WeightedReward(lambda completions: [0.0] * len(completions), name=name)])


def test_weights_keep_their_precision_under_another_default_dtype():
    groups = [Group(Prompt("p"), [1], [Completion([1], [0.0], "stop", "a"), Completion([1], [0.0], "stop", "b")])]
    rewards = RewardSet([WeightedReward(lambda completions: [1.0] * len(completions), weight=1 / 3, name="third")])
    torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does inside a training step
    assert rewards.score(groups).total[0].tolist() == pytest.approx([1 / 3, 1 / 3], rel=1e-6)
