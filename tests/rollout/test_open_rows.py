"""Rows of waiting prompts join the open rows: the completions of a rollout without a limit of rows, in fewer steps."""

import copy
import queue
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core import ranks
from grpo_lightning.core.types import PromptVision, SamplingParams, VisionInputs
from grpo_lightning.policy import kv_cache
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout import local_engine
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.rollout.open_rows import WaitingPrompts, Wave
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

WORDS = list(range(2, 120))
"""All tokens but the pad token and the stop token."""


def connected(model, **options):
    engine = LocalEngine(**options)
    engine.connect(model, tiny_tokenizer(), Sharding())
    return engine


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (length,), generator=generator).tolist() for length in lengths]


def ids_of(groups):
    return [[completion.token_ids for completion in group] for group in groups]


def assert_same(got, want):
    """The same tokens and ends, and log-probs and entropies equal but for rounding."""
    assert ids_of(got) == ids_of(want)
    for one, other in zip([c for group in got for c in group], [c for group in want for c in group], strict=True):
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.entropies, other.entropies, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def model():
    """A model of which completions have geometric lengths, of 10 tokens in the mean.

    Its weights have 64 bits: with 32, rounding decides about one token in some ten thousand, because its random number
    lies at the limit between two tokens.
    """
    model = tiny_model("qwen2", num_hidden_layers=2, dtype=torch.float64)
    model.generation_config.eos_token_id = list(range(2, 14))
    return model


# ----------------------------------------------------------------------------------------------------- same completions


@SLOW
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    num_generations=st.integers(1, 4),
    max_rows=st.integers(1, 14),
    longest=st.sampled_from([1, 2, 9, 70]),
    interval=st.sampled_from([1, 3, 16]),
    least_ended=st.sampled_from([0.0, 0.25]),
    shared=st.booleans(),
)
@settings(max_examples=20)
def test_completions_equal_those_without_a_limit(
    model, lengths, num_generations, max_rows, longest, interval, least_ended, shared
):
    prompts, seeds = prompts_of(lengths), list(range(len(lengths)))
    sampling = SamplingParams(max_completion_length=longest)
    want = connected(model).generate(prompts, num_generations, sampling, seeds)
    engine, told, shapes = connected(model, max_rows=max_rows), [], []
    engine.path = "shared" if shared else "repeated"
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": interval})
        patch.setattr(local_engine, "LEAST_ENDED", {"cpu": least_ended})
        got = engine.generate(prompts, num_generations, sampling, seeds, lambda *steps: told.append(steps))
    hook.remove()
    assert_same(got, want)
    assert max(rows for rows, _ in shapes) <= max(max_rows, num_generations)
    num_waves = -(-len(prompts) // max(1, max_rows // num_generations))
    assert told == [(step + 1, num_waves * longest) for step in range(len(told))], "progress never goes back"
    assert len(told) <= num_waves * longest


@few(3)
@pytest.mark.parametrize(
    "filters",
    [
        {"repetition_penalty": 1.7},
        {"top_k": 5, "temperature": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        # With two letters, many prompts end with the first half of a stop string.
        {
            "suppress_tokens": [0, *(token for token in WORDS if token not in (67, 68))],
            "stop_strings": ["aba", "bbbab"],
        },
        {"stop_strings": ["d", "qu"], "repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("interval", [1, 5])
def test_what_depends_on_the_tokens_before(monkeypatch, model, filters, interval):
    """The history of a row is its own prompt and completion, whenever the row joined."""
    monkeypatch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": interval})
    prompts = [[*ids[:-3], 67, 68, 67] for ids in prompts_of([20, 4, 9, 5, 30, 7, 12])]
    sampling = SamplingParams(max_completion_length=24, **filters)
    want = connected(model).generate(prompts, 3, sampling, list(range(7)))
    assert len({len(ids) for group in ids_of(want) for ids in group}) > 1
    assert_same(connected(model, max_rows=7).generate(prompts, 3, sampling, list(range(7))), want)


def test_rows_of_the_maximum_length_leave_alone(monkeypatch, model):
    """They wait for no others that have ended, and not for the next look."""
    monkeypatch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": 7})
    monkeypatch.setattr(local_engine, "LEAST_ENDED", {"cpu": 0.6})
    prompts, sampling = prompts_of([5] * 20), SamplingParams(max_completion_length=18)
    want = connected(model).generate(prompts, 2, sampling, list(range(20)))
    assert_same(connected(model, max_rows=14).generate(prompts, 2, sampling, list(range(20))), want)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_other_families(family):
    model = tiny_model(family, dtype=torch.float64)
    model.generation_config.eos_token_id = list(range(2, 14))
    prompts, sampling = prompts_of([3, 20, 9, 5, 14]), SamplingParams(max_completion_length=30)
    want = connected(model).generate(prompts, 3, sampling, list(range(5)))
    assert_same(connected(model, max_rows=5).generate(prompts, 3, sampling, list(range(5))), want)


@SLOW
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits(autocast):
    """Greedy, so that rounding changes few tokens: the log-probs are those of the unlimited rollout."""
    model = tiny_model("qwen2", dtype=torch.float32 if autocast else torch.bfloat16)
    model.generation_config.eos_token_id = list(range(2, 14))
    prompts, sampling = prompts_of([3, 20, 9, 5, 14]), SamplingParams(max_completion_length=20)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        want = connected(model).generate(prompts, 3, sampling, list(range(5)))
        got = connected(model, max_rows=5).generate(prompts, 3, sampling, list(range(5)))
    pairs = zip([c for group in got for c in group], [c for group in want for c in group], strict=True)
    same = [(one, other) for one, other in pairs if one.token_ids == other.token_ids]
    assert len(same) > 10
    for one, other in same:
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=0.1, rtol=0)


@SLOW
def test_random_numbers_do_not_depend_on_when_a_prompt_joins(model):
    """Across blocks of random numbers: the second prompt joins in the middle of a block."""
    engine = connected(model, max_rows=2)
    engine.stop_ids = []
    sampling = SamplingParams(max_completion_length=100)
    prompts, seeds = prompts_of([3, 4, 5, 6]), [5, 6, 7, 8]
    got = engine.generate(prompts, 2, sampling, seeds)  # the third prompt needs numbers of two blocks
    engine.max_rows = None
    assert ids_of(got) == ids_of(engine.generate(prompts, 2, sampling, seeds))


# ------------------------------------------------------------------------------------------------------------- the work


@SLOW
def test_rows_join_when_there_is_room_for_a_prompt(model):
    """16 prompts of 2 rows with at most 4 rows: the rows stay open, and fewer steps are needed than in waves."""
    prompts, seeds = prompts_of([5] * 16), list(range(16))
    sampling, steps = SamplingParams(max_completion_length=60), {}
    for way in ("shared", "repeated"):
        engine, calls = connected(model, max_rows=4), []
        engine.path = way
        groups = engine.generate(prompts, 2, sampling, seeds, lambda *told, calls=calls: calls.append(told))
        steps[way] = len(calls)
    lengths = [[len(ids) for ids in group] for group in ids_of(groups)]
    in_waves = sum(max(*lengths[i], *lengths[i + 1]) for i in range(0, 16, 2))
    assert steps["repeated"] == in_waves
    assert steps["shared"] == filled_steps(lengths, 4) < 0.8 * in_waves


def filled_steps(lengths, max_rows):
    """Steps of a rollout in which a prompt joins as soon as there is room for its rows."""
    waiting, left, steps = list(lengths), [], 0
    while waiting or left:
        while waiting and len(left) + len(waiting[0]) <= max_rows:
            left += waiting.pop(0)
        left = [tokens - 1 for tokens in left if tokens > 1]
        steps += 1
    return steps


@SLOW
def test_memory_is_bounded(monkeypatch, model):
    """However many prompts join, the cache holds `max_rows` rows of the longest completion, and histories are cut."""
    sizes = []
    feed = LocalEngine.feed

    def measured(self, rows, step, placed):
        feed(self, rows, step, placed)
        cache = rows.cache
        own = cache.own[0].keys
        storage = own.untyped_storage().nbytes() // (own[0, :, 0].nbytes)  # tokens, also of rows that have left
        prompts, _, tokens, _ = cache.prompts[0].keys.shape
        sizes.append((len(own), storage, cache.capacity, prompts, tokens, rows.history.shape[1]))

    monkeypatch.setattr(LocalEngine, "feed", measured)
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 8)
    lengths = [3, 30, 4, 8, 5, 9, 7] * 6
    sampling = SamplingParams(max_completion_length=40)
    connected(model, max_rows=6).generate(prompts_of(lengths), 2, sampling, list(range(42)))
    most = [max(column) for column in zip(*sizes, strict=True)]
    assert most[0] == 6
    assert most[1] <= 6 * 39
    assert most[2] <= 39
    assert most[3] <= 1 + 6 - 2
    assert (most[4], sizes[-1][4]) == (30, 9), "the padding of a prompt that has left is dropped"
    assert most[5] <= 30 + 2 * 40
    assert len(sizes) > 3 * 40


@pytest.mark.parametrize("way", ["shared", "repeated"])
def test_what_has_left_is_freed(monkeypatch, model, way):
    """When prompts are prefilled, no other cache exists than that of the open rows, if there are any."""
    made, alive, opened = [], [], LocalEngine.open

    def open_rows(self, *args):
        alive.append(sum(reference() is not None for reference in made))
        rows, placed = opened(self, *args)
        made.extend([weakref.ref(rows), weakref.ref(rows.cache)])
        return rows, placed

    monkeypatch.setattr(LocalEngine, "open", open_rows)
    engine = connected(model, max_rows=6)
    engine.path = way
    engine.generate(prompts_of([5] * 9), 3, SamplingParams(max_completion_length=20), list(range(9)))
    assert len(alive) > 3
    assert max(alive) == (1 if way == "shared" else 0)


def test_without_a_limit_nothing_is_masked(monkeypatch, model):
    """While all rows have the same age, the kernel of the own tokens has no bias."""
    biases = []
    usual = kv_cache.attention

    def noted(query, keys, values, bias, scaling):
        biases.append(bias)
        return usual(query, keys, values, bias, scaling)

    monkeypatch.setattr(kv_cache, "attention", noted)
    sampling = SamplingParams(max_completion_length=20)
    connected(model).generate(prompts_of([5, 5, 5]), 3, sampling, [0, 1, 2])
    assert set(biases) == {None}
    biases.clear()
    connected(model, max_rows=6).generate(prompts_of([5, 5, 5]), 3, sampling, [0, 1, 2])
    assert any(bias is not None for bias in biases), "the third prompt joins rows that are older"


@given(
    num_prompts=st.integers(0, 9),
    part=st.integers(1, 4),
    max_rows=st.one_of(st.none(), st.integers(1, 20)),
    data=st.data(),
)
def test_waiting_prompts(num_prompts, part, max_rows, data):
    vision = VisionInputs([PromptVision() for _ in range(num_prompts)])
    wave = Wave([[i] for i in range(num_prompts)], list(range(num_prompts)), 4, range(part), vision)
    waiting, taken = WaitingPrompts(wave, max_rows), []
    while len(taken) < num_prompts:
        num_open = data.draw(st.integers(0, max_rows or 9))
        new = waiting.take(num_open)
        if new.prompts:
            assert new.first == len(taken)
            assert [new.vision.prompts[i] is vision.prompts[new.first + i] for i in range(len(new.prompts))]
            assert len(new.vision.prompts) == len(new.prompts) == len(new.seeds)
        assert not num_open or max_rows is None or num_open + len(new.prompts) * part <= max(max_rows, num_open)
        assert num_open or new.prompts, "without open rows a prompt is taken in any case"
        taken += new.prompts
    assert taken == wave.prompts
    assert not waiting.take(0).prompts


# -------------------------------------------------------------------------------------------------------- several ranks


class Meeting:
    """Two threads that stand for two ranks; a collective waits for the other rank and must be of the same kind."""

    def __init__(self):
        self.boxes = [queue.Queue(), queue.Queue()]
        self.rank = threading.local()
        self.kinds = []

    def exchange(self, kind, value):
        own = self.rank.number
        self.boxes[1 - own].put((kind, value))
        other_kind, other = self.boxes[own].get(timeout=20)
        assert kind == other_kind, "the ranks make different collective calls"
        if own == 0:
            self.kinds.append(kind)
        return other


class Shards(Sharding):
    is_sharded = True


@SLOW
@given(
    lengths=st.tuples(*[st.lists(st.integers(1, 12), max_size=6)] * 2),
    max_rows=st.tuples(*[st.sampled_from([None, 2, 3, 7])] * 2),
    longest=st.sampled_from([1, 9, 25]),
    interval=st.sampled_from([1, 4]),
    way=st.sampled_from(["shared", "repeated"]),
)
@settings(max_examples=10)
def test_ranks_make_the_same_forward_calls(model, lengths, max_rows, longest, interval, way):
    """Weights that stay sharded: every forward call is a collective, and the completions are those of one rank."""
    meeting, found, sampling = Meeting(), {}, SamplingParams(max_completion_length=longest)
    models = [copy.deepcopy(model) for _ in range(2)]

    def run(rank):
        meeting.rank.number = rank
        engine = LocalEngine(max_rows=max_rows[rank], gather_for_generation=False)
        engine.connect(models[rank], tiny_tokenizer(), Shards())
        engine.path = way
        models[rank].register_forward_pre_hook(
            lambda module, args, kwargs: meeting.exchange("forward", None) and None, with_kwargs=True
        )
        prompts = prompts_of(lengths[rank], seed=rank)
        found[rank] = engine.generate(prompts, 2, sampling, list(range(len(prompts))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "LOOK_INTERVAL", {"cpu": interval})
        patch.setattr(ranks, "world_size", lambda: 2)
        patch.setattr(
            ranks, "max_over_ranks", lambda values: torch.maximum(values, meeting.exchange("max", values.clone()))
        )
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in range(2):
        prompts = prompts_of(lengths[rank], seed=rank)
        assert_same(found[rank], connected(model).generate(prompts, 2, sampling, list(range(len(prompts)))))
    assert all(box.empty() for box in meeting.boxes)
