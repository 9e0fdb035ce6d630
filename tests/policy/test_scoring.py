"""Extended scoring equals dense scoring, in value and gradient, for every family."""

import math

import pytest
import torch
from transformers.cache_utils import Cache

from grpo_lightning.policy.loading import checkpoint_layers, disable_dropout
from grpo_lightning.policy.prefix_cache import LostCacheError, PrefixCache
from grpo_lightning.policy.scoring import Scorer, choose_path, probe_difference
from grpo_lightning.types import MicroBatch
from tests.tiny_models import FAMILIES, VOCAB, tiny_model

# Older releases of transformers do not read linear-attention states through the cache: there such models score densely.
READS_LINEAR_STATES = hasattr(Cache, "get_conv_state")
EXTENDED = [family for family in FAMILIES if family != "qwen3.5" or READS_LINEAR_STATES]


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
    """How far two dense passes differ when only padding does: linear attention works in blocks that padding moves."""
    wider = vars(batch).copy()
    wider["prompt_ids"] = torch.nn.functional.pad(batch.prompt_ids, (5, 0))
    wider["prompt_mask"] = torch.nn.functional.pad(batch.prompt_mask, (5, 0))
    dense = Scorer("dense")
    return worst_difference(
        loss_and_gradients(model, MicroBatch(**wider), dense, weights)[1],
        loss_and_gradients(model, batch, dense, weights)[1],
    )


@pytest.mark.parametrize("family", EXTENDED)
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


def test_a_wrong_position_turns_the_equality_red(monkeypatch):
    """Completions at the padded instead of the real prompt length: no loss curve would show it, this test does."""
    model, batch = tiny_model("qwen2"), ragged_batch(seed=1)
    _, want = loss_and_gradients(model, batch, Scorer("dense"), row_weights(batch))
    monkeypatch.setattr(
        "grpo_lightning.policy.scoring.text_positions", lambda mask: torch.arange(mask.shape[1]).expand_as(mask)
    )
    _, got = loss_and_gradients(model, batch, Scorer(), row_weights(batch))
    assert worst_difference(got, want) > 0.1


def test_dense_equals_one_unpadded_row_at_a_time():
    """The reference of the other tests, checked without padding, masks, positions or batches."""
    model, batch = tiny_model("qwen2"), ragged_batch()
    scores = Scorer("dense")(model, batch, temperature=0.7)
    for row, prompt in enumerate(batch.prompt_index):
        ids = torch.cat(
            [batch.prompt_ids[prompt][batch.prompt_mask[prompt]], batch.completion_ids[row][batch.attention_mask[row]]]
        )
        count = int(batch.attention_mask[row].sum())
        logprobs = torch.log_softmax(model(ids[None]).logits[0, -count - 1 : -1] / 0.7, -1)
        want = logprobs.gather(1, ids[-count:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs[row, :count], want, atol=2e-5, rtol=0)
        torch.testing.assert_close(scores.entropy[row, :count], -(logprobs.exp() * logprobs).sum(-1), atol=2e-5, rtol=0)
        assert not scores.logprobs[row, count:].any()


@pytest.mark.parametrize("checkpointing", ["none", "chunks", "layers"])
def test_prompts_are_embedded_once_per_pass(checkpointing):
    model, batch = tiny_model("qwen2").train(), ragged_batch(lengths=(20, 10), generations=8)
    if checkpointing == "layers":
        checkpoint_layers(model)
    embedded = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: embedded.append(inputs[0].shape))
    scorer = Scorer(chunk_size=4 if checkpointing == "chunks" else None, checkpoint_chunks=checkpointing == "chunks")
    scorer(model, batch, temperature=1.0).logprobs.sum().backward()
    assert [tuple(shape) for shape in embedded if shape[1] == 20] == [(2, 20)]
    assert sum(shape[0] for shape in embedded if shape[1] != 20) == (32 if checkpointing == "chunks" else 16)


def test_transformers_checkpointing_is_refused():
    model = tiny_model("qwen2")
    model.gradient_checkpointing_enable()
    for path in ("extended", "dense"):
        with pytest.raises(RuntimeError, match="activation_checkpointing"):
            Scorer(path)(model, ragged_batch(), temperature=1.0)


def test_a_lost_cache_raises(monkeypatch):
    model, batch = tiny_model("qwen2").train(), ragged_batch()
    model.gradient_checkpointing_enable()
    monkeypatch.setattr("grpo_lightning.policy.scoring.refuse_transformers_checkpointing", lambda model: None)
    with pytest.raises(LostCacheError, match="stored nothing of the prompt"):
        Scorer()(model, batch, temperature=1.0)


def test_no_pass_before_phase_one():
    with pytest.raises(LostCacheError):
        PrefixCache(tiny_model("qwen2").config).extend(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_extended_path(family):
    path, reason = choose_path(tiny_model(family))
    assert path == ("extended" if family in EXTENDED else "dense"), reason


def test_the_static_rule_refuses_models_without_a_key_value_cache():
    model = tiny_model("mamba2")
    path, reason = choose_path(model)
    assert path == "dense"
    assert "past_key_values" in reason
    with pytest.raises(ValueError, match=r"policy.scoring is 'extended', but"):
        choose_path(model, "extended")


def test_the_static_rule_refuses_length_dependent_rope():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path, reason = choose_path(tiny_model("llama", rope_parameters=rope))
    assert path == "dense"
    assert "dynamic rope" in reason


def test_the_probe_has_the_last_word(monkeypatch):
    model = tiny_model("qwen2")
    assert probe_difference(model).max() < 5e-6
    monkeypatch.setattr("grpo_lightning.policy.scoring.probe_difference", lambda model: torch.full((3,), 0.01))
    path, reason = choose_path(model)
    assert path == "dense"
    assert "1.0e-02 nats" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scorer", [Scorer(), Scorer(chunk_size=4), Scorer(chunk_size=4, checkpoint_chunks=True), Scorer("dense")]
)
def test_unmoved_weights_give_a_ratio_of_exactly_one(dtype, scorer):
    """The pass without gradients and the pass with them round alike, bit for bit."""
    model, batch = tiny_model("qwen2", dtype=dtype).train(), ragged_batch()
    with torch.no_grad():
        old = scorer(model, batch, temperature=0.7).logprobs
    assert torch.equal(scorer(model, batch, temperature=0.7).logprobs, old)


def test_chunks_hold_completions_of_like_length():
    batch = ragged_batch(generations=4)
    chunks = Scorer(chunk_size=5).chunks(batch)
    assert sorted(torch.cat(chunks).tolist()) == list(range(12))
    assert max(map(len, chunks)) <= 5
    lengths = batch.attention_mask.sum(1)[torch.cat(chunks)].tolist()
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_single_token_completions(generations, width):
    model = tiny_model("qwen2")
    batch = ragged_batch(lengths=(4,), generations=generations, width=width)
    _, want = loss_and_gradients(model, batch, Scorer("dense"), row_weights(batch))
    _, got = loss_and_gradients(model, batch, Scorer(), row_weights(batch))
    assert worst_difference(got, want) < 1e-5


def test_completions_split_unevenly_over_prompts():
    model, batch = tiny_model("qwen2"), ragged_batch()
    rows = torch.tensor([0, 1, 3, 6, 7, 8])
    fields = {
        name: value[rows] if len(value) == 9 else value
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor)
    }
    batch = MicroBatch(**fields)
    _, want = loss_and_gradients(model, batch, Scorer("dense"), row_weights(batch))
    _, got = loss_and_gradients(model, batch, Scorer(), row_weights(batch))
    assert worst_difference(got, want) < 1e-5


def test_mamba_trains_by_the_dense_path():
    model, batch = tiny_model("mamba2"), ragged_batch()
    scorer = Scorer(choose_path(model)[0], chunk_size=4)
    loss, gradients = loss_and_gradients(model, batch, scorer, row_weights(batch))
    assert math.isfinite(loss)
    assert sum(float(g.norm()) for g in gradients.values()) > 0
