"""The policy loss in pieces: ratio, surrogate, off-policy correction, KL to the reference, and the mean over tokens.

The loss is not averaged over a micro-batch. Instead, each micro-batch contributes its share of the mean over the entire
optimizer step. The gradient therefore does not depend on how a step is split over ranks and micro-batches.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_token"]


MAX_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio, in nats, as in verl, OpenRLHF and ms-swift. Without the bound, exp overflows float32
at log-ratios above 88.7. The gradient is then nan, even where the loss is clipped to a finite value."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clip(log_ratio, -20, 20)), with a gradient of 0 where the log-ratio is clipped.

    Args:
        log_ratio: [...] nats.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel = "token",
) -> Tensor:
    """Importance ratios of the current policy to the old policy.

        token:     r[b, t] = exp(logprobs - old_logprobs)
        sequence:  r[b]    = exp( mean over trained t of (logprobs - old_logprobs) )
        sequence_token:  r[b, t] = stop_gradient( r[b] / exp(logprobs) ) exp(logprobs)

    Exponents are clipped to [-20, 20] (`bounded_exp`).

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, under the policy before the rollout's first update; treated as a constant.
        mask: [B, T] bool, True where a token is trained on. Where it is False, logprobs - old_logprobs counts as 0.
        level: "token" is the ratio of PPO and GRPO. "sequence" is the length-normalized ratio of GSPO
            (arXiv:2507.18071, eq. 7). "sequence_token" has the value of "sequence", but each token's ratio has the
            gradient of the token's own log-prob (GSPO-token, eq. 14).

    Returns:
        [B, T], or [B, 1] for "sequence".

    Raises:
        ValueError: If the level is none of the three.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, level)
    if level == "sequence_token":
        own = torch.where(mask, logprobs - logprobs.detach(), 0.0)  # 0, with a gradient
        log_ratio = log_ratio.detach() + own
    return bounded_exp(log_ratio)


def is_ratio_clamped(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, level: RatioLevel = "token") -> Tensor:
    """Find trained tokens whose log-ratio is outside [-20, 20] nats, the range to which `importance_ratio` clips it.

    The arguments are those of `importance_ratio`.

    Returns:
        [B, T] bool; False where `mask` is False.
    """
    return (_log_ratio(logprobs.detach(), old_logprobs, mask, level).abs() > MAX_LOG_RATIO) & mask


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Log-ratio [B, T], or its mean over each sequence [B, 1]."""
    # Masked before exp, because an overflow at a padded position gives a nan gradient even if it is masked afterwards.
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    if level == "token":
        return log_ratio
    if level in ("sequence", "sequence_token"):
        return masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
    raise ValueError(f"level must be 'token', 'sequence' or 'sequence_token', got {level!r}.")


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate. A ratio that left the clip range in the direction of the advantage has no gradient.

        loss = -min( min(r, dual_clip) A, clip(r, 1 - epsilon, 1 + epsilon_high) A )

    Without `dual_clip`, the loss is that of PPO (arXiv:1707.06347, eq. 7). With `dual_clip`, the loss is that of
    dual-clip PPO (arXiv:1912.09729) and of INTELLECT-2 (arXiv:2505.07291).

    Args:
        ratio: [B, T], or [B, 1] for sequences.
        advantages: [B, 1], or [B, T].
        epsilon: How far below 1 the ratio may fall.
        epsilon_high: How far above 1 the ratio may rise (clip-higher, DAPO, arXiv:2503.14476, sec. 3.1); None uses
            `epsilon`.
        dual_clip: Upper limit of `ratio` if the advantage is negative; None means no limit.

    Returns:
        The loss of each token: [B, T], or [B, 1] if both inputs have the shape [B, 1].

    Raises:
        ValueError: If `dual_clip` is not above 1 + `epsilon_high`.
        ValueError: If `ratio` or `advantages` does not have two dimensions.
    """
    _check_columns(ratio=ratio, advantages=advantages)
    highest = 1 + (epsilon if epsilon_high is None else epsilon_high)
    if dual_clip is not None and dual_clip <= highest:
        raise ValueError(
            f"dual_clip must be above 1 + epsilon_high = {highest:g}, got {dual_clip:g}. Raise it (3 is common), or "
            "set it to None."
        )
    clipped = ratio.clamp(1 - epsilon, highest)
    if dual_clip is not None:
        ratio = ratio.clamp(max=dual_clip)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped_low(ratio: Tensor, advantages: Tensor, *, epsilon: float) -> Tensor:
    """Find tokens that `clipped_surrogate` clips from below: r < 1 - epsilon and A < 0.

    The arguments are those of `clipped_surrogate`.

    Returns:
        Bool [B, T], or [B, 1] if both inputs have the shape [B, 1]. If `ratio` is [B, T], padding tokens are False,
        because their ratio is 1.
    """
    return (ratio < 1 - epsilon) & (advantages < 0)


def is_clipped_high(ratio: Tensor, advantages: Tensor, *, epsilon_high: float) -> Tensor:
    """Find tokens that `clipped_surrogate` clips from above: r > 1 + epsilon_high and A > 0.

    The arguments are those of `clipped_surrogate`.

    Returns:
        Bool [B, T], or [B, 1] if both inputs have the shape [B, 1]. If `ratio` is [B, T], padding tokens are False,
        because their ratio is 1.
    """
    return (ratio > 1 + epsilon_high) & (advantages > 0)


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, epsilon_high: float, epsilon: float | None = None
) -> Tensor:
    """CISPO: weight each token's log-probability by its capped ratio, so that every token keeps a gradient.

        loss = -stop_gradient( min(max(r, 1 - epsilon), 1 + epsilon_high) ) A logprob

    CISPO is the loss of MiniMax-M1 (arXiv:2506.13585). verl uses the lower bound 1 - `epsilon`. CISPO's authors use
    no lower bound. In some other implementations, the cap is `epsilon_high` itself, not 1 + `epsilon_high`.

    Args:
        ratio: [B, T], or [B, 1] for sequences; treated as a constant.
        advantages: [B, 1], or [B, T].
        logprobs: [B, T] nats, of the current policy. The gradient flows only through these log-probabilities.
        epsilon_high: A ratio above 1 + `epsilon_high` is replaced by 1 + `epsilon_high`.
        epsilon: A ratio below 1 - `epsilon` is replaced by 1 - `epsilon`; None means no lower bound.

    Returns:
        [B, T] the loss of each token. Only its gradient is meaningful.

    Raises:
        ValueError: If `ratio` or `advantages` does not have two dimensions.
    """
    _check_columns(ratio=ratio, advantages=advantages)
    weight = ratio.clamp(min=None if epsilon is None else 1 - epsilon, max=1 + epsilon_high)
    return -weight.detach() * advantages * logprobs


def reinforce_surrogate(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """REINFORCE: the policy gradient itself, without ratio or clip.

        loss = -A logprob

    The loss is that of Williams 1992, and of GPG (arXiv:2504.02546). Its gradient is the policy gradient only if the
    current policy sampled the tokens, so make one optimizer step per rollout.

    Args:
        advantages: [B, 1], or [B, T].
        logprobs: [B, T] nats, of the current policy.

    Returns:
        [B, T] the loss of each token. Only its gradient is meaningful.

    Raises:
        ValueError: If `advantages` or `logprobs` does not have two dimensions.
    """
    _check_columns(advantages=advantages, logprobs=logprobs)
    return -advantages * logprobs


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """SAPO: instead of a hard clip, a sigmoid gate reduces the gradient as the ratio moves away from 1.

        loss = -(4 / tau) sigmoid( tau (r - 1) ) A,   where tau depends on the sign of A

    SAPO is soft adaptive policy optimization (arXiv:2511.20347, eq. 5-6). Only the gradient is meaningful.

    Args:
        ratio: [B, T], or [B, 1] for sequences.
        advantages: [B, 1], or [B, T].
        temperature_positive: tau where A > 0.
        temperature_negative: tau where A <= 0.

    Returns:
        The loss of each token: [B, T], or [B, 1] if both inputs have the shape [B, 1].

    Raises:
        ValueError: If `ratio` or `advantages` does not have two dimensions.
    """
    _check_columns(ratio=ratio, advantages=advantages)
    tau = torch.full_like(advantages, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def gmpo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.4,
    epsilon_high: float | None = None,
) -> Tensor:
    """GMPO: the geometric mean of the clipped token ratios of a completion.

        d = logprobs - old_logprobs
        c = min(d, epsilon_high) where A > 0, else max(d, -epsilon)
        loss = -exp( mean over trained t of c ) A

    GMPO is geometric-mean policy optimization (arXiv:2507.20673). The mean of c is clipped to [-20, 20]
    (`bounded_exp`).

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, under the policy before the rollout's first update; treated as a constant.
        mask: [B, T] bool, True where a token is trained on. Where it is False, d counts as 0.
        advantages: [B, 1].
        epsilon: How far the log-ratio of a token may fall, in nats.
        epsilon_high: How far the log-ratio of a token may rise, in nats; None uses `epsilon`.

    Returns:
        [B, 1] the loss of each completion.

    Raises:
        ValueError: If `logprobs` or `advantages` does not have two dimensions.
    """
    _check_columns(logprobs=logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, "token")
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-epsilon))
    return -bounded_exp(masked_mean(clipped, mask, dim=1).unsqueeze(1)) * advantages


def kl_cov_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    coefficient: float = 1.0,
) -> Tensor:
    """KL-Cov: a penalty for changes to the log-probs of the selected tokens, instead of clipping.

        d = logprobs - old_logprobs
        loss = -exp(d) A + (coefficient |d| where selected, else 0)

    Updates of the selected tokens lower the entropy more than updates of the other tokens. The penalty is the absolute
    log-ratio, as in the code of KL-Cov's authors (arXiv:2505.22617) and in verl.

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, under the policy before the rollout's first update; treated as a constant.
        mask: [B, T] bool, True where a token is trained on. Where it is False, d counts as 0.
        advantages: [B, 1].
        selected: [B, T] bool, True at the tokens that `high_covariance_tokens` finds among all tokens of the optimizer
            step.
        coefficient: Weight of the penalty.

    Returns:
        [B, T] the loss of each token.

    Raises:
        ValueError: If `logprobs` or `advantages` does not have two dimensions.
    """
    _check_columns(logprobs=logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, "token")
    return -bounded_exp(log_ratio) * advantages + coefficient * torch.where(selected, log_ratio.abs(), 0.0)


def dppo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    outside: Tensor,
    *,
    max_ratio: float = 20.0,
) -> Tensor:
    """DPPO: no gradient if a token's probability has moved too far in the direction of the advantage.

        r = exp(logprobs - old_logprobs)
        loss = 0 where outside, else -stop_gradient( min(r, max_ratio) ) A logprob

    DPPO is divergence proximal policy optimization (arXiv:2602.04879, eq. 12), with the loss as in verl. The old policy
    of DPPO is the policy that the engine sampled from, so pass the engine's log-probs as `old_logprobs`.

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, of the engine when it sampled the tokens; treated as a constant.
        mask: [B, T] bool, True where a token is trained on. Where it is False, r counts as 1.
        advantages: [B, 1].
        outside: [B, T] bool, True at the tokens that `leaves_trust_region` finds (`low | high`).
        max_ratio: Maximum ratio; far above 1, because truncating the ratio biases the gradient.

    Returns:
        [B, T] the loss of each token. Only its gradient is meaningful.

    Raises:
        ValueError: If `logprobs` or `advantages` does not have two dimensions.
    """
    _check_columns(logprobs=logprobs, advantages=advantages)
    ratio = importance_ratio(logprobs, old_logprobs, mask).detach().clamp(max=max_ratio)
    return torch.where(outside, 0.0, -ratio * advantages * logprobs)


def leaves_trust_region(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Find tokens whose probability moved too far in the advantage's direction (DPPO, arXiv:2602.04879, eq. 12-14).

        p = exp(logprobs), q = exp(old_logprobs)
        tv:  D = |p - q|
        kl:  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        low:  A <= 0, p < q and D > epsilon;   high:  A > 0, p > q and D > epsilon_high

    In log((1 - q) / (1 - p)), 1e-8 is added to numerator and denominator, as in verl.

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, as in `dppo_surrogate`.
        advantages: [B, 1].
        divergence: "tv" is the total variation, "kl" is KL(old policy || current policy).
        epsilon: Maximum D of tokens that have become less likely: a probability ("tv") or nats ("kl").
        epsilon_high: Maximum D of tokens that have become more likely; None uses `epsilon`.

    Returns:
        `low` and `high`, both [B, T] bool; arbitrary at padding.

    Raises:
        ValueError: If the divergence is neither "tv" nor "kl".
    """
    new, old = logprobs.detach(), old_logprobs.detach()
    p, q = new.exp().clamp(max=1), old.exp().clamp(max=1)
    if divergence == "tv":
        distance = (p - q).abs()
    elif divergence == "kl":
        distance = q * (old - new) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    else:
        raise ValueError(f"divergence must be 'tv' or 'kl', got {divergence!r}.")
    high = epsilon if epsilon_high is None else epsilon_high
    low_moved, high_moved = (advantages <= 0) & (p < q), (advantages > 0) & (p > q)
    return low_moved & (distance > epsilon), high_moved & (distance > high)


def vespo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    rollout_weights: Tensor | None = None,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """VESPO multiplies each token's log-probability by a soft function of its completion's ratio, instead of clipping.

        w = product over trained t of r[b, t] (times rollout_weights[b, t])
        phi = exp(lambda) w^k exp(-lambda w),   where k and lambda depend on the sign of A
        loss = -stop_gradient(phi) A logprob

    VESPO is variational sequence-level soft policy optimization (arXiv:2602.10693). As in TRL, log-ratios are clipped
    to [-20, 20] nats, the logs of w and of `rollout_weights` are clipped to [log 1e-8, 20], and lambda is clipped to at
    least 1e-4.

    Args:
        logprobs: [B, T] nats, of the current policy. The gradient flows only through these log-probabilities.
        old_logprobs: [B, T] nats, under the policy before the rollout's first update; treated as a constant.
        mask: [B, T] bool, True where a token is trained on. Where it is False, r counts as 1.
        advantages: [B, 1].
        rollout_weights: [B, T] off-policy weights, from the function `rollout_weights` with the level "token".
        positive: k and lambda where A >= 0.
        negative: k and lambda where A < 0.

    Returns:
        [B, T] the loss of each token. Only its gradient is meaningful.

    Raises:
        ValueError: If `logprobs` or `advantages` does not have two dimensions.
    """
    _check_columns(logprobs=logprobs, advantages=advantages)
    lowest = math.log(1e-8)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, "token").detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if rollout_weights is not None:
        log_weights = rollout_weights.detach().log().clamp(lowest, MAX_LOG_RATIO)
        log_ratio = log_ratio + torch.where(mask, log_weights, 0.0)
    log_w = log_ratio.sum(dim=1, keepdim=True).clamp(lowest, MAX_LOG_RATIO)
    k, decay = (torch.where(advantages >= 0, *values) for values in zip(positive, negative, strict=True))
    decay = decay.clamp(min=1e-4)
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    return -phi * advantages * logprobs


def _check_columns(**tensors: Tensor) -> None:
    """Refuse [B] tensors: they would broadcast along T if B equals T. Raises: ValueError naming tensor and shape."""
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} must have the shape [B, T] or [B, 1], got {list(tensor.shape)}: with one value per "
                f"completion, pass {name}[:, None]."
            )


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    outside: Literal["truncate", "mask"],
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Off-policy correction weights, which are ratios of the old policy to the engine.

        d = old_logprobs - rollout_logprobs
        token:     w[b, t] = exp(d[b, t])
        sequence:  w[b]    = exp( sum over trained t of d[b, t] )
        geometric: w[b]    = exp( mean over trained t of d[b, t] )
        truncate:  min(max(w, low), high)
        mask:      w where low <= w <= high, else 0

    "truncate" is truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). "mask" at the level "token" is IcePop (Ling team 2025, arXiv:2510.18855).

    Exponents are clipped to [-20, 20] (`bounded_exp`).

    Args:
        old_logprobs: [B, T] nats, under the policy before the rollout's first update, computed by the training code.
        rollout_logprobs: [B, T] nats, of the engine when it sampled the tokens.
        mask: [B, T] bool, True where a token is trained on. Where it is False, d counts as 0.
        level: "token" gives one weight per token. The other levels give one weight per completion.
        outside: Treatment of weights outside of [low, high].
        low: Minimum weight.
        high: Maximum weight.

    Returns:
        [B, T] for the level "token", otherwise [B, 1]; detached.

    Raises:
        ValueError: If `level` or `outside` has another value.
    """
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    elif level == "geometric":
        difference = masked_mean(difference, mask, dim=1).unsqueeze(1)
    elif level != "token":
        raise ValueError(f"level must be 'token', 'sequence' or 'geometric', got {level!r}.")
    weights = bounded_exp(difference)
    if outside == "truncate":
        return weights.clamp(low, high)
    if outside == "mask":
        return torch.where((weights >= low) & (weights <= high), weights, 0.0)
    raise ValueError(f"outside must be 'truncate' or 'mask', got {outside!r}.")


def keeps_sequence(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, advantages: Tensor, *, threshold: float
) -> Tensor:
    """Off-policy sequence masking, which drops completions of negative advantage that have become unlikely.

        kept[b] = A[b] >= 0  or  mean over trained t of (rollout_logprobs - logprobs) <= threshold

    The method is from DeepSeek-V3.2 (arXiv:2512.02556, sec. 3.1).

    Args:
        logprobs: [B, T] nats, of the current policy.
        rollout_logprobs: [B, T] nats, of the engine when it sampled the tokens.
        mask: [B, T] bool, True where a token is trained on.
        advantages: [B, 1].
        threshold: Limit, in nats per token.

    Returns:
        [B, 1] bool, True where a completion is trained on.
    """
    moved = masked_mean(torch.where(mask, rollout_logprobs - logprobs, 0.0).detach(), mask, dim=1)
    return (advantages >= 0) | (moved.unsqueeze(1) <= threshold)


MAX_K3 = 10.0
"""Bound of k3 in nats per token, as in verl, OpenRLHF and ms-swift. With d = ref_logprobs - logprobs, k3 grows as
exp(d): without a bound, a single token that has become very unlikely dominates the loss."""


def kl_divergence(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Tensor:
    """Estimate KL(policy || reference) per token, from the sampled token.

        d = ref_logprobs - logprobs
        k1 = -d,   k2 = d^2 / 2,   k3 = min( exp(d) - d - 1, 10 )

    For tokens sampled from the policy, k1 and k3 are unbiased estimates of the KL, and k2 is biased (Schulman 2020,
    http://joschu.net/blog/kl-approx.html). The gradient of k2 is an unbiased estimate of the gradient of the KL, but
    the gradients of k1 and k3 are not. GRPO uses k3 without bounds (eq. 4 of arXiv:2402.03300). Here, d in k3 is
    clipped to [-20, 20]. Clipped values have a gradient of 0. With these bounds, k3 is unbiased only if no token is
    clipped (`is_k3_clamped`).

    Args:
        logprobs: [B, T] nats, of the policy.
        ref_logprobs: [B, T] nats, of the reference; treated as a constant.
        mask: [B, T] bool, True where a token is trained on; None means everywhere. Where it is False, the estimate is
            0.
        estimator: "k1", "k2" or "k3".

    Returns:
        [B, T] the estimate of each token, in nats.

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
        # not exp(d) - 1, which for small d may round to a value below d
        return (torch.expm1(difference) - difference).clamp(max=MAX_K3)
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}.")


def is_k3_clamped(kl: Tensor) -> Tensor:
    """Find tokens whose k3 was clipped.

    Args:
        kl: [B, T] nats, from `kl_divergence`.

    Returns:
        [B, T] bool; False where the mask given to `kl_divergence` is False.
    """
    return kl >= MAX_K3


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the values where the mask is True.

        mean = sum(v * m) / max(sum(m), 1)

    Args:
        values: [...] of any float type; may be nan or infinite where the mask is False.
        mask: bool, broadcastable with `values`; True where a value counts.
        dim: Dimension to average over; None averages over all dimensions.

    Returns:
        The mean, which has all dimensions of `values` except `dim`; a scalar if `dim` is None. If no value counts, the
        mean is 0, with a gradient of 0.
    """
    kept = _keep(values, mask)
    mask = mask.expand_as(kept)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def aggregate(
    values: Tensor,
    mask: Tensor,
    *,
    by: Literal["token", "sequence", "constant"],
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    max_completion_length: int,
) -> Tensor:
    """Aggregate token losses into this micro-batch's share of the mean over the optimizer step.

        token:     sum_it(v m) / num_tokens
        sequence:  sum_i( sum_t(v m) / sum_t(m) ) / num_sequences
        constant:  sum_it(v m) / (num_sequences * max_completion_length)

    The shares of all micro-batches of all ranks add up to the mean. If the strategy averages gradients over ranks (DDP,
    FSDP, ZeRO), multiply the share by the number of ranks. If gradient accumulation averages over micro-batches, also
    multiply the share by the number of micro-batches.

    Args:
        values: [B, T] loss of each token, or [B, 1] if the loss is the same for every token of a row. The loss may be
            nan or infinite where the mask is False.
        mask: [B, T] bool, True where a token is trained on.
        by: "token" weights all tokens equally (DAPO, arXiv:2503.14476, sec. 3.3). "sequence" weights all completions
            equally (GRPO, arXiv:2402.03300, eq. 3). "constant" divides by a constant that does not depend on the
            lengths (Dr. GRPO, arXiv:2503.20783, sec. 3.2).
        num_tokens: Number of trained tokens of the step, over all micro-batches and ranks.
        num_sequences: Number of the step's completions that have at least one trained token.
        max_completion_length: The length limit of sampling, in tokens.

    Returns:
        A scalar; 0 if `mask` is False everywhere. Even this 0 is connected to the graph of `values`.

    Raises:
        ValueError: If `by` is none of the three.
    """
    kept = _keep(values, mask)
    if by == "token":
        return kept.sum() / _at_least_one(num_tokens)
    if by == "sequence":
        return masked_mean(kept, mask, dim=1).sum() / _at_least_one(num_sequences)
    if by == "constant":
        return kept.sum() / (_at_least_one(num_sequences) * max_completion_length)
    raise ValueError(f"by must be 'token', 'sequence' or 'constant', got {by!r}.")


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    # Not a product with the mask: nan or infinity at a padded position would make the entire sum nan.
    return torch.where(mask, values, 0.0)


def _at_least_one(count: int | Tensor) -> int | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
