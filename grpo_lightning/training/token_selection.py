"""Choose some tokens of an optimizer step, by entropy or by covariance of log-prob and advantage.

The choice depends on all tokens of the step, on all ranks. So before each step, all its micro-batches run through the
policy in an additional pass without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lightning.core import ranks
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import MicroBatch
from grpo_lightning.functional import high_covariance_tokens, high_entropy_tokens, random_covariance_tokens
from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import TokenLogprobs
from grpo_lightning.training.actor import Actor


class Selection(NamedTuple):
    """One way to select tokens, for a value of `Objective.selection`."""

    features: Callable[[Objective, MicroBatch, TokenLogprobs, int], list[Tensor]]
    """Computes the features that the choice depends on, each [B, T]."""

    choose: Callable[..., Tensor]
    """Computes which of the step's M trained tokens are chosen, [M] bool, from the objective and the features, each
    [M]."""


def select_tokens(
    actor: Actor, objective: Objective, micro_batches: Sequence[MicroBatch], *, seed: int
) -> list[TokenLogprobs]:
    """Set `selected` of the micro-batches of an optimizer step.

    Collective: every rank calls this function, with the same number of micro-batches and the same `seed`.

    Returns:
        Log-probs, entropies and routing of each micro-batch.
    """
    assert objective.selection is not None
    features, choose = SELECTIONS[objective.selection]
    own, results = [], []
    with torch.no_grad(), actor.phase("token_selection"):
        for batch in micro_batches:
            results.append(actor.token_logprobs(batch))
            values = features(objective, batch, results[-1], seed)
            own.append(torch.stack(values, dim=-1)[batch.completion_mask])  # [trained tokens, F]
    everyone = ranks.gather_rows(torch.cat(own))
    chosen = choose(objective, *torch.cat(everyone).unbind(dim=1)).split([len(part) for part in everyone])
    for batch, tokens in zip(micro_batches, chosen[ranks.rank()].split([len(part) for part in own]), strict=True):
        batch.selected = torch.zeros_like(batch.completion_mask).masked_scatter(batch.completion_mask, tokens)
    return results


def _entropies(_: Objective, batch: MicroBatch, tokens: TokenLogprobs, seed: int) -> list[Tensor]:
    return [tokens.entropy]


def _high_entropy(objective: Objective, entropies: Tensor) -> Tensor:
    return high_entropy_tokens(entropies, objective.top_entropy_fraction)


def _covariates(_: Objective, batch: MicroBatch, tokens: TokenLogprobs, seed: int) -> list[Tensor]:
    advantages = batch.token_advantages.expand_as(tokens.logprobs)
    return [tokens.logprobs, advantages, random_keys(batch, seed).to(tokens.logprobs)]


def _high_covariance(objective: Objective, logprobs: Tensor, advantages: Tensor, keys: Tensor) -> Tensor:
    return high_covariance_tokens(logprobs, advantages, objective.covariance_fraction, keys)


def _covariates_and_clipped(objective: Objective, batch: MicroBatch, tokens: TokenLogprobs, seed: int) -> list[Tensor]:
    low, high = objective.find_clipped(tokens.logprobs, batch)
    return [*_covariates(objective, batch, tokens, seed), (low | high).to(tokens.logprobs)]


def _random_covariance(
    objective: Objective, logprobs: Tensor, advantages: Tensor, keys: Tensor, is_clipped: Tensor
) -> Tensor:
    limits = {"low": objective.clip_cov_low, "high": objective.clip_cov_high}
    return random_covariance_tokens(
        logprobs, advantages, is_clipped, keys, fraction=objective.covariance_fraction, **limits
    )


SELECTIONS = {
    "high_entropy": Selection(_entropies, _high_entropy),
    "high_covariance": Selection(_covariates, _high_covariance),
    "random_covariance": Selection(_covariates_and_clipped, _random_covariance),
}
"""The ways to select tokens, by their name in `Objective.selection`."""


def random_keys(batch: MicroBatch, seed: int) -> Tensor:
    """One random number per token, which depends only on seed, prompt and completion.

    Returns:
        [B, T] float32 in [0, 1), on the CPU; 0 at padding.
    """
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    keys = torch.zeros(batch.completion_ids.shape)
    for row, (prompt, ids, mask) in enumerate(
        zip(batch.prompt_index.tolist(), batch.completion_ids, batch.attention_mask, strict=True)
    ):
        completion = ids[mask].tolist()
        generator = torch.Generator().manual_seed(derived_seed(seed, str(prompts[prompt]), str(completion)))
        keys[row, : len(completion)] = torch.rand(len(completion), generator=generator)
    return keys
