"""Advantages: how much better a completion is than the others of its prompt.

Several rewards are weighted and summed before these functions are called.
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

        A[n, g] = (r[n, g] - baseline[n, g]) / (std + eps),   "group_mean": / mean[n],   "none": no division

    A nan reward is not scorable: it is excluded from every mean and std, and its advantage is 0. Zero-variance groups
    and groups with fewer than two scorable rewards get exactly 0 (rounding can make their std positive, and dividing
    rounding errors by it would train on noise).

    Args:
        rewards: [N, G] one reward per completion, row n is prompt n's group; nan is not scorable.
        baseline: "group_mean" is GRPO (arXiv:2402.03300, sec. 4.1.2); "leave_one_out" is the mean of the other scorable
            rewards, RLOO (arXiv:2402.14740): its advantages are K / (K - 1) times the former for K scorable rewards.
        scale: "group_std" is GRPO; "batch_std" divides by the std of all scorable rewards in `rewards` (pass those of
            all ranks, otherwise each rank divides by its own), "batch_advantage_std" by that of their differences from
            the baseline, REINFORCE++-baseline (arXiv:2501.03262); "none" is Dr. GRPO (arXiv:2503.20783). Every std is
            unbiased (divided by K - 1). "group_mean" is MaxRL (arXiv:2602.02710): with rewards 1 and 0 the gradient is
            that of the log success probability, so that rarely solved prompts weigh more.
        eps: Added to the std, in units of reward.

    Returns:
        [N, G] float32 (float64 if the rewards are); the rows of both baselines sum to 0.

    Raises:
        ValueError: If the rewards are not [N, G] with G >= 2, for an unknown baseline or scale, or for rewards below 0
            with "group_mean".
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
        # Every group's mean is 0, so no mean is subtracted.
        std = (numerator.square().nansum() / (num_scorable.sum() - 1).clamp(min=1)).sqrt()
        scaled = numerator / (std + eps)
    elif scale == "group_mean":
        if (rewards < 0).any():
            raise ValueError(
                f"scale 'group_mean' divides by the mean reward, a success rate: rewards must be at least 0, got "
                f"{rewards[rewards < 0].min():g}. Use another scale, or rewards from 0 to 1."
            )
        scaled = numerator / rewards.nanmean(dim=1, keepdim=True)  # 0 only where all are equal
    elif scale == "none":
        scaled = numerator
    else:
        raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}.")

    return torch.where(is_scorable & ~zero_variance_groups(rewards).unsqueeze(1), scaled, 0.0)


def normalized_sum(by_reward: Tensor, weights: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Normalize each reward within its group, then sum, so that no reward dominates by its variance (GDPO).

        s[n, g] = sum over rewards k of weights[k] (r[k, n, g] - mean[k, n]) / (std[k, n] + eps)

    If they were summed first, opposing rewards would cancel, and a reward in larger units would decide alone. GDPO
    (arXiv:2601.05242) and TRL (`normalize_then_sum`) divide the sum by its std over the batch: `scale="batch_std"` of
    `group_relative_advantages`.

    Args:
        by_reward: [K, N, G]; nan where a reward does not apply or returned no value, which contributes 0.
        weights: [K].
        eps: Added to each std.

    Returns:
        [N, G], not yet an advantage; the mean of each group is 0.
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
