"""Completions that are scored and not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from grpo_lightning.evaluation import Evaluation
from grpo_lightning.seeding import derived_seed, run_seed
from grpo_lightning.types import Prompt

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule


@torch.no_grad()
def evaluate(module: GRPOLightningModule, prompts: Sequence[Prompt], *, is_greedy: bool) -> Evaluation:
    """Draw completions of N prompts and score them; what a prompt gets depends on its place in the data alone."""
    num_generations, sampling = module.validation.draw(module.sampling, is_greedy=is_greedy)
    module.engine.sync_weights(module.policy)
    names = (prompt.index if prompt.index >= 0 else str(prompt.content) for prompt in prompts)
    seeds = [derived_seed(run_seed(module.seed), "evaluation", name) for name in names]
    groups = module.generate(prompts, num_generations, sampling, seeds)
    return Evaluation(groups, module.begin_rewards(groups, num_generations).finish())
