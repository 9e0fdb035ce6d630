from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import kl_divergence

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
NAN, INF = float("nan"), float("inf")
ESTIMATORS = ["k1", "k2", "k3"]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@st.composite
def logprob_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    distance = draw(st.sampled_from([1e-6, 1e-3, 1.0, 4.0]))
    logprobs = -torch.rand(shape, generator=generator) * 5
    return logprobs, logprobs + distance * torch.randn(shape, generator=generator)


# --- by hand


def check_kl_divergence(kl_divergence: Any) -> None:
    # The policy gives the token 1/2, the reference 1/4 then 1: d = -log 2, then log 2.
    logprobs = torch.tensor([[0.5, 0.5, 0.5]]).log().requires_grad_()
    ref_logprobs = torch.tensor([[0.25, 1.0, 0.5]]).log()
    log2 = math.log(2)
    expected = {
        "k1": ([log2, -log2, 0.0], [1.0, 1.0, 1.0]),
        "k2": ([log2**2 / 2, log2**2 / 2, 0.0], [log2, -log2, 0.0]),  # slope -d
        "k3": ([log2 - 0.5, 1 - log2, 0.0], [0.5, -1.0, 0.0]),  # 1/2 + log 2 - 1, 2 - log 2 - 1; slope 1 - exp(d)
    }
    for estimator, (values, slopes) in expected.items():
        result = kl_divergence(logprobs, ref_logprobs, estimator=estimator)
        assert_close(result, torch.tensor([values]))
        (gradient,) = torch.autograd.grad(result.sum(), logprobs)
        assert_close(gradient, torch.tensor([slopes]))
    assert_close(kl_divergence(logprobs, ref_logprobs), kl_divergence(logprobs, ref_logprobs, estimator="k3"))


def test_kl_divergence_by_hand() -> None:
    check_kl_divergence(kl_divergence)


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="estimator must be 'k1', 'k2' or 'k3', got 'k4'"):
        kl_divergence(torch.zeros(1, 1), torch.zeros(1, 1), estimator="k4")  # type: ignore[arg-type]


@every_estimator
def test_padding_has_neither_value_nor_gradient(estimator: Any) -> None:
    # exp(500) overflows; without the mask its gradient is nan even when its value is dropped later.
    logprobs = torch.tensor([[-1.0, -500.0, -INF, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False, False, False]])
    result = kl_divergence(logprobs, torch.zeros(1, 4), mask, estimator=estimator)
    result.sum().backward()
    assert logprobs.grad is not None
    assert (result[~mask] == 0).all()
    assert (logprobs.grad[~mask] == 0).all()
    assert logprobs.grad[mask].isfinite().all()


@every_estimator
def test_the_reference_is_a_constant(estimator: Any) -> None:
    logprobs, ref_logprobs = (torch.rand(1, 3, requires_grad=True) for _ in range(2))
    kl_divergence(logprobs, ref_logprobs, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    assert ref_logprobs.grad is None


def check_k3_is_bounded(kl_divergence: Any) -> None:
    # The reference finds the token more likely by 2, 3, 100 and, less likely, 5, 15 and 100 nats.
    # exp(2) - 3 = 4.39 and exp(-5) + 5 - 1 = 4.007 stay; the others are above 10.
    ref_logprobs = torch.tensor([[2.0, 3.0, 100.0, -5.0, -15.0, -100.0]])
    logprobs = torch.zeros(1, 6, requires_grad=True)
    kl = kl_divergence(logprobs, ref_logprobs)
    assert_close(kl, torch.tensor([[math.exp(2) - 3, 10.0, 10.0, math.exp(-5) + 4, 10.0, 10.0]]))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert_close(gradient, torch.tensor([[1 - math.exp(2), 0.0, 0.0, 1 - math.exp(-5), 0.0, 0.0]]))


def test_k3_is_bounded_by_hand() -> None:
    """As verl, OpenRLHF and ms-swift bound it: above 88.7 nats exp overflows, and long before one token is the loss."""
    check_k3_is_bounded(kl_divergence)


@pytest.mark.parametrize("far", [-INF, -300.0, -100.0])
def test_a_token_that_the_policy_has_all_but_lost_has_a_finite_k3(far: float) -> None:
    logprobs = torch.tensor([[far]], requires_grad=True)
    kl = kl_divergence(logprobs, torch.zeros(1, 1))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.item() == 10
    assert gradient.item() == 0


# --- parity with a loop, reductions


@every_estimator
@quick
@given(pair=logprob_pairs())
def test_kl_divergence_equals_a_loop(estimator: str, pair: tuple[Tensor, Tensor]) -> None:
    result = kl_divergence(*(tensor.double() for tensor in pair), estimator=estimator)  # type: ignore[arg-type]
    for ours, now, ref in zip(result.flatten().tolist(), *(t.flatten().tolist() for t in pair), strict=True):
        odds = math.exp(ref) / math.exp(now)  # pi_ref / pi
        expected = {"k1": math.log(1 / odds), "k2": math.log(odds) ** 2 / 2, "k3": min(odds - 1 - math.log(odds), 10)}
        assert ours == pytest.approx(expected[estimator], rel=1e-6, abs=1e-12)


@quick
@given(pair=logprob_pairs())
def test_k2_and_k3_are_never_negative(pair: tuple[Tensor, Tensor]) -> None:
    for estimator in ("k2", "k3"):
        assert (kl_divergence(*pair, estimator=estimator) >= 0).all()


@every_estimator
def test_the_same_policy_has_no_divergence(estimator: Any) -> None:
    logprobs = torch.randn(3, 4)
    assert (kl_divergence(logprobs, logprobs.clone(), estimator=estimator) == 0).all()


def test_expectations_over_the_policy_are_as_documented() -> None:
    # Summed over the whole vocabulary with the policy's probabilities, nothing is left to chance.
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 1, 9, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    divergence = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    (direction,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    drawn = logprobs.exp().detach()

    def expected(estimator: Any) -> tuple[Tensor, Tensor]:
        value = (drawn * kl_divergence(logprobs, ref_logprobs, estimator=estimator)).sum()
        return value, torch.autograd.grad(value, logits, retain_graph=True)[0]

    for estimator in ("k1", "k3"):
        assert_close(expected(estimator)[0], divergence)
    assert_close(expected("k2")[1], direction)
    assert_close(expected("k1")[1], torch.zeros_like(direction))


# --- properties


@every_estimator
@quick
@given(pair=logprob_pairs(), num_padding=st.integers(1, 3))
def test_padding_and_masks_change_nothing_else(estimator: Any, pair: tuple[Tensor, Tensor], num_padding: int) -> None:
    logprobs, ref_logprobs = pair
    expected = kl_divergence(logprobs, ref_logprobs, estimator=estimator)
    mask = torch.nn.functional.pad(torch.ones_like(logprobs, dtype=torch.bool), (0, num_padding))
    longer = torch.nn.functional.pad(logprobs, (0, num_padding), value=NAN)
    longer_ref = torch.nn.functional.pad(ref_logprobs, (0, num_padding))
    result = kl_divergence(longer, longer_ref, mask, estimator=estimator)
    assert_close(result, torch.nn.functional.pad(expected, (0, num_padding)))


@quick
@given(pair=logprob_pairs())
def test_inputs_are_not_modified(pair: tuple[Tensor, Tensor]) -> None:
    before = [tensor.clone() for tensor in pair]
    for estimator in ESTIMATORS:
        kl_divergence(*pair, torch.ones_like(pair[0], dtype=torch.bool), estimator=estimator)  # type: ignore[arg-type]
    assert_close(before, list(pair), rtol=0, atol=0)


# --- teeth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("ref_logprobs.detach() - logprobs", "logprobs - ref_logprobs.detach()", id="direction"),
        pytest.param("return -difference", "return difference", id="k1 sign"),
        pytest.param("difference.square() / 2", "difference.square()", id="k2 not halved"),
        pytest.param("torch.expm1(difference) - difference", "torch.exp(difference) - difference", id="k3 not 0 at 0"),
        pytest.param("torch.expm1(difference) - difference", "torch.expm1(difference) + difference", id="k3 sign"),
    ],
)
def test_a_broken_divergence_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_kl_divergence(broken(kl_divergence, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "difference", id="exponent not bounded"),
        pytest.param(".clamp(max=MAX_K3)", "", id="value not bounded"),
    ],
)
def test_a_broken_bound_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_k3_is_bounded(broken(kl_divergence, old, new))
