"""Surrogates that are computed from log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import (
    clipped_surrogate,
    dppo_surrogate,
    gmpo_surrogate,
    importance_ratio,
    kl_cov_surrogate,
    leaves_trust_region,
    reinforce_surrogate,
    vespo_surrogate,
)

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
NAN, INF = float("nan"), float("inf")


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw log-probs before and after some updates: nan or infinite wherever nothing is trained."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old_logprobs = (logprobs + torch.randn(shape, generator=generator)).clamp(max=0.0)
    advantages = torch.randn(shape[0], 1, generator=generator, dtype=torch.float64)
    return {
        "logprobs": logprobs.masked_fill(~mask, draw(st.sampled_from([NAN, -INF, 0.0]))),
        "old_logprobs": old_logprobs.masked_fill(~mask, draw(st.sampled_from([NAN, INF, 0.0]))),
        "mask": mask,
        "advantages": advantages,
    }


def slope(loss: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logprobs)[0]


# --- GMPO


def check_gmpo(gmpo_surrogate: Any) -> None:
    # The tokens became e^0.5, e^-0.3 and (masked) e^9 times as likely: with limits of 0.2 and 0.4 nats, 0.4 - 0.3 where
    # A > 0, 0.5 - 0.2 where A < 0.
    moved = torch.tensor([[0.5, -0.3, 9.0], [0.5, -0.3, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    gain = torch.tensor([[2.0], [-2.0]])
    loss = gmpo_surrogate(moved, torch.zeros(2, 3), mask, gain, epsilon=0.2, epsilon_high=0.4)
    up, down = math.exp(0.05), math.exp(0.15)
    assert_close(loss, torch.tensor([[-2 * up], [2 * down]]))
    # Each of the two tokens that is not clipped has half of the slope of the mean.
    assert_close(slope(loss, moved), torch.tensor([[0.0, -up, 0.0], [down, 0.0, 0.0]]))
    same = gmpo_surrogate(moved, torch.zeros(2, 3), mask, gain, epsilon=0.4)
    assert_close(same, gmpo_surrogate(moved, torch.zeros(2, 3), mask, gain, epsilon=0.4, epsilon_high=0.4))


def test_gmpo_by_hand() -> None:
    check_gmpo(gmpo_surrogate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("log_ratio.clamp(max=high)", "log_ratio", id="high not clipped"),
        pytest.param("log_ratio.clamp(min=-epsilon)", "log_ratio", id="low not clipped"),
        pytest.param("torch.where(advantages > 0, log", "torch.where(advantages < 0, log", id="sides exchanged"),
        pytest.param("masked_mean(clipped, mask, dim=1)", "clipped.mean(dim=1)", id="padding counted"),
        pytest.param("masked_mean(clipped, mask, dim=1)", "clipped.sum(dim=1)", id="not a mean"),
        pytest.param("return -bounded_exp(masked", "return bounded_exp(masked", id="sign flipped"),
    ],
)
def test_a_broken_gmpo_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_gmpo(broken(gmpo_surrogate, old, new))


@quick
@given(rows())
def test_gmpo_equals_a_loop(rows: dict[str, Tensor]) -> None:
    """A product of clipped ratios, as the paper has it, to the power of one over the length."""
    expected = []
    for now, old, mask, gain in zip(*(rows[name].tolist() for name in rows), strict=True):
        product, length = 1.0, 0
        for n, o, is_trained in zip(now, old, mask, strict=True):
            if is_trained:
                ratio = math.exp(n) / math.exp(o)
                product *= min(ratio, math.exp(0.5)) if gain[0] > 0 else max(ratio, math.exp(-0.3))
                length += 1
        expected.append([-gain[0] * product ** (1 / max(length, 1))])
    found = gmpo_surrogate(**rows, epsilon=0.3, epsilon_high=0.5)
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


@quick
@given(rows())
def test_gmpo_of_one_token_is_the_clip(rows: dict[str, Tensor]) -> None:
    """Clipped at 1 - epsilon, if GMPO's limit is the log of it."""
    one = {name: value[:, :1] for name, value in rows.items()}
    ratio = importance_ratio(one["logprobs"], one["old_logprobs"], one["mask"])
    clip = clipped_surrogate(ratio, one["advantages"], epsilon=0.2, epsilon_high=0.28)
    assert_close(gmpo_surrogate(**one, epsilon=-math.log(0.8), epsilon_high=math.log(1.28)), clip)


@quick
@given(rows())
def test_gmpo_without_a_limit_is_the_sequence_ratio(rows: dict[str, Tensor]) -> None:
    ratio = importance_ratio(rows["logprobs"], rows["old_logprobs"], rows["mask"], level="sequence")
    assert_close(gmpo_surrogate(**rows, epsilon=99.0), -ratio * rows["advantages"])


# --- REINFORCE


def test_reinforce_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    loss = reinforce_surrogate(torch.tensor([[2.0], [-0.5]]), logprobs)
    assert_close(loss, torch.tensor([[2.0, 4.0], [-1.5, -2.0]]))
    assert_close(slope(loss, logprobs), torch.tensor([[-2.0, -2.0], [0.5, 0.5]]))


@quick
@given(rows())
def test_where_nothing_has_moved_all_have_the_gradient_of_reinforce(rows: dict[str, Tensor]) -> None:
    """Each by its own aggregation: GMPO's is the mean over the completion."""
    mask, gain = rows["mask"], rows["advantages"]
    leaf = rows["logprobs"].nan_to_num(0.0, neginf=0.0).requires_grad_()
    plain = slope(torch.where(mask, reinforce_surrogate(gain, leaf), 0.0), leaf)
    for name, surrogate in SURROGATES.items():
        loss = surrogate(leaf, leaf.detach(), mask, gain)
        per_token = plain / mask.sum(1, keepdim=True).clamp(min=1) if name == "gmpo" else plain
        assert_close(slope(loss if name == "gmpo" else torch.where(mask, loss, 0.0), leaf), per_token)


# --- KL-Cov


def check_kl_cov(kl_cov_surrogate: Any) -> None:
    # Twice and half as likely, then padding: -r A = -2 A, -A / 2, and 0.5 x log 2 more where selected.
    moved = torch.tensor([[0.2, 0.1, 0.5], [0.2, 0.1, 0.5]]).log().requires_grad_()
    old = torch.tensor([[0.1, 0.2, 0.1], [0.1, 0.2, 0.1]]).log()
    mask = torch.tensor([[True, True, False]] * 2)
    selected = torch.tensor([[True, True, False], [False] * 3])
    loss = kl_cov_surrogate(moved, old, mask, torch.tensor([[3.0], [-1.0]]), selected, coefficient=0.5)
    half = 0.5 * math.log(2)
    assert_close(loss, torch.tensor([[-6.0 + half, -1.5 + half, -3.0], [2.0, 0.5, 1.0]]))
    assert_close(slope(loss, moved), torch.tensor([[-6.0 + 0.5, -1.5 - 0.5, 0.0], [2.0, 0.5, 0.0]]))


def test_kl_cov_by_hand() -> None:
    check_kl_cov(kl_cov_surrogate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("log_ratio.abs()", "log_ratio", id="not absolute"),
        pytest.param("torch.where(selected, log_ratio.abs(), 0.0)", "log_ratio.abs()", id="all penalized"),
        pytest.param("return -bounded_exp(log_ratio)", "return -bounded_exp(log_ratio.clamp(max=0.2))", id="clipped"),
        pytest.param("+ coefficient * torch", "+ torch", id="coefficient ignored"),
    ],
)
def test_a_broken_kl_cov_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_kl_cov(broken(kl_cov_surrogate, old, new))


@quick
@given(rows())
def test_kl_cov_without_selected_tokens_is_the_ratio(rows: dict[str, Tensor]) -> None:
    ratio = importance_ratio(rows["logprobs"], rows["old_logprobs"], rows["mask"])
    for options in ({"selected": rows["mask"] & False}, {"selected": rows["mask"], "coefficient": 0.0}):
        assert_close(kl_cov_surrogate(**rows, **options), -ratio * rows["advantages"])


def kl_cov_of_all(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    return kl_cov_surrogate(logprobs, old_logprobs, mask, advantages, mask)


# --- VESPO


def check_vespo(vespo_surrogate: Any) -> None:
    # The ratios 2, 3/2 and (masked) 5 multiply to 3: phi = e^3 3^2 e^-9 where A > 0, e^2 3^3 e^-6 where A < 0.
    now = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]).log().requires_grad_()
    old = torch.tensor([[0.1, 0.2, 0.1], [0.1, 0.2, 0.1]]).log()
    mask = torch.tensor([[True, True, False]] * 2)
    gain = torch.tensor([[2.0], [-0.5]])
    up, down = 9 * math.exp(-6), 27 * math.exp(-4)
    loss = vespo_surrogate(now, old, mask, gain)
    first, second, _ = now[0].tolist()
    assert_close(
        loss[:, :2], torch.tensor([[-2 * up * first, -2 * up * second], [down / 2 * first, down / 2 * second]])
    )
    assert_close(slope(loss, now)[:, :2], torch.tensor([[-2 * up] * 2, [down / 2] * 2]))
    # Weights 2 and 1/3 (and one at padding) make the product 2: with k = 1 and lambda = 0.5, phi = 2 e^-0.5.
    weights = torch.tensor([[2.0, 1 / 3, 7.0]] * 2)
    same = {"positive": (1.0, 0.5), "negative": (1.0, 0.5)}
    corrected = vespo_surrogate(now, old, mask, gain, rollout_weights=weights, **same)
    assert_close(corrected[0, 0].item(), -2 * 2 * math.exp(-0.5) * first)
    # A weight of 0 counts as 1e-8: the product is 3e-8.
    masked = vespo_surrogate(now, old, mask, gain, rollout_weights=torch.tensor([[0.0, 1.0, 1.0]] * 2), **same)
    assert_close(masked[0, 0].item(), -2 * 3e-8 * math.exp(0.5) * first, rtol=1e-5, atol=0.0)


def test_vespo_by_hand() -> None:
    check_vespo(vespo_surrogate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("advantages >= 0, *values", "advantages < 0, *values", id="signs exchanged"),
        pytest.param("log_ratio.sum(dim=1, keepdim=True)", "log_ratio.mean(dim=1, keepdim=True)", id="a mean"),
        pytest.param("torch.where(mask, log_weights, 0.0)", "log_weights", id="weights at padding"),
        pytest.param("(decay + k * log_w", "(k * log_w", id="not 1 at 1"),
        pytest.param("- decay * log_w.exp()", "- decay * log_w", id="no decay"),
        pytest.param("log().clamp(lowest, MAX_LOG_RATIO)", "log().clamp(-2.0, MAX_LOG_RATIO)", id="another floor"),
    ],
)
def test_a_broken_vespo_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_vespo(broken(vespo_surrogate, old, new))


def test_vespo_fades_on_both_sides() -> None:
    """The weight's maximum is at k / lambda."""
    ratios = torch.logspace(-4, 4, 400, base=2, dtype=torch.float64)[:, None]
    ones = torch.ones_like(ratios)
    for gain, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        weights = vespo_surrogate(ratios.log(), 0 * ratios, ones.bool(), gain * ones) / (-gain * ratios.log())
        assert ratios[weights.argmax()].item() == pytest.approx(peak, rel=0.02)
        assert weights[0] < 0.1
        assert weights[-1] < 1e-3


# --- DPPO


def check_leaves_trust_region(leaves_trust_region: Any) -> None:
    new = torch.tensor([[0.71, 0.69, 0.29, 0.31, 0.005]] * 2).log()
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.001]] * 2).log()
    gain = torch.tensor([[1.0], [-1.0]])
    low, high = leaves_trust_region(new, old, gain, divergence="tv")
    assert high.tolist() == [[True, False, False, False, False], [False] * 5], "five times as likely is not far"
    assert low.tolist() == [[False] * 5, [False, False, True, False, False]]
    low, high = leaves_trust_region(new, old, gain, divergence="tv", epsilon=0.195, epsilon_high=0.185)
    assert high.tolist()[0] == [True, True, False, False, False]
    assert low.tolist()[1] == [False, False, True, False, False]
    # KL of 0.5 to p is -log(4 p (1 - p)) / 2: 0.097 for 0.71 and 0.29, 0.078 for 0.69 and 0.31; of 0.001 to 0.005
    # 0.0024.
    low, high = leaves_trust_region(new, old, gain, divergence="kl", epsilon=0.08, epsilon_high=0.09)
    assert high.tolist() == [[True, False, False, False, False], [False] * 5]
    assert low.tolist() == [[False] * 5, [False, False, True, False, False]]
    low, high = leaves_trust_region(new, old, gain, divergence="kl", epsilon=0.07, epsilon_high=0.002)
    assert high.tolist()[0] == [True, True, False, False, True]
    assert low.tolist()[1] == [False, False, True, True, False]


def test_the_trust_region_by_hand() -> None:
    check_leaves_trust_region(leaves_trust_region)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("(advantages <= 0) & (p < q)", "(p < q)", id="down whatever the sign"),
        pytest.param("(advantages > 0) & (p > q)", "(advantages > 0)", id="up whatever the direction"),
        pytest.param("q * (old - new)", "p * (old - new)", id="another KL"),
        pytest.param("distance = (p - q).abs()", "distance = (p / q - 1).abs()", id="the ratio"),
        pytest.param("high_moved & (distance > high)", "high_moved & (distance > epsilon)", id="one limit"),
    ],
)
def test_a_broken_trust_region_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_leaves_trust_region(broken(leaves_trust_region, old, new))


def test_an_unknown_divergence_is_named() -> None:
    with pytest.raises(ValueError, match="divergence must be 'tv' or 'kl', got 'js'"):
        leaves_trust_region(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), divergence="js")  # type: ignore[arg-type]


def test_certain_tokens_have_a_finite_divergence() -> None:
    """In float32 a log-prob can round to above 0."""
    new, old = torch.tensor([[1e-7, -5.0]]), torch.tensor([[-5.0, 1e-7]])
    low, high = leaves_trust_region(new, old, torch.tensor([[1.0]]), divergence="kl", epsilon=0.05)
    assert high.tolist() == [[True, False]]
    low, high = leaves_trust_region(new, old, torch.tensor([[-1.0]]), divergence="kl", epsilon=0.05)
    assert low.tolist() == [[False, True]]


def test_dppo_by_hand() -> None:
    # Ratios 2, 1/2, 30 (at most 20) and (masked) 5; the second token is outside.
    now = torch.tensor([[0.2, 0.1, 0.3, 0.5]]).log().requires_grad_()
    old = torch.tensor([[0.1, 0.2, 0.01, 0.1]]).log()
    mask, outside = torch.tensor([[True, True, True, False]]), torch.tensor([[False, True, False, False]])
    loss = dppo_surrogate(now, old, mask, torch.tensor([[3.0]]), outside)
    logs = now[0].tolist()
    assert_close(loss[:, :3], torch.tensor([[-6.0 * logs[0], 0.0, -60.0 * logs[2]]]))
    assert_close(slope(loss, now)[:, :3], torch.tensor([[-6.0, 0.0, -60.0]]))
    lower = dppo_surrogate(now, old, mask, torch.tensor([[3.0]]), outside, max_ratio=1.5)
    assert_close(slope(lower, now)[:, :3], torch.tensor([[-4.5, 0.0, -4.5]]))


def dppo_of_verl(now: float, old: float, gain: float, divergence: str, low: float, high: float) -> float:
    """The slope of one token's loss, as the two functions of `core_algos` have it."""
    p, q = math.exp(now), math.exp(old)
    if divergence == "tv":
        is_valid = p - q <= high if gain > 0 else p - q >= -low
    else:
        kl = q * (old - now) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_valid = kl <= high or p <= q if gain > 0 else kl <= low or p >= q
    return -gain * min(math.exp(now - old), 20.0) * is_valid


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@quick
@given(rows=rows())
def test_dppo_is_verls(divergence: Any, rows: dict[str, Tensor]) -> None:
    leaf = rows["logprobs"].clone().requires_grad_()
    limits = {"epsilon": 0.05, "epsilon_high": 0.1}
    low, high = leaves_trust_region(leaf, rows["old_logprobs"], rows["advantages"], divergence=divergence, **limits)
    loss = torch.where(rows["mask"], dppo_surrogate(**{**rows, "logprobs": leaf}, outside=low | high), 0.0)
    found = slope(loss, leaf)
    for (row, token), value in zip(rows["mask"].nonzero().tolist(), found[rows["mask"]].tolist(), strict=True):
        now, old = rows["logprobs"][row, token].item(), rows["old_logprobs"][row, token].item()
        gain = rows["advantages"][row].item()
        assert value == pytest.approx(dppo_of_verl(now, old, gain, divergence, 0.05, 0.1), abs=1e-12)


def dppo_of_tv(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    low, high = leaves_trust_region(logprobs, old_logprobs, advantages, divergence="tv")
    return dppo_surrogate(logprobs, old_logprobs, mask, advantages, low | high)


# --- all of them


SURROGATES = {"gmpo": gmpo_surrogate, "kl_cov": kl_cov_of_all, "vespo": vespo_surrogate, "dppo": dppo_of_tv}
each = pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)


@each
@quick
@given(rows=rows())
def test_padding_has_no_gradient_and_inputs_are_not_modified(surrogate: Any, rows: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in rows.items()}
    leaf = rows["logprobs"].clone().requires_grad_()
    loss = surrogate(**{**rows, "logprobs": leaf})
    kept = torch.where(rows["mask"], loss, 0.0)
    found = slope(kept, leaf)
    assert kept.isfinite().all()
    assert (found[~rows["mask"]] == 0).all()
    assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


@each
def test_one_value_per_completion_is_a_column(surrogate: Any) -> None:
    values = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"advantages must have the shape .*, got \[3\].* pass advantages\[:, None\]"):
        surrogate(values, values, values.bool(), torch.ones(3))


@each
@pytest.mark.parametrize("far", [30.0, 89.0, 200.0, -30.0, -200.0])
@pytest.mark.parametrize("gain", [2.0, -2.0])
def test_a_token_that_has_moved_far_leaves_loss_and_gradient_finite(surrogate: Any, far: float, gain: float) -> None:
    old = torch.tensor([[-300.0, -1.0], [-1.0, -2.0]])
    logprobs = (old + torch.tensor([[far, far], [0.1, -0.1]])).requires_grad_()
    loss = surrogate(logprobs, old, torch.ones(2, 2).bool(), torch.full((2, 1), gain))
    assert loss.isfinite().all()
    assert slope(loss, logprobs).isfinite().all()
