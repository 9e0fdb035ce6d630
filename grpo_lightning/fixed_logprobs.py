"""Log-probs that stay as they are for a cycle: of the policy when it drew the rollout, and of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.rollout_batches import micro_batches_of
from grpo_lightning.types import Completion, Group, MicroBatch

if TYPE_CHECKING:
    from grpo_lightning.module import GRPOLightningModule


def add_old_logprobs(module: GRPOLightningModule, micro_batches: Sequence[MicroBatch]) -> None:
    """Score all but the first update with the weights as they are, or take the engine's log-probs for it.

    The first update's own forward passes see the weights as they still are: they need no pass before.
    """
    if module.old_logprobs == "rollout":
        for batch in micro_batches:
            batch.old_logprobs = batch.rollout_logprobs
    elif later := micro_batches[module.trainer.accumulate_grad_batches :]:
        with torch.no_grad(), module.phase("old_logprobs"):
            module.policy.train()
            for batch in later:
                batch.old_logprobs = module.logprobs(module.policy, batch)


def add_ref_logprobs(module: GRPOLightningModule, groups: Sequence[Group]) -> None:
    """Give completions their log-probs under the reference, if there is one and they have none; every rank takes part.

    Completions that are not trained on are left out, unless the KL is part of the rewards.
    """
    if module.reference is None:
        return
    is_all = module.objective.kl_in == "reward"
    scored = [c for group in groups for c in group.completions if is_all or c.mask is None or any(c.mask)]
    if not ranks.is_any(any(completion.ref_logprobs is None for completion in scored)):
        return
    rows: Sequence[Group] = groups
    if is_all:
        rows = [replace(group, completions=[replace(c, mask=None) for c in group.completions]) for group in groups]
    with torch.no_grad(), module.phase("ref_logprobs"), module.reference.scoring(module.policy) as model:
        for batch in micro_batches_of(module, rows, None)[0]:
            logprobs = module.logprobs(model, batch).float().tolist()
            for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
                if number >= 0:  # none that only stands in
                    completion = groups[batch.groups[prompt]].completions[number]
                    completion.ref_logprobs = logprobs[row][: len(completion.token_ids)]


def without_kl(module: GRPOLightningModule, groups: Sequence[Group], rewards: Tensor) -> Tensor:
    """Rewards [N, G] less the KL to the reference where it belongs there: k1, summed over a completion's tokens.

    reward - beta * sum over t of (rollout_logprob[t] - ref_logprob[t])
    """
    if module.objective.kl_in != "reward" or module.reference is None:
        return rewards
    sums = [[_kl(completion) for completion in group.completions] for group in groups]
    return rewards - module.objective.beta * torch.tensor(sums, dtype=torch.float32).view_as(rewards)


def _kl(completion: Completion) -> float:
    """The sum over the tokens that the policy drew, in nats; a completion that is not trained on has drawn all."""
    assert completion.ref_logprobs is not None
    mask = completion.mask if completion.mask and any(completion.mask) else [True] * len(completion.logprobs)
    drawn = zip(completion.logprobs, completion.ref_logprobs, mask, strict=True)
    return sum(own - ref for own, ref, is_drawn in drawn if is_drawn)
