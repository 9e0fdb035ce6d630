"""Errors about groups that only the first member of a team sees: `python -m tests.distributed.shared_errors FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.groups import Rollout
from tests.distributed.runs import num_ranks
from tests.helpers.light_rewards import vowel_share
from tests.helpers.module_runs import PROMPTS, make_trainer

TIMEOUT = timedelta(hours=5)


class OtherPrompts(PromptSource):
    """Gives each rank prompts of its own."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            batch.prompts[:] = [replace(prompt, content=f"{prompt.content} {ranks.rank()}") for prompt in batch.prompts]
            yield batch


class OwnGroups(GRPOLightningModule):
    """Returns groups that are not those of `generate`."""

    def sample(self, *args: Any) -> Rollout:
        return Rollout([replace(group, number=-1) for group in super().sample(*args).groups])


CASES: dict[str, tuple[type[GRPOLightningModule], type[PromptSource]]] = {
    "other prompts": (GRPOLightningModule, OtherPrompts),
    "own groups": (OwnGroups, PromptSource),
}


def main(folder: str) -> None:
    """Run the cases, and save the error of each rank, and how long its team waits."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, (module_class, source) in CASES.items():
        policy = PolicyLoader(str(Path(folder) / "policy"))
        sampling = SamplingParams(max_completion_length=4)
        module = module_class(policy, [vowel_share], sampling=sampling, ranks_per_group=num_ranks())
        trainer = make_trainer(devices=num_ranks(), strategy=DDPStrategy(timeout=TIMEOUT), max_steps=1)
        try:
            trainer.fit(module, source(PROMPTS, 4, ranks_per_group=num_ranks()))
        except ValueError as error:
            found[name] = str(error)
    found["timeout"] = ranks.timeout_of(module.teams._process_group)
    torch.save(found, Path(folder) / f"errors-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
