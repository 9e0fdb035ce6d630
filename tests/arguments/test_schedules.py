"""Arguments of schedules: other learning rates over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from grpo_lightning.schedules import (
    Constant,
    Cosine,
    CosineWithRestarts,
    InverseSqrt,
    Linear,
    Schedule,
    WarmupStableDecay,
)
from tests.arguments.registry import case, case_of_each

SCHEDULES = [Constant, Cosine, CosineWithRestarts, InverseSqrt, Linear, WarmupStableDecay]


def rates(kind: type[Schedule], steps: int = 12, lr: float = 1.0, **settings: Any) -> list[float]:
    """The learning rate of every step."""
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=lr)
    schedule = kind(optimizer, **settings)
    schedule.set_length(steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@case_of_each(SCHEDULES, "optimizer")
def test_optimizer(owner):
    optimizers = [torch.optim.SGD([Parameter(torch.zeros(1))], lr=lr) for lr in (1.0, 2.0)]
    for optimizer in optimizers:
        owner(optimizer, warmup_steps=2).set_length(4)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0, 0]
    assert rates(owner, lr=2.0) == pytest.approx([2 * rate for rate in rates(owner, lr=1.0)])


@case_of_each(SCHEDULES, "warmup_ratio", "warmup_steps")
def test_warm_up(owner):
    # a quarter of twelve steps, or two: a straight line from 0
    assert rates(owner)[0] == 1
    assert rates(owner, warmup_ratio=0.25)[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert rates(owner, warmup_steps=2)[:3] == pytest.approx([0, 1 / 2, 1])


@case(Cosine, "min_lr_ratio")
def test_cosine_min_lr_ratio():
    zero, tenth = (rates(Cosine, 100, min_lr_ratio=ratio) for ratio in (0.0, 0.1))
    assert (zero[-1], tenth[-1]) == pytest.approx((0, 0.1), abs=1e-3)


@case(WarmupStableDecay, "min_lr_ratio")
def test_warmup_stable_decay_min_lr_ratio():
    zero, tenth = (rates(WarmupStableDecay, 100, min_lr_ratio=ratio) for ratio in (0.0, 0.1))
    assert (zero[-1], tenth[-1]) == pytest.approx((0, 0.1), abs=0.01)
    assert zero[:81] == tenth[:81] == [1.0] * 81


@case(WarmupStableDecay, "decay_ratio")
def test_decay_ratio():
    for ratio, stable in ((0.2, 80), (0.5, 50)):
        assert sum(rate == 1 for rate in rates(WarmupStableDecay, 100, decay_ratio=ratio)) == stable + 1


@case(CosineWithRestarts, "num_cycles")
def test_num_cycles():
    assert [rates(CosineWithRestarts, 12, num_cycles=n).count(1.0) for n in (1, 2, 3)] == [1, 2, 3]
