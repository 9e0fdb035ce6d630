"""What makes up for tokens that another distribution drew than the one that is trained.

An engine computes in other precisions, with other kernels or older weights than the policy, so that its log-probs are
not those of the policy at the start of the cycle. Left out on purpose: the ratio of the policy now to the policy then,
which is the importance ratio of the loss (`losses.importance_ratio`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.functional.log_ratios import bounded_exp
from grpo_lightning.functional.masking import masked_mean


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"],
    outside: Literal["truncate", "mask"],
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weigh the loss by how likely the policy was to draw what the engine drew.

        d = old_logprobs - rollout_logprobs
        token:     w[b, t] = exp(d[b, t])
        sequence:  w[b]    = exp( sum over trained t of d[b, t] )
        truncate:  min(max(w, low), high)
        mask:      w where low <= w <= high, else 0

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"); masked per token it is IcePop (Ling team 2025, arXiv:2510.18855). A sequence's weight is a product over
    its tokens: long completions leave any fixed range. Exponents are clipped to -20 and 20 (`log_ratios.py`).

    Args:
        old_logprobs: [B, T] nats, of the policy at the start of the cycle.
        rollout_logprobs: [B, T] nats, of the engine when it drew the tokens.
        mask: [B, T] bool, True where a token is trained on; the others count as equal.
        level: A weight per token, or one per completion.
        outside: What becomes of weights outside of [low, high].
        low: Least weight.
        high: Largest weight.

    Returns:
        [B, T] for tokens, [B, 1] for sequences; a constant. Exactly 1 where both distributions agree and 1 is allowed.

    Raises:
        ValueError: If level or outside are none of these.
    """
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    elif level != "token":
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}.")
    weights = bounded_exp(difference)
    if outside == "truncate":
        return weights.clamp(low, high)
    if outside == "mask":
        return torch.where((weights >= low) & (weights <= high), weights, 0.0)
    raise ValueError(f"outside must be 'truncate' or 'mask', got {outside!r}.")


def keeps_sequence(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, advantages: Tensor, *, threshold: float
) -> Tensor:
    """Leave out completions of negative advantage that the policy by now would hardly draw.

        kept[b] = A[b] >= 0  or  mean over trained t of (rollout_logprobs - logprobs) <= threshold

    To push down what is already unlikely teaches little and destabilises (DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1,
    "off-policy sequence masking").

    Args:
        logprobs: [B, T] nats, of the policy now.
        rollout_logprobs: [B, T] nats, of what drew the tokens.
        mask: [B, T] bool, True where a token is trained on.
        advantages: [B, 1].
        threshold: Nats per token.

    Returns:
        [B, 1] bool, True where a completion is trained on.
    """
    moved = masked_mean(torch.where(mask, rollout_logprobs - logprobs, 0.0).detach(), mask, dim=1)
    return (advantages >= 0) | (moved.unsqueeze(1) <= threshold)
