"""Decoding steps from graphs: the tokens of steps without them, whatever changes between steps; and failures.

A stand-in for CUDA graphs computes a captured function again, with the tensors that it was captured with.
"""

import logging

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import kv_cache, precision, transformers_internals
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.kernel_fusion import FusedLayers
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few
from tests.rollout.test_kernel_fusion import NEEDS_COMPILER, graphs_by_name

PROMPTS = [[token] * length for token, length in zip(range(40, 46), [3, 9, 17, 5, 2, 8], strict=True)]


class Captures:
    """The stand-in."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def __call__(self, run):
        result = run().clone()
        self.num_captures += 1

        def replay():
            self.num_replays += 1
            result.copy_(run())

        return result, replay


@pytest.fixture
def captures(monkeypatch):
    made = []

    def capture(device):
        made.append(Captures())
        return made[-1]

    monkeypatch.setitem(local_engine.CAPTURES, "cpu", capture)
    monkeypatch.setattr(local_engine, "free_bytes", lambda device: 2**30)
    monkeypatch.setattr(kv_cache, "WINDOWS", (4, 8))
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 6)
    monkeypatch.setitem(local_engine.LEAST_ENDED, "cpu", 0.25)
    monkeypatch.setitem(local_engine.LOOK_INTERVAL, "cpu", 5)
    return made


def policy(**changes):
    model = tiny_model("qwen2", num_hidden_layers=2, **changes)
    model.generation_config.eos_token_id = list(range(2, 9))
    return model


def sample(model, engine, length=40, **settings):
    engine.connect(model, tiny_tokenizer(), Sharding())
    groups = engine.generate(PROMPTS, 4, SamplingParams(max_completion_length=length, **settings), list(range(6)))
    return [completion for group in groups for completion in group]


@few(2, slow=True)
@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "temperature": 0.7}, {"suppress_tokens": list(range(2, 9))}])
@pytest.mark.parametrize("max_rows", [None, 9])
def test_completions_equal_those_without_graphs(captures, max_rows, settings):
    """While rows leave and join, the cache grows, and the window of own tokens does."""
    want = sample(policy(), LocalEngine(max_rows, enforce_eager=True), **settings)
    assert not captures
    got = sample(policy(), LocalEngine(max_rows), **settings)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    for one, other in zip(got, want, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    (made,) = captures
    assert made.num_captures > 3
    assert made.num_replays > 2 * made.num_captures


@SLOW
@NEEDS_COMPILER
def test_fused_layers_sample_the_same_tokens(captures, monkeypatch, fused_functions):
    want = sample(policy(), LocalEngine(enforce_eager=True))
    monkeypatch.setattr(local_engine, "fused_layers", lambda policy, _: FusedLayers(policy))
    got = sample(policy(), LocalEngine(9))
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    for one, other in zip(got, want, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert set(graphs_by_name(fused_functions)) == {"the merge of attention", "the norms", "the rotary embeddings"}
    assert all(graphs_by_name(fused_functions).values())
    num_graphs = sum(graphs_by_name(fused_functions).values())
    sample(policy(), LocalEngine(), length=31)  # steps of short rollouts, without graphs, are not fused
    assert sum(graphs_by_name(fused_functions).values()) == num_graphs


@SLOW
def test_weights_that_changed_are_used(captures):
    model, engine = policy(), LocalEngine()
    before = sample(model, engine)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    after = sample(model, engine)
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    want = sample(model, LocalEngine(enforce_eager=True))
    assert [one.token_ids for one in after] == [one.token_ids for one in want]


def test_short_rollouts_are_not_captured(captures):
    sample(policy(), LocalEngine(), length=31)
    assert not captures


def refused(run):
    run()
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def other_logits(run):
    result = run().clone()
    return result, lambda: result.copy_(run() + 1)


def nothing_captured(run):
    """As on another device than the current one."""
    return run().clone(), lambda: None


def no_memory(run):
    raise torch.OutOfMemoryError("CUDA out of memory")


def of_the_first_step(run):
    """As of a model that computes with the number of tokens."""
    result = run().clone()
    values, replays = result.clone(), []
    return result, lambda: (replays.append(1), result.copy_(values if len(replays) > 1 else run()))


@few(2, slow=True)
@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (refused, "operation not permitted when stream is capturing)"),
        (no_memory, "CUDA out of memory"),
        (other_logits, "differ by"),
        (nothing_captured, "differ by nan"),
        (of_the_first_step, "differ by"),
    ],
)
def test_what_cannot_be_captured_runs_without_and_is_logged_once(captures, capture, reason, monkeypatch, caplog):
    want = sample(policy(), LocalEngine(enforce_eager=True))
    tries = []
    monkeypatch.setitem(local_engine.CAPTURES, "cpu", lambda device: lambda run: (tries.append(1), capture(run))[1])
    engine = LocalEngine()
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        for _ in range(2):
            got = sample_again(engine)
            assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert len(tries) == 1
    (record,) = [record for record in caplog.records if "CUDA graphs" in record.message]
    assert reason in record.message


def sample_again(engine):
    """Another rollout of a connected engine."""
    if not hasattr(engine, "policy"):
        return sample(policy(), engine)
    groups = engine.generate(PROMPTS, 4, SamplingParams(max_completion_length=40), list(range(6)))
    return [completion for group in groups for completion in group]


def test_nothing_of_a_rollout_is_kept(captures):
    engine = LocalEngine()
    sample(policy(), engine)
    assert engine.captured.replay is None
    assert not engine.captured.inputs


@SLOW
@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
def test_weights_are_cast_once_per_rollout(monkeypatch, settings):
    """Lightning's autocast casts all weights at every token, to the same values."""
    want, counts = {}, []
    usual = precision.linear_copies

    def counted(*args):
        counts.append(usual(*args))
        return counts[-1]

    monkeypatch.setattr(local_engine, "linear_copies", counted)
    model = policy(**settings)
    for way in ("at every token", "once"):
        if way == "once":
            monkeypatch.setitem(local_engine.CAPTURES, "cpu", lambda device: Captures())
            monkeypatch.setattr(local_engine, "free_bytes", lambda device: 2**30)
        engine = LocalEngine(enforce_eager=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            want[way] = sample(model, engine)
        assert not engine.copies
    assert want["once"] == want["at every token"]
    (copies,) = counts
    assert "lm_head.weight" in copies
    assert all(copy.dtype == torch.bfloat16 for copy in copies.values())
    assert "model.embed_tokens.weight" not in copies  # autocast does not cast what it looks up


@pytest.mark.parametrize(("free", "is_enabled"), [(0, True), (2**30, False)])
def test_without_room_or_autocast_no_weights_are_copied(monkeypatch, free, is_enabled):
    monkeypatch.setattr(local_engine, "free_bytes", lambda device: free)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
        assert local_engine.copies_for_autocast(policy(), torch.device("cpu")) == {}


def test_no_two_caches_have_a_layout_in_common():
    """Also if one is made where another was in memory: a graph of the other would be replayed."""
    model, layouts = policy(), []
    for _ in range(20):
        prefilled = kv_cache.SamplingCache(config=model.config)
        ids = torch.full((2, 5), 7)
        model(ids, past_key_values=prefilled) if not transformers_internals.accepts(model, "cache") else model(
            ids, cache=prefilled
        )
        cache = kv_cache.SharedPrompts(model, prefilled, torch.ones(2, 5, dtype=torch.bool), torch.tensor([0, 1]), 40)
        cache.has_fixed_shapes = True
        cache.next_token()
        layouts.append(cache.layout)
        del cache, prefilled
    assert len(set(layouts)) == 20
