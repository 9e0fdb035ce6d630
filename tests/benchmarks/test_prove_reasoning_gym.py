"""`make prove-reasoning-gym`: its controls, and its bars by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("reasoning_gym")

from benchmarks import versus_trl
from grpo_lightning.core.types import Completion
from grpo_lightning.demo.reasoning_gym import TASKS
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.training.run_state import RunState


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; it imports its neighbors."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_reasoning_gym")


def test_the_bars_by_hand(prove: Any):
    def summary(before: float, after: float, *, gain: float = 0.5, seconds: float = 200.0) -> dict[str, float]:
        found = {"seed": 0, **dict(zip(prove.MEANS, (before, after, before, after), strict=True)), "seconds": seconds}
        of_tasks = {f"{task}_before": 0.1 for task in TASKS} | {f"{task}_after": 0.1 + 0.4 for task in TASKS}
        return found | of_tasks | {"chain_sum_after": 0.1 + gain}

    good = {"trained": [summary(0.2, 0.9), summary(0.35, 0.8)], "random values": [summary(0.2, 0.29)]}
    assert all(prove.verdicts(good).values())
    for changed, bars in (
        ({"trained": [summary(0.2, 0.8), summary(0.36, 0.8)]}, ["sampled before <= 0.35"]),
        ({"trained": [summary(0.2, 0.9) | {"greedy_after": 0.79}]}, ["greedy after >= 0.80"]),
        ({"trained": [summary(0.2, 0.79)]}, ["sampled after >= 0.80", "greedy after >= 0.80"]),
        ({"trained": [summary(0.2, 0.8), summary(0.2, 0.8, gain=0.29)]}, ["chain_sum: gain >= 0.30"]),
        ({"trained": [summary(0.2, 0.8, seconds=241.0)]}, ["seconds <= 240"]),
        ({"random values": [summary(0.2, 0.31)]}, ["random values: gain < 0.10"]),
    ):
        assert [name for name, holds in prove.verdicts(good | changed).items() if not holds] == bars


def test_the_numbers_of_a_task_are_those_of_sampled_answers(prove: Any):
    def table(value: float) -> dict[str, dict[str, float]]:
        sampled = {f"source/{task}/reasoning_gym": value + place for place, task in enumerate(TASKS)}
        return {"sampled": sampled, "greedy": dict.fromkeys(sampled, 9.0)}

    assert prove.by_task({"before": table(0.1), "after": table(0.5)}) == {
        **{"chain_sum_before": 0.1, "chain_sum_after": 0.5},
        **{"number_filtering_before": 1.1, "number_filtering_after": 1.5},
        **{"spell_backward_before": 2.1, "spell_backward_after": 2.5},
    }
    assert list(prove.by_task({"before": table(0.1), "after": table(0.5)})) == prove.BY_TASK


def test_random_values_have_nothing_to_do_with_the_rewards(prove: Any):
    one, other = (object.__new__(prove.RandomValues) for _ in range(2))
    torch.nn.Module.__init__(one)
    torch.nn.Module.__init__(other)
    compared = []
    for module, rewards in ((one, torch.zeros(2, 4)), (other, torch.ones(2, 4))):
        module.run = RunState()
        module.run.rollout_index = 3
        module.objective = importlib.import_module("grpo_lightning.objective").Objective()
        groups = [SimpleNamespace(completions=[Completion([1, 2], [0.0, 0.0], "stop")] * 4)] * 2
        compared.append(module.compute_advantages(Rollout(groups, rewards=rewards)).advantages)
    assert torch.equal(*compared)
    assert compared[0].std() > 0
