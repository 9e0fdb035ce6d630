"""A model that runs with FlashAttention gives what it gives with sdpa; one that cannot is not run with it."""

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import loading
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.kv_cache import unshared_reason
from grpo_lightning.policy.loading import PolicyLoader, no_flash_reason
from grpo_lightning.policy.probe import choose_path, probe_batch
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers import tiny_vlms
from tests.helpers.families import families
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.helpers.vision_prompts import encoder_of, vision_batch
from tests.marks import SLOW
from tests.policy.flash_stand_in import Kernels, install

FAMILIES = ["qwen2", "qwen3", "mistral", "gemma3", "gpt2"]
"""With a sliding window, with and without padding in front, and without rotary positions."""


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    return install(monkeypatch)


def scored(model, batch, scorer, *, dtype=torch.float32):
    """Log-probs and the gradient of their weighted sum, as bf16-mixed computes them; at 16-bit weights, as those do."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        logprobs = scorer(model, batch, temperature=1.0).logprobs
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (logprobs * weights * batch.attention_mask).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return logprobs.detach()[batch.attention_mask], gradient


def assert_same(got, want):
    assert (got[0] - want[0]).abs().mean() < 0.05
    assert torch.nn.functional.cosine_similarity(got[1], want[1], dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families(FAMILIES))
def test_scores_and_gradients_are_those_of_sdpa(kernels, family, dtype):
    model = tiny_model(family, dtype=dtype)
    batch = probe_batch(model)
    want = scored(model, batch, Scorer("dense"), dtype=dtype)
    model.set_attn_implementation("flash_attention_2")
    for scorer in (Scorer("dense"), Scorer(), Scorer(chunk_size=1, checkpoint_chunks=True)):
        before = sum(kernels.calls.values())
        assert_same(scored(model, batch, scorer, dtype=dtype), want)
        assert sum(kernels.calls.values()) > before
    assert choose_path(model)[0] == "extended"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "glm4v"])
def test_images_are_scored_as_with_sdpa(kernels, family):
    vlm = tiny_vlms.build(family)
    prompts = [[tiny_vlms.picture(0), "where?"], ["compare", tiny_vlms.picture(1, 84, 56), "with this"]]
    batch = vision_batch(encoder_of(vlm), prompts)
    want = scored(vlm.model, batch, Scorer("dense"))
    vlm.model.set_attn_implementation("flash_attention_2")
    assert_same(scored(vlm.model, batch, Scorer()), want)
    assert kernels.calls["ragged"]


@SLOW
@pytest.mark.parametrize("family", families(FAMILIES))
def test_what_is_sampled_has_the_log_probs_of_the_scorer(kernels, family):
    model = tiny_model(family)
    model.set_attn_implementation("flash_attention_2")
    engine = LocalEngine()
    engine.connect(model, tiny_tokenizer(), loading.Sharding())
    engine.check_logprobs(Scorer())
    assert engine.path == ("repeated" if unshared_reason(model) else "shared")
    before = dict(kernels.calls)
    with torch.autocast("cpu", torch.bfloat16):
        groups = engine.generate([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21]], 2, SamplingParams(), seeds=[0, 1])
    assert len(groups) == 2
    assert kernels.calls["ragged"] > before["ragged"]


@SLOW
def test_a_run_in_bf16_mixed_asks_for_it_and_trains_through_it(kernels, monkeypatch):
    """From the choice to the optimizer step; the stand-in refuses anything of 32 bits."""
    asked = []

    def choose(requested, compute_dtype, device_type, no_flash_reason):
        asked.append((requested, compute_dtype, device_type, no_flash_reason()))
        return "flash_attention_2"

    monkeypatch.setattr(loading, "choose_attention", choose)
    policy = PolicyLoader(model=tiny_model("qwen2", **SMALL).config, tokenizer=tiny_tokenizer())
    module, history = make_module(policy=policy, tokenizer=None), History()
    fit(module, max_steps=2, precision="bf16-mixed", callbacks=[history])
    assert asked == [("auto", "bfloat16", "cpu", None)]
    assert module.policy.config._attn_implementation == "flash_attention_2"
    assert module.scorer.path == "extended"
    assert module.scorer.head_chunk_size == 512
    assert kernels.calls["ragged"]
    assert max(map(abs, history.of("policy/rollout_kl"))) < 0.01
    untrained = policy.load_model(attention="sdpa").state_dict()
    assert not are_equal(weights_of(module), untrained)


# ------------------------------------------------------------------------------------------- models that cannot have it


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", families(FAMILIES))
def test_models_that_can_have_it(family):
    config = tiny_model(family).config
    assert no_flash_reason(config) is None
    assert config._attn_implementation == "sdpa"


def other_config(family="qwen2", **changes):
    config = tiny_model(family).config
    config.update(changes)
    return config


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tiny_vlms.build("gemma3").model.config, "image tokens attend to each other bidirectionally"),
        (lambda: other_config(attention_chunk_size=64), "its layers attend in chunks"),
        (lambda: other_config("qwen3", head_dim=512), "head dimensions up to 256"),
        (lambda: other_config("gpt_oss"), "vllm-flash-attn3"),
    ],
)
def test_a_model_that_it_would_compute_wrongly_takes_its_default(monkeypatch, config, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    loader = PolicyLoader(model=config(), tokenizer=tiny_tokenizer())
    assert reason in no_flash_reason(loader.model)
    assert loader.choose_attention("bfloat16", "cuda", loader.model) is None
    loader.attention = "flash_attention_2"
    with pytest.raises(
        ValueError, match=rf"policy.attention is 'flash_attention_2': it cannot run this model: .*{reason}"
    ):
        loader.choose_attention("bfloat16", "cuda", loader.model)


def test_a_model_that_transformers_refuses_it_for_takes_its_default(kernels):
    assert "transformers refuses it" in no_flash_reason(tiny_model("mamba2").config)


def test_a_model_in_memory_keeps_its_own(monkeypatch):
    monkeypatch.setattr(loading, "choose_attention", lambda *_: pytest.fail("nothing to choose"))
    PolicyLoader(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer()).load()
