"""Shared groups on one rank or several: `python -m tests.distributed.teams STRATEGY RANKS_PER_GROUP FOLDER CASE...`.

Every kind of data with and without dynamic sampling, with and without images and a reference: all pairs of them. A
group has five completions, which no team of two, three or four ranks can divide evenly. The policy samples them itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.core import ranks
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from tests.distributed import steps, vision
from tests.distributed.runs import fit, make_module
from tests.distributed.steps import whole_weights
from tests.helpers.light_rewards import varies_if_open

FAMILY = "qwen2_5_vl"
NUM_PROMPTS = 4
"""Prompts per rollout, over all ranks."""
NUM_GENERATIONS = 5

TEXTS: dict[str, list[str]] = {
    "all open": ["open"] * 9,
    "a team of equals": ["open", "equal"] * 5,
    "nothing but equals": ["equal"] * 10,
    "one prompt": ["open"],
    "some further prompts": ["equal", "open", "equal", "equal", "open", "open", "equal", *["open"] * 3, "equal"],
}
"""The kind of each prompt, in the order of the data. The second of two teams has the prompts at odd places."""

IMAGES: dict[str, list[list[Any]]] = {
    "images on one team": [[0, "open"], ["equal"], ["open", 1, 2], ["open"], ["equal"], ["open"]],
    "one image": [[3, "open"]],
    "images of equals": [[0, "equal"], ["open"], ["equal", 1, 2], [3, "equal"], ["open"], [4, "open"], ["open"]],
}
"""Numbers stand for pictures."""


OBJECTIVES = {
    "": Objective(beta=0.0),
    "kl": Objective(beta=0.04),
    "kl in the reward": Objective(beta=0.5, kl_in="reward"),
}


REPLACED = ["a team of equals", "one prompt", "one image"]
"""Data of which dynamic sampling replaces all equal groups. With the KL in the rewards, those that stay would differ in
their KL alone, which is rounding until the first update, and their advantages divide it by its own size."""


@dataclass(frozen=True)
class Case:
    """A few steps with some data."""

    data: str
    is_dynamic: bool
    kl: str

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.data, "dynamic" if self.is_dynamic else "fixed", self.kl]))

    @property
    def has_images(self) -> bool:
        return self.data in IMAGES

    def prompts(self, folder: Path) -> list[Prompt]:
        """The prompts, numbered."""
        if self.has_images:
            return [vision.with_files(parts, folder, index) for index, parts in enumerate(IMAGES[self.data])]
        return [Prompt(f"{kind} {'x' * i}{i}", index=i) for i, kind in enumerate(TEXTS[self.data])]


CASES = {
    str(case): case
    for case in (
        # All pairs: every data fixed and dynamic, and both with and without a reference.
        *(
            Case(data, is_dynamic, "kl" if number % 2 == is_dynamic else "")
            for number, data in enumerate([*TEXTS, *IMAGES])
            for is_dynamic in (False, True)
        ),
        *(Case(data, True, "kl in the reward") for data in REPLACED),
    )
}

SCORED: list[tuple[str, str]] = []
"""(prompt, completion) of every completion that `slow` has scored in this process."""


async def slow(completions: list[Any], prompts: list[Any]) -> list[float]:
    """Nothing that varies, after a time that depends on the prompts; async as judges are."""
    SCORED.extend((str(prompt), str(text)) for prompt, text in zip(prompts, completions, strict=True))
    await asyncio.sleep(0.004 * (sum(len(str(prompt)) for prompt in prompts) % 17))
    return [0.1 for _ in completions]


class Sleepy:
    """Sleeps in the training process, longest on the rank with the first prompt."""

    in_process = True
    name = "sleepy"

    def __call__(self, completions: list[Any], prompts: list[Any]) -> list[float]:
        time.sleep(0.05 if any("0" in str(prompt) for prompt in prompts) else 0.0)
        return [0.2 for _ in completions]


class Watch(L.Callback):
    """The weights, the groups of each rollout, and the metrics of each optimizer step."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = []
        self.steps: list[dict[str, float]] = []
        self.validated: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.before = whole_weights(pl_module)

    def on_rollout(self, trainer: L.Trainer, module: Any, rollout: Any) -> None:
        self.groups.append(
            [
                (group.prompt.index, [completion.token_ids for completion in group.completions], advantages)
                for group, advantages in zip(rollout.groups, rollout.advantages.tolist(), strict=True)
            ]
        )

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.validated = {name: float(value) for name, value in trainer.callback_metrics.items() if "val/" in name}

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.after = whole_weights(pl_module)


def run(case: Case, strategy: str, ranks_per_group: int, folder: Path) -> dict[str, Any]:
    """Train the case. Returns: what this rank found."""
    SCORED.clear()
    module = make_module(
        PolicyLoader(str(folder / (FAMILY if case.has_images else "policy"))),
        [varies_if_open, slow, Sleepy()],
        length=4 if case.has_images else 6,
        lr=0.1,
        objective=OBJECTIVES[case.kl],
        dynamic_sampling=DynamicSampling(2, reward="varies_if_open") if case.is_dynamic else None,
        num_generations=NUM_GENERATIONS,
        ranks_per_group=ranks_per_group,
        updates_per_rollout=2,
    )
    watch = Watch()
    logs = CompletionLog(dirpath=str(folder / "logs" / f"{strategy}-{ranks_per_group}-{case}"), token_logprobs=True)
    fit(
        module,
        case.prompts(folder),
        strategy,
        batch=NUM_PROMPTS,
        validation=PromptSource(case.prompts(folder)[:3], 1, shuffle=False),
        max_steps=4,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[watch, logs],
    )
    kept = {name: getattr(watch, name) for name in ("before", "after", "groups", "steps", "validated")}
    return kept | {"scored": list(SCORED)}


def save_policies(folder: Path) -> None:
    """The policies that all runs start from, and the pictures."""
    steps.save_policy(folder)
    vision.save_policy(folder, FAMILY)


def main(strategy: str, ranks_per_group: str, folder: str, *names: str) -> None:
    """Run the cases, and save what came out on each rank."""
    torch.set_num_threads(1)
    for name in names:
        sys.stderr.write(f"case {name}\n")  # a rank that fails says where
        result = run(CASES[name], strategy, int(ranks_per_group), Path(folder))
        torch.save(result, Path(folder) / f"{strategy}-{ranks_per_group}-{name}-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
