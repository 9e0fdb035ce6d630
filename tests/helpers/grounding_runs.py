"""Runs of a tiny policy that sees images, whose answers are written down: what tests of boxes and pictures share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Box, Prompt
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards.boxes.rewards import IoU
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import ScriptedEngine, make_module
from tests.helpers.tiny_models import EOS

build = functools.cache(tiny_vlms.build)
"""One model for all tests of a process: none of them trains far."""


class Answers(ScriptedEngine):
    """Gives these texts to every prompt: the g-th completion has the g-th."""

    def __init__(self, *texts: str) -> None:
        super().__init__([])
        self.texts = texts

    def connect(self, policy: Any, tokenizer: Any, sharding: Any) -> None:
        super().connect(policy, tokenizer, sharding)
        self.say(*self.texts)

    def say(self, *texts: str) -> None:
        """Give other texts from now on."""
        self.token_ids = [[*self.tokenizer(text)["input_ids"], EOS] for text in texts]

    def generate(
        self,
        prompts: Any,
        num_generations: int,
        sampling: Any,
        seeds: Any,
        progress: Any = None,
        vision: Any = None,
    ) -> Any:
        return super().generate(prompts, num_generations, sampling, seeds, progress)


def grounding_module(engine: Any, family: str = "qwen2_5_vl", **options: Any) -> GRPOLightningModule:
    """A module around a tiny vision-language model that is rewarded for boxes."""
    model, processor = build(family)
    policy = PolicyLoader(model=model, tokenizer=processor)
    settings: dict[str, Any] = {"policy": policy, "rewards": [IoU()], "engine": engine, "length": 64, **options}
    return make_module(**settings)


def box_prompt(box: Sequence[float] | Box | None, *, index: int = -1, seed: int = 0, **options: Any) -> Prompt:
    """An image 84 wide and 56 high, which the tiny processors leave as it is, and what is asked about it."""
    content = [{"type": "image"}, {"type": "text", "text": f"where is thing {seed}?"}]
    image = ImageRef(tiny_vlms.picture(seed))
    columns = {} if box is None else {"solution": list(box)}
    return Prompt([{"role": "user", "content": content}], images=[image], columns=columns, index=index, **options)


def text_prompt(text: str = "what?", *, index: int = -1) -> Prompt:
    """A question without an image."""
    return Prompt([{"role": "user", "content": text}], columns={"solution": None}, index=index)
