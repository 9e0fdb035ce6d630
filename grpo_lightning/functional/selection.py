"""Choose tokens of an optimizer step: those of high entropy, or of high covariance of log-prob and advantage.

The functions take all trained tokens of the step, over all micro-batches and ranks, as vectors [M]. A quantile or mean
of a micro-batch alone would make the loss depend on how a step is split.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def high_entropy_tokens(entropies: Tensor, fraction: float) -> Tensor:
    """Find the tokens of highest entropy, at which the policy decides between continuations.

        chosen[m] = H[m] >= quantile of H at 1 - fraction

    "Beyond the 80/20 rule" (arXiv:2506.01939, with a fraction of 0.2). The quantile is interpolated linearly, as
    `torch.quantile` does it for fewer elements: floor(fraction (M - 1)) + 1 tokens are chosen, and more with ties.

    Args:
        entropies: [M] nats.
        fraction: Above 0 and at most 1.

    Returns:
        [M] bool.
    """
    return _highest(entropies, math.floor(fraction * (len(entropies) - 1)) + 1)


def high_covariance_tokens(logprobs: Tensor, advantages: Tensor, fraction: float) -> Tensor:
    """Find the tokens of highest covariance, whose updates lower the entropy most (KL-Cov, arXiv:2505.22617).

    Args:
        logprobs: [M] nats.
        advantages: [M] of each token's completion.
        fraction: Above 0 and at most 1; at least one token is chosen, and more than the fraction with ties.

    Returns:
        [M] bool, True at the floor(fraction M) tokens of highest `token_covariances`.
    """
    return _highest(token_covariances(logprobs, advantages), max(1, int(fraction * len(logprobs))))


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
    """Choose tokens of high covariance at random (Clip-Cov, arXiv:2505.22617).

    Candidates are the tokens with low < covariance < high that are not clipped. Of these, floor(fraction M) are chosen,
    at least one, or all if there are fewer.

    Args:
        logprobs: [M] nats.
        advantages: [M] of each token's completion.
        is_clipped: [M], true where the surrogate clips the token, which then has no gradient to remove.
        keys: [M] random numbers: the candidates with the smallest are chosen.
        fraction: Above 0 and at most 1, of all M tokens.
        low: Exclusive bound of the covariance, in nats times the unit of the advantage.
        high: Exclusive bound.

    Returns:
        [M] bool.
    """
    covariances = token_covariances(logprobs, advantages)
    candidates = (covariances > low) & (covariances < high) & ~is_clipped.bool()
    count = min(max(1, int(fraction * len(logprobs))), int(candidates.sum()))
    return _highest(torch.where(candidates, -keys, -torch.inf), count) & candidates


def token_covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's term of the covariance of log-prob and advantage.

        cov[m] = (logprob[m] - mean of logprobs) (A[m] - mean of A)

    A policy gradient step changes the entropy by minus this covariance (arXiv:2505.22617): likely tokens of
    good completions lower it, and so do unlikely tokens of bad ones.

    Args:
        logprobs: [M] nats.
        advantages: [M].

    Returns:
        [M].
    """
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _highest(values: Tensor, count: int) -> Tensor:
    """True at the `count` highest values [M], and at those equal to the lowest of them, whatever their order."""
    if not len(values) or not count:
        return torch.zeros_like(values, dtype=torch.bool)
    return values >= values.sort(descending=True).values[count - 1]
