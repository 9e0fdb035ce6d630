"""Trend of a metric over a run, as an arrow and as a line of bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Literal

LEVELS = "▁▂▃▄▅▆▇█"
ARROWS = {"rising": "↑", "falling": "↓", "level": "→"}

MAX_WINDOW = 20
"""Maximum number of latest values that are compared."""

MIN_WINDOW = 3
"""Minimum number of latest values that are compared."""

Trend = Literal["rising", "falling", "level"]


def trend_of(values: Sequence[float]) -> Trend | None:
    """Direction of the latest values of a metric; None if there are fewer than 2 x `MIN_WINDOW` values.

    The mean of the last k of n values is compared with the mean of the k values before them, where k = min(20, n / 2),
    rounded down. The standard error of the difference is sqrt((var_1 + var_2) / k), with the variances of the two sets.
    If the absolute difference is larger than its standard error, the direction is "rising" or "falling". If not, the
    direction is "level".
    """
    k = min(len(values) // 2, MAX_WINDOW)
    if k < MIN_WINDOW:
        return None
    new, old = values[-k:], values[-2 * k : -k]
    difference, error = fmean(new) - fmean(old), math.sqrt((variance(new) + variance(old)) / k)
    if abs(difference) <= error:
        return "level"
    return "rising" if difference > 0 else "falling"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw all values of a run as a line of at most `width` bars.

    Each bar shows the mean of successive values. The number of values per bar is almost the same for all bars.
    """
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else [0]
    means = [fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    if high == low:
        return LEVELS[0] * count
    return "".join(LEVELS[round((mean - low) / (high - low) * (len(LEVELS) - 1))] for mean in means)
