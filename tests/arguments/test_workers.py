"""Arguments of the processes that rewards run in: how many, and what is too much."""

from __future__ import annotations

import os
from typing import Any

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import RewardSet, RewardWorkers, WeightedReward
from tests.arguments.registry import case
from tests.helpers.module_runs import fit, make_module
from tests.marks import SLOW
from tests.rewards import misbehaving


def scored(reward: Any, count: int = 1, workers: RewardWorkers | None = None) -> Any:
    """Score `count` groups of one completion each."""
    groups = [Group(Prompt("p", index=n), [1], [Completion([1], [0.0], "stop", f"{n}")]) for n in range(count)]
    return RewardSet([WeightedReward(reward, on_error="none")], workers=workers).score(groups)


def failed(reward: Any, kind: str, count: int = 1, **limits: Any) -> int:
    """How many completions failed in a way."""
    return scored(reward, count, RewardWorkers(**limits)).failures[f"{reward.__name__}/{kind}"]


@case(RewardWorkers, "num_workers")
def test_how_many_workers():
    def processes(number: int) -> set[int]:
        return set(scored(misbehaving.process, 8, RewardWorkers(num_workers=number)).extras["pid"])

    assert processes(0) == {os.getpid()}
    assert len(processes(1) - {os.getpid()}) == 1
    assert 1 <= len(processes(3) - {os.getpid()}) <= 3


@SLOW
@case(RewardWorkers, "timeout_seconds", "step_timeout_seconds")
def test_how_long_calls_may_take():
    slow = misbehaving.takes_a_second
    assert failed(slow, "timeout", num_workers=2, timeout_seconds=30, step_timeout_seconds=60) == 0
    assert failed(slow, "timeout", num_workers=2, timeout_seconds=0.2, step_timeout_seconds=60) == 1
    # Of four calls, one worker makes no more than two in this time.
    assert failed(slow, "timeout", 4, num_workers=1, timeout_seconds=2.5, step_timeout_seconds=2.5) >= 2
    assert failed(slow, "timeout", 4, num_workers=1, timeout_seconds=2.5, step_timeout_seconds=60) == 0


@SLOW
@case(RewardWorkers, "memory_gb")
def test_how_much_memory_calls_may_take():
    assert failed(misbehaving.takes_a_gigabyte, "exception", memory_gb=2.0) == 0
    assert failed(misbehaving.takes_a_gigabyte, "exception", memory_gb=0.5) == 1


@case(RewardSet, "workers")
def test_where_rewards_run():
    assert set(scored(misbehaving.process).extras["pid"]) == {os.getpid()}
    assert os.getpid() not in scored(misbehaving.process, workers=RewardWorkers()).extras["pid"]


@SLOW
@case(GRPOLightningModule, "reward_workers")
def test_where_the_rewards_of_a_run_run():
    def places(workers: RewardWorkers | None) -> set[int]:
        module = make_module(rewards=[misbehaving.process], reward_workers=workers)
        fit(module, max_steps=1)
        assert module.rollout is not None
        return set(module.rollout.scores.extras["pid"])

    assert os.getpid() not in places(None)
    assert places(RewardWorkers(num_workers=0)) == {os.getpid()}
