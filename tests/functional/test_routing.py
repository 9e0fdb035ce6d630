"""The load-balancing loss: by hand, as in transformers, and the same however the tokens are split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_lightning.functional import load_balancing_loss, max_expert_load, router_load, total_load
from grpo_lightning.functional.routing import RouterLoad


def loss_of(load: RouterLoad) -> Tensor:
    return load_balancing_loss(load.routed, load.probs, load.num_tokens)


def some_tokens(routers: int = 3, tokens: int = 12, experts: int = 5, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Logits of every router, and weights, some of them 0 or above 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = [3 * torch.randn(tokens, experts, generator=generator) for _ in range(routers)]
    return logits, torch.randint(0, 4, (tokens,), generator=generator)


def test_by_hand():
    # Two tokens, the second counts twice; probabilities (3/4, 1/4) and (1/5, 4/5), so the experts are 0, 1, 1.
    logits = torch.log(torch.tensor([[0.75, 0.25], [0.2, 0.8], [0.5, 0.5]]))
    load = router_load([logits], torch.tensor([1, 2, 0]), top_k=1)
    assert load.routed.tolist() == [[1.0, 2.0]]
    assert load.probs.tolist() == pytest.approx([0.75 + 2 * 0.2, 0.25 + 2 * 0.8])
    assert load.num_tokens == 3
    # E * (f0 P0 + f1 P1)
    assert loss_of(load).item() == pytest.approx(2 * (1 / 3 * 1.15 / 3 + 2 / 3 * 1.85 / 3))
    assert max_expert_load(load.routed).item() == pytest.approx(2 * 2 / 3)


def test_two_routers_are_pooled():
    """The means are over tokens and routers: opposite preferences of two routers cancel out."""
    logits = torch.log(torch.tensor([[0.9, 0.1]]))
    load = router_load([logits, logits.flip(1)], torch.tensor([1]), top_k=1)
    assert loss_of(load).item() == pytest.approx(1.0)
    assert max_expert_load(load.routed).item() == 2.0  # of a single router


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_uniform_load_gives_k(top_k):
    """The minimum for uniform probabilities; and k experts for all tokens the maximum of `max_expert_load`."""
    experts = torch.eye(4)
    logits = sum(experts.roll(shift, 1) for shift in range(top_k)) * 1e-6
    load = router_load([logits], torch.ones(4), top_k=top_k)
    assert loss_of(load).item() == pytest.approx(top_k, abs=1e-5)
    assert max_expert_load(load.routed).item() == 1.0
    alone = router_load([logits[:1].expand(4, 4)], torch.ones(4), top_k=top_k)
    assert max_expert_load(alone.routed).item() == 4 / top_k


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_loss_and_gradient_are_those_of_transformers(top_k):
    """Its mask counts tokens 0 or 1 times: a token that counts twice is repeated there."""
    logits, weights = some_tokens()
    repeated = [each.repeat_interleave(weights, 0) for each in logits]
    mask = torch.ones(1, int(weights.sum()))
    own, theirs = ([each.clone().requires_grad_() for each in logits] for _ in range(2))
    repeated = [each.repeat_interleave(weights, 0) for each in theirs]
    loss = loss_of(router_load(own, weights, top_k=top_k))
    want = load_balancing_loss_func(tuple(repeated), 5, top_k, mask)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    loss.backward()
    want.backward()
    for got, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_16_bit_logits_are_summed_in_32_bits():
    logits, weights = some_tokens(tokens=400)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        load = router_load([each.bfloat16() for each in logits], weights, top_k=2)
    assert load.probs.dtype == torch.float32
    torch.testing.assert_close(
        load.probs, router_load([each.bfloat16().float() for each in logits], weights, top_k=2).probs
    )


@given(cut=st.integers(0, 12), pads=st.integers(0, 5), seed=st.integers(0, 99))
def test_the_loss_of_parts_adds_up(cut, pads, seed):
    """Micro-batches, chunks or ranks: with the routing of all tokens, the shares of two parts are the loss of both."""
    logits, weights = some_tokens(seed=seed)
    whole = router_load(logits, weights, top_k=2)
    garbage = [torch.cat([each, torch.full((pads, 5), torch.nan)]) for each in logits]  # padding is not read
    padded = torch.cat([weights, torch.zeros(pads, dtype=torch.long)])
    parts = [
        router_load([each[part] for each in garbage], padded[part], top_k=2) for part in (slice(cut), slice(cut, None))
    ]
    total = total_load(parts)
    for got, want in zip(total, whole, strict=True):
        torch.testing.assert_close(got, want)
    shares = [load_balancing_loss(total.routed, part.probs, total.num_tokens) for part in parts]
    assert sum(share.item() for share in shares) == pytest.approx(loss_of(whole).item(), rel=1e-5)


def test_padding_has_no_gradient():
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss_of(router_load([logits], torch.tensor([1, 0]), top_k=2)).backward()
    assert logits.grad[0].any()
    assert not logits.grad[1].any()


def test_no_tokens_give_a_loss_of_0():
    logits = torch.randn(3, 4).requires_grad_()
    load = router_load([logits], torch.zeros(3), top_k=2)
    assert loss_of(load) == 0
    assert max_expert_load(load.routed) == 0
    loss_of(load).backward()
    assert not logits.grad.any()
