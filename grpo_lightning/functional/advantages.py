"""Advantages: how much better a completion is than the other completions of its prompt.

`group_relative_advantages` takes one reward per completion. If a completion has several rewards, combine them first, by
a weighted sum or by `normalized_sum`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_lightning.functional.pass_at_k import marginal_gains

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "pass_at_k"]
Scale = Literal["group_std", "batch_std", "batch_advantage_std", "group_mean", "nonzero_fraction", "none"]


def group_relative_advantages(
    rewards: Tensor,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    eps: float = 1e-4,
    lengths: Tensor | None = None,
    k: int | None = None,
) -> Tensor:
    """Compute advantages, which compare each completion's reward with the other rewards of its group.

        scale "group_std", "batch_std", "batch_advantage_std":  A[n, g] = gain[n, g] / (std + eps)
        scale "group_mean":                                     A[n, g] = gain[n, g] / mean[n]
        scale "nonzero_fraction":                               A[n, g] = gain[n, g] / fraction
        scale "none":                                           A[n, g] = gain[n, g]

        baseline "pass_at_k":  gain[n, g] = mean of max(r[n, g] - max of r[n, S], 0) over all sets S of k - 1 others
        other baselines:       gain[n, g] = r[n, g] - baseline[n, g]

    A completion with the reward nan is not scorable. Its reward is excluded from every mean and std, and its advantage
    is 0. The advantages of a zero-variance group are exactly 0 (`zero_variance_groups`).

    Args:
        rewards: [N, G] one reward per completion. Row n is the group of prompt n.
        baseline: The value that a reward is compared with.

            - "group_mean" is the mean reward of the group, as in GRPO (arXiv:2402.03300, sec. 4.1.2).
            - "leave_one_out" is the mean of the other scorable rewards of the group, as in RLOO (arXiv:2402.14740).
            - "length_weighted" is the mean reward of the group, weighted by the lengths of the completions, as in OPO
              (arXiv:2505.23585).
            - "pass_at_k" maximizes the expected maximum of k rewards (arXiv:2503.19595). With k = None, only the
              completion with the highest reward can have a gain above 0. This gain is the highest reward minus the
              second-highest reward (verl's `grpo_passk`).
        scale: The divisor of the gain. Every std is unbiased. For "batch_std", "batch_advantage_std" and
            "nonzero_fraction", pass the rewards of all ranks.

            - "group_std" is the std of the group's rewards, as in GRPO.
            - "batch_std" is the std of all scorable rewards.
            - "batch_advantage_std" is the std of all differences from the baseline, as in REINFORCE++-baseline
              (arXiv:2501.03262).
            - "group_mean" is the mean reward of the group, as in MaxRL (arXiv:2602.02710).
            - "nonzero_fraction" is the fraction of groups that have a gain other than 0, as in GPG (arXiv:2504.02546).
            - "none" is 1, as in Dr. GRPO (arXiv:2503.20783).
        eps: Added to the std, in units of reward.
        lengths: [N, G] number of trained tokens of each completion, for "length_weighted". If a group has no trained
            tokens, its completions count equally.
        k: k of the baseline "pass_at_k", from 2 to G. Groups with fewer than k scorable rewards get advantage 0. None
            means the group's number of scorable rewards.

    Returns:
        [N, G] float32, or float64 if the rewards are float64.

    Raises:
        ValueError: If the rewards do not have the shape [N, G] with G >= 2.
        ValueError: If the baseline or the scale is unknown.
        ValueError: If the baseline is "length_weighted", and `lengths` is None or does not have the shape [N, G].
        ValueError: If the baseline is "pass_at_k", and k is neither None nor from 2 to G.
        ValueError: If the scale is "group_mean", and a reward is below 0.
        ValueError: If the scale is "batch_advantage_std", and the baseline is "length_weighted" or "pass_at_k".
    """
    _check_shape(rewards)
    if scale == "batch_advantage_std" and baseline in ("length_weighted", "pass_at_k"):
        raise ValueError(
            f"scale 'batch_advantage_std' is a std around 0, but gains of baseline {baseline!r} do not have mean 0. "
            "Use another scale."
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    gains = _gains(rewards, baseline, lengths, k)
    scaled = gains / _divisor(rewards, gains, scale, eps)
    is_zero = rewards.isnan() | zero_variance_groups(rewards).unsqueeze(1) | (gains == 0)  # 0 / 0 would be nan
    return torch.where(is_zero, 0.0, scaled)


def _gains(rewards: Tensor, baseline: Baseline, lengths: Tensor | None, k: int | None) -> Tensor:
    """[N, G] reward minus baseline, or the gain of "pass_at_k"; arbitrary where the reward is nan."""
    is_scorable = ~rewards.isnan()
    deviation = rewards - rewards.nanmean(dim=1, keepdim=True)  # [N, G]
    if baseline == "group_mean":
        return deviation
    if baseline == "leave_one_out":
        num_scorable = is_scorable.sum(dim=1, keepdim=True)  # [N, 1]
        return deviation * num_scorable / (num_scorable - 1).clamp(min=1)
    if baseline == "length_weighted":
        if lengths is None or lengths.shape != rewards.shape:
            got = "none" if lengths is None else f"the shape {list(lengths.shape)}"
            raise ValueError(
                f"baseline 'length_weighted' needs lengths {list(rewards.shape)}, the trained tokens of each "
                f"completion; got {got}."
            )
        weights = lengths * is_scorable
        weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, is_scorable)
        return deviation - (weights * deviation).nansum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
    if baseline == "pass_at_k":
        return marginal_gains(rewards, k)
    raise ValueError(f"baseline must be one of {', '.join(get_args(Baseline))}, got {baseline!r}.")


def _divisor(rewards: Tensor, gains: Tensor, scale: Scale, eps: float) -> Tensor:
    """The divisor of the gains: a scalar, or [N, 1]. May be 0 or nan where every advantage is 0."""
    is_scorable = ~rewards.isnan()
    num_scorable = is_scorable.sum(dim=1, keepdim=True)  # [N, 1]
    if scale == "group_std":
        deviation = rewards - rewards.nanmean(dim=1, keepdim=True)
        return (deviation.square().nansum(dim=1, keepdim=True) / (num_scorable - 1).clamp(min=1)).sqrt() + eps
    if scale == "batch_std":
        spread = rewards - rewards.nanmean()
        return (spread.square().nansum() / (num_scorable.sum() - 1).clamp(min=1)).sqrt() + eps
    if scale == "batch_advantage_std":
        # The gains of every group have mean 0, so no mean is subtracted from them.
        return (gains.square().nansum() / (num_scorable.sum() - 1).clamp(min=1)).sqrt() + eps
    if scale == "group_mean":
        if (rewards < 0).any():
            raise ValueError(
                f"scale 'group_mean' divides by the mean reward, a success rate: rewards must be at least 0, got "
                f"{rewards[rewards < 0].min():g}. Use another scale, or rewards from 0 to 1."
            )
        return rewards.nanmean(dim=1, keepdim=True)  # the mean is 0 only if all rewards are 0
    if scale == "nonzero_fraction":
        # Gains of equal rewards may differ from 0 by rounding. With "pass_at_k", all gains may be 0 even if rewards
        # differ.
        has_gain = (is_scorable & (gains != 0)).any(dim=1) & ~zero_variance_groups(rewards)
        return has_gain.to(rewards.dtype).mean()
    if scale == "none":
        return rewards.new_ones(())
    raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}.")


def normalized_sum(by_reward: Tensor, weights: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Normalize each reward within each group, then sum up, so that no reward dominates by its variance (GDPO).

        s[n, g] = sum over rewards k of weights[k] (r[k, n, g] - mean[k, n]) / (std[k, n] + eps)

    GDPO (arXiv:2601.05242) and TRL (`normalize_then_sum`) also divide the sum by its std over the batch. To do so, pass
    the result to `group_relative_advantages` with `scale="batch_std"`.

    Args:
        by_reward: [K, N, G]; nan where a reward does not apply or returned no value. A nan adds 0 to the sum.
        weights: [K].
        eps: Added to each std.

    Returns:
        [N, G]; the mean of each group is 0.
    """
    compared = torch.stack([group_relative_advantages(values, eps=eps) for values in by_reward])
    return (compared * weights.to(compared)[:, None, None]).sum(dim=0)


def turn_credits(rewards: Sequence[Sequence[float]], *, discount: float = 1.0, eps: float = 1e-4) -> list[list[float]]:
    """Compute the credit of each turn of a group's conversations, from rewards per turn.

        return[i, k] = sum over turns j >= k of discount^(j - k) * rewards[i][j]
        credit[i, k] = (return[i, k] - mean over i' of return[i', k]) / (std over i' of return[i', k] + eps)

    The mean and the unbiased std are over the conversations that have a k-th turn. If there is only one such
    conversation, or if all of them have the same return, the credit is 0. Zeng et al. 2025, "Reinforcing Multi-Turn
    Reasoning in LLM Agents via Turn-Level Credit Assignment", normalize the reward of a turn in the same way.

    Args:
        rewards: G lists with one reward per turn; the lists may have different lengths.
        discount: Factor per turn, in [0, 1].
        eps: Added to the std.

    Returns:
        G lists of credits.
    """
    returns: list[list[float]] = []
    for of_turns in rewards:
        later, own = 0.0, []
        for reward in reversed(of_turns):
            later = reward + discount * later
            own.append(later)
        returns.append(own[::-1])
    credits = [[0.0] * len(own) for own in returns]
    for turn in range(max(map(len, returns), default=0)):
        having = [i for i, own in enumerate(returns) if len(own) > turn]
        values = [returns[i][turn] for i in having]
        if len(values) < 2 or max(values) == min(values):
            continue
        mean, std = statistics.fmean(values), statistics.stdev(values)
        for i in having:
            credits[i][turn] = (returns[i][turn] - mean) / (std + eps)
    return credits


def zero_variance_groups(rewards: Tensor) -> Tensor:
    """Find zero-variance groups, in which all scorable rewards are equal, or fewer than two rewards are scorable.

    Args:
        rewards: [N, G] one reward per completion; nan if the completion is not scorable.

    Returns:
        [N] bool.

    Raises:
        ValueError: If the rewards are not [N, G] with G >= 2.
    """
    _check_shape(rewards)
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    is_scorable = ~rewards.isnan()
    highest = torch.where(is_scorable, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(is_scorable, rewards, torch.inf).amin(dim=1)
    return highest <= lowest  # -inf <= inf where nothing is scorable


def groups_without_gradient(
    rewards: Tensor, lengths: Tensor, *, baseline: Baseline = "group_mean", k: int | None = None
) -> Tensor:
    """Find groups in which every completion has advantage 0 or no trained token.

    Args:
        rewards: [N, G] one reward per completion; nan if the completion is not scorable.
        lengths: [N, G] number of trained tokens of each completion.
        baseline: As in `group_relative_advantages`.
        k: As in `group_relative_advantages`.

    Returns:
        [N] bool.

    Raises:
        ValueError: If the rewards are not [N, G] with G >= 2, or k is out of range.
    """
    advantages = group_relative_advantages(rewards, baseline=baseline, scale="none", lengths=lengths, k=k)
    return ((advantages == 0) | (lengths == 0)).all(dim=1)


def _check_shape(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.size(1) < 2:
        raise ValueError(
            f"rewards must be [num_prompts, num_generations] with num_generations >= 2, got {list(rewards.shape)}. "
            "Raise num_generations, or reshape flat rewards with .view(-1, num_generations)."
        )
