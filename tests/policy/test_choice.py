"""The path and the head of a run: by static rule, then by a probe that has the last word."""

import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_lightning.policy.choice import choose_head, choose_path, measure, probe_difference
from grpo_lightning.policy.head import SlicedHead
from grpo_lightning.policy.scoring import Scorer
from tests.tiny_models import FAMILIES, READS_LINEAR_STATES, tiny_model

# Older releases of transformers do not read linear-attention states through the cache: there such models score densely.
DENSE = [] if READS_LINEAR_STATES else ["qwen3.5"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_extended_path_and_a_sliced_head(family):
    model = tiny_model(family)
    path, reason = choose_path(model)
    assert path == ("dense" if family in DENSE else "extended"), reason
    scorer, reason = choose_head(Scorer(path), model)
    assert (scorer.head_chunk_size, scorer.logit_scale) == (512, 1.0), reason


def test_the_static_rule_refuses_models_without_a_key_value_cache():
    model = tiny_model("mamba2")
    path, reason = choose_path(model)
    assert path == "dense"
    assert "past_key_values" in reason
    with pytest.raises(ValueError, match=r"policy.scoring is 'extended', but"):
        choose_path(model, "extended")


def test_the_probe_has_the_last_word(monkeypatch):
    model = tiny_model("qwen2")
    assert probe_difference(model, Scorer(), Scorer("dense")).max() < 5e-6
    monkeypatch.setattr("grpo_lightning.policy.choice.probe_difference", lambda *_: torch.full((3,), 0.01))
    path, reason = choose_path(model)
    assert path == "dense"
    assert "1.0e-02 nats" in reason
    scorer, reason = choose_head(Scorer(), model)
    assert scorer.head_chunk_size is None
    assert "whole logits: a probe differs from whole logits by 1.0e-02 nats" in reason


def test_every_rank_takes_the_worst_difference_of_all(monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.choice.max_over_ranks", lambda nats: nats + 0.01)
    assert choose_path(tiny_model("qwen2"))[0] == "dense"


# ---------------------------------------------------------------------------------------------------------- rounding


def quantised_in_wide_storage(model):
    model.config.quantization_config = {"load_in_4bit": True}


def quantised(model):
    weight = torch.zeros(2, dtype=torch.uint8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)


def narrow_further_in(model):
    model.model.layers[0].bfloat16()


def sharded(param_dtype):
    def shard(model):
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.model.layers[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))

    return shard


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("change", "is_wide"),
    [
        (lambda model: None, True),
        (sharded(None), True),
        (sharded(torch.float32), True),
        (sharded(torch.bfloat16), False),
        (narrow_further_in, False),
        (quantised, False),
        (quantised_in_wide_storage, False),
    ],
)
def test_what_is_computed_in_16_bits_is_not_compared_as_32(change, is_wide, monkeypatch):
    model = tiny_model("qwen2")
    change(model)
    monkeypatch.setattr("grpo_lightning.policy.choice.probe_difference", lambda *_: torch.tensor([0.0, 0.01]))
    measured = measure(model, Scorer(), Scorer("dense"))
    assert measured.is_rounding != is_wide
    assert measured.nats == pytest.approx(0.01 if is_wide else 0.005)


def test_autocast_is_not_exact(monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.choice.probe_difference", lambda *_: torch.tensor([0.0, 0.01]))
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(tiny_model("qwen2"), Scorer(), Scorer("dense")).is_rounding


@pytest.mark.parametrize("path", ["extended", "dense"])
@pytest.mark.parametrize("moved", ["ids", "states", "scores"])
def test_a_broken_head_is_found_by_the_probe(monkeypatch, path, moved):
    def shift(tensor, name):
        return tensor.roll(1, 1) if name == moved else tensor

    class Broken(SlicedHead):
        def score(self, model, inputs, aligned, ids, mask):
            ids = shift(ids, "ids")
            scores = super().score(model, inputs, lambda states: shift(aligned(states), "states"), ids, mask)
            return shift(scores, "scores")

    monkeypatch.setattr("grpo_lightning.policy.scoring.SlicedHead", Broken)
    scorer, reason = choose_head(Scorer(path), tiny_model("qwen2"))
    assert scorer.head_chunk_size is None
    assert "more than rounding" in reason


# ------------------------------------------------------------------------------------------------------ whole logits


def whole_because(model, scorer=None):
    scorer, reason = choose_head(scorer or Scorer(chunk_size=3, checkpoint_chunks=True), model)
    assert scorer == Scorer(chunk_size=3, checkpoint_chunks=True, head_chunk_size=None)
    return reason


def test_whole_logits_on_request():
    scorer = Scorer(chunk_size=3, checkpoint_chunks=True, head_chunk_size=None)
    assert whole_because(tiny_model(), scorer) == "whole logits: asked for"


def test_whole_logits_without_a_named_head(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    assert "Qwen2ForCausalLM names no head" in whole_because(model)


def test_whole_logits_of_a_head_of_several_modules():
    """A part of a head may be gathered by its own hooks, as often as a rank has slices."""
    model = tiny_model()
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 120))
    assert "Sequential, is made of several modules" in whole_because(model)


def test_a_scale_behind_the_head_is_measured_and_anything_else_takes_whole_logits():
    model = tiny_model()

    def behind(change):
        handle = model.register_forward_hook(lambda module, _, output: setattr(output, "logits", change(output.logits)))
        chosen = choose_head(Scorer(head_chunk_size=7), model)
        handle.remove()
        return chosen

    assert behind(lambda logits: logits * 0.25)[0] == Scorer(head_chunk_size=7, logit_scale=0.25)
    for change in (
        lambda logits: 5 * torch.tanh(logits / 5),
        lambda logits: logits + 1,
        lambda logits: -logits,
        lambda logits: logits.log_softmax(-1),
        lambda logits: logits[..., :4],
        lambda logits: logits.view(-1, 4, 120),
        lambda logits: 0 * logits,
    ):
        scorer, reason = behind(change)
        assert scorer.head_chunk_size is None
        assert reason == "whole logits: the model does more than scale what its head gives"


def test_whole_logits_where_the_head_is_not_called():
    """Some models multiply by its weight, normalised."""
    model = tiny_model()
    head = model.lm_head
    model.lm_head = torch.nn.Linear(64, 120, bias=False)
    model.get_output_embeddings = types.MethodType(lambda self: head, model)
    assert "more than scale" in whole_because(model)
