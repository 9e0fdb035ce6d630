"""Whether a metric rises or falls, and a line of bars."""

import random

import pytest

from grpo_lightning.callbacks.trend import sparkline, trend_of


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([], None),
        ([0.1, 0.2, 0.3, 0.4, 0.5], None),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "rising"),
        ([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "falling"),
        ([1.0] * 10, "level"),
        ([0.0] * 30 + [1.0] * 20, "rising"),
        ([1.0] * 30 + [0.5] * 20, "falling"),
        ([0.0] * 20 + [1.0] * 40, "level"),  # it rose earlier
    ],
)
def test_the_latest_values_are_compared_with_those_before(values, trend):
    assert trend_of(values) == trend


def test_noise_is_level_mostly():
    """The difference of the means has to be larger than its standard error, which noise has 3 times in 10."""
    trends = [trend_of([random.Random(seed * 100 + i).gauss(0, 1) for i in range(40)]) for seed in range(300)]
    assert 0.55 < trends.count("level") / 300 < 0.8


def test_the_error_is_that_of_the_difference():
    """By hand: means 2 and 3, variances 1 and 1, k = 3: error sqrt(2 / 3) = 0.816 is below the difference of 1."""
    assert trend_of([1, 2, 3, 2, 3, 4]) == "rising"
    assert trend_of([0, 2, 4, 1, 3, 5]) == "level"  # variances 4 and 4: sqrt(8 / 3) = 1.63


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0, 1.0], 5, "▁▁"),
        (list(range(8)), 8, "▁▂▃▄▅▆▇█"),
        (list(range(8)), 4, "▁▃▆█"),
        ([0, 0, 4, 4, 0, 0], 3, "▁█▁"),
        ([-1.0, 0.0, 1.0], 10, "▁▅█"),
    ],
)
def test_a_line_of_bars(values, width, line):
    assert sparkline(values, width) == line
