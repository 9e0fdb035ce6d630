from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    is_ratio_clamped,
    kl_divergence,
    sapo_surrogate,
)
from tests.helpers.step_counts import step_counts
from tests.marks import few

quick = settings(deadline=None, max_examples=15, derandomize=True, database=None)
NAN, INF = float("nan"), float("inf")
BY = ["token", "sequence", "constant"]
LEVELS = ["token", "sequence", "sequence_token"]
SURROGATES = ["clip", "dual_clip", "cispo", "sapo"]
every_level = pytest.mark.parametrize("level", LEVELS)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw the completions of an optimizer step: nan or infinite wherever nothing is trained."""
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.4, 0.8, 1.0]))
    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old_logprobs, ref_logprobs = (logprobs + torch.randn(shape, generator=generator) for _ in range(2))
    return {
        "logprobs": logprobs.masked_fill(~mask, draw(st.sampled_from([NAN, -INF, 0.0]))),
        "old_logprobs": old_logprobs.masked_fill(~mask, draw(st.sampled_from([NAN, INF, 0.0]))),
        "ref_logprobs": ref_logprobs.masked_fill(~mask, draw(st.sampled_from([NAN, INF, 0.0]))),
        "mask": mask,
        "advantages": torch.randn(shape[0], 1, generator=generator, dtype=torch.float64),
    }


def share(rows: dict[str, Tensor], counts: tuple[int, int], *, by: Any, level: Any, surrogate: str) -> Tensor:
    """Compose a loss of every piece: what a micro-batch adds to its step."""
    ratio = importance_ratio(rows["logprobs"], rows["old_logprobs"], rows["mask"], level=level)
    if surrogate == "cispo":
        loss = cispo_surrogate(ratio, rows["advantages"], rows["logprobs"], epsilon_high=0.2)
    elif surrogate == "sapo":
        loss = sapo_surrogate(ratio, rows["advantages"])
    else:
        dual_clip = 2.0 if surrogate == "dual_clip" else None
        loss = clipped_surrogate(ratio, rows["advantages"], epsilon=0.2, epsilon_high=0.3, dual_clip=dual_clip)
    loss = loss + 0.1 * kl_divergence(rows["logprobs"], rows["ref_logprobs"], rows["mask"])
    num_tokens, num_sequences = counts
    return aggregate(
        loss, rows["mask"], by=by, num_tokens=num_tokens, num_sequences=num_sequences, max_completion_length=9
    )


# --- by hand


def check_importance_ratio(importance_ratio: Any) -> None:
    # The token became 2, 8 and 1/2 times as likely; the last one is padding. The geometric mean of 2 and 8 is 4.
    old_logprobs = torch.tensor([[0.1, 0.1, 0.5], [0.5, 0.2, 0.2]]).log()
    logprobs = torch.tensor([[0.2, 0.8, 0.25], [0.5, 0.2, 0.2]]).log().requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False]])
    token = importance_ratio(logprobs, old_logprobs, mask)
    assert_close(token, torch.tensor([[2.0, 8.0, 1.0], [1.0, 1.0, 1.0]]))
    sequence = importance_ratio(logprobs, old_logprobs, mask, level="sequence")
    assert_close(sequence, torch.tensor([[4.0], [1.0]]))
    # Slopes: the ratio itself per token; for a sequence shared by its two trained tokens.
    assert_close(torch.autograd.grad(token.sum(), logprobs)[0], torch.tensor([[2.0, 8.0, 0.0], [0.0, 0.0, 0.0]]))
    assert_close(torch.autograd.grad(sequence.sum(), logprobs)[0], torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    # GSPO-token has the value of the sequence, and of each token the slope that the sequence has over all of them.
    both = importance_ratio(logprobs, old_logprobs, mask, level="sequence_token")
    assert_close(both, torch.tensor([[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]]))
    assert_close(torch.autograd.grad(both[:, 0].sum(), logprobs)[0], torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))


# Ratio, advantage, and with clip range [0.8, 1.3] the loss -min(r A, clip(r) A), its slope in r, clipped low, high.
SURROGATE_CASES = [
    (1.0, 2.0, -2.0, -2.0, False, False),
    (0.5, 2.0, -1.0, -2.0, False, False),  # below the range but A > 0: min(1, 1.6), it may recover
    (0.5, -2.0, 1.6, 0.0, True, False),  # below and A < 0: min(-1, -1.6), stopped
    (2.0, 2.0, -2.6, 0.0, False, True),  # above and A > 0: min(4, 2.6), stopped
    (2.0, -2.0, 4.0, 2.0, False, False),  # above but A < 0: min(-4, -2.6), pushed back
    (5.0, 0.0, 0.0, 0.0, False, False),
]


def check_clipped_surrogate(clipped_surrogate: Any) -> None:
    for r, advantage, loss, slope, _, _ in SURROGATE_CASES:
        ratio = torch.tensor([[r]], requires_grad=True)
        result = clipped_surrogate(ratio, torch.tensor([[advantage]]), epsilon=0.2, epsilon_high=0.3)
        (gradient,) = torch.autograd.grad(result.sum(), ratio)
        assert_close(result, torch.tensor([[loss]]))
        assert_close(gradient, torch.tensor([[slope]]))
    # dual_clip 3 with A = -2: 2.5 is left alone (loss 5), 4 counts as 3 (loss 6, slope 0); A > 0 is clipped before.
    ratio = torch.tensor([[2.5, 4.0]], requires_grad=True)
    dual = clipped_surrogate(ratio, torch.tensor([[-2.0]]), dual_clip=3.0)
    assert_close(dual, torch.tensor([[5.0, 6.0]]))
    assert_close(torch.autograd.grad(dual.sum(), ratio)[0], torch.tensor([[2.0, 0.0]]))
    assert_close(clipped_surrogate(ratio, torch.tensor([[2.0]]), dual_clip=3.0), torch.tensor([[-2.4, -2.4]]))


def check_cispo_surrogate(cispo_surrogate: Any) -> None:
    # Ratios 0.1, 1.2, 5 with cap 1 + 0.5 weigh 0.1, 1.2, 1.5; times -A = -2; log-probs -1, -2, -3.
    ratio = torch.tensor([[0.1, 1.2, 5.0]], requires_grad=True)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    loss = cispo_surrogate(ratio, torch.tensor([[2.0]]), logprobs, epsilon_high=0.5)
    loss.sum().backward()
    assert_close(loss, torch.tensor([[0.2, 4.8, 9.0]]))
    assert_close(logprobs.grad, torch.tensor([[-0.2, -2.4, -3.0]]))
    assert ratio.grad is None
    # With the lower bound 1 - 0.3 the first ratio weighs 0.7.
    bounded = cispo_surrogate(ratio, torch.tensor([[2.0]]), logprobs, epsilon_high=0.5, epsilon=0.3)
    assert_close(bounded, torch.tensor([[1.4, 4.8, 9.0]]))


def check_clipped(is_clipped_low: Any, is_clipped_high: Any) -> None:
    ratio, advantages = (torch.tensor([[case[i]] for case in SURROGATE_CASES]) for i in (0, 1))
    low, high = is_clipped_low(ratio, advantages, epsilon=0.2), is_clipped_high(ratio, advantages, epsilon_high=0.3)
    assert low.flatten().tolist() == [case[4] for case in SURROGATE_CASES]
    assert high.flatten().tolist() == [case[5] for case in SURROGATE_CASES]


def test_importance_ratio_by_hand() -> None:
    check_importance_ratio(importance_ratio)


def test_clipped_surrogate_by_hand() -> None:
    check_clipped_surrogate(clipped_surrogate)


def test_cispo_surrogate_by_hand() -> None:
    check_cispo_surrogate(cispo_surrogate)


def test_is_clipped_by_hand() -> None:
    check_clipped(is_clipped_low, is_clipped_high)


@pytest.mark.parametrize("dual_clip", [0.5, 1.28])
def test_a_dual_clip_inside_the_trust_region_is_explained(dual_clip: float) -> None:
    with pytest.raises(ValueError, match=rf"above 1 \+ epsilon_high = 1.28, got {dual_clip}. Raise it"):
        clipped_surrogate(torch.ones(1, 1), torch.ones(1, 1), epsilon_high=0.28, dual_clip=dual_clip)


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="level must be 'token', 'sequence' or 'sequence_token', got 'word'"):
        importance_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), level="word")  # type: ignore[arg-type]


@every_level
def test_padding_has_neither_value_nor_gradient(level: Any) -> None:
    logprobs = torch.tensor([[-1.0, -INF, NAN, 500.0]], requires_grad=True)
    mask = torch.tensor([[True, False, False, False]])
    ratio = importance_ratio(logprobs, torch.tensor([[-2.0, 0.0, 0.0, -500.0]]), mask, level=level)
    ratio.sum().backward()
    assert logprobs.grad is not None
    assert_close(ratio[0, 0], torch.tensor(math.e))
    assert_close(logprobs.grad, torch.tensor([[math.e, 0.0, 0.0, 0.0]]))


@every_level
def test_what_has_not_moved_has_ratio_exactly_one(level: Any) -> None:
    logprobs = torch.randn(3, 7, requires_grad=True)
    ratio = importance_ratio(logprobs, logprobs, torch.ones(3, 7, dtype=torch.bool), level=level)
    assert (ratio == 1).all()
    assert torch.autograd.grad(ratio.sum(), logprobs)[0].abs().min() > 0, "the old log-probs are a constant"


# --- parity with a loop


def loop_surrogate(r: float, now: float, gain: float, surrogate: str) -> float:
    """Compute the loss of one token with ratio r."""
    if surrogate == "cispo":
        return -gain * now * (r if r < 1.2 else 1.2)
    if surrogate == "sapo":
        tau = 1.0 if gain > 0 else 1.05
        return -4 / tau * gain / (1 + math.exp(-tau * (r - 1)))
    if gain >= 0:
        return -gain * (r if r < 1.3 else 1.3)
    inner = gain * (r if r > 0.8 else 0.8)
    return -max(inner, 2.0 * gain) if surrogate == "dual_clip" else -inner  # as the paper of the dual clip writes it


def loop_loss(rows: dict[str, Tensor], *, by: str, level: str, surrogate: str) -> float:
    kept: list[list[float]] = []
    for row in range(len(rows["mask"])):
        now, old, ref = (
            [rows[name][row, t].item() for t in range(rows["mask"].size(1)) if rows["mask"][row, t]]
            for name in ("logprobs", "old_logprobs", "ref_logprobs")
        )
        if not now:
            continue
        ratios = [math.exp(n) / math.exp(o) for n, o in zip(now, old, strict=True)]
        if level != "token":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        gain = rows["advantages"][row].item()
        losses = []
        for r, n, f in zip(ratios, now, ref, strict=True):
            losses.append(loop_surrogate(r, n, gain, surrogate) + 0.1 * min(math.exp(f) / math.exp(n) - 1 + n - f, 10))
        kept.append(losses)
    if not kept:
        return 0.0
    if by == "token":
        return sum(map(sum, kept)) / sum(map(len, kept))
    if by == "sequence":
        return sum(sum(losses) / len(losses) for losses in kept) / len(kept)
    return sum(map(sum, kept)) / len(kept) / 9


@pytest.mark.parametrize(("by", "level", "surrogate"), itertools.product(BY, LEVELS, SURROGATES))
@quick
@given(rows=steps())
def test_the_composed_loss_equals_a_loop(by: str, level: str, surrogate: str, rows: dict[str, Tensor]) -> None:
    loss = share(rows, step_counts(rows["mask"]), by=by, level=level, surrogate=surrogate)
    assert loss.item() == pytest.approx(loop_loss(rows, by=by, level=level, surrogate=surrogate), abs=1e-12)


# --- reductions


@every_level
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_first_update_is_reinforce(level: Any, surrogate: str) -> None:
    logprobs = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(4, 1, dtype=torch.float64)
    mask = torch.ones(4, 5, dtype=torch.bool)
    constants = {"old_logprobs": logprobs.detach(), "ref_logprobs": logprobs.detach(), "mask": mask}
    loss = share(
        {"logprobs": logprobs, "advantages": advantages, **constants},
        step_counts(mask),
        by="token",
        level=level,
        surrogate=surrogate,
    )
    reinforce = -(advantages * logprobs).mean()
    assert_close(torch.autograd.grad(loss, logprobs), torch.autograd.grad(reinforce, logprobs))


@quick
@given(rows=steps())
def test_at_one_token_sequence_and_token_ratio_agree(rows: dict[str, Tensor]) -> None:
    columns = [rows[name][:, :1] for name in ("logprobs", "old_logprobs", "mask")]
    assert_close(importance_ratio(*columns, level="sequence"), importance_ratio(*columns, level="token"))


@quick
@given(rows=steps(), epsilon=st.floats(0.05, 0.5))
def test_special_cases_of_the_clip(rows: dict[str, Tensor], epsilon: float) -> None:
    ratio = importance_ratio(rows["logprobs"], rows["old_logprobs"], rows["mask"])
    plain = clipped_surrogate(ratio, rows["advantages"], epsilon=epsilon)
    equal = clipped_surrogate(ratio, rows["advantages"], epsilon=epsilon, epsilon_high=epsilon)
    far = clipped_surrogate(ratio, rows["advantages"], epsilon=epsilon, dual_clip=1e9)
    assert_close((equal, far), (plain, plain), rtol=0, atol=0)
    assert (plain >= -ratio * rows["advantages"]).all(), "the surrogate is a pessimistic bound"


@quick
@given(rows=steps())
def test_clipped_tokens_are_those_without_a_gradient(rows: dict[str, Tensor]) -> None:
    ratio = importance_ratio(rows["logprobs"], rows["old_logprobs"], rows["mask"]).requires_grad_()
    loss = clipped_surrogate(ratio, rows["advantages"], epsilon=0.2, epsilon_high=0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    low = is_clipped_low(ratio, rows["advantages"], epsilon=0.2)
    high = is_clipped_high(ratio, rows["advantages"], epsilon_high=0.3)
    assert ((gradient == 0) == (low | high)).all()
    assert not (low & high).any()
    assert not (low | high)[~rows["mask"]].any()


def test_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old_logprobs, start = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.8
    rows = {"old_logprobs": old_logprobs, "ref_logprobs": old_logprobs, "mask": mask}
    rows["advantages"] = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    for by, level, surrogate in itertools.product(BY, LEVELS, ["clip", "dual_clip"]):

        def loss(logprobs: Tensor, options: Any = (by, level, surrogate)) -> Tensor:
            names = dict(zip(("by", "level", "surrogate"), options, strict=True))
            return share({**rows, "logprobs": logprobs}, step_counts(mask), **names)

        assert torch.autograd.gradcheck(loss, start.clone().requires_grad_())


# --- properties


@few(9)
@pytest.mark.parametrize(("by", "level", "surrogate"), itertools.product(BY, LEVELS, SURROGATES))
@quick
@given(rows=steps(), world_size=st.integers(1, 3), num_padding=st.integers(0, 2), data=st.data())
def test_neither_splits_nor_ranks_nor_order_nor_padding_matter(
    by: str, level: str, surrogate: str, rows: dict[str, Tensor], world_size: int, num_padding: int, data: st.DataObject
) -> None:
    pieces = {"by": by, "level": level, "surrogate": surrogate}
    counts = step_counts(rows["mask"])
    leaf = rows["logprobs"].clone().requires_grad_()
    whole = share({**rows, "logprobs": leaf}, counts, **pieces)
    (expected,) = torch.autograd.grad(whole, leaf)
    assert whole.isfinite()
    assert (expected[~rows["mask"]] == 0).all()

    def padded(tensor: Tensor, name: str) -> Tensor:
        if name == "advantages":
            return tensor
        return torch.nn.functional.pad(tensor, (0, num_padding), value=False if name == "mask" else NAN)

    # Every row goes to a micro-batch of a rank in any order; some micro-batches stay empty. Gradients are averaged over
    # ranks, so each scales its shares by their number.
    order = data.draw(st.permutations(range(len(leaf))))
    place = data.draw(st.lists(st.integers(0, 2 * world_size - 1), min_size=len(leaf), max_size=len(leaf)))
    everything = {**rows, "logprobs": leaf}
    ranks = []
    for rank in range(world_size):
        micro_batches = [[row for row in order if place[row] == 2 * rank + half] for half in range(2)]
        shares = [
            share({name: padded(tensor[chosen], name) for name, tensor in everything.items()}, counts, **pieces)
            for chosen in micro_batches
        ]
        ranks.append(world_size * torch.stack(shares).sum())
    mean = torch.stack(ranks).mean()
    assert_close(mean, whole)
    assert_close(torch.autograd.grad(mean, leaf)[0], expected)


@every_level
@pytest.mark.parametrize("surrogate", SURROGATES)
@quick
@given(rows=steps())
def test_inputs_are_not_modified(level: str, surrogate: str, rows: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in rows.items()}
    share(rows, step_counts(rows["mask"]), by="token", level=level, surrogate=surrogate)
    is_clipped_low(rows["logprobs"], rows["advantages"], epsilon=0.2)
    is_clipped_high(rows["logprobs"], rows["advantages"], epsilon_high=0.2)
    assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


# --- teeth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("logprobs - old_logprobs.detach()", "old_logprobs.detach() - logprobs", id="inverted"),
        pytest.param("torch.where(mask, logprobs - old_logprobs.detach(), 0.0)", "logprobs - old_logprobs", id="mask"),
        pytest.param("masked_mean(log_ratio, mask, dim=1)", "log_ratio.mean(dim=1)", id="padding counted"),
        pytest.param("masked_mean(log_ratio, mask, dim=1)", "log_ratio.sum(dim=1)", id="not length-normalized"),
    ],
)
def test_a_broken_ratio_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_importance_ratio(broken(importance_ratio, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("return -torch.minimum", "return torch.minimum", id="sign flipped"),
        pytest.param("torch.minimum(", "torch.maximum(", id="optimistic"),
        pytest.param("ratio.clamp(1 - epsilon, highest)", "ratio", id="clip dropped"),
        pytest.param("ratio.clamp(1 - epsilon, highest)", "ratio.clamp(2 - highest, 1 + epsilon)", id="clip inverted"),
        pytest.param("ratio.clamp(max=dual_clip)", "ratio", id="dual clip dropped"),
        pytest.param("ratio.clamp(max=dual_clip)", "ratio.clamp(min=dual_clip)", id="dual clip inverted"),
    ],
)
def test_a_broken_surrogate_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_clipped_surrogate(broken(clipped_surrogate, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("max=1 + epsilon_high)", "max=epsilon_high)", id="cap not counted from 1"),
        pytest.param("None if epsilon is None else 1 - epsilon", "None", id="lower bound ignored"),
        pytest.param("-weight.detach()", "-weight", id="weight not detached"),
        pytest.param("return -weight", "return weight", id="sign flipped"),
        pytest.param("-weight.detach() * advantages * logprobs", "-weight.detach() * advantages", id="no log-prob"),
    ],
)
def test_a_broken_cispo_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_cispo_surrogate(broken(cispo_surrogate, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(" & (advantages < 0)", "", id="low counted whatever the sign"),
        pytest.param("(advantages < 0)", "(advantages > 0)", id="low with the wrong sign"),
        pytest.param(" & (advantages > 0)", "", id="high counted whatever the sign"),
        pytest.param("(ratio > 1 + epsilon_high)", "(ratio < 1 + epsilon_high)", id="high on the wrong side"),
    ],
)
def test_broken_clip_counts_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_clipped(broken(is_clipped_low, old, new), broken(is_clipped_high, old, new))


# --- SAPO


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05), (-2.0, 3.0)])
def test_sapo_by_hand(advantage: float, tau: float) -> None:
    ratio = torch.tensor([[0.5, 1.0, 3.0]], requires_grad=True)
    options = {"temperature_positive": tau} if advantage > 0 else {"temperature_negative": tau}
    loss = sapo_surrogate(ratio, torch.tensor([[advantage]]), **options)
    gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in (0.5, 1.0, 3.0)]
    assert_close(loss, torch.tensor([[-4 / tau * gate * advantage for gate in gates]]))
    slopes = torch.autograd.grad(loss.sum(), ratio)[0]
    assert_close(slopes, torch.tensor([[-4 * gate * (1 - gate) * advantage for gate in gates]]))
    assert_close(slopes[0, 1], torch.tensor(-advantage))  # at 1 that of the ratio itself


def test_sapo_fades_where_clip_cuts() -> None:
    ratio = torch.tensor([[0.3, 0.9, 1.0, 1.1, 4.0]], requires_grad=True)
    slopes = torch.autograd.grad(sapo_surrogate(ratio, torch.tensor([[1.0]])).sum(), ratio)[0].abs()[0]
    assert slopes[2] == slopes.max()
    assert (slopes > 0).all()
    assert slopes[4] < slopes[3] < slopes[2]
    assert slopes[0] < slopes[1] < slopes[2]


# --- log-ratios too large for exp


FAR = [30.0, 89.0, 200.0]
"""Nats; in float32 exp overflows above 88.7."""


@every_level
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("far", [*FAR, *(-far for far in FAR)])
@pytest.mark.parametrize("gain", [2.0, -2.0])
def test_a_log_ratio_too_large_for_exp_counts_as_20_nats(level: Any, surrogate: str, far: float, gain: float) -> None:
    """Its loss is finite and its gradient exactly 0, as in verl; the other tokens' are what they were."""
    old = torch.tensor([[-300.0, -1.0], [-1.0, -2.0]])
    logprobs = (old + torch.tensor([[far, far], [0.1, -0.1]])).requires_grad_()
    rows = {"logprobs": logprobs, "old_logprobs": old, "mask": torch.ones(2, 2, dtype=torch.bool)}
    rows |= {"ref_logprobs": old, "advantages": torch.full((2, 1), gain)}
    loss = share(rows, (4, 2), by="token", level=level, surrogate=surrogate)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    if surrogate != "cispo":  # whose loss is the log-prob itself; the ratio is a weight that is capped anyway
        assert loss.isfinite()
        assert (gradient[0] == 0).all()
    assert gradient.isfinite().all()
    assert (gradient[1] != 0).all()


def check_log_ratios(importance_ratio: Any, is_ratio_clamped: Any) -> None:
    # Moved by 21, 19, -21 and (masked) 50 nats; of the second row the mean is 21. Bounded by exp(20) and exp(-20).
    moved = torch.tensor([[21.0, 19.0, -21.0, 50.0], [41.0, 1.0, 50.0, 50.0]], requires_grad=True)
    old, mask = torch.zeros(2, 4), torch.tensor([[True, True, True, False], [True, True, False, False]])
    bounded = torch.tensor([[20.0, 19.0, -20.0, 0.0], [20.0, 1.0, 0.0, 0.0]]).exp()
    token = importance_ratio(moved, old, mask)
    assert_close(token, bounded)
    slopes = torch.autograd.grad(token.sum(), moved)[0]
    assert_close(slopes, bounded * torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0]]))
    assert is_ratio_clamped(moved, old, mask).tolist() == [[True, False, True, False], [True, False, False, False]]
    for level in ("sequence", "sequence_token"):
        ratio = importance_ratio(moved, old, mask, level=level)
        assert_close(ratio[:, :1], torch.tensor([[19 / 3], [20.0]]).exp())
        slopes = torch.autograd.grad(ratio.sum(), moved)[0]
        assert (slopes[0, :3] > 0).all()
        assert (slopes[1] == 0).all()
        assert is_ratio_clamped(moved, old, mask, level=level).tolist() == [[False] * 4, [True, True, False, False]]


def test_log_ratios_are_bounded_by_hand() -> None:
    check_log_ratios(importance_ratio, is_ratio_clamped)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("return bounded_exp(log_ratio)", "return log_ratio.exp()", id="not bounded"),
        pytest.param(
            "log_ratio = log_ratio.detach() + own",
            "return bounded_exp(log_ratio.detach()) * own.exp()",
            id="a gradient beyond",
        ),
        pytest.param("mask, level).abs() > MAX", "mask, level) > MAX", id="one side counted"),
        pytest.param(".abs() > MAX_LOG_RATIO) & mask", ".abs() > MAX_LOG_RATIO).expand_as(mask)", id="padding counted"),
    ],
)
def test_broken_bounds_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_log_ratios(broken(importance_ratio, old, new), broken(is_ratio_clamped, old, new))


@pytest.mark.parametrize("surrogate", [clipped_surrogate, cispo_surrogate, sapo_surrogate])
@pytest.mark.parametrize("name", ["ratio", "advantages"])
def test_one_value_per_completion_is_a_column(surrogate, name):
    """[B] would broadcast along T where B equals T."""
    tensors = {"ratio": torch.ones(3, 3), "advantages": torch.tensor([[1.0], [2.0], [3.0]])}
    tensors[name] = torch.tensor([1.0, 2.0, 3.0])
    others = {"logprobs": torch.zeros(3, 3), "epsilon_high": 0.2} if surrogate is cispo_surrogate else {}
    with pytest.raises(ValueError, match=rf"{name} must have the shape .*, got \[3\].* pass {name}\[:, None\]"):
        surrogate(**tensors, **others)
