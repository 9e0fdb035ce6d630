"""Decoding steps from graphs: the tokens of steps without them, whatever changes between steps; and failures.

A stand-in for CUDA graphs computes a captured function again, with the tensors that it was captured with.
"""

import logging

import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy import kv_cache
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.captured import CapturedSteps
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.tiny_models import tiny_model, tiny_tokenizer

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

    def capture():
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
    result = run() + 1
    return result, lambda: None


@pytest.mark.parametrize(
    ("capture", "reason"), [(refused, "operation not permitted when stream is capturing)"), (other_logits, "differ by")]
)
def test_what_cannot_be_captured_runs_without_and_is_logged_once(captures, capture, reason, monkeypatch, caplog):
    want = sample(policy(), LocalEngine(enforce_eager=True))
    tries = []
    monkeypatch.setitem(local_engine.CAPTURES, "cpu", lambda: lambda run: (tries.append(1), capture(run))[1])
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


def test_out_of_memory_is_not_hidden(captures):
    def capture(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps, ids = CapturedSteps(capture), torch.zeros(1, 1)
    steps(1, lambda ids, position: ids, ids, ids)
    with pytest.raises(torch.OutOfMemoryError):
        steps(1, lambda ids, position: ids, ids, ids)


def test_nothing_of_a_rollout_is_kept(captures):
    engine = LocalEngine()
    sample(policy(), engine)
    assert engine.captured.replay is None
    assert not engine.captured.inputs


def test_autocast_casts_each_weight_once_per_rollout(captures):
    """Lightning's autocast casts all weights at every token."""
    model = policy()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        want = sample(model, LocalEngine(enforce_eager=True))
        weight = model.lm_head.weight
        with local_engine.weights_cast_once(model, torch.device("cpu")), torch.no_grad():
            hidden = torch.ones(1, weight.shape[1])
            one = torch.nn.functional.linear(hidden, weight)
            weight.mul_(0.5)  # what has been cast stays
            assert torch.equal(torch.nn.functional.linear(hidden, weight), one)
        with torch.no_grad():
            assert not torch.equal(torch.nn.functional.linear(hidden, weight), one)
            weight.mul_(2)
        assert not torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        got = sample(model, LocalEngine(enforce_eager=True))
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
