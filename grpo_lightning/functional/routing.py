"""Load-balancing loss of mixtures of experts.

The loss is computed from sums over tokens (`RouterLoad`). The sums of several micro-batches or ranks can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RouterLoad(NamedTuple):
    """How M routers distribute tokens over E experts, summed over tokens."""

    routed: Tensor
    """[M, E] number of tokens that each router sends to each expert; a token counts once for each of its k experts."""

    probs: Tensor
    """[E] sum of the router probabilities over tokens and routers, with gradients."""

    num_tokens: Tensor
    """Scalar: number of tokens; the same for every router."""


def router_load(logits: Sequence[Tensor], weights: Tensor, *, top_k: int) -> RouterLoad:
    """Count the tokens that each router sends to each expert, and add up the router probabilities of each expert.

    A token is sent to the k experts with the highest logits. The router probabilities are the softmax of the logits.

    Args:
        logits: For each router, the logits [R, E] of R tokens.
        weights: [R] how often each token counts; 0 for padding. The logits of padding are not read.
        top_k: k, the number of experts that a token is sent to.
    """
    places = weights.nonzero()[:, 0]
    counts = weights[places, None].float()
    routed, probs = [], []
    for each in logits:
        real = each.index_select(0, places).float()
        is_chosen = torch.zeros_like(real).scatter(1, real.detach().topk(top_k, dim=1).indices, 1.0)
        # Not a matrix product, which autocast and TF32 would round.
        routed.append((counts * is_chosen).sum(0))
        probs.append((counts * real.softmax(1)).sum(0))
    return RouterLoad(torch.stack(routed), torch.stack(probs).sum(0), counts.sum())


def total_load(loads: Sequence[RouterLoad]) -> RouterLoad:
    """Add up the loads of several sets of tokens."""
    return RouterLoad(*(torch.stack(parts).sum(0) for parts in zip(*loads, strict=True)))


def load_balancing_loss(routed: Tensor, probs: Tensor, num_tokens: Tensor) -> Tensor:
    """Compute the load-balancing loss of the Switch Transformer (arXiv:2101.03961, eq. 4 to 6), pooled over routers.

        loss = E * sum over e of  f[e] * P[e]
        f[e] = sum over m of routed[m, e] / (M * num_tokens)             fractions of tokens, which sum to k
        P[e] = probs[e] / (M * num_tokens)                               mean probability

    As in `load_balancing_loss_func` of transformers, f and P are means over all M routers. The loss is k if the load is
    uniform. Only P has a gradient.

    The loss of an optimizer step is the sum of one loss per micro-batch, each with the `probs` of the micro-batch and
    the `routed` and `num_tokens` of the step.

    Args:
        routed: [M, E] as in `RouterLoad`, of the optimizer step.
        probs: [E] as in `RouterLoad`, of the step or of a part of it.
        num_tokens: Scalar: number of tokens of the step; 0 gives a loss of 0.
    """
    divisor = len(routed) * num_tokens.clamp(min=1)
    return routed.shape[1] * (routed.sum(0) / divisor * probs / divisor).sum()


def max_expert_load(routed: Tensor) -> Tensor:
    """Find the largest load of any expert in any router, relative to a uniform load.

        load = E * max over m, e of (routed[m, e] / sum of routed[m])

    Args:
        routed: [M, E] as in `RouterLoad`.

    Returns:
        Scalar from 1 (uniform) to E / k (the same k experts for every token); 0 without tokens.
    """
    return routed.shape[1] * (routed / routed.sum(1, keepdim=True).clamp(min=1)).max()
