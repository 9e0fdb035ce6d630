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
    high_covariance_tokens,
    high_entropy_tokens,
    random_covariance_tokens,
    token_covariances,
)
from tests.marks import SLOW

quick = settings(deadline=None, max_examples=50, derandomize=True, database=None)
fractions = st.sampled_from([0.001, 0.1, 0.2, 0.25, 0.5, 0.7, 0.9, 1.0])


@st.composite
def tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    size, generator = draw(st.integers(1, 40)), torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return -3 * torch.rand(size, generator=generator), torch.randn(size, generator=generator)


# --- high entropy


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(0.2, [4]), (0.25, [2, 4]), (0.5, [0, 2, 4]), (0.9, [0, 1, 2, 4]), (1.0, [0, 1, 2, 3, 4])],
)
def test_high_entropy_by_hand(fraction: float, chosen: list[int]) -> None:
    # In order 0.1 0.2 0.5 0.7 0.9: the quantile at 0.8 lies between 0.7 and 0.9, at 0.75 it is 0.7, at 0.5 it is 0.5.
    entropies = torch.tensor([0.5, 0.2, 0.7, 0.1, 0.9])
    assert high_entropy_tokens(entropies, fraction).nonzero().flatten().tolist() == chosen


@quick
@given(tokens(), fractions)
def test_high_entropy_is_the_quantile_of_torch(drawn: tuple[Tensor, Tensor], fraction: float) -> None:
    """As TRL finds it, over one micro-batch; doubles, so that no interpolation is rounded below its lower end."""
    entropies = drawn[1].abs().double()
    threshold = entropies.quantile(1 - fraction)
    near = (entropies - threshold).abs() < 1e-9  # 1 - fraction is rounded
    assert_close(high_entropy_tokens(entropies, fraction)[~near], (entropies >= threshold)[~near])


@quick
@given(tokens(), fractions, st.randoms())
def test_the_order_of_tokens_does_not_matter(drawn: tuple[Tensor, Tensor], fraction: float, random: Any) -> None:
    logprobs, advantages = drawn
    coarse = (advantages * 2).round()  # with ties
    order = list(range(len(coarse)))
    random.shuffle(order)
    coarse_logprobs, keys = logprobs.round().double(), torch.randperm(len(coarse)).double()
    for choose in (
        lambda order: high_entropy_tokens(coarse[order], fraction),
        lambda order: high_covariance_tokens(
            coarse_logprobs[order], coarse[order].double(), fraction, keys=keys[order]
        ),
    ):
        assert choose(order).tolist() == choose(list(range(len(coarse))))[order].tolist()


@pytest.mark.parametrize("choose", [high_entropy_tokens, lambda x, f: high_covariance_tokens(x, x, f)])
def test_of_no_tokens_none_is_chosen(choose: Any) -> None:
    assert choose(torch.zeros(0), 0.2).tolist() == []


@SLOW
def test_more_elements_than_torchs_quantile_takes() -> None:
    many = torch.arange(2**24 + 1, dtype=torch.float32)
    assert high_entropy_tokens(many, 1e-7).nonzero().flatten().tolist() == [2**24 - 1, 2**24]


# --- covariances

LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -2.0])  # mean -2
ADVANTAGES = torch.tensor([3.0, 0.0, -2.0, -1.0])  # mean 0
"""Covariances 3, 0, 2, 0."""


def check_covariances(token_covariances: Any) -> None:
    assert token_covariances(LOGPROBS, ADVANTAGES).tolist() == [3.0, 0.0, 2.0, 0.0]
    assert token_covariances(LOGPROBS - 5.0, ADVANTAGES + 7.0).tolist() == [3.0, 0.0, 2.0, 0.0]


def test_covariances_by_hand() -> None:
    check_covariances(token_covariances)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("(logprobs - logprobs.mean())", "logprobs", id="log-probs not centered"),
        pytest.param("(advantages - advantages.mean())", "advantages", id="advantages not centered"),
        pytest.param("return (logprobs", "return -(logprobs", id="sign flipped"),
    ],
)
def test_broken_covariances_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_covariances(broken(token_covariances, old, new))


@quick
@given(tokens())
def test_their_mean_is_the_covariance(drawn: tuple[Tensor, Tensor]) -> None:
    values = torch.stack(drawn)
    assert_close(token_covariances(*drawn).mean(), torch.cov(values, correction=0)[0, 1], rtol=1e-4, atol=1e-5)


def test_high_covariance_by_hand() -> None:
    for fraction, chosen in ((0.001, [0]), (0.49, [0]), (0.5, [0, 2]), (0.75, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        assert high_covariance_tokens(LOGPROBS, ADVANTAGES, fraction).nonzero().flatten().tolist() == chosen
    keys = torch.tensor([0.0, 0.9, 0.5, 0.1])  # two covariances are 0
    assert high_covariance_tokens(LOGPROBS, ADVANTAGES, 0.75, keys).nonzero().flatten().tolist() == [0, 2, 3]


@quick
@given(tokens(), fractions)
def test_equal_covariances_do_not_add_tokens(drawn: tuple[Tensor, Tensor], fraction: float) -> None:
    """A certain policy has the log-prob 0 at most tokens, and advantages may all be 0: verl's topk takes no more."""
    logprobs, advantages = drawn
    keys = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(0))
    count = max(1, int(len(logprobs) * fraction))
    for equal_logprobs, equal_advantages in ((0 * logprobs, advantages.sign()), (logprobs, 0 * advantages)):
        found = high_covariance_tokens(equal_logprobs, equal_advantages, fraction, keys)
        assert found.sum() == count
    assert set(keys[found].tolist()) == set(keys.sort().values[:count].tolist())


def kl_cov_of_verl(logprobs: list[float], advantages: list[float], fraction: float) -> set[int]:
    """The tokens that `compute_policy_loss_kl_cov` penalizes, sorted instead of by topk."""
    size = len(logprobs)
    mean_logprob, mean_advantage = sum(logprobs) / size, sum(advantages) / size
    terms = {i: (logprobs[i] - mean_logprob) * (advantages[i] - mean_advantage) for i in range(size)}
    return set(sorted(terms, key=lambda i: -terms[i])[: max(1, int(size * fraction))])


@quick
@given(tokens(), fractions)
def test_high_covariance_is_verls(drawn: tuple[Tensor, Tensor], fraction: float) -> None:
    logprobs, advantages = (each.double() for each in drawn)
    found = high_covariance_tokens(logprobs, advantages, fraction).nonzero().flatten().tolist()
    assert set(found) == kl_cov_of_verl(logprobs.tolist(), advantages.tolist(), fraction)


def test_random_covariance_by_hand() -> None:
    def chosen(keys: list[float], fraction: float = 0.25, clipped: int | None = None, **limits: float) -> list[int]:
        is_clipped = torch.arange(4) == (-1 if clipped is None else clipped)
        picked = random_covariance_tokens(
            LOGPROBS, ADVANTAGES, is_clipped, torch.tensor(keys), fraction=fraction, **limits
        )
        return picked.nonzero().flatten().tolist()

    assert chosen([0.1, 0.0, 0.2, 0.0]) == [0], "candidates are 0 and 2, with 3 and 2"
    assert chosen([0.3, 0.0, 0.2, 0.0]) == [2]
    assert chosen([0.3, 0.0, 0.2, 0.0], fraction=0.001) == [2], "at least one"
    assert chosen([0.3, 0.0, 0.2, 0.0], fraction=0.5) == [0, 2]
    assert chosen([0.3, 0.0, 0.2, 0.0], fraction=1.0) == [0, 2], "there are no more"
    assert chosen([0.3, 0.0, 0.2, 0.0], high=3.0) == [2], "exclusive"
    assert chosen([0.3, 0.0, 0.2, 0.0], low=2.0) == [0]
    assert chosen([0.3, 0.0, 0.2, 0.0], clipped=2) == [0]
    assert chosen([0.3, 0.0, 0.2, 0.0], low=4.0) == []
    assert chosen([0.3, 0.2, 0.2, 0.1], low=-1.0, high=1.0) == [3]
    assert chosen([0.3, 0.2, 0.3, 0.1]) == [0], "one, even if keys are equal"


@quick
@given(tokens(), fractions)
def test_as_many_are_picked_as_in_verl(drawn: tuple[Tensor, Tensor], fraction: float) -> None:
    """`clip_num` of `compute_policy_loss_clip_cov`, of candidates between the limits."""
    logprobs, advantages = drawn
    keys = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(0))
    is_clipped = advantages > 1.5
    found = random_covariance_tokens(logprobs, advantages, is_clipped, keys, fraction=fraction, low=0.1, high=2.0)
    terms = token_covariances(logprobs, advantages)
    candidates = (terms > 0.1) & (terms < 2.0) & ~is_clipped
    assert not (found & ~candidates).any()
    assert found.sum() == min(max(int(fraction * len(logprobs)), 1), candidates.sum())
    if found.any() and (candidates & ~found).any():
        assert keys[found].max() < keys[candidates & ~found].min()
    assert math.isfinite(terms.sum())
