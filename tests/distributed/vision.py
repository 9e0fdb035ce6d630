"""Steps of a policy that sees images, on one rank or two: `python -m tests.distributed.vision STRATEGY FOLDER`.

As `steps`, with images on some prompts: of two ranks, the second has the prompts at odd places, and may have no image.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_lightning import PolicyLoader
from grpo_lightning.core import ranks
from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import EnvironmentReward, RewardWorkers
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.distributed.runs import fit, make_module
from tests.distributed.steps import LONGEST, ByPrompt, Watch
from tests.helpers import tiny_vlms
from tests.helpers.light_rewards import capitals
from tests.helpers.observed_images import Shows
from tests.helpers.vision_prompts import prompt_of

MIXED = [[0, "where?"], ["words only"], ["compare", 1, "with", 2], ["no image here"]]
"""Numbers stand for pictures: the first rank of two has them all."""

SHOWN = [["look"], ["none, words only"], [0, "see"], ["none again"]]
"""The first rank of two has all images of the environment, too."""

TEXT = [["one"], ["two of them"], ["3"], ["number four"]]


@dataclass
class Case:
    """A few steps with prompts of texts and pictures."""

    prompts: list[list[Any]] = field(default_factory=lambda: MIXED)
    steps: int = 1
    accumulate: int = 1
    updates: int = 1
    beta: float = 0.0
    lr: float = 0.1
    policy: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2_5_vl"
    ranks_per_group: int = 1
    """On two ranks; one device has all completions of a prompt."""
    engine: Any = None
    """Arguments of the local engine; None scripts the completions."""
    shows: bool = False
    """Conversations, in which the environment shows images to prompts without the word "none"."""


CASES = {
    # Two steps: DDP says at the second one which weights got no gradient in the first, and what it left shows.
    "a rank without images": Case(steps=2),
    "a rank without images, kl": Case(beta=0.04, accumulate=2, steps=2),
    "no image anywhere": Case(prompts=TEXT),
    "images everywhere": Case(prompts=[[0, "a"], [1, "b"], ["c", 2, 3], [4, "d"]], updates=2, accumulate=2, steps=2),
    "images in some micro-batches": Case(prompts=[["a"], [1, "b"], [2, "c"], ["d"]], accumulate=2, beta=0.04, steps=2),
    "a rank without prompts": Case(prompts=[[0, "lonely"]], accumulate=2),
    "dense": Case(policy={"scoring": "dense", "chunk_size": 3}),
    "layers": Case(policy={"activation_checkpointing": "layers"}, accumulate=2),
    "frozen tower": Case(policy={"freeze_vision_modules": True}, beta=0.04, steps=2),
    "a tower with an unused head": Case(family="gemma3", steps=2),
    "experts": Case(family="qwen3_vl_moe", accumulate=2),
    # In the first step only B moves.
    "lora": Case(
        policy={"lora": {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "down_proj"]}},
        beta=0.04,
        lr=0.01,
        steps=2,
    ),
    "sampled, gathered": Case(engine={}, steps=2),
    "sampled layer by layer": Case(engine={"gather_for_generation": False, "max_rows": 4}),
    "sampled by a frozen tower": Case(policy={"freeze_vision_modules": True}, engine={}, beta=0.04, steps=2),
    "sampled by a frozen tower layer by layer": Case(
        policy={"freeze_vision_modules": True}, engine={"gather_for_generation": False}, beta=0.04
    ),
    "images in observations": Case(prompts=SHOWN, shows=True, engine={}, beta=0.04, accumulate=2, steps=2),
    "images in observations, layer by layer": Case(
        prompts=SHOWN,
        shows=True,
        engine={"gather_for_generation": False},
        policy={"activation_checkpointing": "chunks"},
    ),
    "images in observations, frozen tower, layer by layer": Case(
        prompts=SHOWN,
        shows=True,
        engine={"gather_for_generation": False},
        policy={"freeze_vision_modules": True},
        beta=0.04,
    ),
    "images in observations of shared groups": Case(prompts=SHOWN, shows=True, engine={}, ranks_per_group=2, updates=2),
    "shared groups, kl": Case(ranks_per_group=2, beta=0.04, accumulate=2, steps=2),
    "shared groups, sampled by a frozen tower": Case(
        ranks_per_group=2, policy={"freeze_vision_modules": True}, engine={}, beta=0.04, steps=2
    ),
}


def run(case: Case, strategy: str, folder: Path) -> dict[str, Any]:
    """Train the case; returns the weights before and after, whole, and which are trained."""
    module = make_module(
        PolicyLoader(str(folder / case.family), **case.policy),
        [EnvironmentReward()] if case.shows else [capitals],
        length=60 if case.shows else LONGEST if case.engine is None else 4,
        lr=case.lr,
        engine=ByPrompt() if case.engine is None else LocalEngine(**case.engine),
        objective=Objective(beta=case.beta),
        num_generations=4,
        ranks_per_group=case.ranks_per_group,
        updates_per_rollout=case.updates,
        environment=Shows(num_turns=2) if case.shows else None,
        conversation=ConversationSettings(max_turn_length=4) if case.shows else None,
        # Workers that run the environment would import torch, on every rank.
        reward_workers=RewardWorkers(num_workers=0) if case.shows else None,
    )
    watch = Watch()
    prompts = [with_files(parts, folder, index) for index, parts in enumerate(case.prompts)]
    fit(
        module,
        prompts,
        strategy,
        max_steps=case.steps,
        accumulate_grad_batches=case.accumulate,
        callbacks=[watch],
    )
    return {"before": watch.before, "after": watch.after, "trained": watch.trained}


def with_files(parts: list[Any], folder: Path, index: int) -> Prompt:
    """A prompt with the files of its pictures."""
    prompt = prompt_of(*(tiny_vlms.picture(0) if isinstance(part, int) else part for part in parts), index=index)
    prompt.images = [ImageRef(folder / f"{part}.png") for part in parts if isinstance(part, int)]
    return prompt


def save_policies(folder: Path) -> None:
    """The policies that all runs start from, and the pictures."""
    for family in {case.family for case in CASES.values()}:
        save_policy(folder, family)


def save_policy(folder: Path, family: str) -> None:
    """One policy, in a folder of its name, and the pictures."""
    # Under ZeRO-3 a step takes as long as there are modules.
    model, processor = tiny_vlms.build(family, **({"num_hidden_layers": 2} if family == "qwen2_5_vl" else {}))
    model.save_pretrained(folder / family)
    processor.save_pretrained(folder / family)
    for i in range(5):
        tiny_vlms.picture(i, 56 + 28 * (i % 2), 84).save(folder / f"{i}.png")


def main(strategy: str, folder: str, *names: str) -> None:
    """Run the cases, all of them if none is named, and save what came out on each rank."""
    torch.set_num_threads(1)
    for name in names or CASES:
        sys.stderr.write(f"case {name}\n")  # a rank that fails says where
        result = run(CASES[name], strategy, Path(folder))
        torch.save(result, Path(folder) / f"{strategy}-{name}-{ranks.rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
