"""Evaluations are summed up completion by completion, so that batches and sources of different size average right."""

import math

import pytest
import torch

from grpo_lightning.core.types import Completion, Group, Prompt, SamplingParams
from grpo_lightning.rewards import ExactMatch, RewardSet, Scores
from grpo_lightning.training.completion_records import records
from grpo_lightning.training.validation import (
    Evaluation,
    EvaluationTable,
    Validation,
    evaluation_tables,
    means,
    warn_never_solved,
)

NAN = math.nan


def completion(length):
    return Completion([7] * length, [0.0] * length, "length" if length > 4 else "stop", text="x" * length)


def evaluation(rewards, lengths, *, sources=None, **by_reward):
    """[N][G] rewards and lengths; the total counts as a reward too."""
    groups = [
        Group(Prompt("p", columns={"answer": n}, index=n, source=source), [5], [completion(length) for length in row])
        for n, (row, source) in enumerate(zip(lengths, sources or [""] * len(lengths), strict=True))
    ]
    columns = {name: torch.tensor(values) for name, values in by_reward.items()}
    return Evaluation(groups, Scores(torch.tensor(rewards), columns, {}, {}, {}))


def test_numbers_by_hand():
    result = evaluation(
        [[1.0, NAN], [0.5, 0.0]], [[2, 9], [4, 1]], right=[[1.0, NAN], [0.0, 1.0]], silent=[[NAN, NAN], [NAN, NAN]]
    )
    numbers = means([result])
    assert {name: value for name, value in numbers.items() if "@" not in name} == {
        "reward": pytest.approx(0.5),
        "right": pytest.approx(2 / 3),
        "length": 4.0,
        "truncated": 0.25,
    }
    assert numbers["avg@2"] == pytest.approx((1 / 1 + 1 / 2) / 2)  # the mean over prompts, of what is scorable
    assert numbers["pass@2"] == 1.0  # the first prompt has one scorable completion only
    assert numbers["avg@2/low"] < numbers["avg@2"] < numbers["avg@2/high"]


def test_batches_of_different_size_weigh_every_completion_alike():
    first = evaluation([[1.0]] * 3, [[1], [2], [3]], right=[[1.0]] * 3)
    second = evaluation([[0.0]], [[6]], right=[[NAN]])
    numbers = means([first, second])
    assert numbers["reward"] == pytest.approx(3 / 4)
    assert (numbers["right"], numbers["avg@1"]) == (1.0, 1.0)
    assert (numbers["length"], numbers["truncated"]) == (3.0, pytest.approx(1 / 4))
    assert "pass@1" not in numbers  # avg@1 under another name


def test_nothing_has_no_numbers():
    assert means([]) == {}
    assert EvaluationTable(["right"], 2, Validation()).compute() == {}


@pytest.mark.parametrize(
    ("settings", "average"),
    [
        ({}, 0.25),  # the first reward, at least 1
        ({"success_value": 0.5}, 0.75),
        ({"success": "kind"}, 1.0),
    ],
)
def test_what_counts_as_solved(settings, average):
    result = evaluation([[0.0] * 4], [[1] * 4], right=[[1.0, 0.5, 0.5, 0.0]], kind=[[1.0] * 4])
    assert means([result], Validation(num_generations=4, **settings))["avg@4"] == average


@pytest.mark.parametrize(
    ("settings", "values", "is_warned"),
    [
        ({}, [0.2, 0.4, 0.9, 0.3], True),  # a reward that is no yes or no, and never reaches 1
        ({}, [0.2, 0.4, 1.0, 0.3], False),
        ({"success_value": 0.9}, [0.2, 0.4, 0.9, 0.3], False),
        ({}, [0.0, 0.5, 0.0, 0.5], False),  # nothing solved yet
        ({"success": "right"}, [0.2, 0.4, 0.9, 0.3], False),
    ],
)
def test_a_reward_that_never_says_solved_is_reported_once(settings, values, is_warned, caplog):
    warn_never_solved.cache_clear()
    result = evaluation([[0.0] * 4], [[1] * 4], brief=[values], right=[[0.0] * 4])
    validation = Validation(num_generations=4, **settings)
    with caplog.at_level("WARNING"):
        assert means([result], validation)["avg@4"] == means([result], validation)["avg@4"]
    expected = "Reward 'brief' decides what counts as solved, but none of its values reached success_value 1"
    assert [expected in record.getMessage() for record in caplog.records] == [True] * is_warned


def test_what_says_solved_comes_from_the_rewards():
    rewards = RewardSet([lambda completions: [0.5 for _ in completions], ExactMatch()])
    tables = evaluation_tables(rewards, Validation(), [], torch.device("cpu"))
    assert {table.success for table in tables.values()} == {"exact_match"}
    named = evaluation_tables(rewards, Validation(success="<lambda>"), [], torch.device("cpu"))
    assert {table.success for table in named.values()} == {"<lambda>"}


def test_pass_at_several_k():
    result = evaluation([[0.0] * 4], [[1] * 4], right=[[1.0, 0.0, 0.0, 0.0]])
    numbers = means([result], Validation(num_generations=4, pass_at=[1, 2, 4]))
    assert (numbers["avg@4"], numbers["pass@1"], numbers["pass@2"], numbers["pass@4"]) == (0.25, 0.25, 0.5, 1.0)
    assert [name for name in means([result]) if name.startswith("pass@") and "/" not in name] == ["pass@4"]


def test_confidence_widens_the_interval():
    result = evaluation([[0.0]] * 4, [[1]] * 4, right=[[1.0], [0.0], [1.0], [1.0]])
    narrow, wide = (means([result], Validation(confidence=c)) for c in (0.5, 0.99))
    assert wide["avg@1/low"] < narrow["avg@1/low"] < narrow["avg@1/high"] < wide["avg@1/high"]


def test_every_source_has_its_numbers():
    table = EvaluationTable(["right"], 1, Validation(), sources=["easy", "hard"])
    table.update(evaluation([[1.0], [0.0]], [[1], [3]], sources=["easy", "hard"], right=[[1.0], [0.0]]))
    table.update(evaluation([[1.0]], [[5]], sources=["hard"], right=[[1.0]]))
    numbers = table.compute()
    assert (numbers["source/easy/right"], numbers["source/hard/right"]) == (1.0, 0.5)
    assert (numbers["source/easy/length"], numbers["source/hard/length"]) == (1.0, 4.0)
    assert numbers["source/hard/avg@1"] == 0.5
    assert numbers["right"] == pytest.approx(2 / 3)
    table.reset()
    assert table.compute() == {}


def test_records_have_what_a_reader_needs():
    result = evaluation([[1.0, NAN]], [[2, 9]], sources=["easy"], right=[[1.0, NAN]])
    first, second = records(result)
    assert first == {
        "source": "easy",
        "prompt_index": 0,
        "row": "",
        "prompt": "p",
        "completion": "xx",
        "length": 2,
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"right": 1.0},
        "columns": {"answer": 0},
    }
    assert (second["reward"], second["rewards"], second["finish_reason"]) == (None, {"right": None}, "length")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 0}, "validation.num_generations must be a whole number, at least 1, got 0"),
        ({"num_generations": 2, "sampling": {"temperature": 0}}, "1 at temperature 0: all would be equal"),
        (
            {"num_generations": 4, "pass_at": [8]},
            r"validation.pass_at must be whole numbers from 1 to num_generations, got \[8\]",
        ),
        ({"num_generations": 2.5}, "validation.num_generations must be a whole number, at least 1, got 2.5"),
        ({"pass_at": [1.5]}, "validation.pass_at must be whole numbers from 1 to num_generations, got"),
        ({"success_value": NAN}, "validation.success_value must be a finite number, got nan"),
        ({"sampling": SamplingParams()}, "validation.sampling must be a mapping of settings that differ from training"),
        ({"sampling": {"temprature": 1}}, "validation.sampling must be a mapping .*top_p.*got {'temprature': 1}"),
        ({"confidence": 1.0}, "validation.confidence must be between 0 and 1, got 1.0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Validation(**settings)


def test_how_completions_are_drawn():
    training = SamplingParams(temperature=0.7, max_completion_length=9)
    assert Validation(num_generations=3).sampling_settings(training, is_greedy=False) == (3, training)
    assert Validation(num_generations=3).sampling_settings(training, is_greedy=True) == (
        1,
        SamplingParams(temperature=0.0, max_completion_length=9),
    )
    own = {"temperature": 0.2}
    expected = SamplingParams(temperature=0.2, max_completion_length=9)
    assert Validation(sampling=own).sampling_settings(training, is_greedy=False) == (1, expected)


def test_a_share_without_prompts_adds_nothing():
    nothing = Evaluation([], Scores(torch.zeros(0, 2), {"right": torch.zeros(0, 2)}, {}, {}, {}))
    something = evaluation([[1.0, 0.0]], [[1, 3]], right=[[1.0, 0.0]])
    assert means([nothing, something]) == means([something, nothing]) == means([something])
    assert means([nothing]) == {}
    assert list(records(nothing)) == []
