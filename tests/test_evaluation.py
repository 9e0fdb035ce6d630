"""Evaluations are sums and counts, so that batches of different size average right."""

import math

import pytest
import torch

from grpo_lightning.evaluation import Evaluation, means
from grpo_lightning.rewards import Scores
from grpo_lightning.types import Completion, Group, Prompt

NAN = math.nan


def evaluation(rewards, lengths, **by_reward):
    groups = [Group(Prompt(""), [5], [Completion([7] * n, [0.0] * n, "length" if n > 4 else "stop")]) for n in lengths]
    total = torch.tensor(rewards)[:, None]
    columns = {name: torch.tensor(values)[:, None] for name, values in by_reward.items()}
    return Evaluation.of(groups, Scores(total, columns, {}, {}, {}))


def test_totals_by_hand():
    result = evaluation([1.0, NAN, 0.5], [2, 9, 4], right=[1.0, NAN, 0.0], silent=[NAN, NAN, NAN])
    assert result.totals == {
        "reward": (1.5, 2.0),
        "right": (1.0, 2.0),
        "silent": (0.0, 0.0),
        "length": (15.0, 3.0),
        "truncated": (1.0, 3.0),
    }


def test_means_weigh_every_completion_alike():
    first = evaluation([1.0, 1.0, 1.0], [1, 2, 3], right=[1.0, 1.0, 1.0], silent=[NAN] * 3)
    second = evaluation([0.0], [6], right=[NAN], silent=[NAN])
    assert means([first, second]) == {
        "reward": pytest.approx(3 / 4),
        "right": 1.0,
        "length": 3.0,
        "truncated": pytest.approx(1 / 4),
    }


def test_means_of_nothing_are_none():
    assert means([]) == {}


def test_a_metric_that_only_one_batch_has_is_kept():
    assert means([evaluation([1.0], [1]), evaluation([1.0], [1], extra=[0.25])])["extra"] == 0.25
