"""Advantages: how much better a completion is than the other completions of its prompt.

`group_relative_advantages` takes one reward per completion. If a completion has several rewards, combine them first, by
a weighted sum or by `normalized_sum`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["group_std", "batch_std", "batch_advantage_std", "group_mean", "none"]


def group_relative_advantages(
    rewards: Tensor,
    *,
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean",
    scale: Scale = "group_std",
    eps: float = 1e-4,
) -> Tensor:
    """Compute advantages: each completion's reward relative to its group.

        scale "group_std", "batch_std", "batch_advantage_std":  A[n, g] = (r[n, g] - baseline[n, g]) / (std + eps)
        scale "group_mean":                                     A[n, g] = (r[n, g] - baseline[n, g]) / mean[n]
        scale "none":                                           A[n, g] =  r[n, g] - baseline[n, g]

    A completion whose reward is nan is not scorable: its reward is excluded from every mean and std, and its advantage
    is 0. The advantages of zero-variance groups, and of groups with fewer than two scorable rewards, are set to exactly
    0. Otherwise, rounding could make both the differences and the std of such a group slightly different from 0, and
    their quotient would be noise.

    Args:
        rewards: [N, G] one reward per completion, row n is prompt n's group; nan is not scorable.
        baseline: "group_mean" is GRPO (arXiv:2402.03300, sec. 4.1.2). "leave_one_out" is RLOO (arXiv:2402.14740), the
            mean of the other scorable rewards of the group: with K scorable rewards, the difference from this baseline
            is K / (K - 1) times the difference from the group's mean.
        scale: "group_std" is GRPO. "batch_std" divides by the std of all scorable rewards in `rewards`: pass the
            rewards of all ranks, otherwise each rank divides by the std of its own rewards. "batch_advantage_std"
            divides by the std of all differences from the baseline (REINFORCE++-baseline, arXiv:2501.03262). Every std
            is unbiased (K - 1 in the denominator). "none" is Dr. GRPO (arXiv:2503.20783). "group_mean" is MaxRL
            (arXiv:2602.02710): with rewards of 1 and 0, the gradient is that of the log success probability, so that
            rarely solved prompts weigh more.
        eps: Added to the std, in units of reward.

    Returns:
        [N, G] float32, or float64 if the rewards are float64. Every row sums to 0.

    Raises:
        ValueError: If the rewards are not [N, G] with G >= 2, if the baseline or scale is unknown, or if a reward is
            below 0 and the scale is "group_mean".
    """
    _check_shape(rewards)
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    is_scorable = ~rewards.isnan()
    num_scorable = is_scorable.sum(dim=1, keepdim=True)  # [N, 1]
    deviation = rewards - rewards.nanmean(dim=1, keepdim=True)  # [N, G]

    if baseline == "leave_one_out":
        numerator = deviation * num_scorable / (num_scorable - 1).clamp(min=1)
    elif baseline == "group_mean":
        numerator = deviation
    else:
        raise ValueError(f"baseline must be 'group_mean' or 'leave_one_out', got {baseline!r}.")

    if scale == "group_std":
        std = (deviation.square().nansum(dim=1, keepdim=True) / (num_scorable - 1).clamp(min=1)).sqrt()  # [N, 1]
        scaled = numerator / (std + eps)
    elif scale == "batch_std":
        spread = rewards - rewards.nanmean()
        std = (spread.square().nansum() / (num_scorable.sum() - 1).clamp(min=1)).sqrt()
        scaled = numerator / (std + eps)
    elif scale == "batch_advantage_std":
        # The differences of every group have mean 0, so no mean is subtracted from them.
        std = (numerator.square().nansum() / (num_scorable.sum() - 1).clamp(min=1)).sqrt()
        scaled = numerator / (std + eps)
    elif scale == "group_mean":
        if (rewards < 0).any():
            raise ValueError(
                f"scale 'group_mean' divides by the mean reward, a success rate: rewards must be at least 0, got "
                f"{rewards[rewards < 0].min():g}. Use another scale, or rewards from 0 to 1."
            )
        scaled = numerator / rewards.nanmean(dim=1, keepdim=True)  # the mean is 0 only if all rewards are 0
    elif scale == "none":
        scaled = numerator
    else:
        raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}.")

    return torch.where(is_scorable & ~zero_variance_groups(rewards).unsqueeze(1), scaled, 0.0)


def normalized_sum(by_reward: Tensor, weights: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Normalize each reward within its group, then sum, so that no reward dominates by its variance (GDPO).

        s[n, g] = sum over rewards k of weights[k] (r[k, n, g] - mean[k, n]) / (std[k, n] + eps)

    If the rewards were summed first, opposing rewards would cancel, and a reward in larger units would dominate. GDPO
    (arXiv:2601.05242) and TRL (`normalize_then_sum`) then divide the sum by its std over the batch: pass the sum to
    `group_relative_advantages` with `scale="batch_std"`.

    Args:
        by_reward: [K, N, G]; nan where a reward does not apply or returned no value. A nan adds 0 to the sum.
        weights: [K].
        eps: Added to each std.

    Returns:
        [N, G], to be passed to `group_relative_advantages`; the mean of each group is 0.
    """
    compared = torch.stack([group_relative_advantages(values, eps=eps) for values in by_reward])
    return (compared * weights.to(compared)[:, None, None]).sum(dim=0)


def zero_variance_groups(rewards: Tensor) -> Tensor:
    """Find groups without a gradient: all scorable rewards are equal, or fewer than two are scorable.

    Args:
        rewards: [N, G] one reward per completion; nan is not scorable.

    Returns:
        [N] bool, True where every advantage of the group is 0.

    Raises:
        ValueError: If the rewards are not [N, G] with G >= 2.
    """
    _check_shape(rewards)
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    is_scorable = ~rewards.isnan()
    highest = torch.where(is_scorable, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(is_scorable, rewards, torch.inf).amin(dim=1)
    return highest <= lowest  # -inf <= inf where nothing is scorable


def _check_shape(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.size(1) < 2:
        raise ValueError(
            f"rewards must be [num_prompts, num_generations] with num_generations >= 2, got {list(rewards.shape)}. "
            "Raise num_generations, or reshape flat rewards with .view(-1, num_generations)."
        )
