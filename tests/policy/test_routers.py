"""The routing of a micro-batch is that of its dense rows, on every path, however it is cut."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo_lightning.functional import load_balancing_loss
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import checkpoint_layers
from grpo_lightning.policy.probe import check_routers
from grpo_lightning.policy.routers import Routers, UnsupportedRoutersError, find_routers
from tests.helpers import tiny_vlms
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW
from tests.policy.scored import ragged_batch, row_weights, worst_difference

DENSE = Scorer("dense", head_chunk_size=None)
EXPERTS = [
    "qwen3_moe",
    pytest.param("mixtral", marks=pytest.mark.slow),
    pytest.param("gpt_oss", marks=pytest.mark.slow),
]


def routed(model, batch, scorer):
    """(load, load-balancing loss, its gradient and that of the log-probs together)."""
    model.zero_grad()
    scores = scorer(model, batch, temperature=0.7, routers=find_routers(model))
    loss = load_balancing_loss(scores.load.routed, scores.load.probs, scores.load.num_tokens)
    (loss + (scores.logprobs * row_weights(batch)).sum() / batch.completion_mask.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return scores.load, loss.item(), gradients


@SLOW
@pytest.mark.parametrize("family", EXPERTS)
def test_the_extended_path_counts_what_the_dense_path_does(family):
    """A prompt as often as it has completions; recomputed activations once."""
    model, batch = tiny_model(family), ragged_batch(seed=1)
    want, want_loss, want_gradients = routed(model, batch, DENSE)
    lengths = batch.prompt_mask.sum(1)[batch.prompt_index] + batch.attention_mask.sum(1) - 1
    assert want.num_tokens == lengths.sum()
    assert (want.routed.sum(1) == 2 * lengths.sum()).all()

    def check(scorer):
        load, loss, gradients = routed(model, batch, scorer)
        assert torch.equal(load.routed, want.routed)
        assert load.num_tokens == want.num_tokens
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert worst_difference(gradients, want_gradients) < 1e-5, scorer

    for scorer in (Scorer(), Scorer(chunk_size=2), Scorer(chunk_size=4, checkpoint_chunks=True, head_chunk_size=5)):
        check(scorer)
    check(Scorer("dense", chunk_size=4, checkpoint_chunks=True))
    checkpoint_layers(model.train())
    check(Scorer(head_chunk_size=None))
    check(Scorer(chunk_size=4, head_chunk_size=5))


@pytest.mark.parametrize("family", EXPERTS)
def test_the_loss_is_that_of_transformers(family):
    """Its own forward pass over the dense rows, without the last tokens, which our passes need not run."""
    model, batch = tiny_model(family), ragged_batch(seed=1)
    prompt_mask = batch.prompt_mask[batch.prompt_index]
    mask = torch.cat([prompt_mask, batch.attention_mask], 1).long()
    output = model(
        input_ids=torch.cat([batch.prompt_ids[batch.prompt_index], batch.completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        output_router_logits=True,
    )
    is_last = mask.flip(1).cumsum(1).flip(1) == 1
    theirs = sys.modules[type(model).__module__].load_balancing_loss_func
    want = theirs(output.router_logits, 4, 2, mask * ~is_last)
    assert routed(model, batch, Scorer())[1] == pytest.approx(want.item(), rel=1e-5)


def test_what_is_not_trained_does_not_count():
    """Fully masked completions, their share of the prompt, and the rows that fill up a number of chunks."""
    model, batch = tiny_model("qwen3_moe"), ragged_batch(seed=1)
    some = dataclasses.replace(batch, completion_mask=batch.completion_mask.clone())
    some.completion_mask[3:7] = False  # the second prompt is not trained at all
    some.completion_mask[0, ::2] = False  # a gap: tool output
    rows = [0, 1, 2, 7, 8]
    kept = dataclasses.replace(
        batch,
        prompt_index=batch.prompt_index[rows],
        **{
            name: getattr(batch, name)[rows]
            for name in ("completion_ids", "attention_mask", "completion_mask", "advantages", "rollout_logprobs")
        },
    )
    want = routed(model, kept, DENSE)[0]
    for scorer in (DENSE, Scorer(), Scorer(chunk_size=2)):
        load = routed(model, some, scorer)[0]
        assert torch.equal(load.routed, want.routed)
        torch.testing.assert_close(load.probs, want.probs)
    for scorer in (DENSE, Scorer()):
        more = routed(model, dataclasses.replace(kept, num_chunks=8), dataclasses.replace(scorer, chunk_size=1))[0]
        assert torch.equal(more.routed, want.routed)
    nothing = dataclasses.replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
    load, loss, _ = routed(model, nothing, Scorer())
    assert (loss, load.num_tokens) == (0, 0)


def test_padding_does_not_count():
    model, batch = tiny_model("qwen3_moe"), ragged_batch(seed=1)
    wider = dataclasses.replace(
        batch,
        prompt_ids=nn.functional.pad(batch.prompt_ids, (5, 0)),
        prompt_mask=nn.functional.pad(batch.prompt_mask, (5, 0)),
    )
    want, got = (routed(model, each, Scorer())[0] for each in (batch, wider))
    assert torch.equal(got.routed, want.routed)
    torch.testing.assert_close(got.probs, want.probs)


def test_nothing_is_recorded_unasked():
    model, batch = tiny_model("qwen3_moe"), ragged_batch()
    plain = Scorer()(model, batch, temperature=0.7)
    routers = find_routers(model)
    with_load = Scorer()(model, batch, temperature=0.7, routers=routers)
    assert plain.load is None
    assert torch.equal(plain.logprobs, with_load.logprobs)
    assert not any(module._forward_hooks for module, _ in routers.places)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_vl_moe", "glm4v_moe")]
)
def test_vision_language_models(family):
    """The routers of the language model; glm4v_moe's first layer is dense."""
    model = tiny_vlms.build(family).model
    routers = find_routers(model)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(routers.places) == layers - (family == "glm4v_moe")
    batch = ragged_batch(lengths=(6, 4), generations=2, width=5)
    want, loss, gradients = routed(model, batch, DENSE)
    got = routed(model, batch, Scorer(chunk_size=3))
    assert torch.equal(got[0].routed, want.routed)
    assert got[1] == pytest.approx(loss, rel=1e-5)
    assert worst_difference(got[2], gradients) < 1e-5


class Declared(nn.Module):
    """A model that declares its routers as transformers allows."""

    def __init__(self, recorded):
        super().__init__()
        self._can_record_outputs = {"router_logits": recorded}
        self.mlp = nn.ModuleDict({"gate": nn.Linear(2, 2), "up": nn.Linear(2, 2)})
        self.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_experts_per_tok=1))


@pytest.mark.parametrize(
    ("recorded", "names", "index"),
    [
        (nn.Linear, ["mlp.gate", "mlp.up"], 1),
        ("mlp.gate", ["mlp.gate"], 1),
        (SimpleNamespace(target_class=nn.Linear, index=0, layer_name="mlp.gate", class_name=None), ["mlp.gate"], 0),
        ([SimpleNamespace(target_class=None, index=2, layer_name=None, class_name=".up")], ["mlp.up"], 2),
    ],
)
def test_declarations_of_routers(recorded, names, index):
    model = Declared(recorded)
    assert find_routers(model).places == tuple((model.get_submodule(name), index) for name in names)


def test_routers_that_cannot_be_read_are_refused():
    with pytest.raises(UnsupportedRoutersError, match="declares no routers"):
        find_routers(tiny_model("qwen2"))
    model = Declared(nn.Linear)
    model.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    with pytest.raises(UnsupportedRoutersError, match="num_experts_per_tok is None"):
        find_routers(model)


def test_the_check_of_a_model_refuses_logits_that_are_not_those_of_its_tokens():
    model = tiny_model("qwen3_moe")
    routers = find_routers(model)
    check_routers(Scorer(), model, routers)
    check_routers(Scorer(), model, dataclasses.replace(routers, places=routers.places[:1]))
    twice = Routers((*routers.places, (nn.Linear(2, 2), 0)), 2)
    with pytest.raises(UnsupportedRoutersError, match=r"5 routers returned logits .* in 4 calls"):
        check_routers(Scorer(), model, twice)
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, out: (out[0][:3], *out[1:]))
    with pytest.raises(UnsupportedRoutersError, match=r"logits of \[\(3, 4\), .* for"):
        check_routers(Scorer(), model, routers)


def test_routers_that_are_trained_as_copies_are_recorded():
    """`modules_to_save: [gate]`: of the original and the copy, only the copy runs."""
    peft = pytest.importorskip("peft")
    model, batch = tiny_model("qwen3_moe"), ragged_batch(seed=1)
    want, want_loss, _ = routed(model, batch, DENSE)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    load, loss, _ = routed(peft.get_peft_model(model, config), batch, DENSE)
    assert torch.equal(load.routed, want.routed)
    assert loss == pytest.approx(want_loss, rel=1e-6)
