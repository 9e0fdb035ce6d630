"""Extended scoring equals dense scoring, in value and gradient, for every family."""

import math

import pytest
import torch

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.kv_cache import LostCacheError, PrefixCache
from grpo_lightning.policy.loading import checkpoint_layers, disable_dropout
from grpo_lightning.policy.probe import choose_path
from tests.helpers.families import families
from tests.helpers.tiny_models import FAMILIES, READS_LINEAR_STATES, tiny_model
from tests.marks import few
from tests.policy.scored import loss_and_gradients, ragged_batch, row_weights, worst_difference

REFERENCE = Scorer("dense", head_chunk_size=None)
EXTENDED = [family for family in FAMILIES if family != "qwen3.5" or READS_LINEAR_STATES]


def dense_noise(model, batch, weights):
    """How far two dense passes differ when only padding does: linear attention works in blocks that padding moves."""
    wider = vars(batch).copy()
    wider["prompt_ids"] = torch.nn.functional.pad(batch.prompt_ids, (5, 0))
    wider["prompt_mask"] = torch.nn.functional.pad(batch.prompt_mask, (5, 0))
    return worst_difference(
        loss_and_gradients(model, MicroBatch(**wider), REFERENCE, weights)[1],
        loss_and_gradients(model, batch, REFERENCE, weights)[1],
    )


@few(2)
@pytest.mark.parametrize("family", families(EXTENDED))
@pytest.mark.parametrize("generations", [3, 1])
def test_extended_equals_dense(family, generations):
    model = tiny_model(family)
    disable_dropout(model)
    batch = ragged_batch(generations=generations, seed=1)
    weights = row_weights(batch)
    want_loss, want = loss_and_gradients(model, batch, REFERENCE, weights)
    floor = max(1e-5, 3 * dense_noise(model, batch, weights)) if family == "qwen3.5" else 1e-5
    for scorer in (Scorer(), Scorer(chunk_size=2), Scorer(chunk_size=4, checkpoint_chunks=True, head_chunk_size=5)):
        loss, got = loss_and_gradients(model, batch, scorer, weights)
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < floor, scorer
    checkpoint_layers(model.train())
    for scorer in (Scorer(head_chunk_size=None), Scorer(chunk_size=4, head_chunk_size=5)):
        loss, got = loss_and_gradients(model, batch, scorer, weights)
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert worst_difference(got, want) < floor, scorer


@pytest.mark.parametrize(("family", "masks"), [("qwen2", False), ("gemma3", True)])
def test_prompts_of_different_lengths_need_no_mask_with_full_attention(family, masks):
    """The prompt pass has its padding behind the prompts. Sliding windows are stored as they end, padding in front."""
    model, batch = tiny_model(family), ragged_batch(lengths=(20, 10, 5))
    given = []
    model.register_forward_pre_hook(lambda _, args, inputs: given.append(inputs), with_kwargs=True)
    Scorer()(model, batch, temperature=1.0)
    prompts = given[0]
    assert bool(prompts["attention_mask"].all()) != masks
    if not masks:
        for ids, real, mask in zip(prompts["input_ids"], batch.prompt_ids, batch.prompt_mask, strict=True):
            assert ids[: mask.sum()].tolist() == real[mask].tolist()
    assert torch.equal(given[1]["attention_mask"][::3, :20].bool(), batch.prompt_mask), "in front of the completions"


def test_a_wrong_position_turns_the_equality_red(monkeypatch):
    """Completions at the padded instead of the real prompt length: no loss curve would show it, this test does."""
    model, batch = tiny_model("qwen2"), ragged_batch(seed=1)
    _, want = loss_and_gradients(model, batch, REFERENCE, row_weights(batch))
    padded = "grpo_lightning.policy.completion_logprobs.text_positions"
    monkeypatch.setattr(padded, lambda mask: torch.arange(mask.shape[1]).expand_as(mask))
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


def trained(model, checkpointing):
    """A scorer in chunks of 4 with this checkpointing, and the rows of every call of the last layer."""
    if checkpointing == "layers":
        checkpoint_layers(model)
    calls = []
    # A recomputed layer is called by its `forward`, which hooks do not see: count what is inside.
    inside = model.model.layers[-1].self_attn.q_proj
    inside.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    return Scorer(chunk_size=4, checkpoint_chunks=checkpointing == "chunks", head_chunk_size=5), calls


@few(2)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("checkpointing", "recomputed"), [("none", []), ("chunks", [4, 4, 4, 4]), ("layers", [2, 4, 4, 4, 4])]
)
def test_checkpointed_forwards_run_again_in_the_backward_pass_alone(checkpointing, recomputed, mode):
    """The prompts (2) run once and the chunks (4) once each, where gradients are off; else they are recomputed."""
    batch = ragged_batch(lengths=(20, 10), generations=8)
    _, want = loss_and_gradients(tiny_model("qwen2"), batch, Scorer(chunk_size=4), row_weights(batch))
    model = tiny_model("qwen2").train(mode == "train")
    scorer, calls = trained(model, checkpointing)
    with torch.no_grad():
        scorer(model, batch, temperature=0.7)
    assert calls == [2, 4, 4, 4, 4]
    calls.clear()
    logprobs = scorer(model, batch, temperature=0.7).logprobs
    assert calls == [2, 4, 4, 4, 4]
    calls.clear()
    (-(logprobs * row_weights(batch)).sum() / batch.completion_mask.sum()).backward()
    assert sorted(calls) == recomputed
    assert worst_difference({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want) < 1e-5


@few(2)
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("checkpointing", ["none", "chunks", "layers"])
def test_checkpointing_recomputes_a_prompt_once_and_keeps_the_gradients(checkpointing, chunk_size):
    """Token positions that run through each layer. Without shared prompts, they would be 16 rows of 20 + 8."""
    batch = ragged_batch(lengths=(20, 10), generations=8)
    _, want = loss_and_gradients(tiny_model("qwen2"), batch, Scorer(chunk_size=chunk_size), row_weights(batch))
    model = tiny_model("qwen2").train()
    if checkpointing == "layers":
        checkpoint_layers(model)
    shapes = [[] for _ in model.model.layers]
    for layer, found in zip(model.model.layers, shapes, strict=True):
        # A recomputed layer is called by its `forward`, which hooks do not see: count what is inside.
        layer.self_attn.q_proj.register_forward_hook(lambda _, inputs, __, found=found: found.append(inputs[0].shape))
    scorer = Scorer(chunk_size=chunk_size, checkpoint_chunks=checkpointing == "chunks")
    _, got = loss_and_gradients(model, batch, scorer, row_weights(batch))
    assert worst_difference(got, want) < 1e-6
    masks = [batch.attention_mask if rows is None else batch.attention_mask[rows] for rows in scorer.chunks(batch)]
    of_completions = sum(len(mask) * max(int(mask.sum(1).max()) - 1, 2) for mask in masks)
    passes = {"none": (1, 1), "chunks": (1, 2), "layers": (2, 2)}[checkpointing]
    for found in shapes:
        of_prompts = sum(shape[0] * shape[1] for shape in found if shape[1] == 20)
        of_all = sum(shape[0] * shape[1] for shape in found)
        assert (of_prompts, of_all - of_prompts) == (passes[0] * 2 * 20, passes[1] * of_completions)


def test_sampling_runs_no_layer_twice():
    calls = {}
    for checkpointing in ("none", "layers"):
        model = tiny_model("qwen2").train()
        _, calls[checkpointing] = trained(model, checkpointing)
        with torch.no_grad():
            model.generate(torch.arange(2, 7)[None], max_new_tokens=4, do_sample=False)
    assert calls["layers"] == calls["none"]
    assert len(calls["none"]) == 4


def test_transformers_checkpointing_is_refused():
    model = tiny_model("qwen2")
    model.gradient_checkpointing_enable()
    for path in ("extended", "dense"):
        with pytest.raises(RuntimeError, match="activation_checkpointing"):
            Scorer(path)(model, ragged_batch(), temperature=1.0)


def test_a_lost_cache_raises(monkeypatch):
    model, batch = tiny_model("qwen2").train(), ragged_batch()
    model.gradient_checkpointing_enable()
    monkeypatch.setattr(
        "grpo_lightning.policy.completion_logprobs.refuse_transformers_checkpointing", lambda model: None
    )
    with pytest.raises(LostCacheError, match="did not store the prompt"):
        Scorer()(model, batch, temperature=1.0)


def test_no_pass_before_phase_one():
    with pytest.raises(LostCacheError):
        PrefixCache(tiny_model("qwen2").config).extend(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scorer",
    [
        Scorer(),
        Scorer(chunk_size=4),
        Scorer(chunk_size=4, checkpoint_chunks=True),
        Scorer("dense"),
        Scorer(head_chunk_size=5),
        Scorer(head_chunk_size=None),
    ],
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


@few(1)
@pytest.mark.parametrize("path", ["extended", "dense"])
@pytest.mark.parametrize("checkpoint_chunks", [False, True])
def test_any_number_of_forward_calls_gives_the_same_scores_and_gradients(path, checkpoint_chunks):
    """More chunks than rows: what fills up the number runs forward and backward, and changes nothing."""
    model, batch = tiny_model("qwen2"), ragged_batch(lengths=(6, 4), generations=2)
    weights, scorer = row_weights(batch), Scorer(path, 3, checkpoint_chunks)
    calls, passed_back = [], []
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    model.model.layers[0].register_full_backward_hook(lambda *_: passed_back.append("backward"))
    want = scorer(model, batch, temperature=0.7)
    _, gradients = loss_and_gradients(model, batch, scorer, weights)
    assert scorer.num_chunks(batch) == 2
    for number in (2, 3, 4, 7):
        batch.num_chunks = number
        calls.clear(), passed_back.clear()
        got = scorer(model, batch, temperature=0.7)
        num_calls = number + (path == "extended")
        assert len(calls) == num_calls
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        calls.clear()
        _, found = loss_and_gradients(model, batch, scorer, weights)
        assert len(calls) == num_calls + (number if checkpoint_chunks else 0)
        assert len(passed_back) == num_calls
        assert worst_difference(found, gradients) < 1e-5
    batch.num_chunks = 1
    with pytest.raises(AssertionError, match="more than 3 rows"):
        scorer(model, batch, temperature=0.7)


@pytest.mark.parametrize(
    ("chunk_size", "rows", "number"), [(None, 9, 1), (9, 9, 1), (4, 9, 3), (3, 9, 3), (1, 9, 9), (100, 9, 1)]
)
def test_the_number_of_chunks_by_hand(chunk_size, rows, number):
    batch, scorer = ragged_batch(generations=rows // 3), Scorer(chunk_size=chunk_size)
    assert scorer.num_chunks(batch) == len(scorer.chunks(batch)) == number


def test_what_fills_up_the_number_of_chunks_is_the_shortest_row():
    batch = ragged_batch(lengths=(5,), generations=3)
    batch.num_chunks = 5
    chunks = Scorer().chunks(batch)
    assert [len(rows) for rows in chunks] == [1] * 5
    lengths = batch.attention_mask.sum(1)[torch.cat(chunks)].tolist()
    assert lengths == [*sorted(lengths[:3], reverse=True), 1, 1]


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_single_token_completions(generations, width):
    model = tiny_model("qwen2")
    batch = ragged_batch(lengths=(4,), generations=generations, width=width)
    _, want = loss_and_gradients(model, batch, REFERENCE, row_weights(batch))
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
    _, want = loss_and_gradients(model, batch, REFERENCE, row_weights(batch))
    _, got = loss_and_gradients(model, batch, Scorer(), row_weights(batch))
    assert worst_difference(got, want) < 1e-5


def test_mamba_trains_by_the_dense_path():
    model, batch = tiny_model("mamba2"), ragged_batch()
    scorer = Scorer(choose_path(model)[0], chunk_size=4)
    loss, gradients = loss_and_gradients(model, batch, scorer, row_weights(batch))
    assert math.isfinite(loss)
    assert sum(float(g.norm()) for g in gradients.values()) > 0
