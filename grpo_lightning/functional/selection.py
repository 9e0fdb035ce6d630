"""Choose tokens of an optimizer step by their entropy, or by their covariance of log-prob and advantage.

The functions take vectors [M] with one value for each trained token of the step, over all micro-batches and ranks. If
the quantile or mean were taken over each micro-batch separately, the loss would depend on how the step is split into
micro-batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def high_entropy_tokens(entropies: Tensor, fraction: float) -> Tensor:
    """Find the tokens of highest entropy.

        chosen[m] = H[m] >= quantile of H at 1 - fraction

    The method is from "Beyond the 80/20 rule" (arXiv:2506.01939). The number of chosen tokens is
    floor(fraction (M - 1)) + 1, or more if entropies are equal. The quantile is computed by sorting, because
    `torch.quantile` refuses large inputs.

    Args:
        entropies: [M] entropy of each token, in nats.
        fraction: The function chooses this fraction of the M tokens. The fraction is above 0 and at most 1.

    Returns:
        [M] bool, True at the chosen tokens.
    """
    if not len(entropies):
        return torch.zeros_like(entropies, dtype=torch.bool)
    count = math.floor(fraction * (len(entropies) - 1)) + 1
    return entropies >= entropies.sort(descending=True).values[count - 1]


def high_covariance_tokens(logprobs: Tensor, advantages: Tensor, fraction: float, keys: Tensor | None = None) -> Tensor:
    """Find the tokens of highest covariance. Their updates lower the entropy most (KL-Cov, arXiv:2505.22617).

    The number of chosen tokens is floor(fraction M), but at least 1.

    Args:
        logprobs: [M] nats.
        advantages: [M] advantage of each token's completion.
        fraction: The function chooses this fraction of the M tokens. The fraction is above 0 and at most 1.
        keys: [M] random numbers for ties. A tie is a set of tokens with equal covariances. In a tie, the token with the
            smallest number is chosen first. If `keys` is None, the token with the smallest index is chosen first.

    Returns:
        [M] bool, True at the chosen tokens.
    """
    covariances = token_covariances(logprobs, advantages)
    count = max(1, int(fraction * len(logprobs)))
    return _highest(covariances, count, torch.zeros_like(covariances) if keys is None else keys)


def random_covariance_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    is_clipped: Tensor,
    keys: Tensor,
    *,
    fraction: float,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Choose tokens of high covariance at random, to remove their gradient (Clip-Cov, arXiv:2505.22617).

    Candidates are the tokens with low < covariance < high that are not clipped. The number of chosen candidates is
    floor(fraction M), but at least 1. If there are fewer candidates, all of them are chosen.

    Args:
        logprobs: [M] nats.
        advantages: [M] advantage of each token's completion.
        is_clipped: [M], nonzero or True where the surrogate clips the token.
        keys: [M] random numbers; the candidates with the smallest numbers are chosen.
        fraction: Above 0 and at most 1; a fraction of all M tokens, not of the candidates.
        low: Exclusive lower limit of the covariance, in nats times the unit of the advantage.
        high: Exclusive upper limit of the covariance.

    Returns:
        [M] bool, True at the chosen tokens.
    """
    covariances = token_covariances(logprobs, advantages)
    candidates = (covariances > low) & (covariances < high) & ~is_clipped.bool()
    count = min(max(1, int(fraction * len(logprobs))), int(candidates.sum()))
    return _highest(candidates.to(keys), count, keys)


def token_covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's term of the covariance of log-prob and advantage.

        cov[m] = (logprob[m] - mean of logprobs) (A[m] - mean of A)

    A policy gradient step changes the entropy in proportion to minus the covariance (arXiv:2505.22617).

    Args:
        logprobs: [M] nats.
        advantages: [M] advantage of each token's completion.

    Returns:
        [M], in nats times the unit of the advantage.
    """
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _highest(values: Tensor, count: int, keys: Tensor) -> Tensor:
    """True at the `count` highest of the values [M]; among equal values, smaller keys [M] come first."""
    order = keys.argsort(stable=True)
    order = order[values[order].argsort(descending=True, stable=True)]
    return torch.zeros_like(values, dtype=torch.bool).scatter(0, order[:count], True)
