"""Fused kernels, of the token draw and of layers: the same tokens and states, and single operations if that fails.

The compilations are for the CPU, whose fused kernels are C++; `tests/cuda` counts the kernels.
"""

import copy
import functools
import logging
import shutil
import types

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import transformers_internals
from grpo_lightning.policy.kv_cache import merge_parts
from grpo_lightning.rollout import kernel_fusion
from grpo_lightning.rollout.kernel_fusion import Fused, FusedLayers, fused_sampler, next_token
from grpo_lightning.rollout.token_sampler import NextToken, TokenSettings
from tests.helpers.tiny_models import tiny_model
from tests.marks import few, only

CPU = torch.device("cpu")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler: the fused token draw is NOT tested here",
)
SAMPLINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "suppressed": {"suppress_tokens": [1, 5, 298, 299]},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9, "temperature": 1.3},
    "min-p": {"min_p": 0.05},
    "penalty": {"repetition_penalty": 1.3},
    "all": {"repetition_penalty": 1.2, "suppress_tokens": [7], "temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
IN_ALL = ["temperature", "suppressed", "top-k", "top-p", "penalty"]
"""Settings that "all" has too: alone, they are nightly."""


def next_token_of(vocabulary=300, **sampling):
    return NextToken(TokenSettings.of(SamplingParams(**sampling)), vocabulary, CPU)


def inputs(rows, seen=5, vocabulary=300, dtype=torch.float32, seed=0):
    """History, logits and uniform numbers."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(vocabulary, (rows, seen + 3), generator=generator)[:, :seen]
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    return history, logits, torch.rand(rows, generator=generator, dtype=torch.float64)


def assert_equal_draws(drawn, expected):
    assert torch.equal(drawn.ids, expected.ids)
    torch.testing.assert_close(drawn.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.entropies, expected.entropies, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- compilations


@NEEDS_COMPILER
@pytest.mark.parametrize("name", only([], SAMPLINGS, nightly=IN_ALL))
def test_compiled_draws_equal_those_of_the_operations(name, caplog):
    """Over numbers of rows and of seen tokens; these need one compilation, and one more for a single row."""
    draw = next_token_of(**SAMPLINGS[name])
    quick, graphs = fused_sampler(draw), torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for seed, rows in enumerate((64, 63, 17, 2, 40)):
        for seen in (5, 6, 30):
            history, logits, uniforms = inputs(rows, seen, seed=seed)
            uniforms = None if name == "greedy" else uniforms
            assert_equal_draws(quick(history, logits, uniforms), draw(history, logits, uniforms))
    assert quick.is_fused, caplog.text
    assert graphs["unique_graphs"] - before <= 2
    history, logits, uniforms = inputs(1)
    uniforms = None if name == "greedy" else uniforms
    assert_equal_draws(quick(history, logits, uniforms), draw(history, logits, uniforms))
    assert graphs["unique_graphs"] - before <= 3


@few(3, slow=True)
@NEEDS_COMPILER
@pytest.mark.parametrize("vocabulary", [1, 120, 128, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabularies_and_types_of_logits(vocabulary, dtype):
    draw = next_token_of(vocabulary, temperature=0.7)
    quick = fused_sampler(draw)
    given = inputs(32, vocabulary=vocabulary, dtype=dtype)
    assert_equal_draws(quick(*given), draw(*given))
    assert quick.is_fused


@pytest.mark.slow
@NEEDS_COMPILER
def test_many_settings_do_not_exhaust_the_limit_of_compilations():
    """Dynamo counts compilations per code object: other settings must not be other cases of one function."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for temperature in (0.5, 0.6, 0.7, 0.8):
            draw = next_token_of(temperature=temperature)
            quick = fused_sampler(draw)
            assert_equal_draws(quick(*inputs(8)), draw(*inputs(8)))
            assert quick.is_fused


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
def test_fused_draws_on_a_gpu(name):
    gpu = torch.device("cuda")
    settings = TokenSettings.of(SamplingParams(**SAMPLINGS[name]))
    quick, draw = next_token(settings, 300, gpu, 64), NextToken(settings, 300, gpu)
    for rows in (64, 63, 1):
        history, logits, uniforms = (x.to(gpu) for x in inputs(rows))
        uniforms = None if name == "greedy" else uniforms
        assert_equal_draws(quick(history, logits, uniforms), draw(history, logits, uniforms))
    assert quick.is_fused


# ----------------------------------------------------------------------------------------------------------- fallback


def test_only_long_rollouts_on_cuda_are_fused():
    settings = TokenSettings.of(SamplingParams())
    assert isinstance(next_token(settings, 300, CPU, 512), NextToken)
    assert isinstance(next_token(settings, 300, torch.device("cuda", 0), 512), Fused)
    assert isinstance(next_token(settings, 300, torch.device("cuda", 0), kernel_fusion.LEAST_LENGTH - 1), NextToken)
    assert next_token(settings, 300, torch.device("cuda", 0), 512) is next_token(
        TokenSettings.of(SamplingParams()), 300, torch.device("cuda", 0), 512
    )


def refusing(draw):
    raise RuntimeError("no compiler was found\nand more about it")


def failing(draw):
    def compiled(history, logits, uniforms):
        raise OSError("the disk is full")

    return compiled


def wrong_tokens(draw):
    def compiled(history, logits, uniforms):
        drawn = draw(history, logits, uniforms)
        return drawn._replace(ids=drawn.ids + 1)

    return compiled


def wrong_numbers(name, value):
    def make(draw):
        def compiled(history, logits, uniforms):
            drawn = draw(history, logits, uniforms)
            wrong = getattr(drawn, name).clone()
            wrong[3] += value
            return drawn._replace(**{name: wrong})

        return compiled

    return make


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (refusing, "no compiler was found)"),
        (failing, "the disk is full"),
        (wrong_tokens, "100% of the tokens differ"),
        (wrong_numbers("logprobs", 0.01), "differ by 1.0e-02 nats"),
        (wrong_numbers("entropies", torch.nan), "differ by inf nats"),
    ],
)
def test_what_cannot_be_fused_is_drawn_unfused_and_logged_once(compiler, reason, monkeypatch, caplog):
    monkeypatch.setattr(kernel_fusion, "compile_sampler", compiler)
    draw = next_token_of()
    quick = fused_sampler(draw)
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        for seed in range(3):
            assert_equal_draws(quick(*inputs(8, seed=seed)), draw(*inputs(8, seed=seed)))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.message
    assert "\n" not in record.message


def test_rounding_is_no_difference(monkeypatch, caplog):
    monkeypatch.setattr(kernel_fusion, "compile_sampler", wrong_numbers("logprobs", 1e-5))
    quick = fused_sampler(next_token_of())
    quick(*inputs(8))
    assert quick.is_fused


def test_one_other_token_is_rounding():
    drawn = next_token_of()(*inputs(8))
    for count, is_rounding in ((1, True), (2, False)):
        ids = drawn.ids.clone()
        ids[:count] += 1
        assert (kernel_fusion.sampled_difference(drawn._replace(ids=ids), drawn) == "") == is_rounding


def test_nan_is_no_difference(monkeypatch):
    """Diverged logits are reported by the next look, not as a failed compilation."""
    monkeypatch.setattr(kernel_fusion, "compile_sampler", lambda draw: draw)
    history, logits, uniforms = inputs(8)
    logits[2, 4] = torch.nan
    quick = fused_sampler(next_token_of())
    drawn = quick(history, logits, uniforms)
    assert drawn.entropies.isnan().tolist() == [row == 2 for row in range(8)]
    assert quick.is_fused


def test_a_lack_of_memory_is_raised(monkeypatch):
    def compiler(draw):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(kernel_fusion, "compile_sampler", compiler)
    with pytest.raises(torch.OutOfMemoryError):
        fused_sampler(next_token_of())(*inputs(8))


# ------------------------------------------------------------------------------------------------------- policy layers


def graphs_by_name(functions):
    """The number of compiled graphs of each fused function; None if it runs unfused."""
    return {each.name: len(each.compiled) if each.is_fused else None for each in functions}


LAYER_GRAPHS = {"the merge of attention": 0, "the norms": 1, "the rotary embeddings": 1}
"""The graphs of a forward without a `SharedPrompts`, which alone merges attention."""


def logits_of(model, rows, seed=0):
    """Logits of one token per row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 90, (rows, 1), generator=generator)
    with torch.no_grad():
        return model(input_ids=ids).logits


@NEEDS_COMPILER
@few(2, slow=True)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma3", torch.float32),
        ("qwen2", torch.float32),
        ("qwen3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("qwen2", torch.bfloat16),
        ("gemma3", torch.bfloat16),
    ],
)
def test_fused_layers_compute_the_same_logits(family, dtype, fused_functions):
    """In 16 bits too: intermediate results are rounded as without fusion. All layers share a compilation."""
    model = tiny_model(family, num_hidden_layers=3, dtype=dtype).eval()
    layers = FusedLayers(model)
    for rows in (8, 5, 7):
        want = logits_of(model, rows)
        with layers.replacing():
            got = logits_of(model, rows)
        torch.testing.assert_close(got, want, atol=1e-5 if dtype == torch.float32 else 0, rtol=1e-5)
    of_heads = family in ("qwen3", "gemma3")  # which have norms of heads too
    assert graphs_by_name(fused_functions) == LAYER_GRAPHS | {"the norms": 1 + of_heads}


@NEEDS_COMPILER
@few(1, slow=True)
@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (9, 2, 5)])
def test_the_fused_merge(shape, fused_functions):
    """Parts of other layouts give a contiguous result: that of the prompts is transposed, and kernels return views."""
    layers = FusedLayers(nn.Linear(1, 1))
    for rows in (shape[0], shape[0] + 2):
        generator = torch.Generator().manual_seed(rows)
        of_own, of_prompt = (torch.randn(rows, *shape[1:], 8, generator=generator) for _ in range(2))
        own_sum, prompt_sum = (torch.randn(rows, *shape[1:], generator=generator) for _ in range(2))
        of_own = of_own.transpose(-3, -2).contiguous().transpose(-3, -2)
        of_prompt, prompt_sum = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (of_prompt, prompt_sum))
        got = layers.merge(of_own, own_sum, of_prompt, prompt_sum)
        share = torch.exp(prompt_sum) / (torch.exp(prompt_sum) + torch.exp(own_sum))
        torch.testing.assert_close(got, of_own + share[..., None] * (of_prompt - of_own))
        assert got.is_contiguous()
        assert merge_parts(of_own, own_sum, of_prompt, prompt_sum).is_contiguous()
    assert graphs_by_name(fused_functions) == {"the merge of attention": 1}


def test_layers_are_replaced_only_in_the_context():
    """Only those of this policy: other models, in other threads, call the same functions of transformers."""
    model, other = tiny_model("qwen3", num_hidden_layers=2), tiny_model("qwen3", num_hidden_layers=2)
    rotary, norm, attention = modeling_qwen3.apply_rotary_pos_emb, model.model.norm, model.model.layers[0].self_attn
    layers = FusedLayers(model)
    with layers.replacing():
        assert {"forward"} <= vars(norm).keys() & vars(attention).keys()
        assert modeling_qwen3.apply_rotary_pos_emb is rotary
        assert not any("forward" in vars(module) for module in other.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_forwards_of_others_are_kept():
    """Norms of torch are one kernel already, and a module with a forward of its own may be another library's."""
    model = tiny_model("qwen3", num_hidden_layers=1)
    model.own = nn.RMSNorm(4)
    layers, usual = FusedLayers(model), model.model.norm.forward
    assert model.own not in [module for module, _ in layers.forwards]
    model.model.norm.forward = usual
    with layers.replacing():
        assert model.model.norm.forward is usual
    assert model.model.norm.forward is usual


def test_decorators_of_a_forward_are_kept(fused_functions):
    """Attention finds its arguments under their former names too, as transformers' decorator provides."""
    attention = tiny_model("qwen3", num_hidden_layers=1).model.layers[0].self_attn
    ((_, forward),) = transformers_internals.rotary_layers(attention)
    calls = []

    def decorated(function):
        @functools.wraps(function)
        def call(*arguments, **options):
            calls.append("before")
            return function(*arguments, **options)

        return call

    def forward_of(layer, states):
        return apply_rotary_pos_emb(states)  # noqa: F821 - a global name that the test provides

    twice = decorated(decorated(types.FunctionType(forward_of.__code__, {"apply_rotary_pos_emb": abs})))
    assert transformers_internals.rotary_function(twice) is None  # a built-in function cannot be compiled
    twice = decorated(decorated(types.FunctionType(forward_of.__code__, {"apply_rotary_pos_emb": usual_rotary})))
    assert transformers_internals.rotary_function(twice) is usual_rotary
    assert kernel_fusion.with_name(twice, transformers_internals.ROTARY, lambda states: -states)(None, 3) == -3
    assert twice(None, 3) == 3
    assert calls == ["before"] * 4
    assert kernel_fusion.fused_rotary(forward).__code__ is forward.__code__


def usual_rotary(states):
    return states


def test_another_function_of_transformers_is_found(monkeypatch, fused_functions):
    """As where another library has replaced it before the run."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", usual_rotary)
    FusedLayers(tiny_model("qwen3", num_hidden_layers=1))
    assert usual_rotary in [each.function for each in fused_functions]


def test_more_kinds_of_calls_than_the_limit_of_compilations(monkeypatch, fused_functions):
    """Training and validation, with rows that leave until one is left: each graph is compiled once."""
    inductor = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: inductor(function, fullgraph=True, backend="eager"))
    layers, graphs = FusedLayers(nn.Linear(1, 1)), torch._dynamo.utils.counters["stats"]
    before, kinds = graphs["unique_graphs"], set()
    groups = (8, 8), (4, 8), (2, 2), (7, 3), (64, 1), (1, 8), (9,)
    with torch._dynamo.config.patch(recompile_limit=1):
        for mode in (torch.no_grad, torch.inference_mode):
            for shape in [(*each, 2, 7) for each in groups]:
                with mode():
                    given = torch.randn(*shape, 8), torch.randn(shape), torch.randn(*shape, 8), torch.randn(shape)
                    torch.testing.assert_close(layers.merge(*given), merge_parts(*given))
                kinds.add((mode, *(size > 1 for size in shape)))
    assert graphs_by_name(fused_functions) == {"the merge of attention": len(kinds)} == {"the merge of attention": 8}
    assert graphs["unique_graphs"] - before == 8


def test_every_graph_is_compared(monkeypatch, caplog, fused_functions):
    """A compiler is noticed that is wrong for another type of numbers only."""

    def compiler(function):
        return lambda *given: function(*given) * (1 if given[0].dtype == torch.float32 else 2)

    monkeypatch.setattr(kernel_fusion, "compile_copy", compiler)
    merge = FusedLayers(nn.Linear(1, 1)).merge
    given = torch.ones(2, 3, 4), torch.zeros(2, 3), -torch.ones(2, 3, 4), torch.ones(2, 3)
    assert torch.equal(merge(*given), merge_parts(*given))
    given = [x.double() for x in given]
    assert torch.equal(merge(*given), merge_parts(*given))
    assert graphs_by_name(fused_functions) == {"the merge of attention": None}
    assert "differ by" in caplog.text


def test_kinds_of_calls():
    """Some changes need another graph, and others do not."""
    norm, states = tiny_model("qwen3", num_hidden_layers=1).model.norm, torch.zeros(3, 4, 8)
    usual = kernel_fusion.graph_of([norm, states])
    assert kernel_fusion.graph_of([copy.deepcopy(norm), torch.zeros(5, 2, 8)]) == usual
    wider = copy.deepcopy(norm)
    wider.variance_epsilon *= 2
    for values in (
        [wider, states],
        [norm, states.double()],
        [norm, states[:1]],
        [norm, states[..., :4]],
        [norm, states, 1],
    ):
        assert kernel_fusion.graph_of(values) != usual
    assert kernel_fusion.graph_of([norm, torch.zeros(4, 3, 8).transpose(0, 1)]) != usual
    with torch.inference_mode():
        assert kernel_fusion.graph_of([norm, states]) != usual


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (refusing, "no compiler was found)"),
        (lambda function: lambda *arguments: (out := function(*arguments), out + 0.1 * out.abs().max())[1], "1.0e-01"),
        (lambda function: lambda *arguments: function(*arguments) * torch.nan, "differ by inf"),
    ],
)
def test_layers_that_cannot_be_fused_run_unfused(compiler, reason, monkeypatch, caplog, fused_functions):
    monkeypatch.setattr(kernel_fusion, "compile_copy", compiler)
    layers = FusedLayers(nn.Linear(1, 1))
    given = torch.ones(2, 3, 4), torch.zeros(2, 3), -torch.ones(2, 3, 4), torch.ones(2, 3)
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        for _ in range(3):
            assert torch.equal(layers.merge(*given), merge_parts(*given))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the merge of attention" in record.message
    assert reason in record.message


def test_states_that_are_zero_or_infinite_do_not_differ():
    assert kernel_fusion.states_difference(torch.zeros(3), torch.zeros(3)) == ""
    overflown = torch.tensor([1.0, torch.inf, torch.nan])
    assert kernel_fusion.states_difference(overflown, overflown.clone()) == ""
    assert kernel_fusion.states_difference(overflown + torch.tensor([0.1, 0.0, 0.0]), overflown) != ""
    assert kernel_fusion.states_difference(torch.tensor([1.0, 2.0]), overflown[:2]) != ""
    assert kernel_fusion.states_difference((torch.zeros(3), torch.ones(3)), (torch.zeros(3), torch.zeros(3))) != ""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_fused_layers_on_a_gpu(family, dtype, fused_functions):
    model = tiny_model(family, num_hidden_layers=3, dtype=dtype).eval()
    want = logits_of(model.float(), 8)
    model.to("cuda", dtype)
    layers = FusedLayers(model)
    with layers.replacing(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        got = model(input_ids=torch.randint(10, 90, (8, 1), generator=generator).cuda()).logits
    difference = (got.float().cpu() - want).abs().max() / want.abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 3e-2)
    of_heads = family == "qwen3"
    assert graphs_by_name(fused_functions) == LAYER_GRAPHS | {"the norms": 1 + of_heads}
