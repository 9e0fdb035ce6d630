from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import (
    ByMethod,
    Cosine,
    Countdown,
    ExactMatch,
    Format,
    IoU,
    Length,
    MultipleChoice,
    Repetition,
    Reward,
    RewardSet,
    SoftOverlong,
    WeightedReward,
)
from grpo_lightning.rewards.scoring import weighted_total
from tests.marks import SLOW

NAN = math.nan


def group(*texts: str, content: Any = "question", index: int = 0, source: str = "", **columns: Any) -> Group:
    prompt = Prompt(content, columns=columns, index=index, source=source)
    return Group(prompt, [1], [Completion([ord(c) for c in t], [0.0] * len(t), "stop", t) for t in texts])


def giving(*values: Any, name: str = "given") -> WeightedReward:
    return WeightedReward(Given(list(values)), name=name)


class Given:
    in_process = True  # the values are those of the whole batch

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __call__(self, completions: Any) -> Any:
        return self.values


def first(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def second(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def own_judge(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("rewards", "success"),
    [
        ([first, ExactMatch()], "exact_match"),  # `first` is some number, and may never reach 1
        ([Format(), Length(max_tokens=9), WeightedReward(ExactMatch(), weight=0.0, name="right")], "right"),
        ([ByMethod(), ExactMatch()], "accuracy"),
        ([IoU(), ExactMatch()], "iou"),
        ([Format(), WeightedReward(Countdown(), name="solved")], "solved"),
        ([Cosine(accuracy=first), MultipleChoice()], "multiple_choice"),
        ([own_judge, Format()], "own_judge"),
        ([first, second], "first"),
    ],
)
def test_the_reward_that_says_what_is_solved(rewards: list[Any], success: str):
    assert RewardSet(rewards).success == success


def test_a_reward_of_ones_own_can_say_what_is_solved():
    class Judge(Reward):
        says_solved = True

        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0 for _ in completions]

    assert RewardSet([first, Judge()]).success == "judge"


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
        for kind in ("exception", "timeout", "crash", "wrong_length", "invalid_value", "not_scorable")
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


@SLOW
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
        (first, None, r"must be a list of at least one reward, got <function first .*: write \[<function first"),
        ("short", None, r"must be a list of at least one reward, got 'short': write \['short'\]"),
        (None, None, "must be a list of at least one reward, got None"),
        (["short"], None, r"got the text 'short': pass the function itself, or .*reward\('short'\)"),
        ([ExactMatch], None, r"pass an instance, ExactMatch\(\.\.\.\)"),
        ([first, second], [1.0], "reward_weights has 1 entries and rewards has 2"),
        ([first], [1.0, 1.0], "reward_weights has 2 entries and rewards has 1"),
        ([first], [math.inf], "must be finite, got inf for 'first'"),
        ([first, second], [0, 0], "All rewards have weight 0"),
        ([WeightedReward(first, weight=0)], None, "All rewards have weight 0"),
        ([WeightedReward(first, weight=2)], [3], "'first' has weight 2.0 and reward_weights sets it to 3: keep one"),
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


def having(columns: list[str]) -> list[Prompt]:
    """A prompt with these columns."""
    return [Prompt("p", columns=dict.fromkeys(columns))]


def test_columns_are_checked_before_the_first_batch():
    rewards = RewardSet([needs_answer, ExactMatch("solution")])
    rewards.validate_prompts(having(["answer", "solution", "id"]))
    with pytest.raises(ValueError, match=r"'needs_answer' needs the data column 'answer', .*have only: solution, id"):
        rewards.validate_prompts(having(["solution", "id"]))
    with pytest.raises(ValueError, match=r"'exact_match' needs the data column 'solution', .*have only: answer"):
        rewards.validate_prompts(having(["answer"]))
    with pytest.raises(ValueError, match="have only: none"):
        rewards.validate_prompts(having([]))
    with pytest.raises(ValueError, match=r"\['completions'\] have the names of reward arguments"):
        rewards.validate_prompts(having(["answer", "solution", "completions"]))


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
    rewards.validate_prompts(having(["answer", "box"]))  # the whole mixture has it: a batch without is no mistake
    close(rewards.score([group("b", box=[1])]).total, [[1]])


def test_prompts_are_checked_source_by_source():
    rewards = RewardSet([needs_answer, ExactMatch("solution")])
    math = Prompt("p", columns={"answer": "1"}, index=0, source="math", rewards=["needs_answer"])
    text = Prompt("p", columns={"solution": "1", "id": 3}, index=0, source="text", rewards=["exact_match"])
    rewards.validate_prompts([math, text])
    rewards.validate_prompts([])
    with pytest.raises(
        ValueError, match="'exact_match' needs the data column 'solution', but the data of 'math' have only"
    ):
        rewards.validate_prompts(
            [
                Prompt("p", columns={"answer": "1"}, index=0, source="math"),
                Prompt("p", columns={"answer": "1"}, index=1, source="math"),
            ]
        )
    with pytest.raises(ValueError, match="of 'math' name an unknown reward 'exact'"):
        rewards.validate_prompts(
            [text, Prompt("p", columns={"answer": "1"}, index=0, source="math", rewards=["exact"])]
        )
    with pytest.raises(ValueError, match="No reward of nonzero weight applies to the prompts of 'math'"):
        RewardSet([needs_answer, second], [1, 0]).validate_prompts(
            [Prompt("p", columns={}, index=0, source="math", rewards=["second"])]
        )


# --- rewards of some prompts only


def only(names: Any, *texts: str, **columns: Any) -> Group:
    made = group(*texts, **columns)
    made.prompt.rewards = names
    return made


def test_a_reward_is_called_only_with_the_prompts_it_applies_to():
    seen: list[Any] = []

    def watched(completions: list[str], answer: list[str], log_extra: Any) -> list[float]:
        seen.append((completions, answer))
        log_extra("doubled", [2 * text for text in completions])
        return [float(len(text)) for text in completions]

    groups = [
        only(["watched"], "a", "bb", answer="1"),
        only(["second"], "c", "dd", answer="2"),
        only(None, "eee", "", answer="3"),
        only(["second", "watched"], "f", "g", answer="4"),
    ]
    scores = RewardSet([watched, second], [1, 10]).score(groups)
    assert seen == [(["a", "bb"], ["1", "1"]), (["eee", ""], ["3", "3"]), (["f", "g"], ["4", "4"])]
    close(scores.by_reward["watched"], [[1, 2], [NAN, NAN], [3, 0], [1, 1]])
    close(scores.by_reward["second"], [[NAN, NAN], [1, 1], [1, 1], [1, 1]])
    close(scores.total, [[1, 2], [10, 10], [13, 10], [11, 11]])
    assert scores.extras == {"doubled": ["aa", "bbbb", None, None, "eeeeee", "", "ff", "gg"]}
    assert set(scores.failures.values()) == {0}


def test_a_reward_that_applies_to_no_prompt_is_not_called():
    def never(completions: Any, column: Any) -> Any:
        raise AssertionError

    scores = RewardSet([never, second]).score([only(["second"], "a")])
    close(scores.by_reward["never"], [[NAN]])
    close(scores.total, [[1]])
    assert scores.failures["never/exception"] == 0


def test_whole_groups_of_some_prompts_only():
    class Ranks:
        per_group = True

        def __call__(self, completions: list[list[str]], answer: list[str]) -> list[list[float]]:
            assert answer == ["2"]
            return [[float(sorted(row).index(text)) for text in row] for row in completions]

    groups = [only(["second"], "b", "a", answer="1"), only(["ranks"], "b", "a", answer="2")]
    close(RewardSet([Ranks(), second]).score(groups).total, [[1, 1], [1, 0]])


def test_failures_of_a_reward_count_where_it_applies():
    def bad(completions: Any) -> Any:
        raise KeyError("x")

    groups = [only(["second"], "a", "b", index=3), only(None, "a", "b", index=4)]
    scores = RewardSet([WeightedReward(bad, on_error="value", error_value=-1), second]).score(groups)
    close(scores.total, [[1, 1], [0, 0]])
    assert scores.failures["bad/exception"] == 2
    with pytest.raises(RuntimeError, match=r"\(prompt 4\)"):
        RewardSet([bad, second]).score(groups)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["first"], "name an unknown reward 'first'; available: second, zero"),
        (["zero"], "No reward of nonzero weight applies"),
        ([], "No reward of nonzero weight applies"),
        ("second", r"must be a list of names, got 'second'"),
    ],
)
def test_names_that_do_not_fit_are_errors_without_a_check_before(names: Any, message: str):
    rewards = RewardSet([second, WeightedReward(second, weight=0, name="zero")])
    with pytest.raises(ValueError, match=message):
        rewards.score([only(names, "a")])


# --- names in the logs


@pytest.mark.parametrize("metric", ["mean", "logs", "second"])
def test_a_metric_must_not_have_the_name_of_another(metric: str):
    def logs(completions: Any, log_metric: Any) -> list[float]:
        log_metric(metric, 1)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=rf"'logs' calls log_metric\('{metric}'\), .* for example logs_{metric}"):
        RewardSet([logs, second]).score([group("a")])


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
    assert scores.metrics == {"seen": (1 + 4 + 1 + 4 + 7) / 5}
    assert scores.extras == {"shout": ["A", "BB", "C", "DD"], "letters": [1, 2, 1, 2]}


def test_a_column_that_two_rewards_log_is_there_twice():
    def logs(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("shout", [text.upper() for text in completions])
        log_extra(f"with {completions[0]}", completions)
        return [0.0] * len(completions)

    def quiet(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("shout", ["-"] * len(completions))
        return [1.0] * len(completions)

    groups = [group("a", "bb"), only(["logs"], "c", "dd")]
    assert RewardSet([logs, quiet]).score(groups).extras == {
        "logs/shout": ["A", "BB", "C", "DD"],
        "quiet/shout": ["-", "-", None, None],
        "with a": ["a", "bb", None, None],
        "with c": [None, None, "c", "dd"],
    }


def test_data_that_name_a_method_need_a_reward_that_goes_by_it():
    def named(completions: Any, accu_reward_method: Any = None) -> Any: ...

    def any_column(completions: Any, **columns: Any) -> Any: ...

    class Own(Reward):
        optional_columns = ("accu_reward_method",)

        def __call__(self, completions: Any, **columns: Any) -> Any: ...

    row = {"solution": "B", "answer": "B"}
    plain, chosen = Prompt("p", columns=row), Prompt("p", columns=row | {"accu_reward_method": "mcq"}, source="quiz")
    empty = Prompt("p", columns=row | {"accu_reward_method": ""}, source="quiz")
    for reward in (ByMethod(), named, any_column, Own(), Cosine(accuracy=ByMethod())):
        RewardSet([ExactMatch(), reward]).validate_prompts(prompt for prompt in (plain, chosen))
    RewardSet([ExactMatch()]).validate_prompts([plain, empty, Prompt("p", columns=row | {"accu_reward_method": None})])
    message = r"of 'quiz' name the method 'mcq' in 'accu_reward_method', .* add the reward ByMethod"
    for reward in (second, MultipleChoice("answer"), ByMethod(method_column="kind")):
        with pytest.raises(ValueError, match=message):
            RewardSet([ExactMatch(), reward]).validate_prompts(prompt for prompt in (plain, empty, chosen))
    elsewhere = Prompt("p", columns=dict(chosen.columns), source="quiz", rewards=["exact_match"])
    with pytest.raises(ValueError, match=message):
        RewardSet([ExactMatch(), ByMethod()]).validate_prompts([plain, elsewhere])


def test_settings_are_checked_against_the_limit_of_the_run():
    class Own(Reward):
        def __call__(self, completions: Any) -> Any: ...

        def check(self, max_completion_length: int) -> None:
            raise ValueError(f"no {max_completion_length}")

    class Foreign:
        def __call__(self, completions: Any) -> Any: ...

        def check(self) -> None:
            raise AssertionError("a method of somebody else's class")

    RewardSet([second, Foreign(), SoftOverlong(9), ExactMatch()]).check(10)
    RewardSet([SoftOverlong(9, max_length=20)]).check(4)
    too_short = r"Reward 'soft_overlong': cache_length 9 must be below the run's max_completion_length, 9 tokens"
    with pytest.raises(ValueError, match=too_short):
        RewardSet([second, WeightedReward(SoftOverlong(9), weight=0)]).check(9)
    with pytest.raises(ValueError, match="Reward 'cosine': Reward 'own': no 7"):
        RewardSet([Cosine(accuracy=Own())]).check(7)
    with pytest.raises(ValueError, match="Reward 'accuracy': Reward 'length': no 7"):
        RewardSet([ByMethod({"length": Own()})]).check(7)


def test_a_set_is_picklable_before_and_after_use():
    rewards = RewardSet(
        [
            *(WeightedReward(first, weight=2, on_error="none"), ExactMatch(), Format(), Length(max_tokens=1)),
            *(Cosine(max_len=9, accuracy=ExactMatch()), Repetition(), SoftOverlong(2, 9), MultipleChoice("answer")),
        ]
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


@pytest.mark.parametrize("name", ["reward", "mean", "length", "truncated", "zero_variance_groups"])
def test_a_reward_cannot_take_a_name_that_the_logs_use(name):
    with pytest.raises(ValueError, match=f"must not be named '{name}'"):
        RewardSet([WeightedReward(lambda completions: [0.0] * len(completions), name=name)])


def test_weights_keep_their_precision_under_another_default_dtype():
    groups = [Group(Prompt("p"), [1], [Completion([1], [0.0], "stop", "a"), Completion([1], [0.0], "stop", "b")])]
    rewards = RewardSet([WeightedReward(lambda completions: [1.0] * len(completions), weight=1 / 3, name="third")])
    torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does inside a training step
    assert rewards.score(groups).total[0].tolist() == pytest.approx([1 / 3, 1 / 3], rel=1e-6)


def test_without_groups_no_reward_is_called():
    def called(completions):
        raise AssertionError

    async def called_too(completions):
        raise AssertionError

    scores = RewardSet([called, called_too]).score([], num_generations=3)
    assert scores.total.shape == (0, 3)
    assert {name: values.shape for name, values in scores.by_reward.items()} == {"called": (0, 3), "called_too": (0, 3)}
    assert set(scores.failures.values()) == {0}
    assert (scores.metrics, scores.extras) == ({}, {})
    with pytest.raises(ValueError, match="at least 1; got sizes"):
        RewardSet([called]).score([])


def test_rewards_of_a_prompt_that_starts_the_answer_get_what_comes_after_it():
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>"}]
    seen = []

    def keeps(prompts: Any, completions: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0 for _ in completions]

    RewardSet([keeps]).score([group("so.</think>", content=chat)])
    assert seen == [(chat, [{"role": "assistant", "content": "so.</think>"}])]


@pytest.mark.parametrize(
    ("start", "whole"),
    [
        ("<think>", "<think>so."),
        (None, "so."),
        ([{"type": "text", "text": "<think>"}], [{"type": "text", "text": "<think>"}, {"type": "text", "text": "so."}]),
    ],
)
def test_messages_are_a_chat_in_which_an_answer_that_the_prompt_starts_is_one_turn(start: Any, whole: Any):
    asked, seen = {"role": "user", "content": "Why?"}, []

    def keeps(messages: Any) -> list[float]:
        seen.extend(messages)
        return [0.0 for _ in messages]

    RewardSet([keeps]).score([group("so.", content=[asked, {"role": "assistant", "content": start, "name": "it"}])])
    assert seen == [[asked, {"role": "assistant", "content": whole, "name": "it"}]]
