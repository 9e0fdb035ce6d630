"""The token draw in fused kernels: the same tokens, few compilations, and the operations one by one if that fails.

The compilations are for the CPU, whose fused kernels are C++; `tests/cuda` counts the kernels.
"""

import logging
import shutil

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.rollout import fused
from grpo_lightning.rollout.fused import FusedSampler, next_token
from grpo_lightning.rollout.token_sampler import NextToken, TokenSettings
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
    quick, graphs = FusedSampler(draw), torch._dynamo.utils.counters["stats"]
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
    quick = FusedSampler(draw)
    given = inputs(32, vocabulary=vocabulary, dtype=dtype)
    assert_equal_draws(quick(*given), draw(*given))
    assert quick.is_fused


@pytest.mark.slow
@NEEDS_COMPILER
def test_many_settings_do_not_exhaust_the_limit_of_compilations(monkeypatch):
    """Dynamo counts compilations per code object: other settings must not be other cases of one function."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    for temperature in (0.5, 0.6, 0.7, 0.8):
        draw = next_token_of(temperature=temperature)
        quick = FusedSampler(draw)
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
    assert isinstance(next_token(settings, 300, torch.device("cuda", 0), 512), FusedSampler)
    assert isinstance(next_token(settings, 300, torch.device("cuda", 0), fused.LEAST_LENGTH - 1), NextToken)
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
    monkeypatch.setattr(fused, "compile_sampler", compiler)
    draw = next_token_of()
    quick = FusedSampler(draw)
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        for seed in range(3):
            assert_equal_draws(quick(*inputs(8, seed=seed)), draw(*inputs(8, seed=seed)))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.message
    assert "\n" not in record.message


def test_rounding_is_no_difference(monkeypatch, caplog):
    monkeypatch.setattr(fused, "compile_sampler", wrong_numbers("logprobs", 1e-5))
    quick = FusedSampler(next_token_of())
    quick(*inputs(8))
    assert quick.is_fused


def test_one_other_token_is_rounding():
    drawn = next_token_of()(*inputs(8))
    for count, is_rounding in ((1, True), (2, False)):
        ids = drawn.ids.clone()
        ids[:count] += 1
        assert (fused.difference(drawn._replace(ids=ids), drawn) == "") == is_rounding


def test_nan_is_no_difference(monkeypatch):
    """Diverged logits are reported by the next look, not as a failed compilation."""
    monkeypatch.setattr(fused, "compile_sampler", lambda draw: draw)
    history, logits, uniforms = inputs(8)
    logits[2, 4] = torch.nan
    quick = FusedSampler(next_token_of())
    drawn = quick(history, logits, uniforms)
    assert drawn.entropies.isnan().tolist() == [row == 2 for row in range(8)]
    assert quick.is_fused


def test_a_lack_of_memory_is_raised(monkeypatch):
    def compiler(draw):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fused, "compile_sampler", compiler)
    with pytest.raises(torch.OutOfMemoryError):
        FusedSampler(next_token_of())(*inputs(8))
