"""The token that a random number chooses, and which tokens can be sampled."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.rollout.token_sampler import (
    BLOCK_TOKENS,
    NextToken,
    TokenSettings,
    first_above,
    next_below,
    pick,
    sampled_ids,
)

CPU = torch.device("cpu")


def picked(probabilities, *uniforms):
    """The tokens that the numbers choose from one distribution."""
    rows = torch.tensor([probabilities]).expand(len(uniforms), -1)
    return pick(rows, torch.tensor(uniforms, dtype=torch.float64)).tolist()


# ------------------------------------------------------------------------------------------------------------- `pick`


def test_by_hand():
    # Cumulated: 0.25, 0.75, 0.75, 1. A number equal to a bound belongs to the next token.
    assert picked([0.25, 0.5, 0.0, 0.25], 0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999) == [0, 0, 1, 1, 3, 3]
    assert picked([0.0, 0.0, 1.0, 0.0], 0.0, 0.5, 1 - 2**-53) == [2, 2, 2]


def test_by_hand_over_blocks():
    """Probabilities that straddle three blocks of tokens, the middle one empty."""
    probabilities = [0.0] * (3 * BLOCK_TOKENS)
    first, last = BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS + 1
    probabilities[3], probabilities[first], probabilities[last] = 0.25, 0.25, 0.5
    assert picked(probabilities, 0.0, 0.24, 0.25, 0.49, 0.5, 1 - 2**-53) == [3, 3, first, first, last, last]


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
def test_the_largest_number_is_the_last_possible_token(vocabulary):
    """The probabilities add up to less than 1 in 32 bits, or more: neither may run over the end."""
    for scale in (1.0, 0.999, 1.001):
        probabilities = torch.rand(1, vocabulary) + 0.1
        probabilities *= scale / probabilities.sum()
        probabilities[:, vocabulary // 2 + 1 :] = 0
        for uniform in (1 - 2**-53, 1.0):  # 1 is what 32 bits can round a number to
            assert pick(probabilities, torch.tensor([uniform], dtype=torch.float64)).item() == vocabulary // 2


@given(st.integers(1, 400), st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
def test_it_inverts_the_cumulated_probabilities(vocabulary, seed, uniform):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=generator) * 4
    logits[torch.rand(vocabulary, generator=generator) < 0.3] = -torch.inf
    logits[torch.randint(vocabulary, (1,), generator=generator)] = 1.0
    probabilities = torch.softmax(logits, 0)
    token = pick(probabilities[None], torch.tensor([uniform], dtype=torch.float64)).item()
    assert probabilities[token] > 0
    cumulated = probabilities.double().cumsum(0) / probabilities.double().sum()
    assert cumulated[token] - probabilities[token] - 1e-6 <= uniform <= cumulated[token] + 1e-6


def test_what_is_drawn_is_distributed_as_said():
    """A chi-square test over 300 tokens of very different probability, some of them 0."""
    probabilities = torch.softmax(2 * torch.randn(300), 0)
    probabilities[::7] = 0
    probabilities /= probabilities.sum()
    count = 20_000
    tokens = pick(probabilities.expand(count, -1), torch.rand(count, dtype=torch.float64))
    expected = probabilities.double() * count
    is_seen = expected >= 5
    observed = torch.bincount(tokens, minlength=300).double()
    assert observed[probabilities == 0].sum() == 0
    statistic = float(((observed - expected) ** 2 / expected)[is_seen].sum())
    freedom = int(is_seen.sum()) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_zeros_are_passed_over_where_rounding_moved_the_sum(monkeypatch):
    """Sums made in parallel may differ by a rounding from one place to the next, also where 0 was added."""
    moved = torch.tensor([[0.5, 0.5 + 2**-52, 1.0, 1.0 + 2**-52]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda weights, dim, dtype: moved)
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    for target in (0.5, 1.0):
        index, *_ = first_above(weights, torch.tensor([[target]], dtype=torch.float64))
        assert index.item() == 2


@given(st.floats(1e-300, 1e300))
def test_the_number_below_is_that_of_the_floating_point_format(number):
    assert next_below(torch.tensor([number], dtype=torch.float64)).item() == math.nextafter(number, 0)
    wide = torch.tensor([number**0.1], dtype=torch.float32)
    assert torch.equal(next_below(wide), torch.nextafter(wide, torch.zeros(1)))


# -------------------------------------------------------------------------------------------------------- suppression


@pytest.mark.parametrize(
    ("never", "size", "expected"),
    [
        ((), 5, (5, ())),
        ((3, 4), 5, (3, ())),
        ((1, 4), 5, (4, (1,))),
        ((1, 2), 5, (5, (1, 2))),
        ((1, 7), 5, (5, (1,))),  # the model has no score for it
        ((2, 3, 4, 9), 5, (2, ())),
    ],
)
def test_what_can_be_drawn(never, size, expected):
    assert sampled_ids(never, size) == expected


def test_suppressed_tokens_have_no_probability_and_no_entropy():
    settings = TokenSettings.of(SamplingParams(suppress_tokens=[1, 2, 7]))
    draw = NextToken(settings, 8, CPU)
    logits = torch.zeros(6, 8)
    uniforms = torch.arange(6, dtype=torch.float64) / 6
    ids, logprobs, entropies = draw(torch.zeros(6, 1, dtype=torch.long), logits, uniforms)
    assert set(ids.tolist()) == {0, 3, 4, 5, 6}
    torch.testing.assert_close(logprobs, torch.full((6,), -math.log(5)))
    torch.testing.assert_close(entropies, torch.full((6,), math.log(5)))


def test_autocast_changes_no_number():
    """Autocast computes dot products in 16 bits, where the lowest 32-bit number is -inf."""
    draw = NextToken(TokenSettings.of(SamplingParams(suppress_tokens=[1, 2])), 200, CPU)
    given = torch.zeros(6, 1, dtype=torch.long), torch.randn(6, 200), torch.rand(6, dtype=torch.float64)
    want = draw(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = draw(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
