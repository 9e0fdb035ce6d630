"""Arguments of SamplingParams and LocalEngine: other completions, or the same in other batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.vllm.requests import sampling_settings
from tests.arguments.registry import case
from tests.helpers.module_runs import SMALL
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = [40, 50, 60]


def draw(sampling: SamplingParams, engine: LocalEngine | None = None, **options: Any) -> list[Any]:
    """Six completions of one prompt by a model that does not stop by itself."""
    model = tiny_model(**SMALL)
    tokenizer = tiny_tokenizer()
    model.generation_config.eos_token_id, tokenizer.eos_token = None, None
    engine = engine or LocalEngine()
    model.register_forward_pre_hook(options.get("hook", lambda *_: None), with_kwargs="hook" in options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lightning.rollout.local_engine.log.warning", lambda *_: None)  # that there is no stop token
        engine.connect(model, tokenizer, options.get("sharding", Sharding()))
    prompts = options.get("prompts", [PROMPT])
    return [c for group in engine.generate(prompts, 6, sampling, seeds=list(range(len(prompts)))) for c in group]


def texts(**settings: Any) -> list[str]:
    """Return the sampled texts."""
    return [c.text for c in draw(SamplingParams(**{"max_completion_length": 8} | settings))]


@case(SamplingParams, "max_completion_length")
def test_max_completion_length():
    for length in (3, 5):
        assert {len(c.token_ids) for c in draw(SamplingParams(max_completion_length=length))} == {length}


@case(SamplingParams, "temperature")
def test_temperature():
    assert len(set(texts(temperature=1.0))) > 1
    assert len(set(texts(temperature=0.0))) == 1
    hot, cold = (
        [c.logprobs[0] for c in draw(SamplingParams(max_completion_length=8, temperature=t))] for t in (5.0, 0.2)
    )
    assert max(hot) < max(cold)  # log-probs are of the distribution drawn from


@case(SamplingParams, "top_p", "top_k", "min_p")
def test_only_the_most_likely_token_is_left():
    greedy = texts(temperature=0.0)
    assert texts() != greedy
    for name, narrow in {"top_p": 1e-6, "top_k": 1, "min_p": 0.999}.items():
        assert texts(**{name: narrow}) == greedy, name


@case(SamplingParams, "repetition_penalty")
def test_repetition_penalty():
    distinct = {}
    for penalty in (1.0, 1e6):
        sampling = SamplingParams(max_completion_length=20, temperature=0.0, repetition_penalty=penalty)
        distinct[penalty] = len(set(PROMPT + draw(sampling)[0].token_ids))
    assert distinct[1.0] < distinct[1e6] == len(PROMPT) + 20  # no token twice, nor one of the prompt's


@case(SamplingParams, "guided_regex")
def test_guided_regex():
    for regex in (None, "[0-9]+"):
        guide = sampling_settings(SamplingParams(guided_regex=regex), [])["structured_outputs"]
        assert guide == (None if regex is None else {"regex": regex})


@case(SamplingParams, "suppress_tokens")
def test_suppress_tokens():
    free = {token for c in draw(SamplingParams(max_completion_length=8)) for token in c.token_ids}
    banned = sorted(free)[:20]
    assert banned
    kept = {
        token for c in draw(SamplingParams(max_completion_length=8, suppress_tokens=banned)) for token in c.token_ids
    }
    assert not kept & set(banned)


@case(SamplingParams, "stop_strings")
def test_stop_strings():
    first, *_ = draw(SamplingParams(max_completion_length=8))
    stopped, *_ = draw(SamplingParams(max_completion_length=8, stop_strings=[first.text[2]]))
    assert stopped.text == first.text[: first.text.index(first.text[2]) + 1]
    assert (first.finish_reason, stopped.finish_reason) == ("length", "stop")


class Shards(Sharding):
    """Counts how often they are gathered."""

    is_sharded = True

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        self.count += 1
        yield


@case(LocalEngine, "enforce_eager")
def test_enforce_eager(monkeypatch):
    captured: list[bool] = []

    def capture(run: Any) -> Any:
        captured.append(True)
        return run(), lambda: None

    monkeypatch.setitem(local_engine.CAPTURES, "cpu", lambda device: capture)
    for enforce_eager in (True, False):
        draw(SamplingParams(max_completion_length=40), LocalEngine(enforce_eager=enforce_eager))
        assert bool(captured) == (not enforce_eager)


@case(LocalEngine, "gather_for_generation")
def test_gather_for_generation():
    gathered, drawn = {}, {}
    for gather in (True, False, "auto"):
        shards = Shards()
        engine = LocalEngine(gather_for_generation=gather)
        drawn[gather] = draw(SamplingParams(max_completion_length=4), engine, sharding=shards)
        gathered[gather] = shards.count
    assert gathered == {True: 1, False: 0, "auto": 1}  # on a CPU the weights are gathered
    assert drawn[True] == drawn[False] == drawn["auto"]


@case(LocalEngine, "max_rows")
def test_max_rows():
    most = {}
    for max_rows in (None, 6):
        rows: list[int] = []
        draw(
            SamplingParams(max_completion_length=2),
            LocalEngine(max_rows=max_rows),
            prompts=[PROMPT, PROMPT, PROMPT],
            hook=lambda _, args, kwargs, rows=rows: rows.append(len(kwargs["input_ids"])),
        )
        most[max_rows] = max(rows)
    assert most == {None: 18, 6: 6}
