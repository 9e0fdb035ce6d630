"""pass@k and its interval: by hand, against counting, and by how often the truth lies inside."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.functional.pass_at_k import interval, pass_at_k


def test_pass_at_k_by_hand():
    # 4 drawn, 1 solves: of the 6 pairs, 3 have it. 2 solve: only 1 pair has neither.
    result = pass_at_k(torch.tensor([0, 1, 2, 4]), torch.tensor([4, 4, 4, 4]), 2)
    assert result.tolist() == pytest.approx([0, 3 / 6, 5 / 6, 1])


def test_one_attempt_is_the_share():
    assert pass_at_k(torch.tensor([3.0]), torch.tensor([8.0]), 1).item() == 3 / 8


def test_more_attempts_than_completions_have_no_value():
    assert pass_at_k(torch.tensor([1, 1]), torch.tensor([2, 3]), 3).isnan().tolist() == [True, False]


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_subsets(drawn, data):
    solved, k = data.draw(st.integers(0, drawn)), data.draw(st.integers(1, drawn))
    subsets = list(itertools.combinations([True] * solved + [False] * (drawn - solved), k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(torch.tensor([solved]), torch.tensor([drawn]), k).item() == pytest.approx(expected)


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_low():
    generator = torch.Generator().manual_seed(0)
    solved = (torch.rand(20_000, 4, generator=generator) < 0.3).sum(dim=1)
    truth = 1 - 0.7**3
    assert pass_at_k(solved, torch.full_like(solved, 4), 3).mean().item() == pytest.approx(truth, abs=0.01)
    assert (1 - (1 - solved / 4) ** 3).mean().item() < truth - 0.05


def test_large_counts_are_exact():
    solved, drawn = torch.tensor([1]), torch.tensor([1000])
    assert pass_at_k(solved, drawn, 500).item() == pytest.approx(0.5, rel=1e-12)


def test_interval_by_hand():
    # Wilson for 8 of 10 with z = 1.96: center (0.8 + 0.19207) / 1.38415, half 1.95996 sqrt(0.016 + 0.0096) / 1.38415.
    low, high = interval(torch.tensor([1.0] * 8 + [0.0] * 2))
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_of_equal_prompts_is_no_point(value):
    low, high = interval(torch.full((20,), value))
    assert high - low == pytest.approx(0.161, abs=1e-3)
    assert value in (low, high)


def test_interval_of_nothing_has_no_value():
    assert all(math.isnan(end) for end in interval(torch.tensor([math.nan])))


def test_unsolvable_prompts_widen_it_to_that_of_the_prompts_alone():
    """8 completions of a prompt that agree are worth one; where they are independent, they are worth 8."""
    agreeing = torch.tensor([0.0, 1.0] * 20)
    assert interval(agreeing, num_generations=8) == pytest.approx(interval(agreeing))
    alike = torch.full((40,), 0.5)
    width = interval(alike, num_generations=8)[1] - interval(alike, num_generations=8)[0]
    assert width < 0.45 * (interval(agreeing)[1] - interval(agreeing)[0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.5, 0.95]), st.sampled_from([1, 8]))
def test_interval_holds_the_mean_and_stays_in_range(values, confidence, draws):
    low, high = interval(torch.tensor(values, dtype=torch.float64), confidence, draws)
    assert 0 <= low <= sum(values) / len(values) + 1e-9
    assert sum(values) / len(values) - 1e-9 <= high <= 1


def test_interval_holds_the_truth_as_often_as_it_says():
    """Prompts of different difficulty, 8 completions each: the interval of the mean over such prompts."""
    generator = torch.Generator().manual_seed(1)
    difficulty = torch.rand(2000, 50, generator=generator)  # mean 1/2
    values = torch.binomial(torch.full_like(difficulty, 8.0), difficulty, generator=generator) / 8
    held = sum(low <= 0.5 <= high for low, high in (interval(row, 0.9, num_generations=8) for row in values))
    assert held / 2000 == pytest.approx(0.9, abs=0.03)
