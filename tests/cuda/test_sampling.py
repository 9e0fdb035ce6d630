"""`LocalEngine` on an emulated CUDA device: the completions of the CPU, and what a token costs the host.

Counted per decoding step, as the difference of rollouts of 32 and of 64 tokens in which no completion ends:
synchronisations; and launches of three parts: the model's forward, `TokenSampler`, and the rest of the loop.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.token_sampler import TokenSampler
from tests.cuda.emulated import EmulatedCuda
from tests.marks import SLOW
from tests.tiny_models import EOS, tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7] * 4, [8, 9], [11, 12, 13, 14]]
LAYERS = 2
SYNCS_PER_STEP = 0.1
LOOP_LAUNCHES = 12
"""Launches per step outside the model and the sampler."""

SAMPLER_LAUNCHES = 51
"""Launches per step of the sampler without filters but a suppressed token, in 16 bits."""

ATTENTION_LAUNCHES = 12
"""Launches per layer and step of attention to shared prompts, in 16 bits, beyond those of the model's own attention."""


class Engine(LocalEngine):
    """Counts launches by part."""

    def __init__(self, gpu=None):
        super().__init__()
        self.gpu, self.launches = gpu, Counter()

    def forward(self, ids, **arguments):
        before = self.gpu.launches.total() if self.gpu else 0
        logits = super().forward(ids, **arguments)
        self.launches["model"] += self.gpu.launches.total() - before if self.gpu else 0
        return logits


def sample(engine, model, length=64, way="shared", **settings):
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.way = way
    sampling = SamplingParams(max_completion_length=length, **settings)
    groups = engine.generate(PROMPTS, 4, sampling, seeds=[0, 1, 2])
    return [completion.token_ids for group in groups for completion in group]


def cost_per_step(monkeypatch, way="shared", dtype=torch.float32, **settings):
    """Synchronisations, and launches by part, of one decoding step."""
    usual = TokenSampler.__call__
    with EmulatedCuda() as gpu:
        model = tiny_model("qwen2", num_hidden_layers=LAYERS, dtype=dtype).to("cuda")
        costs = []
        for length in (32, 64):
            engine = Engine(gpu)

            def counted(own, *args, engine=engine):
                before = gpu.launches.total()
                drawn = usual(own, *args)
                engine.launches["sampler"] += gpu.launches.total() - before
                return drawn

            monkeypatch.setattr(TokenSampler, "__call__", counted)
            gpu.reset()
            sample(engine, model, length, way, suppress_tokens=[EOS], **settings)
            rest = gpu.launches.total() - engine.launches.total()
            costs.append(Counter(syncs=gpu.syncs.total(), loop=rest, **engine.launches))
    fewer, more = costs
    return {name: (more[name] - fewer[name]) / 32 for name in more}


@pytest.mark.parametrize("way", ["shared", "repeated"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=SLOW),
        pytest.param({"top_k": 5, "top_p": 0.9, "temperature": 0.7}, id="filtered"),
    ],
)
def test_completions_equal_those_of_the_cpu(way, settings):
    model = tiny_model("qwen2", num_hidden_layers=LAYERS)
    model.generation_config.eos_token_id = list(range(2, 5))
    want = sample(Engine(), model, way=way, **settings)
    assert len({len(row) for row in want}) > 3
    with EmulatedCuda():
        assert sample(Engine(), model.to("cuda"), way=way, **settings) == want


@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits_no_phase_takes_the_math_kernel(autocast):
    with EmulatedCuda() as gpu:
        model = tiny_model("qwen2", num_hidden_layers=LAYERS, dtype=torch.float32 if autocast else torch.bfloat16).to(
            "cuda"
        )
        with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
            sample(Engine(), model, 2)  # tries the kernel
            gpu.launches.clear()
            sample(Engine(), model, 4)
        assert set(gpu.attention) == {"efficient"}  # the prefill's, of padded prompts
        assert gpu.launches["_scaled_dot_product_efficient_attention"] == 3 * LAYERS * 2  # prompt and own tokens


def test_what_a_decoding_step_waits_for_and_launches(monkeypatch):
    """The model launches at most what it does with its own attention and cache, and the operations of the merge."""
    cost = cost_per_step(monkeypatch, dtype=torch.bfloat16)
    assert cost["syncs"] <= SYNCS_PER_STEP
    with EmulatedCuda() as gpu, torch.no_grad():
        model = tiny_model("qwen2", num_hidden_layers=LAYERS, dtype=torch.bfloat16).to("cuda")
        ids, cache = torch.full((12, 12), 5, device="cuda"), DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        gpu.reset()
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        own = gpu.launches.total()
    assert cost["model"] <= own + ATTENTION_LAUNCHES * LAYERS, (cost, own)
    assert cost["sampler"] <= SAMPLER_LAUNCHES
    assert cost["loop"] <= LOOP_LAUNCHES
