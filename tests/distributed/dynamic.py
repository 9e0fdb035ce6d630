"""Dynamic sampling on one rank or several: `python -m tests.distributed.dynamic STRATEGY FOLDER`.

Completions are drawn by the policy itself: sharded weights are gathered by all ranks, also by one that needs nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from tests.distributed.runs import fit, make_module
from tests.helpers.early_calls import Calls
from tests.helpers.light_rewards import varies_if_open, vowel_share

OPEN, EQUAL = "open", "equal"

CASES: dict[str, list[str]] = {
    # Of two ranks, the first needs all rounds and is left with what it had; the second needs none.
    "one rank all rounds, one none": [EQUAL, OPEN, EQUAL, OPEN, *[EQUAL] * 6, OPEN],
    "one rank some rounds": [EQUAL, OPEN, OPEN, OPEN, EQUAL, OPEN, OPEN],
    "both ranks, unlike": [EQUAL, EQUAL, OPEN, EQUAL, EQUAL, OPEN, OPEN, EQUAL, OPEN, OPEN],
    "the epoch ends within a round": [EQUAL, EQUAL, EQUAL, OPEN, OPEN, OPEN, OPEN],
    "nothing is left to draw": [EQUAL, OPEN, EQUAL, OPEN],
    "a rank without prompts": [EQUAL],
}
"""The kind of each prompt, in the order of the data; a rollout has four."""
SHARED = ["one rank some rounds", "the epoch ends within a round", "a rank without prompts"]
"""Cases that also run with groups that both ranks share: of three completions the first rank samples one."""


def prompts_of(case: str) -> list[str]:
    """The prompts, numbered."""
    return [f"{kind} {number}" for number, kind in enumerate(CASES[case])]


def differs_if_open(completions: list[str], prompts: list[str]) -> list[float]:
    """A half for prompts that are equal; for the others vowels and the number in the group: no two are alike."""
    return [
        0.5 if EQUAL in prompt else share + place % 3
        for place, (prompt, share) in enumerate(zip(prompts, vowel_share(completions), strict=True))
    ]


class Found(L.Callback):
    """Records the groups of the first rollout, and its metrics."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.reward_set.pool.wait()  # otherwise no reward starts early in the first rollout

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if not self.metrics:
            groups, advantages = pl_module.rollout.groups, pl_module.rollout.advantages
            ids = [[completion.token_ids for completion in group.completions] for group in groups]
            self.groups = list(zip((g.prompt.content for g in groups), ids, advantages.tolist(), strict=True))
            names = ("resample_rounds", "skipped_prompts", "kept_zero_variance_groups")
            self.metrics = {name: float(trainer.callback_metrics[f"rollout/{name}"]) for name in names}


def run(
    strategy: str,
    folder: Path,
    case: str,
    ranks_per_group: int = 1,
    *,
    reward: Any = differs_if_open,
    is_early: bool = True,
) -> tuple[list[Any], dict[str, float]]:
    """Train a step on a case. Returns: this rank's groups (prompt, completions, advantages) and the metrics."""
    module = make_module(
        PolicyLoader(str(folder / "policy")),
        [reward],
        length=6,
        lr=0.1,
        objective=Objective(beta=0.04),
        dynamic_sampling=DynamicSampling(),
        num_generations=3,
        ranks_per_group=ranks_per_group,
    )
    module.reward_set.starts_early = is_early
    found = Found()
    fit(module, prompts_of(case), strategy, max_steps=2, max_epochs=1, callbacks=[found])
    return found.groups, found.metrics


def early_and_late(strategy: str, folder: Path) -> dict[str, Any]:
    """Return the results of this rank, and the number of early calls and of those not used.

    With calls of the rewards during sampling, after it, and with groups that the ranks share. Workers can load the
    reward, unlike those of this file.
    """
    ways: dict[str, Any] = {"early": {}, "late": {"is_early": False}, "shared": {"ranks_per_group": 2}}
    found = {}
    for way, options in ways.items():
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch)
            groups = run(strategy, folder, "one rank some rounds", reward=varies_if_open, **options)
            found[way] = groups, calls.num_early, calls.num_unused
    return found


def main(strategy: str, folder: str) -> None:
    """Run all cases, and save what each rank trained on."""
    torch.set_num_threads(1)
    found = {case: run(strategy, Path(folder), case) for case in CASES}
    torch.save(found, Path(folder) / f"{strategy}-{ranks.rank()}.pt")
    if strategy != "one":
        torch.save(early_and_late(strategy, Path(folder)), Path(folder) / f"{strategy}-early-{ranks.rank()}.pt")
        found = {case: run(strategy, Path(folder), case, ranks_per_group=2) for case in SHARED}
        torch.save(found, Path(folder) / f"{strategy}-shared-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
