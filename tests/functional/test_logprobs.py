from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.functional import token_entropy, token_logprobs

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
INF = float("inf")


@st.composite
def scores(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    token_ids = torch.randint(shape[2], shape[:2], generator=generator)
    return logits, token_ids, draw(st.sampled_from([0.5, 1.0, 1.7]))


# --- by hand


def check_token_logprobs(token_logprobs: Any) -> None:
    # Weights 1 : 2 : 5, so the probabilities are 1/8, 2/8, 5/8; at temperature 1/2 the weights are squared, 1 : 4 : 25.
    logits = torch.tensor([[[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]]).log()
    token_ids = torch.tensor([[2, 0]])
    assert_close(token_logprobs(logits, token_ids), torch.tensor([[5 / 8, 1 / 8]]).log())
    assert_close(token_logprobs(logits, token_ids, temperature=0.5), torch.tensor([[25 / 30, 1 / 30]]).log())
    # 1000 equal logits near 100: one bf16 step there is 0.5, the answer is -log(1000) = -6.9078.
    wide = torch.full((1, 1, 1000), 100.0, dtype=torch.bfloat16)
    result = token_logprobs(wide, torch.tensor([[3]]))
    assert_close(result, torch.tensor([[-math.log(1000)]]), rtol=0, atol=1e-4)


def check_token_entropy(token_entropy: Any) -> None:
    # 1/2, 1/4, 1/4 and a forbidden token: H = 1/2 log 2 + 2/4 log 4 = 1.5 log 2.
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]]).log()
    assert_close(token_entropy(logits), torch.tensor([[1.5 * math.log(2)]]))
    # At temperature 1/2 the weights are 4 : 1 : 1, H = log 6 - 4/6 log 4.
    assert_close(token_entropy(logits, temperature=0.5), torch.tensor([[math.log(6) - 2 / 3 * math.log(4)]]))
    # One possible token: certain.
    certain = torch.tensor([[[-INF, 7.0, -INF]]], requires_grad=True)
    entropy = token_entropy(certain)
    entropy.sum().backward()
    assert entropy.item() == 0
    assert_close(certain.grad, torch.zeros(1, 1, 3))


def test_token_logprobs_by_hand() -> None:
    check_token_logprobs(token_logprobs)


def test_token_entropy_by_hand() -> None:
    check_token_entropy(token_entropy)


def test_a_forbidden_token_is_impossible() -> None:
    logits = torch.tensor([[[0.0, -INF, 0.0]]], requires_grad=True)
    assert token_logprobs(logits, torch.tensor([[1]])).item() == -INF
    logprob = token_logprobs(logits, torch.tensor([[0]]))
    logprob.sum().backward()
    assert_close(logprob, torch.tensor([[-math.log(2)]]))
    assert_close(logits.grad, torch.tensor([[[0.5, 0.0, -0.5]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_float32(dtype: torch.dtype) -> None:
    logits, token_ids = torch.randn(2, 3, 5).to(dtype), torch.zeros(2, 3, dtype=torch.long)
    assert token_logprobs(logits, token_ids).dtype == token_entropy(logits).dtype == torch.float32
    assert_close(token_logprobs(logits, token_ids), token_logprobs(logits.float(), token_ids))


def test_an_empty_completion_has_no_logprobs() -> None:
    assert token_logprobs(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)
    assert token_entropy(torch.zeros(2, 0, 5)).shape == (2, 0)


def test_one_vocabulary_wide_tensor_is_kept_for_backward() -> None:
    logits = torch.randn(2, 3, 50, requires_grad=True)
    kept: set[int] = set()

    def remember(tensor: Tensor) -> Tensor:
        if tensor.numel() >= logits.numel():
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        token_logprobs(logits, torch.zeros(2, 3, dtype=torch.long))
    assert kept == {logits.data_ptr()}


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_has_no_logprobs(temperature: float) -> None:
    message = f"temperature must be positive to score tokens, got {temperature}"
    with pytest.raises(ValueError, match=message):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature=temperature)
    with pytest.raises(ValueError, match=message):
        token_entropy(torch.zeros(1, 1, 2), temperature=temperature)


# --- parity with a loop


@quick
@given(case=scores())
def test_both_equal_a_loop(case: tuple[Tensor, Tensor, float]) -> None:
    logits, token_ids, temperature = case
    logprobs = token_logprobs(logits, token_ids, temperature=temperature)
    entropy = token_entropy(logits, temperature=temperature)
    for b, row in enumerate(logits.tolist()):
        for t, scores in enumerate(row):
            weights = [math.exp((score - max(scores)) / temperature) for score in scores]
            probabilities = [weight / math.fsum(weights) for weight in weights]
            chosen = token_ids[b, t].item()
            log_p = (scores[chosen] - max(scores)) / temperature - math.log(math.fsum(weights))
            assert logprobs[b, t].item() == pytest.approx(log_p, rel=1e-5, abs=2e-5)
            expected = math.fsum(-p * math.log(p) for p in probabilities if p > 0)
            assert entropy[b, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


# --- properties


@quick
@given(case=scores(), shift=st.floats(-5, 5))
def test_a_common_shift_of_the_logits_changes_nothing(case: tuple[Tensor, Tensor, float], shift: float) -> None:
    logits, token_ids, temperature = case
    for score in (lambda z: token_logprobs(z, token_ids, temperature=temperature), token_entropy):
        assert_close(score(logits + shift), score(logits), rtol=1e-5, atol=1e-4)


@quick
@given(case=scores())
def test_probabilities_sum_to_one_and_average_to_the_entropy(case: tuple[Tensor, Tensor, float]) -> None:
    logits, token_ids, temperature = case
    every = [torch.full_like(token_ids, v) for v in range(logits.size(2))]
    logprobs = torch.stack([token_logprobs(logits, ids, temperature=temperature) for ids in every], dim=-1)
    entropy = token_entropy(logits, temperature=temperature)
    assert_close(logprobs.exp().sum(-1), torch.ones_like(entropy))
    assert_close(-(logprobs.exp() * logprobs).sum(-1), entropy, rtol=1e-4, atol=1e-5)
    assert (entropy >= 0).all()
    assert (entropy <= math.log(logits.size(2)) + 1e-5).all()


@quick
@given(case=scores())
def test_the_gradient_is_one_hot_minus_probability(case: tuple[Tensor, Tensor, float]) -> None:
    logits, token_ids, temperature = case
    logits.requires_grad_()
    token_logprobs(logits, token_ids, temperature=temperature).sum().backward()
    one_hot = torch.nn.functional.one_hot(token_ids, logits.size(2))
    assert_close(logits.grad, (one_hot - (logits.detach() / temperature).softmax(-1)) / temperature)


@quick
@given(case=scores())
def test_inputs_are_not_modified(case: tuple[Tensor, Tensor, float]) -> None:
    logits, token_ids, temperature = case
    before = logits.clone(), token_ids.clone()
    token_logprobs(logits, token_ids, temperature=temperature)
    token_entropy(logits, temperature=temperature)
    assert_close(before, (logits, token_ids), rtol=0, atol=0)


# --- teeth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("logits / temperature", "logits", id="temperature dropped"),
        pytest.param("logits / temperature", "logits * temperature", id="temperature inverted"),
        pytest.param("logits = logits.float()", "pass", id="computed in bf16"),
        pytest.param(" - torch.logsumexp(scaled, dim=-1)", "", id="not normalized"),
        pytest.param("token_ids.unsqueeze(-1)", "token_ids.roll(1, 1).unsqueeze(-1)", id="off by one token"),
    ],
)
def test_broken_logprobs_are_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_token_logprobs(broken(token_logprobs, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("return -(logprobs", "return (logprobs", id="sign flipped"),
        pytest.param(".masked_fill(logprobs.isneginf(), 0.0)", "", id="0 x -inf"),
        pytest.param("logits / temperature", "logits", id="temperature dropped"),
    ],
)
def test_a_broken_entropy_is_caught(broken: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_token_entropy(broken(token_entropy, old, new))
