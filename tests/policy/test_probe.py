"""The path and the head of a run: by static rule, then by a probe that has the last word."""

import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.policy import probe
from grpo_lightning.policy.completion_logprobs import Scorer, SlicedHead, leaves_out_masks
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.probe import choose_head, choose_path, measure, probe_difference
from tests.helpers.families import families
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import BASE, FAMILIES, READS_LINEAR_STATES, tiny_model, tiny_tokenizer

# Older releases of transformers do not read linear-attention states through the cache: there such models score densely.
DENSE = [] if READS_LINEAR_STATES else ["qwen3.5"]


@pytest.mark.parametrize("family", families(FAMILIES))
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
    assert "has no KV cache" in reason
    with pytest.raises(ValueError, match=r"policy.scoring is 'extended', but"):
        choose_path(model, "extended")


def test_the_probe_has_the_last_word(monkeypatch):
    model = tiny_model("qwen2")
    assert probe_difference(model, Scorer(), Scorer("dense")).max() < 5e-6
    monkeypatch.setattr("grpo_lightning.policy.probe.probe_difference", lambda *_: torch.full((3,), 0.01))
    path, reason = choose_path(model)
    assert path == "dense"
    assert "1.0e-02 nats" in reason
    scorer, reason = choose_head(Scorer(), model)
    assert scorer.head_chunk_size is None
    assert "full logits: a probe of slices differs by 1.0e-02 nats" in reason


def test_every_rank_takes_the_worst_difference_of_all(monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.probe.max_over_ranks", lambda nats: nats + 0.01)
    assert choose_path(tiny_model("qwen2"))[0] == "dense"


# ---------------------------------------------------------------------------------------------------------- rounding


def quantized_in_wide_storage(model):
    model.config.quantization_config = {"load_in_4bit": True}


def quantized(model):
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
        (quantized, False),
        (quantized_in_wide_storage, False),
    ],
)
def test_what_is_computed_in_16_bits_is_not_compared_as_32(change, is_wide, monkeypatch):
    model = tiny_model("qwen2")
    change(model)
    monkeypatch.setattr("grpo_lightning.policy.probe.probe_difference", lambda *_: torch.tensor([0.0, 0.01]))
    measured = measure(model, Scorer(), Scorer("dense"))
    assert measured.is_rounding != is_wide
    assert measured.nats == pytest.approx(0.01 if is_wide else 0.005)


def rounding_unless(is_exact):
    """A model that rounds unless `is_exact()`, otherwise for every length of its input: as TF32 kernels do."""
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda module, _, output: None if is_exact() else output * (1 + 1e-4 * output.shape[1])
        )
    return model


def test_the_probe_judges_in_full_float32_and_restores_the_precision():
    model = rounding_unless(lambda: torch.get_float32_matmul_precision() == "highest")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert probe_difference(model, Scorer(), Scorer("dense")).max() > 5e-5  # a control: it would be taken for wrong
        path, reason = choose_path(model)
        scorer, _ = choose_head(Scorer(path), model)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
    assert path == "extended", reason
    assert scorer.head_chunk_size == 512


def test_convolutions_are_judged_in_full_float32_too():
    assert torch.backends.cudnn.allow_tf32, "the default"
    seen = []
    model = tiny_model("qwen2")
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    choose_path(model)
    assert set(seen) == {False}
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(not hasattr(torch.backends.cudnn.conv, "fp32_precision"), reason="a torch without these settings")
def test_settings_of_single_kernels_are_restored_too():
    """After one of them is set, the older joint setting cannot be read."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "ieee"
        assert choose_path(tiny_model("qwen2"))[0] == "extended"
        assert conv.fp32_precision == "ieee"
        assert torch.backends.cudnn.rnn.fp32_precision == before
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert conv.fp32_precision == before


def test_the_probe_judges_without_autocast():
    model = tiny_model("qwen2")
    with torch.autocast("cpu", torch.bfloat16):
        assert probe_difference(model, Scorer(), Scorer("dense")).max() > 1e-3
        measured = measure(model, Scorer(), Scorer("dense"))
        assert torch.is_autocast_enabled("cpu")
    assert measured.nats < measured.tolerance == 5e-5


@pytest.mark.gpu
def test_tf32_does_not_make_a_run_score_densely():
    model = tiny_model("qwen2", hidden_size=512, intermediate_size=1024, initializer_range=0.06).cuda()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert probe_difference(model, Scorer(), Scorer("dense")).max() > 5e-5
        assert choose_path(model)[0] == "extended"
    finally:
        torch.set_float32_matmul_precision(before)


def test_dropout_of_adapters_does_not_count():
    """Sharded weights are probed once the trainer has put the module into train mode."""
    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj, torch.nn.Dropout(0.5))
    assert choose_path(model.train())[0] == "extended"
    assert model.training
    assert model.model.layers[0].mlp.up_proj[1].training


# ------------------------------------------------------------------------------------------- models that cannot do it


def other_model(kind, **settings):
    """A tiny model of a family that only these tests are about."""
    config = AutoConfig.for_model(kind, **(BASE | {"num_hidden_layers": 2} | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def rwkv():
    """It takes no attention mask: left padding of a prompt enters its state."""
    return other_model("rwkv", attention_hidden_size=64, context_length=256)


def minimax():
    """It takes no cache but its own."""
    return other_model("minimax", num_local_experts=2, num_experts_per_tok=2, block_size=16, head_dim=16)


NO_KERNEL = NotImplementedError("no such kernel.")


def raising(model, error=NO_KERNEL):
    """The model, raising whatever it is given."""

    def refuse(*_):
        raise error

    model.register_forward_pre_hook(refuse)
    return model


def loaded(model, **settings):
    return PolicyLoader(model=model, tokenizer=tiny_tokenizer(), **settings).load()


def test_a_model_that_padding_changes_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model type rwkv cannot be trained: left padding .* differs by .* nats"):
        loaded(rwkv())


def test_no_run_starts_with_such_a_model():
    with pytest.raises(ValueError, match="model type rwkv cannot be trained"):
        fit(make_module(policy=rwkv()), max_steps=1)


def test_a_path_that_raises_gives_way_to_the_dense_one():
    path, reason = choose_path(minimax())
    assert path == "dense"
    assert reason.startswith("a probe of both paths raised ValueError: MiniMax uses cache of its own")
    with pytest.raises(
        ValueError, match=r"policy.scoring is 'extended', but a probe of both paths raised ValueError: Mi"
    ):
        choose_path(minimax(), "extended")


@pytest.mark.parametrize("scoring", ["auto", "dense"])
def test_a_model_that_cannot_be_scored_is_refused_by_name(scoring):
    with pytest.raises(
        ValueError, match=r"model type qwen2 cannot be scored \(dense path\): .* raised NotImplementedError: no such"
    ):
        loaded(raising(tiny_model("qwen2")), scoring=scoring)


def test_too_little_memory_is_no_reason_for_another_path():
    with pytest.raises(torch.OutOfMemoryError):
        choose_path(raising(tiny_model("qwen2"), error=torch.OutOfMemoryError("full")))


def test_what_one_rank_cannot_run_none_runs(monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.probe.gather_objects", lambda own: [own, "ValueError: not here"])
    monkeypatch.setattr("grpo_lightning.policy.probe.max_over_ranks", lambda nats: nats + torch.inf)
    path, reason = choose_path(tiny_model("qwen2"))
    assert (path, reason) == ("dense", "a probe of both paths raised ValueError: not here")


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

    monkeypatch.setattr("grpo_lightning.policy.completion_logprobs.SlicedHead", Broken)
    scorer, reason = choose_head(Scorer(path), tiny_model("qwen2"))
    assert scorer.head_chunk_size is None
    assert "more than rounding" in reason


# ------------------------------------------------------------------------------------------------------ whole logits


def whole_because(model, scorer=None):
    scorer, reason = choose_head(scorer or Scorer(chunk_size=3, checkpoint_chunks=True), model)
    assert scorer == Scorer(chunk_size=3, checkpoint_chunks=True, head_chunk_size=None)
    return reason


def test_on_a_gpu_the_prompt_pass_is_probed_with_masks_and_without(monkeypatch):
    found = []

    def probe_difference(*_):
        found.append(leaves_out_masks.get())
        return torch.tensor([1e-6, 1.0 if found[-1] else 0.0])

    monkeypatch.setattr(probe, "probe_difference", probe_difference)
    monkeypatch.setattr(probe, "compute_device", lambda _: torch.device("cuda"))
    assert probe.slices_difference(tiny_model(), Scorer()).max() == 1.0
    assert found == [False, True]
    assert not leaves_out_masks.get()


def test_whole_logits_on_request():
    scorer = Scorer(chunk_size=3, checkpoint_chunks=True, head_chunk_size=None)
    assert whole_because(tiny_model(), scorer) == "full logits: requested"


def test_whole_logits_without_a_named_head(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    assert "Qwen2ForCausalLM does not declare its head" in whole_because(model)


def test_whole_logits_of_a_head_of_several_modules():
    """A part of a head may be gathered by its own hooks, as often as a rank has slices."""
    model = tiny_model()
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 120))
    assert "Sequential, consists of several modules" in whole_because(model)


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
        assert reason == "full logits: the model does more than scale the output of its head"


def test_whole_logits_where_the_head_is_not_called():
    """Some models multiply by its weight, normalized."""
    model = tiny_model()
    head = model.lm_head
    model.lm_head = torch.nn.Linear(64, 120, bias=False)
    model.get_output_embeddings = types.MethodType(lambda self: head, model)
    assert "more than scale" in whole_because(model)
