"""Per-token estimates of how far the policy has moved from the reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.functional.losses import MAX_LOG_RATIO

MAX_K3 = 10.0
"""Nats per token. k3 grows as exp(d): unbounded, one token that the policy has all but lost is the whole loss. The
bound of verl, OpenRLHF and ms-swift; a token is beyond it where d is above 2.6 or below -11."""


def kl_divergence(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Tensor:
    """Estimate KL(policy || reference) from one drawn token each.

        d = ref_logprobs - logprobs
        k1 = -d,   k2 = d^2 / 2,   k3 = min( exp(d) - d - 1, 10 )

    k1 and k3 are unbiased where the tokens were drawn from the policy, k2 is not; k2 and k3 are never negative
    (Schulman 2020, http://joschu.net/blog/kl-approx.html). Unbiased in value is not unbiased in gradient: of the three
    only k2's gradient is that of the KL. GRPO uses k3 (arXiv:2402.03300, eq. 4). k3's exponent is clipped to 20 nats
    and its value to 10, with a gradient of 0 beyond (`is_k3_clamped` says where): what holds of k3 holds below that.

    Args:
        logprobs: [B, T] nats, of the policy.
        ref_logprobs: [B, T] nats, of the reference; a constant.
        mask: [B, T] bool, True where a token is trained on; None is everywhere. Masked tokens count as unmoved (0),
            whatever their log-probs: exp(d) of padding can overflow, and its gradient is nan even after masking.
        estimator: Which of the three.

    Returns:
        [B, T] nats per token.

    Raises:
        ValueError: If the estimator is none of the three.
    """
    difference = ref_logprobs.detach() - logprobs
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # exp(d) - 1 rounds to below d for small d
        return (torch.expm1(difference) - difference).clamp(max=MAX_K3)
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}.")


def is_k3_clamped(kl: Tensor) -> Tensor:
    """Say which tokens have a k3 that was clipped, by its value. Args: kl: [B, T] nats, of `kl_divergence`.

    Returns:
        [B, T] bool; False where masked.
    """
    return kl >= MAX_K3
