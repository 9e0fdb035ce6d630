"""Choose the tokens of an optimizer step by their entropy or covariance, over all its micro-batches and ranks.

Which tokens have the highest entropy is known only once all tokens of the step are scored, before the first of them is
trained on. So the step's micro-batches run through the policy once more, without gradients, with the weights that the
step starts from.
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
from grpo_lightning.policy.scorer import TokenScores
from grpo_lightning.training.actor import Actor


class Selection(NamedTuple):
    """One choice of `Objective.selection`."""

    features: Callable[[Objective, MicroBatch, TokenScores, int], list[Tensor]]
    """Returns what is gathered of each token, [B, T] each, from a micro-batch, its scores and a seed."""

    choose: Callable[..., Tensor]
    """Returns the tokens chosen, [M] bool, from the objective and the features of all tokens of the step, [M] each."""


def select_tokens(
    actor: Actor, objective: Objective, micro_batches: Sequence[MicroBatch], *, seed: int
) -> list[TokenScores]:
    """Set `selected` of the micro-batches of an optimizer step. Collective: all ranks have equally many.

    Args:
        actor: Scores the micro-batches, with the current weights.
        objective: Has a `selection`.
        micro_batches: All of the step, of this rank.
        seed: Of a random choice; the same on all ranks.

    Returns:
        The scores of the micro-batches.
    """
    assert objective.selection is not None
    features, choose = SELECTIONS[objective.selection]
    own, scores = [], []
    with torch.no_grad(), actor.phase("token_selection"):
        for batch in micro_batches:
            scores.append(actor.token_logprobs(batch))
            values = features(objective, batch, scores[-1], seed)
            own.append(torch.stack(values, dim=-1)[batch.completion_mask])  # [trained tokens, F]
    everyone = ranks.gather_rows(torch.cat(own))
    chosen = choose(objective, *torch.cat(everyone).unbind(dim=1)).split([len(part) for part in everyone])
    for batch, tokens in zip(micro_batches, chosen[ranks.rank()].split([len(part) for part in own]), strict=True):
        batch.selected = torch.zeros_like(batch.completion_mask).masked_scatter(batch.completion_mask, tokens)
    return scores


def _entropies(_: Objective, batch: MicroBatch, scores: TokenScores, seed: int) -> list[Tensor]:
    return [scores.entropy]


def _high_entropy(objective: Objective, entropies: Tensor) -> Tensor:
    return high_entropy_tokens(entropies, objective.top_entropy_fraction)


def _covariates(_: Objective, batch: MicroBatch, scores: TokenScores, seed: int) -> list[Tensor]:
    return [scores.logprobs, batch.advantages[:, None].expand_as(scores.logprobs)]


def _high_covariance(objective: Objective, logprobs: Tensor, advantages: Tensor) -> Tensor:
    return high_covariance_tokens(logprobs, advantages, objective.covariance_fraction)


def _covariates_and_keys(objective: Objective, batch: MicroBatch, scores: TokenScores, seed: int) -> list[Tensor]:
    low, high = objective.clipped(scores.logprobs, batch)
    others = [each.to(scores.logprobs) for each in (low | high, random_keys(batch, seed))]
    return [*_covariates(objective, batch, scores, seed), *others]


def _random_covariance(
    objective: Objective, logprobs: Tensor, advantages: Tensor, is_clipped: Tensor, keys: Tensor
) -> Tensor:
    limits = {"low": objective.clip_cov_low, "high": objective.clip_cov_high}
    return random_covariance_tokens(
        logprobs, advantages, is_clipped, keys, fraction=objective.covariance_fraction, **limits
    )


SELECTIONS = {
    "high_entropy": Selection(_entropies, _high_entropy),
    "high_covariance": Selection(_covariates, _high_covariance),
    "random_covariance": Selection(_covariates_and_keys, _random_covariance),
}
"""How tokens are selected, by name."""


def random_keys(batch: MicroBatch, seed: int) -> Tensor:
    """Random numbers of tokens that follow from seed, prompt and completion, not from micro-batch or rank.

    Args:
        batch: Completions of any prompts. Equal completions of a prompt get the same numbers.
        seed: Of the optimizer step.

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
