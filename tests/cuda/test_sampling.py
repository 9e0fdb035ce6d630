"""`LocalEngine` on an emulated CUDA device: the completions of the CPU, and what a token costs the host.

Counted per decoding step, as the difference of rollouts of 32 and of 64 tokens in which no completion ends:
synchronizations; and launches of three parts: the model's forward, `TokenSampler`, and the rest of the loop.

The emulated device has no compiler, so that the sampler's operations run one by one, as where a compilation fails. The
kernels of the fused draw are counted in the code that inductor generates for an H100 (`compiled.py`).
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.kv_cache import merge_parts
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import known_arguments
from grpo_lightning.rollout.kernel_fusion import compile_sampler, fused_states
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.token_sampler import NextToken, TokenSampler, TokenSettings
from tests.cuda.compiled import launches_on_cuda
from tests.cuda.emulated import EmulatedCuda
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.marks import SLOW

PROMPTS = [[5, 6, 7] * 4, [8, 9], [11, 12, 13, 14]]
LAYERS = 2
SYNCS_PER_STEP = 0.1
STEP_LAUNCHES = 12
"""Launches per step outside the model, with a fused draw."""

LOOP_LAUNCHES = 3
"""Launches per step outside the model and the sampler."""

SYNCS_PER_JOIN = 34
"""Synchronizations when rows leave, and prompts are prefilled and join instead; the prefill has 2 per layer."""

SAMPLER_LAUNCHES = 42
"""Launches per step of the sampler without filters but a suppressed token, in 16 bits, if the draw is not fused."""

CHOICE_LAUNCHES = 1
"""Launches of the sampler outside the draw: the random numbers of the open rows."""

FUSED_LAUNCHES = 8
"""Kernels of a fused draw without filters; seven for few rows, and four if there are more rows than processors."""

FUSED_FILTERED = 16
"""Kernels and operators of a fused draw with one filter."""

ATTENTION_LAUNCHES = 9
"""Launches per layer and step of attention to shared prompts, in 16 bits, beyond those of the model's own attention."""


class Engine(LocalEngine):
    """Counts launches by part."""

    def __init__(self, gpu=None, max_rows=None):
        super().__init__(max_rows)
        self.gpu, self.launches = gpu, Counter()

    def forward(self, ids, **arguments):
        before = self.gpu.launches.total() if self.gpu else 0
        logits = super().forward(ids, **arguments)
        self.launches["model"] += self.gpu.launches.total() - before if self.gpu else 0
        return logits


def sample(engine, model, length=64, way="shared", prompts=PROMPTS, **settings):
    engine.connect(model, tiny_tokenizer(), Sharding())
    engine.path = way
    sampling = SamplingParams(max_completion_length=length, **settings)
    groups = engine.generate(prompts, 4, sampling, seeds=list(range(len(prompts))))
    return [completion.token_ids for group in groups for completion in group]


def cost_per_step(monkeypatch, way="shared", dtype=torch.float32, **settings):
    """Synchronizations, and launches by part, of one decoding step."""
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


@SLOW
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


@SLOW
def test_what_a_decoding_step_waits_for_and_launches(monkeypatch):
    """The model launches at most what it does with its own attention and cache, and the operations of the merge."""
    cost = cost_per_step(monkeypatch, dtype=torch.bfloat16)
    assert cost["syncs"] <= SYNCS_PER_STEP
    with EmulatedCuda() as gpu, torch.no_grad():
        model = tiny_model("qwen2", num_hidden_layers=LAYERS, dtype=torch.bfloat16).to("cuda")
        ids, cache = torch.full((12, 12), 5, device="cuda"), DynamicCache(config=model.config)
        cached = known_arguments(model, cache=cache) | {"use_cache": True}
        model(input_ids=ids, **cached)
        gpu.reset()
        model(input_ids=ids[:, -1:], **cached)
        own = gpu.launches.total()
    assert cost["model"] <= own + ATTENTION_LAUNCHES * LAYERS, (cost, own)
    assert cost["sampler"] <= SAMPLER_LAUNCHES
    assert cost["loop"] <= LOOP_LAUNCHES


@SLOW
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_prompts_that_join(dtype):
    """The completions of the CPU; the host waits for the device at looks and when prompts join."""
    model = tiny_model("qwen2", num_hidden_layers=LAYERS, dtype=dtype)
    model.generation_config.eos_token_id = list(range(2, 9))
    prompts = [[token] * length for token, length in zip(range(40, 48), [3, 9, 17, 5] * 2, strict=True)]
    want = sample(Engine(), model, 20, prompts=prompts)
    with EmulatedCuda() as gpu:
        engine, prefills, steps = Engine(gpu, max_rows=9), [], []
        usual = engine.forward

        def forward(ids, **arguments):
            (steps if ids.shape[1] == 1 else prefills).append(ids.shape)
            return usual(ids, **arguments)

        engine.forward = forward
        model.to("cuda")
        gpu.reset()
        got = sample(engine, model, 20, prompts=prompts)
        syncs = gpu.syncs.total()
    assert len(prefills) > 3
    assert all(length % 8 == 0 for _, length in prefills)
    assert syncs <= SYNCS_PER_STEP * len(steps) + SYNCS_PER_JOIN * len(prefills), gpu.syncs
    if dtype == torch.float32:
        assert got == want


# ------------------------------------------------------------------------------------------------------ the fused draw

VOCABULARY = 151_936
PADDING = range(151_665, VOCABULARY)
"""The logits of Qwen2.5, and its ids without a token, which are never sampled."""


def kernels_of(rows, vocabulary=VOCABULARY, **sampling):
    """Launches of a fused draw on an H100, by name."""
    settings = TokenSettings.of(SamplingParams(**sampling))

    def run(device):
        history = torch.zeros(rows, 5, dtype=torch.long, device=device)
        logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device)
        uniforms = torch.zeros(rows, dtype=torch.float64, device=device)
        compile_sampler(NextToken(settings, vocabulary, device))(history, logits, uniforms)

    return launches_on_cuda(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        pytest.param(64, {}, id="plain"),
        pytest.param(8, {"temperature": 0.7}, id="temperature"),
        pytest.param(512, {"suppress_tokens": [*PADDING]}, id="padding"),
        pytest.param(64, {"suppress_tokens": [7, *PADDING], "temperature": 0.7}, id="suppressed"),
        pytest.param(64, {"vocabulary": 32_001}, id="padded"),
    ],
)
def test_a_fused_draw_without_filters_is_a_few_kernels(rows, settings):
    """Every operation is in a Triton kernel, the cumulative sums too. On the CPU, inductor leaves these to torch."""
    kernels = kernels_of(rows, **settings)
    assert {name.partition("_")[0] for name in kernels} == {"triton"}
    # `pick` pads vocabularies that are no multiple of 128 tokens, which takes a kernel more.
    spare = "vocabulary" in settings
    assert kernels.total() <= FUSED_LAUNCHES + spare
    assert kernels.total() + CHOICE_LAUNCHES + LOOP_LAUNCHES <= STEP_LAUNCHES + spare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "operators"),
    [
        ({"top_k": 50}, {"torch.ops.aten.topk.default"}),
        ({"top_p": 0.9}, {"torch.ops.aten.sort.stable", "aten.scatter_.src"}),
        ({"min_p": 0.1}, {"torch.ops.aten.topk.default"}),
        ({"repetition_penalty": 1.2}, set()),
    ],
    ids=["top-k", "top-p", "min-p", "penalty"],
)
def test_a_fused_draw_with_a_filter_leaves_the_sort_to_torch(settings, operators):
    kernels = kernels_of(64, **settings)
    assert {name for name in kernels if not name.startswith("triton")} == operators
    assert kernels.total() <= FUSED_FILTERED


# ---------------------------------------------------------------------------------------------------- the fused layers


def launches_of_states(function, *shapes, module=None):
    """Launches of a fused function of hidden states on an H100, for zeros of these shapes in 16 bits."""

    def run(device):
        states = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        with torch.device(device), torch.no_grad():
            fixed = [] if module is None else [module(shapes[0][-1])]
            fused_states.__wrapped__(function, "states").compile(function)(*fixed, *states)

    return launches_on_cuda(run).total()


@pytest.mark.slow
def test_fused_layers_are_a_few_kernels():
    """Qwen2.5-0.5B has one kernel per norm, two that rotate queries and keys, and one that merges attention."""
    of_norm = launches_of_states(Qwen2RMSNorm.forward, (256, 1, 896), module=Qwen2RMSNorm)
    heads, angles = [(256, 14, 1, 64), (256, 2, 1, 64)], [(256, 1, 64)] * 2
    of_rotary = launches_of_states(apply_rotary_pos_emb, *heads, *angles)
    parts = [(32, 8, 2, 7, 64), (32, 8, 2, 7)] * 2
    of_merge = launches_of_states(merge_parts, *parts)
    assert (of_norm, of_rotary, of_merge) == (1, 2, 1)
