"""Extended scoring equals dense scoring, in value and gradient, for every family."""

import math

import pytest
import torch

from grpo_lightning.policy.loading import checkpoint_layers, disable_dropout
from grpo_lightning.policy.prefix_cache import LostCacheError, PrefixCache
from grpo_lightning.policy.scoring import Scorer, choose_path, probe_difference
from grpo_lightning.types import MicroBatch
from tests.tiny_models import FAMILIES, VOCAB, tiny_model


def ragged_batch(lengths=(20, 10, 5), generations=3, width=9, seed=0):
    """Left-padded prompts of these lengths with ragged completions; the first is the longest, one has a single token."""
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
    model.zero_grad()
    loss = -(scorer(model, batch, temperature=0.7).logprobs * weights).sum() / batch.completion_mask.sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_difference(got, want):
    """Largest difference of a parameter's gradient, relative to the larger of its norm and 1e-3 of the whole."""
    assert got.keys() == want.keys()
    whole = math.sqrt(sum(g.norm() ** 2 for g in want.values()))
    return max(float((got[n] - want[n]).norm() / max(want[n].norm(), 1e-3 * whole)) for n in want)


def dense_noise(model, batch, weights):
    """How far two dense passes differ when only padding differs: linear attention works in blocks that padding moves."""
    wider = vars(batch).copy()
    wider["prompt_ids"] = torch.nn.functional.pad(batch.prompt_ids, (5, 0))
    wider["prompt_mask"] = torch.nn.functional.pad(batch.prompt_mask, (5, 0))
    dense = Scorer("dense")
    return worst_difference(
        loss_and_gradients(model, MicroBatch(**wider), dense, weights)[1],
        loss_and_gradients(model, batch, dense, weights)[1],
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("generations", [3, 1])
def test_extended_equals_dense(family, generations):
    model = tiny_model(family)
    disable_dropout(model)
    batch = ragged_batch(generations=generations, seed=1)
    weights = row_weights(batch)
    want_loss, want = loss_and_gradients(model, batch, Scorer("dense"), weights)
    floor = max(1e-5, 3 * dense_noise(model, batch, weights)) if family == "qwen3.5" else 1e-5
    for scorer in (Scorer(), Scorer(chunk_size=2), Scorer(chunk_size=4, checkpoint_chunks=True)):
        loss, got = loss_and_gradients(model, batch, scorer, weights)
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < floor, scorer
    checkpoint_layers(model.train())
    for scorer in (Scorer(), Scorer(chunk_size=4)):
        loss, got = loss_and_gradients(model, batch, scorer, weights)
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < floor, scorer
