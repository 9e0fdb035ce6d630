"""How often a policy solves a prompt: pass@k, and how far a mean over prompts can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor


def pass_at_k(solved: Tensor, sampled: Tensor, k: int) -> Tensor:
    """The chance that one of k completions solves the prompt, estimated from n >= k of them without bias.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Chen et al. 2021 (arXiv:2107.03374), equation 1. The plain estimate, 1 - (1 - c / n)^k, is too low. With k = 1 it is
    c / n, and its mean over prompts is avg@n.

    Args:
        solved: [N] c, completions that solve their prompt.
        sampled: [N] n, completions of the prompt.
        k: Attempts.

    Returns:
        [N] in [0, 1]; nan where fewer than k completions were sampled.
    """
    counts = zip(solved.tolist(), sampled.tolist(), strict=True)
    # Whole numbers of any size are exact in Python, and the binomials of n = 64 are beyond float32.
    chances = [1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan for c, n in counts]
    return torch.tensor(chances, dtype=torch.float64)


def interval(values: Tensor, confidence: float = 0.95, draws: int = 1) -> tuple[float, float]:
    """A confidence interval of the mean over prompts.

        low, high = (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Wilson's score interval (1927), which stays inside [0, 1] and does not shrink to a point when every prompt is
    solved. n is the number of independent attempts worth as much as the N prompts with their `draws` each: the ratio
    of a single attempt's variance p (1 - p) to that of the prompts' values, times N. Completions of one prompt
    resemble each other, so n lies between N and N x draws (Miller 2024, arXiv:2411.00640, on clustered questions).

    Args:
        values: [N] in [0, 1], one per prompt; nan is left out.
        confidence: Share of such intervals that hold the true mean.
        draws: Completions behind each value.

    Returns:
        (low, high); (nan, nan) without values.
    """
    values = values[~values.isnan()].double()
    if not len(values):
        return math.nan, math.nan
    mean, num_prompts = values.mean().item(), len(values)
    one_attempt, between = mean * (1 - mean), values.var(correction=0).item()
    # All prompts equally hard: as good as independent draws, unless all are 0 or all 1, which says nothing about it.
    worth = (one_attempt / between if between > 0 else draws) if one_attempt > 0 else 1
    n = num_prompts * min(max(worth, 1.0), draws)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre, half = mean + z**2 / (2 * n), z * math.sqrt(one_attempt / n + z**2 / (4 * n**2))
    low, high = (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)
    return (0.0 if mean == 0 else low), (1.0 if mean == 1 else high)  # exact where rounding leaves 1e-17
