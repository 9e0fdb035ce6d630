"""pass@k as a metric, with confidence intervals, and as the objective of training."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor


def pass_at_k(solved: Tensor, sampled: Tensor, k: int) -> Tensor:
    """Estimate pass@k, the chance that at least one of k completions solves the prompt, from n >= k completions.

        pass@k = 1 - C(n - c, k) / C(n, k)

    This unbiased estimate is equation 1 of Chen et al. 2021 (arXiv:2107.03374).

    Args:
        solved: [N] c, number of completions that solve their prompt.
        sampled: [N] n, number of completions sampled for each prompt.
        k: Number of attempts.

    Returns:
        [N] in [0, 1]; nan where fewer than k completions were sampled.
    """
    counts = zip(solved.tolist(), sampled.tolist(), strict=True)
    # Python integers are exact; the binomials of n = 64 exceed the precision of float32.
    chances = [1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan for c, n in counts]
    return torch.tensor(chances, dtype=torch.float64)


def marginal_gains(rewards: Tensor, k: int | None) -> Tensor:
    """Compute the gain of each completion for the baseline "pass_at_k".

        gain[n, g] = mean of max(r[n, g] - max of r[n, S], 0) over all sets S of k - 1 others

    The others are all scorable completions of the group except g.

    Args:
        rewards: [N, G] one reward per completion; nan if the completion is not scorable.
        k: Number of completions to compare: g and k - 1 others. None means the group's number of scorable completions.

    Returns:
        [N, G]; 0 where the reward is nan, and in groups with fewer than k scorable completions.

    Raises:
        ValueError: If k is neither None nor from 2 to G.
    """
    if k is not None and not 2 <= k <= rewards.size(1):
        raise ValueError(
            f"k of baseline 'pass_at_k' must be from 2 to num_generations = {rewards.size(1)}, got {k}. For k = 1, the "
            "mean reward, use another baseline."
        )
    ascending, order = rewards.sort(dim=1)  # nan comes last
    counts = (~rewards.isnan()).sum(dim=1).tolist()  # n of each group
    chances = {n: _chances(n, n if k is None else k, rewards.size(1)) for n in set(counts)}
    weights = rewards.new_tensor([chances[n] for n in counts]).view(rewards.shape)
    lead = (ascending.unsqueeze(2) - ascending.unsqueeze(1)).clamp(min=0).nan_to_num(0.0)  # [N, G, G]
    return torch.zeros_like(rewards).scatter(1, order, (lead * weights.unsqueeze(1)).sum(dim=2))


def _chances(n: int, k: int, size: int) -> list[float]:
    """For each of n - 1 rewards, lowest first, the chance that it is the maximum of k - 1 of these rewards.

    The k - 1 rewards are chosen at random, without replacement. The result has `size` numbers. The first n - 1 are the
    chances, and the others have no meaning. If n < max(k, 2), all `size` numbers are 0.
    """
    if n < max(k, 2):
        return [0.0] * size
    return [math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(size)]  # exact integers


def interval(values: Tensor, confidence: float = 0.95, num_generations: int = 1) -> tuple[float, float]:
    """Confidence interval of the mean over prompts (Wilson's score interval).

        low, high = (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Wilson's score interval (1927) stays inside [0, 1] and does not shrink to a point if every prompt is solved. p is
    the mean of the values, and z is the two-sided normal quantile of `confidence`. n is the effective sample size. It
    is estimated as n = N p (1 - p) / v, where v is the variance of the values. The estimate is limited to the range
    from N to N x G. Miller 2024 (arXiv:2411.00640) describes the statistics of clustered samples.

    Args:
        values: [N] values in [0, 1], one per prompt. Values that are nan are ignored.
        confidence: Coverage of the interval.
        num_generations: G. Each value is a mean over G completions.

    Returns:
        (low, high); (nan, nan) without values.
    """
    values = values[~values.isnan()].double()
    if not len(values):
        return math.nan, math.nan
    mean, num_prompts = values.mean().item(), len(values)
    one_attempt, between = mean * (1 - mean), values.var(correction=0).item()
    # If the values have variance 0, all prompts are equally hard, and completions count as independent. If all values
    # are 0 or all are 1, the correlation is unknown, and each prompt counts as one attempt.
    worth = (one_attempt / between if between > 0 else num_generations) if one_attempt > 0 else 1
    n = num_prompts * min(max(worth, 1.0), num_generations)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center, half = mean + z**2 / (2 * n), z * math.sqrt(one_attempt / n + z**2 / (4 * n**2))
    low, high = (center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n)
    # Without this, rounding could give 1e-17 instead of 0, or a bound outside of [0, 1].
    return (0.0 if mean == 0 else max(low, 0.0)), (1.0 if mean == 1 else min(high, 1.0))
