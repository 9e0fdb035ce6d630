from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import (
    advantages,
    group_relative_advantages,
    groups_without_gradient,
    normalized_sum,
    zero_variance_groups,
)
from grpo_lightning.functional.pass_at_k import marginal_gains

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
NAN = float("nan")
BASELINES = ["group_mean", "leave_one_out"]
SCALES = ["group_std", "batch_std", "batch_advantage_std", "group_mean", "nonzero_fraction", "none"]
choices = pytest.mark.parametrize(("baseline", "scale"), [(b, s) for b in BASELINES for s in SCALES])


@st.composite
def reward_groups(draw: st.DrawFn, *, min_scorable: float = 0.0) -> Tensor:
    shape = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    coarse = torch.randint(0, 3, shape, generator=generator, dtype=torch.float64)
    fine = torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = coarse if draw(st.booleans()) else fine
    is_dropped = torch.rand(shape, generator=generator) > max(draw(st.sampled_from([0.5, 0.8, 1.0])), min_scorable)
    return rewards.masked_fill(is_dropped, NAN)


def allowed(rewards: Tensor, scale: str) -> Tensor:
    """Rewards that a scale takes: a rate of success is not below 0."""
    return rewards.abs() if scale == "group_mean" else rewards


# --- by hand


def check_advantages(group_relative_advantages: Any) -> None:
    # Group 1: mean 2, deviations -2 0 2, unbiased variance 8 / 2, std 2.
    # Group 2: one is not scorable; mean 5, deviations -1 1, variance 2 / 1, std sqrt(2).
    rewards = torch.tensor([[0.0, 2.0, 4.0], [4.0, NAN, 6.0]])
    root = math.sqrt(2)
    assert_close(
        group_relative_advantages(rewards, eps=0.0), torch.tensor([[-1.0, 0.0, 1.0], [-1 / root, 0.0, 1 / root]])
    )
    assert_close(group_relative_advantages(rewards, eps=1.0)[0], torch.tensor([-2 / 3, 0.0, 2 / 3]))
    assert_close(group_relative_advantages(rewards, scale="none"), torch.tensor([[-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]))
    # Leave one out: 0 - (2 + 4) / 2 = -3; 2 - (0 + 4) / 2 = 0; 4 - (0 + 2) / 2 = 3; and 4 - 6 = -2, 6 - 4 = 2.
    leave_one_out = group_relative_advantages(rewards, baseline="leave_one_out", scale="none")
    assert_close(leave_one_out, torch.tensor([[-3.0, 0.0, 3.0], [-2.0, 0.0, 2.0]]))
    # Over the batch 0 2 4 4 6: mean 3.2, squares 10.24 + 1.44 + .64 + .64 + 7.84 = 20.8, variance 20.8 / 4.
    batch = group_relative_advantages(rewards, scale="batch_std", eps=0.0)
    assert_close(batch, torch.tensor([[-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / math.sqrt(5.2))
    # The deviations -2 0 2 -1 1: squares 4 + 0 + 4 + 1 + 1 = 10, variance 10 / 4.
    centered = group_relative_advantages(rewards, scale="batch_advantage_std", eps=0.0)
    assert_close(centered, torch.tensor([[-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / math.sqrt(2.5))
    # Of leave one out they are -3 0 3 -2 2: variance 26 / 4.
    centered = group_relative_advantages(rewards, baseline="leave_one_out", scale="batch_advantage_std", eps=0.0)
    assert_close(centered, leave_one_out / math.sqrt(6.5))
    # Over the means, 2 and 5.
    mean = group_relative_advantages(rewards, scale="group_mean")
    assert_close(mean, torch.tensor([[-1.0, 0.0, 1.0], [-0.2, 0.0, 0.2]]))
    # Weighted by the lengths 1 2 5, group 1 has the baseline (0 + 4 + 20) / 8 = 3; by 3 and 1, group 2 (12 + 6) / 4.
    lengths = torch.tensor([[1, 2, 5], [3, 9, 1]])
    weighted = group_relative_advantages(rewards, baseline="length_weighted", scale="none", lengths=lengths)
    assert_close(weighted, torch.tensor([[-3.0, -1.0, 1.0], [-0.5, 0.0, 1.5]]))
    # A third group of equal rewards: two of three have a gradient.
    three = torch.cat([rewards, torch.ones(1, 3)])
    fraction = group_relative_advantages(three, scale="nonzero_fraction")
    assert_close(fraction, 1.5 * torch.tensor([[-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))


def check_equal_groups(zero_variance_groups: Any) -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0], [2.0, NAN, NAN], [NAN] * 3, [1.0, 1.0, 0.0]])
    assert zero_variance_groups(rewards).tolist() == [True, True, True, True, False]


def test_advantages_by_hand() -> None:
    check_advantages(group_relative_advantages)


def test_equal_groups_by_hand() -> None:
    check_equal_groups(zero_variance_groups)


def test_groups_without_gradient_by_hand() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, NAN, NAN, 0.0], [2.0] * 4])
    lengths = torch.ones(4, 4, dtype=torch.long)
    assert groups_without_gradient(rewards, lengths).tolist() == [False, False, False, True]
    # The highest reward must be above all others; k = 3: above two others, and three must be scorable.
    for k, expected in {None: [True, False, False, True], 3: [False, False, True, True]}.items():
        assert groups_without_gradient(rewards, lengths, baseline="pass_at_k", k=k).tolist() == expected
    # Only the completions of reward 0 are trained: with pass@k they have no advantage.
    lengths = torch.tensor([[0, 0, 5, 5], [0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    assert groups_without_gradient(rewards, lengths).tolist() == [False, False, False, True]
    assert groups_without_gradient(rewards, lengths, baseline="pass_at_k").all()
    assert groups_without_gradient(rewards, lengths * 0).all()


@quick
@given(rewards=reward_groups(), data=st.data())
def test_groups_without_gradient_have_no_advantage(rewards: Tensor, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, rewards.size(1)))
    lengths = torch.ones_like(rewards, dtype=torch.long)
    for baseline in [*BASELINES, "pass_at_k"]:
        for scale in SCALES:
            if (baseline, scale) == ("pass_at_k", "batch_advantage_std"):
                continue
            options: dict[str, Any] = {"baseline": baseline, "k": k, "lengths": lengths}
            own = allowed(rewards, scale)
            has_none = (group_relative_advantages(own, scale=scale, **options) == 0).all(dim=1)
            assert torch.equal(groups_without_gradient(own, **options), has_none)
    # pass@k in plain words.
    for group, found in zip(rewards, groups_without_gradient(rewards, **options), strict=True):
        known = [reward for reward in group.tolist() if not math.isnan(reward)]
        num_lower = sum(reward < max(known) for reward in known)
        assert bool(found) == (num_lower < k - 1)


@choices
def test_a_group_that_teaches_nothing_gets_exactly_zero(baseline: Any, scale: Any) -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [NAN, 5.0, NAN], [NAN, NAN, NAN], [0.0, 1.0, 2.0]])
    result = group_relative_advantages(rewards, baseline=baseline, scale=scale)
    assert (result[:3] == 0).all()
    assert result[3].abs().sum() > 0


@choices
def test_rounding_errors_of_equal_rewards_teach_nothing(baseline: Any, scale: Any) -> None:
    rewards = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)).expand(500, 7)
    naive = rewards - rewards.mean(dim=1, keepdim=True)
    assert (naive != 0).any(), "the rounding this test is about does not happen"
    assert (group_relative_advantages(rewards, baseline=baseline, scale=scale, eps=0.0) == 0).all()


@pytest.mark.parametrize("shape", [(3, 1), (4,), (2, 2, 2), (3, 0)])
@pytest.mark.parametrize("function", [group_relative_advantages, zero_variance_groups])
def test_a_wrong_shape_is_explained(function: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"num_generations >= 2, got \[.*\]. Raise num_generations, or reshape"):
        function(torch.zeros(shape))


def test_unknown_choices_are_named() -> None:
    with pytest.raises(
        ValueError,
        match="baseline must be one of group_mean, leave_one_out, length_weighted, pass_at_k, got 'mean'",
    ):
        group_relative_advantages(torch.zeros(1, 2), baseline="mean")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"scale must be one of group_std, .*, group_mean, nonzero_fraction, none, got 'std'"
    ):
        group_relative_advantages(torch.zeros(1, 2), scale="std")  # type: ignore[arg-type]


def test_a_mean_that_is_no_rate_of_success_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards must be at least 0, got -0.5"):
        group_relative_advantages(torch.tensor([[0.0, 1.0], [-0.5, 1.0]]), scale="group_mean")


@quick
@given(solved=st.integers(1, 7))
def test_over_the_mean_it_is_the_gradient_of_the_log_of_the_success_rate(solved: int) -> None:
    """d log p = mean over the solved of d log pi (arXiv:2602.02710); the baseline 1 / G adds 0 in the mean."""
    rewards = torch.tensor([[1.0] * solved + [0.0] * (8 - solved)])
    advantages = group_relative_advantages(rewards, scale="group_mean")
    estimator = rewards / solved - 1 / 8
    assert_close(advantages / 8, estimator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_results_are_float32_whatever_the_rewards_are(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[0, 1, 1, 0]], dtype=dtype)
    assert_close(group_relative_advantages(rewards), group_relative_advantages(rewards.float()))
    assert group_relative_advantages(rewards).dtype == torch.float32


# --- parity with a loop


def loop_gains(group: list[float], baseline: str) -> list[float]:
    """Subtract its baseline from every scorable reward of a group."""
    known = [r for r in group if not math.isnan(r)]
    others = [known[:i] + known[i + 1 :] if baseline == "leave_one_out" else known for i in range(len(known))]
    return [r - statistics.fmean(of or [r]) for r, of in zip(known, others, strict=True)]


def loop_advantages(rewards: list[list[float]], baseline: str, scale: str, eps: float) -> list[list[float]]:
    everything = [r for group in rewards for r in group if not math.isnan(r)]
    gains = [gain for group in rewards for gain in loop_gains(group, baseline)]
    result = []
    for group in rewards:
        known = [r for r in group if not math.isnan(r)]
        row = []
        for i, r in enumerate(group):
            if math.isnan(r) or len(set(known)) < 2:
                row.append(0.0)
                continue
            others = [o for j, o in enumerate(group) if j != i and not math.isnan(o)]
            gain = r - statistics.fmean(known if baseline == "group_mean" else others)
            divisor = {
                "group_std": lambda known=known: statistics.stdev(known) + eps,
                "batch_std": lambda: statistics.stdev(everything) + eps,
                "batch_advantage_std": lambda: statistics.stdev(gains) + eps,
                "group_mean": lambda known=known: statistics.fmean(known),
                "nonzero_fraction": lambda: statistics.fmean(
                    len(set(g) - {r for r in g if r != r}) > 1 for g in rewards
                ),
                "none": lambda: 1.0,
            }[scale]
            row.append(gain / divisor())
        result.append(row)
    return result


@choices
@quick
@given(rewards=reward_groups())
def test_advantages_equal_a_loop(baseline: Any, scale: Any, rewards: Tensor) -> None:
    rewards = allowed(rewards, scale)
    expected = torch.tensor(loop_advantages(rewards.tolist(), baseline, scale, 1e-4), dtype=torch.float64)
    assert_close(group_relative_advantages(rewards, baseline=baseline, scale=scale), expected)


def whitened(rewards: list[list[float]]) -> list[list[float]]:
    """REINFORCE++-baseline as verl and OpenRLHF write it: off the group's mean, then whitened over the batch's tokens.

    Every completion has as many tokens here. Where lengths differ, their mean and spread weigh long completions more.
    """
    tokens, num_tokens = [], 3
    for group in rewards:
        mean = sum(group) / len(group)
        tokens += [[reward - mean] * num_tokens for reward in group]
    values = [value for row in tokens for value in row]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    scores = [(row[0] - mean) / math.sqrt(variance + 1e-8) for row in tokens]
    return [scores[i : i + len(rewards[0])] for i in range(0, len(scores), len(rewards[0]))]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_reinforce_plus_plus_is_verls(rate: float) -> None:
    """Binary rewards of easy and hard prompts: raw rewards spread more than their differences in the groups."""
    generator = torch.Generator().manual_seed(0)
    chance = (rate + torch.randn(64, 1, generator=generator)).clamp(0, 1)
    rewards = (torch.rand(64, 8, generator=generator) < chance).double()
    theirs = torch.tensor(whitened(rewards.tolist()), dtype=torch.float64)
    ours = group_relative_advantages(rewards, scale="batch_advantage_std")
    assert_close(ours, theirs, rtol=3e-3, atol=1e-9)  # unbiased: n - 1 completions, not n
    too_small = group_relative_advantages(rewards, scale="batch_std")
    assert theirs.std() > 1.2 * too_small.std()


# --- properties


@choices
@quick
@given(rewards=reward_groups(), data=st.data())
def test_rows_sum_to_zero_and_follow_a_permutation(
    baseline: Any, scale: Any, rewards: Tensor, data: st.DataObject
) -> None:
    rewards = allowed(rewards, scale)
    result = group_relative_advantages(rewards, baseline=baseline, scale=scale)
    assert_close(result.sum(dim=1), torch.zeros(len(rewards), dtype=result.dtype), rtol=0, atol=1e-9)
    assert (result[rewards.isnan()] == 0).all()
    assert (result[zero_variance_groups(rewards)] == 0).all()
    columns = data.draw(st.permutations(range(rewards.size(1))))
    rows = data.draw(st.permutations(range(rewards.size(0))))
    permuted = group_relative_advantages(rewards[rows][:, columns], baseline=baseline, scale=scale)
    assert_close(permuted, result[rows][:, columns])


@choices
@quick
@given(rewards=reward_groups(), shift=st.floats(-10, 10), factor=st.floats(0.5, 20))
def test_shift_and_positive_scale(baseline: Any, scale: Any, rewards: Tensor, shift: float, factor: float) -> None:
    options = {"baseline": baseline, "scale": scale, "eps": 0.0}
    rewards = allowed(rewards, scale)
    expected = group_relative_advantages(rewards, **options)
    if scale != "group_mean":  # a rate of success has a zero of its own
        shifted = group_relative_advantages(rewards + shift, **options)
        assert_close(shifted, expected, rtol=1e-9, atol=1e-9)
    scaled = group_relative_advantages(rewards * factor, **options)
    has_unit = scale in ("none", "nonzero_fraction")
    assert_close(scaled, expected * factor if has_unit else expected, rtol=1e-9, atol=1e-9)


@quick
@given(rewards=reward_groups(min_scorable=1.0))
def test_a_completion_not_scorable_is_as_if_never_drawn(rewards: Tensor) -> None:
    longer = torch.cat([rewards, torch.full((len(rewards), 1), NAN)], dim=1)
    for baseline in [*BASELINES, "pass_at_k"]:
        for scale in SCALES:
            if (baseline, scale) == ("pass_at_k", "batch_advantage_std"):
                continue
            options: dict[str, Any] = {"baseline": baseline, "scale": scale}
            alone = group_relative_advantages(allowed(rewards, scale), **options)
            assert_close(group_relative_advantages(allowed(longer, scale), **options)[:, :-1], alone)


@quick
@given(rewards=reward_groups())
def test_a_group_does_not_see_the_others(rewards: Tensor) -> None:
    alone = torch.cat([group_relative_advantages(group.unsqueeze(0)) for group in rewards])
    assert_close(group_relative_advantages(rewards), alone)


@quick
@given(rewards=reward_groups(min_scorable=1.0))
def test_leave_one_out_is_the_stretched_group_mean(rewards: Tensor) -> None:
    size = rewards.size(1)
    leave_one_out = group_relative_advantages(rewards, baseline="leave_one_out", scale="none")
    assert_close(leave_one_out, group_relative_advantages(rewards, scale="none") * size / (size - 1))


@quick
@given(rewards=reward_groups())
def test_inputs_are_not_modified(rewards: Tensor) -> None:
    before = rewards.clone()
    group_relative_advantages(rewards, baseline="leave_one_out", scale="batch_std")
    zero_variance_groups(rewards)
    assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)


# --- teeth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("return deviation\n", "return -deviation\n", id="sign flipped"),
        pytest.param(
            "nansum(dim=1, keepdim=True) / (num_scorable - 1)",
            "nansum(dim=1, keepdim=True) / num_scorable",
            id="population std of the group",
        ),
        pytest.param(
            "spread.square().nansum() / (num_scorable.sum() - 1)",
            "spread.square().nansum() / num_scorable.sum()",
            id="population std of the batch",
        ),
        pytest.param("return rewards.nanmean(dim=1, keepdim=True)", "return rewards.nanmean()", id="mean of all"),
        pytest.param(
            "gains.square().nansum()", "(gains - gains[:, :1]).square().nansum()", id="std around another value"
        ),
        pytest.param("gains.square().nansum()", "(rewards - rewards.nanmean()).square().nansum()", id="std of rewards"),
        pytest.param("spread = rewards - rewards.nanmean()", "spread = gains", id="std around the group means"),
        pytest.param("deviation * num_scorable / (num_scorable - 1).clamp(min=1)", "deviation", id="baseline ignored"),
        pytest.param("rewards.isnan() | zero", "zero", id="not scorable spreads nan"),
        pytest.param("(weights * deviation).nansum", "deviation.nansum", id="lengths ignored"),
        pytest.param("lengths * is_scorable", "lengths", id="length of what is not scorable"),
        pytest.param("& ~zero_variance_groups(", "& zero_variance_groups(", id="fraction of the others"),
        pytest.param("& ~zero_variance_groups(rewards)", "| True", id="fraction of all"),
        pytest.param(
            "is_scorable.sum(dim=1, keepdim=True)  # [N, 1]\n    if", "0 * gains[:, :1] + 3\n    if", id="nan counted"
        ),
    ],
)
def test_broken_advantages_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_advantages(broken(group_relative_advantages, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("highest <= lowest", "highest == lowest", id="nothing scorable"),
        pytest.param("highest <= lowest", "highest > lowest", id="inverted"),
        pytest.param("rewards, torch.inf).amin", "rewards, 0.0).amin", id="not scorable taken for 0"),
    ],
)
def test_broken_equal_groups_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_equal_groups(broken(zero_variance_groups, old, new))


# --- rewards compared one by one


def check_normalized_sum(normalized_sum: Any) -> None:
    # The first reward of group 1: std 1, deviations -1 0 1; the second: 200 times that, turned around.
    # Of group 2 the second does not apply, and gives the third completion of group 1 nothing.
    first = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 4.0]])
    second = torch.tensor([[400.0, 0.0, NAN], [NAN, NAN, NAN]])
    found = normalized_sum(torch.stack([first, second]), torch.tensor([1.0, 0.5]), eps=0.0)
    root = math.sqrt(0.5)  # deviations 200 -200 over the std of 400 and 0
    by_hand = [[-1 + 0.5 * root, -0.5 * root, 1.0], [-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)]]
    assert_close(found, torch.tensor(by_hand))


def test_normalized_sum_by_hand() -> None:
    check_normalized_sum(normalized_sum)


@pytest.mark.parametrize(
    "broken",
    [
        lambda values, weights, eps: group_relative_advantages(values.nansum(0), eps=eps),  # summed first
        lambda values, weights, eps: normalized_sum(values, torch.ones(2), eps=eps),  # without the weights
        lambda values, weights, eps: normalized_sum(values.nan_to_num(0.0), weights, eps=eps),  # nothing is 0
        lambda values, weights, eps: (values * weights[:, None, None]).nansum(0),
    ],
)
def test_a_broken_sum_is_seen(broken: Any) -> None:
    with pytest.raises(AssertionError):
        check_normalized_sum(broken)


@quick
@given(reward_groups(), st.floats(0.1, 10.0), st.floats(-5.0, 5.0))
def test_units_of_a_reward_do_not_matter(rewards: Tensor, factor: float, shift: float) -> None:
    other = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    one = normalized_sum(torch.stack([rewards, other]), weights, eps=0.0)
    scaled = normalized_sum(torch.stack([factor * rewards + shift, other]), weights, eps=0.0)
    assert_close(one, scaled, rtol=1e-6, atol=1e-6)
    assert_close(one.sum(1), torch.zeros(len(one), dtype=torch.float64), rtol=0.0, atol=1e-9)


@quick
@given(reward_groups())
def test_one_reward_is_its_advantage(rewards: Tensor) -> None:
    assert_close(normalized_sum(rewards[None], torch.ones(1)), group_relative_advantages(rewards))


# --- OPO


def opo_of_verl(scores: list[float], lengths: list[int]) -> list[float]:
    """Compute the advantages of one group as `compute_opo_outcome_advantage` does: scores less the mean over tokens."""
    tokens = [score for score, length in zip(scores, lengths, strict=True) for _ in range(length)]
    return [score - sum(tokens) / len(tokens) for score in scores]


@quick
@given(rewards=reward_groups(min_scorable=1.0), data=st.data())
def test_opo_is_verls(rewards: Tensor, data: st.DataObject) -> None:
    rewards = rewards.nan_to_num(0.5)
    seed = data.draw(st.integers(0, 10**6))
    lengths = torch.randint(1, 9, rewards.shape, generator=torch.Generator().manual_seed(seed))
    found = group_relative_advantages(rewards, baseline="length_weighted", scale="none", lengths=lengths)
    expected = [opo_of_verl(*group) for group in zip(rewards.tolist(), lengths.tolist(), strict=True)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert_close((lengths * found).sum(1), torch.zeros(len(found), dtype=torch.float64), rtol=0, atol=1e-9)


@quick
@given(rewards=reward_groups(), length=st.integers(0, 5))
def test_equal_lengths_weigh_alike(rewards: Tensor, length: int) -> None:
    """Also 0: nothing of the group is trained on."""
    lengths = torch.full(rewards.shape, length)
    found = group_relative_advantages(rewards, baseline="length_weighted", lengths=lengths)
    assert_close(found, group_relative_advantages(rewards))


def test_lengths_are_asked_for() -> None:
    rewards = torch.tensor([[0.0, 1.0]])
    with pytest.raises(ValueError, match=r"baseline 'length_weighted' needs lengths \[1, 2\].*got none"):
        group_relative_advantages(rewards, baseline="length_weighted")
    with pytest.raises(ValueError, match=r"needs lengths \[1, 2\].*got the shape \[2\]"):
        group_relative_advantages(rewards, baseline="length_weighted", lengths=torch.ones(2))


# --- pass@k


def pass_at_k_loop(group: list[float], k: int) -> list[float]:
    """By all subsets of k: how much a completion adds to the best of the others."""
    known = [i for i, reward in enumerate(group) if not math.isnan(reward)]
    result = [0.0] * len(group)
    for i in known if len(known) >= k else []:
        others = itertools.combinations([j for j in known if j != i], k - 1)
        result[i] = statistics.fmean(
            max(group[i], best) - best for best in (max(group[j] for j in subset) for subset in others)
        )
    return result


@quick
@given(rewards=reward_groups(), k=st.integers(2, 6))
def test_pass_at_k_is_a_mean_over_all_subsets(rewards: Tensor, k: int) -> None:
    k = min(k, rewards.size(1))
    found = group_relative_advantages(rewards, baseline="pass_at_k", scale="none", k=k)
    expected = [pass_at_k_loop(group, k) for group in rewards.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert (found >= 0).all()


def check_pass_at_k(group_relative_advantages: Any) -> None:
    rewards = torch.tensor([[1.0, 4.0, 2.0]])
    # All three: the best is 4, the second 2. Pairs: 2 beats 1 in one of its two; 4 beats 1 and 2, by 3 and 2.
    for k, by_hand in ((None, [0.0, 2.0, 0.0]), (3, [0.0, 2.0, 0.0]), (2, [0.0, 2.5, 0.5])):
        found = group_relative_advantages(rewards, baseline="pass_at_k", scale="none", k=k)
        assert_close(found, torch.tensor([by_hand]))
    # Fewer than k are scorable: no estimate. Two ties at the top: neither adds anything.
    rewards = torch.tensor([[1.0, NAN, 0.0], [3.0, 3.0, 1.0]])
    found = group_relative_advantages(rewards, baseline="pass_at_k", scale="none", k=3)
    assert found.tolist() == [[0.0, 0.0, 0.0]] * 2
    found = group_relative_advantages(rewards, baseline="pass_at_k", scale="none", k=2)
    assert_close(found, torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    # Without k, of the scorable: a single completion that is not scorable leaves the others their advantages.
    found = group_relative_advantages(rewards, baseline="pass_at_k", scale="none")
    assert_close(found, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    # Of the groups that differ, only the first has a gain: half of them.
    found = group_relative_advantages(rewards, baseline="pass_at_k", scale="nonzero_fraction")
    assert_close(found, torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    found = group_relative_advantages(rewards[1:], baseline="pass_at_k", scale="nonzero_fraction")
    assert found.tolist() == [[0.0, 0.0, 0.0]], "the fraction is 0"


def test_pass_at_k_by_hand() -> None:
    check_pass_at_k(group_relative_advantages)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("math.comb(j, k - 2)", "math.comb(j, k - 1)", id="another subset size"),
        pytest.param("math.comb(n - 1, k - 1)", "math.comb(n, k)", id="all subsets"),
        pytest.param("n if k is None else k", "rewards.size(1) if k is None else k", id="not of the scorable"),
        pytest.param("n if k is None else k", "2", id="k ignored"),
    ],
)
def test_a_broken_pass_at_k_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(advantages, "marginal_gains", broken(marginal_gains, old, new))
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
        check_pass_at_k(group_relative_advantages)


def test_pass_at_k_of_no_groups() -> None:
    assert group_relative_advantages(torch.zeros(0, 3), baseline="pass_at_k").shape == (0, 3)


@quick
@given(rewards=reward_groups(min_scorable=1.0))
def test_of_all_completions_only_the_best_gains_and_by_its_lead(rewards: Tensor) -> None:
    """`grpo_passk` of verl: the best reward less the second best, over the group's std where it is normalized."""
    rewards = rewards.nan_to_num(0.5)
    best, second = rewards.topk(2, dim=1).values.unbind(1)
    expected = torch.zeros_like(rewards)
    expected[torch.arange(len(rewards)), rewards.argmax(1)] = best - second
    assert_close(group_relative_advantages(rewards, baseline="pass_at_k", scale="none"), expected)
    normalized = expected / (rewards.std(1, keepdim=True) + 1e-4)
    assert_close(group_relative_advantages(rewards, baseline="pass_at_k"), normalized)


def test_pass_at_k_is_the_gradient_of_the_best_of_k() -> None:
    """Exact: all outcomes of four samples of a softmax over three answers, pairs of them, weighed by their chance."""
    values, k, size = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 2, 4
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    pairs = itertools.product(range(3), repeat=k)
    best = sum(logprobs[list(pair)].sum().exp() * values[list(pair)].max() for pair in pairs)
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    estimate = torch.zeros(3, dtype=torch.float64)
    for outcome in itertools.product(range(3), repeat=size):
        chosen = logprobs[list(outcome)]
        advantages = group_relative_advantages(values[list(outcome)][None], baseline="pass_at_k", scale="none", k=k)[0]
        (gradient,) = torch.autograd.grad((advantages * chosen).mean(), logits, retain_graph=True)
        estimate += chosen.sum().exp().detach() * gradient
    assert_close(k * estimate, expected)


@pytest.mark.parametrize("k", [1, 0, 4])
def test_a_k_that_no_subset_has_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k of baseline 'pass_at_k' must be from 2 to num_generations = 3, got {k}"):
        group_relative_advantages(torch.zeros(1, 3), baseline="pass_at_k", k=k)


@pytest.mark.parametrize("baseline", ["length_weighted", "pass_at_k"])
def test_a_std_around_zero_needs_advantages_that_sum_to_zero(baseline: Any) -> None:
    with pytest.raises(ValueError, match=f"scale 'batch_advantage_std' .* baseline '{baseline}'"):
        group_relative_advantages(
            torch.zeros(1, 3), baseline=baseline, scale="batch_advantage_std", lengths=torch.ones(1, 3)
        )


# --- GPG


@quick
@given(rewards=reward_groups(min_scorable=1.0), idle=st.integers(1, 3))
def test_gpg_is_as_if_groups_without_a_gradient_were_never_drawn(rewards: Tensor, idle: int) -> None:
    """alpha = B / (B - M) of the paper turns a mean over B groups into one over those with a gradient."""
    rewards = rewards.nan_to_num(0.5)
    more = torch.cat([rewards, torch.ones(idle, rewards.size(1), dtype=rewards.dtype)])
    few, many = (group_relative_advantages(values, scale="nonzero_fraction") for values in (rewards, more))
    assert_close(many[: len(few)] / len(more), few / len(rewards))
    num_varied = (~zero_variance_groups(more)).sum()
    alpha = len(more) / num_varied.clamp(min=1)
    assert_close(many, alpha * group_relative_advantages(more, scale="none"))
