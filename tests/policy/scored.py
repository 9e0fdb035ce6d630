"""Micro-batches to score, and what two ways of scoring differ by."""

import math

import torch

from grpo_lightning.core.types import MicroBatch
from tests.helpers.tiny_models import VOCAB


def ragged_batch(lengths=(20, 10, 5), generations=3, width=9, seed=0):
    """Left-padded prompts of these lengths with ragged completions: the first the longest, the last one token."""
    generator = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    prompt_mask = torch.arange(longest) >= (longest - torch.tensor(lengths))[:, None]
    sizes = torch.randint(1, width + 1, (count * generations,), generator=generator)
    sizes[0], sizes[-1] = width, 1
    mask = torch.arange(width) < sizes[:, None]
    return MicroBatch(
        prompt_ids=torch.randint(2, VOCAB, (count, longest), generator=generator) * prompt_mask,
        prompt_mask=prompt_mask,
        prompt_index=torch.arange(count).repeat_interleave(generations),
        completion_ids=torch.randint(2, VOCAB, (count * generations, width), generator=generator) * mask,
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.zeros(count * generations),
        rollout_logprobs=torch.zeros(count * generations, width),
    )


def row_weights(batch, seed=1):
    """One random factor per completion, as an advantage would be."""
    factors = torch.randn(len(batch.completion_ids), 1, generator=torch.Generator().manual_seed(seed))
    return factors * batch.completion_mask


def loss_and_gradients(model, batch, scorer, weights):
    """(loss, gradients by name) of a weighted sum of log-probs."""
    model.zero_grad()
    loss = -(scorer(model, batch, temperature=0.7).logprobs * weights).sum() / batch.completion_mask.sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_difference(got, want):
    """Largest difference of a parameter's gradient, relative to the larger of its norm and 1e-3 of the whole."""
    assert got.keys() == want.keys()
    whole = math.sqrt(sum(g.norm() ** 2 for g in want.values()))
    return max(float((got[n] - want[n]).norm() / max(want[n].norm(), 1e-3 * whole)) for n in want)


def whole_difference(got, want):
    """The norm of the difference of two gradients, all parameters together, relative to the second's."""
    assert got.keys() == want.keys()
    return math.sqrt(sum((got[n] - want[n]).norm() ** 2 for n in want) / sum(g.norm() ** 2 for g in want.values()))
