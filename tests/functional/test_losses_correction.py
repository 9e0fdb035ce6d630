from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_lightning.functional import keeps_sequence, rollout_weights

quick = settings(deadline=None, max_examples=50, derandomize=True, database=None)
LEVELS = ["token", "sequence", "geometric"]
every_level = pytest.mark.parametrize("level", LEVELS)
every_outside = pytest.mark.parametrize("outside", ["truncate", "mask"])

# Twice, eight times and half as likely; the last token is padding. The products are 16 and 1/2, the geometric means 4
# (of two tokens) and 0.7937 (of three).
OLD = torch.tensor([[0.2, 0.8, 0.25], [0.1, 0.2, 0.2]]).log()
ROLLOUT = torch.tensor([[0.1, 0.1, 0.5], [0.2, 0.2, 0.2]]).log()
MASK = torch.tensor([[True, True, False], [True, True, True]])


def check_rollout_weights(rollout_weights: Any) -> None:
    def weights(level: str, outside: str, **limits: float) -> list[list[float]]:
        found = rollout_weights(OLD, ROLLOUT, MASK, level=level, outside=outside, **limits)
        return [[round(value, 5) for value in row] for row in found.tolist()]

    assert weights("token", "truncate", high=5) == [[2, 5, 1], [0.5, 1, 1]]
    assert weights("token", "truncate", low=0.75, high=5) == [[2, 5, 1], [0.75, 1, 1]]
    assert weights("token", "mask", high=5) == [[2, 0, 1], [0.5, 1, 1]]
    assert weights("token", "mask", low=0.75, high=5) == [[2, 0, 1], [0, 1, 1]]
    assert weights("sequence", "truncate", high=10) == [[10], [0.5]]
    assert weights("sequence", "mask", high=10) == [[0], [0.5]]
    assert weights("sequence", "mask", high=20) == [[16], [0.5]]
    assert weights("geometric", "truncate", high=3) == [[3], [0.7937]]
    assert weights("geometric", "mask", high=3) == [[0], [0.7937]]
    assert weights("geometric", "mask", low=0.8, high=5) == [[4], [0]]
    assert weights("token", "truncate") == [[2, 2, 1], [0.5, 1, 1]], "the default: at most 2"


def test_weights_by_hand() -> None:
    check_rollout_weights(rollout_weights)


@pytest.mark.parametrize(
    "broken",
    [
        lambda old, rollout, mask, **options: rollout_weights(rollout, old, mask, **options),  # the wrong way round
        lambda old, rollout, mask, **options: rollout_weights(old, rollout, mask | True, **options),  # padding counts
        lambda old, rollout, mask, **options: rollout_weights(old, rollout, mask, **options | {"outside": "truncate"}),
        lambda old, rollout, mask, **options: rollout_weights(old, rollout, mask, **options | {"level": "token"}),
        lambda old, rollout, mask, **options: torch.ones_like(old),
    ],
)
def test_a_break_is_seen(broken: Any) -> None:
    with pytest.raises(AssertionError):
        check_rollout_weights(broken)


@every_level
@every_outside
def test_weights_are_constants(level: Any, outside: Any) -> None:
    old = OLD.clone().requires_grad_()
    assert not rollout_weights(old, ROLLOUT, MASK, level=level, outside=outside).requires_grad


@every_level
def test_weights_are_bounded_whatever_the_limit(level: Any) -> None:
    """A completion of a few hundred tokens leaves the range of exp; without a limit its weight was infinite."""
    old = torch.tensor([[-1.0, -1.0], [-300.0, -300.0]])
    found = rollout_weights(old, old.flip(0), torch.ones(2, 2).bool(), level=level, outside="truncate", high=math.inf)
    assert_close(found[:, 0], torch.tensor([math.exp(20), math.exp(-20)]))


@quick
@given(st.integers(0, 10**6), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_padding_and_agreement(seed: int, padding: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=generator) < 0.6
    old = -3 * torch.rand(3, 4, generator=generator)
    rollout = old + 2 * torch.randn(3, 4, generator=generator)
    for level in LEVELS:
        for outside in ("truncate", "mask"):
            chosen: Any = {"level": level, "outside": outside, "low": 0.5, "high": 2.0}
            found = rollout_weights(old, rollout, mask, **chosen)
            padded = rollout_weights(old.masked_fill(~mask, padding), rollout.masked_fill(~mask, 1.0), mask, **chosen)
            assert torch.equal(found.expand(3, 4)[mask], padded.expand(3, 4)[mask])
            assert ((found >= 0.5) & (found <= 2.0) | (found == 0) & (outside == "mask")).all()
            assert (rollout_weights(old, old, mask, **chosen) == 1).all(), "where both agree"


@every_outside
def test_sequences_of_one_token_are_tokens(outside: Any) -> None:
    one = torch.tensor([[True], [True]])
    token, sequence, geometric = (
        rollout_weights(OLD[:, :1], ROLLOUT[:, :1], one, level=level, outside=outside)  # type: ignore[arg-type]
        for level in LEVELS
    )
    assert torch.equal(token, sequence)
    assert torch.equal(token, geometric)


@quick
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_the_geometric_mean_does_not_depend_on_the_length(seed: int, times: int) -> None:
    """A completion repeated keeps its weight; the product is raised to a power."""
    generator = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, 3, 4, generator=generator)
    limits: dict[str, Any] = {"outside": "truncate", "low": 0.0, "high": math.inf}
    for level, power in (("geometric", 1), ("sequence", times)):
        once, repeated = (
            rollout_weights(o, r, torch.ones_like(o).bool(), level=level, **limits)  # type: ignore[arg-type]
            for o, r in ((old, rollout), (old.repeat(1, times), rollout.repeat(1, times)))
        )
        assert_close(repeated.log(), (once.log() * power).clamp(-20, 20), rtol=1e-4, atol=1e-4)


def test_the_geometric_mask_keeps_what_verl_keeps() -> None:
    """`seq_mean_k1` with the threshold "low_high": the mean of log(engine / policy) lies in log low to log high."""
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 50, 6, generator=generator) / 20
    mask = torch.rand(50, 6, generator=generator) < 0.8
    low, high = 0.98, 1.02
    mean = ((rollout - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
    kept = (mean >= math.log(low)) & (mean <= math.log(high))
    found = rollout_weights(old, rollout, mask, level="geometric", outside="mask", low=1 / high, high=1 / low)
    assert (found[:, 0] > 0).tolist() == kept.tolist()
    assert 5 < kept.sum() < 45
    assert ((found == 0) | (found - 1).abs().lt(0.021)).all(), "verl's weight is 1 there"


def test_unknown_choices_are_named() -> None:
    with pytest.raises(ValueError, match="level must be 'token', 'sequence' or 'geometric', got 'word'"):
        rollout_weights(OLD, ROLLOUT, MASK, level="word", outside="mask")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outside must be 'truncate' or 'mask', got 'drop'"):
        rollout_weights(OLD, ROLLOUT, MASK, level="token", outside="drop")  # type: ignore[arg-type]


def test_what_is_kept_by_hand() -> None:
    # The policy moved away by log 2 and log 8 from the first completion: (log 2 + log 8) / 2 = log 4 = 1.386 nats.
    gain = torch.tensor([[-1.0], [-1.0]])
    moved = {"logprobs": ROLLOUT, "rollout_logprobs": OLD, "mask": MASK}
    assert keeps_sequence(**moved, advantages=gain, threshold=1.38).tolist() == [[False], [True]]
    assert keeps_sequence(**moved, advantages=gain, threshold=1.39).tolist() == [[True], [True]]
    assert keeps_sequence(**moved, advantages=-gain, threshold=0.0).tolist() == [[True], [True]], "good ones stay"
    assert keeps_sequence(**moved, advantages=0 * gain, threshold=0.0).tolist() == [[True], [True]]
    assert_close(torch.tensor(2 * 8.0).log() / 2, torch.tensor(4.0).log())


def test_nothing_trained_is_kept() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    gain = torch.tensor([[-1.0], [-1.0]])
    broken = ROLLOUT.masked_fill(~nothing, math.nan)
    assert keeps_sequence(broken, OLD, nothing, gain, threshold=0.0).all()
