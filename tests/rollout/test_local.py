"""The local engine draws what `generate` draws, from the distribution it says, at a fraction of the work."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lightning.core.types import Group, Prompt, SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.probe import choose_path
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.transformers_internals import left_pad
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import plan_micro_batches
from tests.helpers.families import families
from tests.helpers.module_runs import make_module
from tests.helpers.tiny_models import BASE, EOS, FAMILIES, PAD, VOCAB, tiny_model, tiny_tokenizer
from tests.marks import few

UNUSED = VOCAB - 1
"""A token id that the tokenizer has no text for."""
NO_TOKEN = VOCAB + 5
"""A stop token that is never drawn."""


def make_prompts(lengths=(20, 10, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (length,), generator=generator).tolist() for length in lengths]


def connected(model, tokenizer=None, **options):
    engine = LocalEngine(**options)
    engine.connect(model, tokenizer or tiny_tokenizer(), Sharding())
    return engine


def greedy(**options):
    return SamplingParams(**({"max_completion_length": 12, "temperature": 0.0} | options))


def token_ids(groups):
    return [[completion.token_ids for completion in group] for group in groups]


def generated(model, prompt, length=12, **options):
    """The new tokens of transformers' greedy `generate` on one unpadded row."""
    settings = {"max_new_tokens": length, "do_sample": False, "pad_token_id": PAD, "eos_token_id": NO_TOKEN}
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **(settings | options))
    return output[0, len(prompt) :].tolist()


def cut(row, stops):
    """A row up to its first stop token, that one included."""
    ends = [i + 1 for i, token in enumerate(row) if token in stops]
    return row[: ends[0]] if ends else row


def two_stops(rows):
    """Two tokens that end the rows at as many different steps as can be."""
    tokens = sorted({token for row in rows for token in row})
    return max(itertools.combinations(tokens, 2), key=lambda stops: len({len(cut(row, stops)) for row in rows}))


def scored(model, prompts, groups, path, temperature):
    """(log-probs of the engine, those of the scorer) of all real tokens."""
    groups = [Group(Prompt(""), ids, group) for ids, group in zip(prompts, groups, strict=True)]
    (batch,), _ = plan_micro_batches(
        groups,
        torch.ones(len(groups), len(groups[0].completions)),
        updates=1,
        accumulate=1,
        pad_id=PAD,
        skip_zero_advantages=False,
    )
    with torch.no_grad():
        logprobs = Scorer(path)(model, batch, temperature=temperature).logprobs
    return batch.rollout_logprobs[batch.attention_mask], logprobs[batch.attention_mask]


def scripted(model, tokens):
    """Make the model draw these tokens, in every row."""
    step = itertools.count()

    def force(module, args, kwargs, output):
        nonlocal step
        if kwargs["input_ids"].shape[1] > 1:  # a prefill
            step = itertools.count()
        output.logits[:, -1] = torch.full_like(output.logits[:, -1], -100.0)
        output.logits[:, -1, tokens[next(step)]] = 100.0
        return output

    model.register_forward_hook(force, with_kwargs=True)
    return model


@pytest.fixture(params=["qwen2", "mamba2"])
def either(request):
    """A model for each of the two ways of decoding."""
    return tiny_model(request.param, num_hidden_layers=2)


# ------------------------------------------------------------------------------------------------- against `generate`


@few(1)
@pytest.mark.parametrize("family", families(FAMILIES))
def test_greedy_equals_generate_on_unpadded_rows(family):
    model, prompts = tiny_model(family), make_prompts()
    # Left padding in front of shorter prompts, and sliding windows that the longest fills.
    free = [generated(model, prompt) for prompt in prompts]
    stops = two_stops(free)
    want = [cut(row, stops) for row in free]
    assert len({len(row) for row in want}) > 1, "rows must end at different steps"
    model.generation_config.eos_token_id = list(stops)
    groups = connected(model).generate(prompts, 2, greedy(), seeds=[0, 1, 2])
    assert token_ids(groups) == [[row, row] for row in want]
    assert [group[0].finish_reason for group in groups] == ["stop" if row[-1] in stops else "length" for row in want]


def test_several_stop_ids_mean_what_they_mean_to_generate():
    model, prompts = tiny_model("qwen2"), make_prompts()
    stops = list(two_stops([generated(model, prompt) for prompt in prompts]))
    model.generation_config.eos_token_id = stops
    want = [[generated(model, prompt, eos_token_id=[*stops, EOS])] for prompt in prompts]
    assert token_ids(connected(model).generate(prompts, 1, greedy(), seeds=[0, 1, 2])) == want


@few(1)
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.7}, {"suppress_tokens": list(range(2, 60))}])
def test_processors_equal_generate_on_unpadded_rows(either, options):
    """Pad ids in front of a short prompt must not count as seen."""
    prompts = make_prompts()
    want = [[generated(either, prompt, eos_token_id=EOS, **options)] for prompt in prompts]
    assert want != [[generated(either, prompt, eos_token_id=EOS)] for prompt in prompts]
    assert token_ids(connected(either).generate(prompts, 1, greedy(**options), seeds=[0, 1, 2])) == want


def test_a_repetition_penalty_spares_the_padding(either):
    """The pad id's own score decides here: with a penalty on it, short prompts would answer otherwise than alone."""
    with torch.no_grad():
        either.get_output_embeddings().weight[PAD] = 0
        either.get_output_embeddings().weight.mul_(0.05)
    prompts = make_prompts((20, 3))
    sampling = SamplingParams(max_completion_length=1, temperature=1.0, repetition_penalty=100.0)
    bias = torch.zeros(VOCAB)
    bias[PAD] = 8.0  # the pad id is the most likely by far, unless it is penalized
    either.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output + bias)
    together = connected(either).generate(prompts, 20, sampling, seeds=[0, 1])
    assert sum(completion.token_ids == [PAD] for completion in together[1]) > 10


@few(2)
@pytest.mark.parametrize("way", ["decode", "decode_with_generate"])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.5, "repetition_penalty": 1.3}, {"suppress_tokens": [3]}]
)
def test_entropies_equal_the_scorers(way, filters, monkeypatch):
    """They are the entropies of the softmax at the temperature, before filters remove tokens."""
    if way == "decode_with_generate":
        monkeypatch.setattr("grpo_lightning.rollout.local_engine.no_fan_out_reason", lambda policy: "the test says so")
    model, prompts = tiny_model("qwen2"), make_prompts()
    model.generation_config.eos_token_id = list(range(2, 14))
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = 0  # suppressed, and not likely anyway
    sampling = SamplingParams(max_completion_length=12, temperature=0.7, **filters)
    groups = connected(model).generate(prompts, 3, sampling, seeds=[0, 1, 2])
    whole = [Group(Prompt(""), ids, group) for ids, group in zip(prompts, groups, strict=True)]
    (batch,), _ = plan_micro_batches(
        whole, torch.ones(3, 3), updates=1, accumulate=1, pad_id=PAD, skip_zero_advantages=False
    )
    with torch.no_grad():
        want = Scorer("dense")(model, batch, temperature=0.7).entropy
    rows = [(n, completion) for n, group in enumerate(groups) for completion in group]
    for (_, completion), entropies in zip(rows, want, strict=True):
        length = len(completion.token_ids)
        tolerance = 0.1 if "suppress_tokens" in filters else 1e-4  # the scorer knows of no tokens that are suppressed
        torch.testing.assert_close(torch.tensor(completion.entropies), entropies[:length], atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", families(FAMILIES))
def test_logprobs_equal_the_scorers(family):
    model, prompts = tiny_model(family), make_prompts()
    model.generation_config.eos_token_id = list(range(2, 14))
    sampling = SamplingParams(max_completion_length=12, temperature=0.7)
    groups = connected(model).generate(prompts, 3, sampling, seeds=[0, 1, 2])
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 2
    path, _ = choose_path(model)  # extended, but for linear attention in older releases of transformers
    got, want = scored(model, prompts, groups, path, 0.7)
    # Linear attention works in blocks, which padding moves.
    torch.testing.assert_close(got, want, atol=5e-5 if family == "qwen3.5" else 1e-5, rtol=0)
    _, at_another_temperature = scored(model, prompts, groups, path, 1.0)
    assert (got - at_another_temperature).abs().max() > 0.05


def test_greedy_logprobs_are_those_of_the_model(either):
    prompts = make_prompts()
    groups = connected(either).generate(prompts, 1, greedy(max_completion_length=5), seeds=[0, 1, 2])
    got, want = scored(either, prompts, groups, "dense", 1.0)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# ----------------------------------------------------------------------------------------------------- the work done


@pytest.fixture
def embedded():
    """A qwen2 whose rows end early, and the shapes of the ids it embeds."""
    model, shapes = tiny_model("qwen2"), []
    model.generation_config.eos_token_id = list(range(2, 14))
    model.get_input_embeddings().register_forward_hook(lambda m, inputs, output: shapes.append(tuple(inputs[0].shape)))
    return model, shapes


def test_prompts_are_embedded_once_and_ended_rows_leave(embedded):
    model, shapes = embedded
    sampling = SamplingParams(max_completion_length=12)
    groups = connected(model).generate(make_prompts(), 8, sampling, seeds=[0, 1, 2])
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    assert len(set(lengths)) > 4
    assert shapes[0] == (3, 20)
    # A row of n tokens is fed its first n - 1.
    open_rows = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert shapes[1:] == [(rows, 1) for rows in open_rows]


@few(2)
@pytest.mark.parametrize(("max_rows", "widest"), [(2, 3), (3, 3), (5, 3), (6, 6), (8, 6), (9, 9), (100, 9)])
def test_waves_bound_the_rows_and_keep_the_order(embedded, max_rows, widest):
    model, shapes = embedded
    prompts = make_prompts()
    want = token_ids(connected(model).generate(prompts, 3, greedy(), seeds=[0, 1, 2]))
    shapes.clear()
    assert token_ids(connected(model, max_rows=max_rows).generate(prompts, 3, greedy(), seeds=[0, 1, 2])) == want
    assert max(rows for rows, length in shapes if length == 1) == widest


def test_waves_draw_different_completions():
    """A second wave does not repeat the first one's random numbers."""
    model, prompt = tiny_model("qwen2"), make_prompts((10,))[0]
    sampling = SamplingParams(max_completion_length=8)
    first, second = token_ids(connected(model, max_rows=2).generate([prompt, prompt], 2, sampling, seeds=[0, 1]))
    assert first != second


@pytest.fixture(scope="module")
def engine_and_alone():
    """An engine, and the completions of five prompts each drawn alone."""
    model = tiny_model("qwen2", num_hidden_layers=2)
    model.generation_config.eos_token_id = list(range(2, 14))
    engine, sampling = connected(model), SamplingParams(max_completion_length=8, temperature=0.8, top_p=0.95)
    prompts = [*make_prompts((20, 10, 5, 1)), make_prompts((10,), seed=1)[0]]
    alone = [engine.generate([prompt], 3, sampling, seeds=[i])[0] for i, prompt in enumerate(prompts)]
    return engine, sampling, prompts, alone


@given(order=st.lists(st.sampled_from(range(5)), max_size=7), max_rows=st.one_of(st.none(), st.integers(1, 20)))
@settings(max_examples=10)
def test_what_is_drawn_beside_a_prompt_does_not_matter(engine_and_alone, order, max_rows):
    """Any of the prompts, some of them twice, in any order and any waves: each gets what it gets alone."""
    engine, sampling, prompts, alone = engine_and_alone
    engine.max_rows = max_rows
    groups = engine.generate([prompts[i] for i in order], 3, sampling, seeds=order)
    assert token_ids(groups) == token_ids([alone[i] for i in order])
    for group, i in zip(groups, order, strict=True):
        for completion, other in zip(group, alone[i], strict=True):
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_generate_too_draws_a_prompt_as_alone():
    """The other way of decoding, through transformers' `generate`."""
    model, prompts = tiny_model("mamba2", num_hidden_layers=2), make_prompts()
    model.generation_config.eos_token_id = list(range(2, 14))
    sampling = SamplingParams(max_completion_length=6)
    together = connected(model).generate(prompts, 3, sampling, seeds=[4, 5, 6])
    alone = [connected(model).generate([prompts[i]], 3, sampling, seeds=[4 + i])[0] for i in range(3)]
    assert token_ids(together) == token_ids(alone)
    waves = connected(model, max_rows=3).generate(prompts[::-1], 3, sampling, seeds=[6, 5, 4])
    assert token_ids(waves[::-1]) == token_ids(alone)


def test_both_ways_of_decoding_draw_the_same(monkeypatch):
    model, prompts, sampling = tiny_model("qwen2"), make_prompts(), SamplingParams(max_completion_length=6)
    fanned_out = connected(model).generate(prompts, 3, sampling, seeds=[0, 1, 2])
    monkeypatch.setattr("grpo_lightning.rollout.local_engine.no_fan_out_reason", lambda policy: "the test says so")
    assert token_ids(connected(model).generate(prompts, 3, sampling, seeds=[0, 1, 2])) == token_ids(fanned_out)


def test_a_longer_limit_only_continues(either):
    """The numbers that a seed means do not depend on the longest completion allowed."""
    short, long = (
        connected(either).generate(make_prompts(), 2, SamplingParams(max_completion_length=length), seeds=[0, 1, 2])
        for length in (3, 6)
    )
    assert [[ids[:3] for ids in group] for group in token_ids(long)] == token_ids(short)


def test_no_prompts_no_completions(either):
    assert connected(either).generate([], 3, SamplingParams(max_completion_length=4), seeds=[]) == []
    assert connected(either, max_rows=2).generate([], 3, SamplingParams(max_completion_length=4), seeds=[]) == []


def test_a_seed_for_every_prompt():
    with pytest.raises(ValueError, match="one seed per prompt: 3 prompts, 2 seeds"):
        connected(tiny_model("qwen2")).generate(make_prompts(), 2, greedy(), seeds=[0, 1])


# -------------------------------------------------------------------------------------------------- sharded weights


class Pretended(Sharding):
    """Shards that are whole: says when they are gathered."""

    is_sharded = True

    def __init__(self):
        self.said = []

    @contextlib.contextmanager
    def gathered(self, model):
        self.said.append("gathered")
        try:
            yield
        finally:
            self.said.append("sharded")


@few(3)
@pytest.mark.parametrize("prompts", [make_prompts(), []])
@pytest.mark.parametrize(("gather", "said"), [(True, ["gathered", "sharded"]), (False, []), ("auto", None)])
def test_shards_are_gathered_once_per_rollout(either, gather, said, prompts):
    """Also by a rank without prompts: the others wait for it."""
    want = connected(either).generate(prompts, 2, greedy(), seeds=[0] * len(prompts))
    engine, sharding = LocalEngine(max_rows=2, gather_for_generation=gather), Pretended()
    engine.connect(either, tiny_tokenizer(), sharding)
    assert token_ids(engine.generate(prompts, 2, greedy(), seeds=[0] * len(prompts))) == token_ids(want)
    assert sharding.said == (["gathered", "sharded"] if said is None else said)


def test_whole_weights_are_not_gathered(either):
    sharding = Pretended()
    sharding.is_sharded = False
    engine = LocalEngine(gather_for_generation=True)
    engine.connect(either, tiny_tokenizer(), sharding)
    engine.generate(make_prompts(), 2, greedy(max_completion_length=2), seeds=[0, 1, 2])
    assert sharding.said == []


def test_shards_are_left_when_sampling_fails(either):
    with torch.no_grad():
        next(either.parameters()).fill_(torch.nan)
    engine, sharding = LocalEngine(gather_for_generation=True), Pretended()
    engine.connect(either, tiny_tokenizer(), sharding)
    with pytest.raises(FloatingPointError):
        engine.generate(make_prompts(), 2, greedy(), seeds=[0, 1, 2])
    assert sharding.said == ["gathered", "sharded"]


def test_a_rank_that_is_done_keeps_step(monkeypatch):
    """Another rank decodes for 10 steps, before which a prompt joins twice: this one makes as many calls.

    Where transformers' `generate` decodes, it asks the process group itself: see tests/distributed.
    """
    model = tiny_model("qwen2", num_hidden_layers=2)
    others = iter([[3], [1, 0], [1, 1], [0, 1], *[[1, 0]] * 6, [0, 0]])
    monkeypatch.setattr(
        "grpo_lightning.core.ranks.max_over_ranks", lambda values: values.maximum(torch.tensor(next(others)))
    )
    monkeypatch.setattr("grpo_lightning.core.ranks.any_over_ranks", lambda flag: flag)
    monkeypatch.setattr("grpo_lightning.core.ranks.world_size", lambda: 2)
    model.generation_config.eos_token_id = list(range(2, 60))
    sampling = SamplingParams(max_completion_length=6)
    want = connected(model).generate(make_prompts(), 2, sampling, seeds=[0, 1, 2])
    assert max(len(ids) for group in token_ids(want) for ids in group) < 6
    engine, calls = LocalEngine(gather_for_generation=False), []
    engine.connect(model, tiny_tokenizer(), Pretended())
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True)
    assert token_ids(engine.generate(make_prompts(), 2, sampling, seeds=[0, 1, 2])) == token_ids(want)
    assert len(calls) == 3 + 9
    assert calls[-1] == (1, 1), "a dummy token"


@pytest.mark.parametrize("value", ["always", 1, None])
def test_gather_for_generation_is_checked(value):
    with pytest.raises(ValueError, match=r"engine.gather_for_generation must be 'auto', true or false, got"):
        LocalEngine(gather_for_generation=value)


def test_the_choice_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    engine = LocalEngine()
    engine.connect(tiny_model("qwen2", num_hidden_layers=1), tiny_tokenizer(), Pretended())
    for _ in range(2):
        engine.generate(make_prompts(), 1, greedy(max_completion_length=1), seeds=[0, 1, 2])
    assert len([r for r in caplog.records if "gather_for_generation" in r.getMessage()]) == 1


def test_max_rows_below_one_is_refused():
    with pytest.raises(ValueError, match=r"engine.max_rows must be at least 1.*got 0"):
        LocalEngine(max_rows=0)


@pytest.mark.parametrize("path", ["shared", "repeated", "generate"])
def test_progress_is_told_every_step(path):
    calls = []
    engine = connected(tiny_model("qwen2"))
    engine.path = path
    arguments = (make_prompts(), 2, greedy(max_completion_length=4), [0, 1, 2])
    engine.generate(*arguments, progress=lambda *steps: calls.append(steps))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_progress_of_several_waves_with_generate():
    calls = []
    engine = connected(tiny_model("qwen2"), max_rows=2)
    engine.path = "generate"
    arguments = (make_prompts()[:2], 2, greedy(max_completion_length=3), [0, 1])
    engine.generate(*arguments, progress=lambda *steps: calls.append(steps))
    assert calls == [(step, 6) for step in range(1, 7)]


# ------------------------------------------------------------------------------------------------------ randomness


def test_the_seed_alone_decides(either):
    engine, prompts = connected(either), make_prompts()
    sampling = SamplingParams(max_completion_length=8)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = engine.generate(prompts, 3, sampling, seeds=[5, 6, 7])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert engine.generate(prompts, 3, sampling, seeds=[5, 6, 7]) == first
    assert token_ids(engine.generate(prompts, 3, sampling, seeds=[8, 9, 10])) != token_ids(first)
    assert all(len({tuple(ids) for ids in group}) == 3 for group in token_ids(first))


def next_token_probabilities(model, prompt, temperature):
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)


def draw_once(model, prompt, count, **options):
    """[count] first tokens and their log-probs."""
    sampling = SamplingParams(max_completion_length=1, **options)
    (group,) = connected(model).generate([prompt], count, sampling, seeds=[0])
    return torch.tensor([c.token_ids[0] for c in group]), torch.tensor([c.logprobs[0] for c in group])


def chi_square(tokens, probabilities):
    """How many standard deviations the statistic lies above its mean; tokens expected less than 5 times are one bin."""
    observed, expected = torch.bincount(tokens, minlength=VOCAB).double(), probabilities.double() * len(tokens)
    is_rare = expected < 5
    if expected[is_rare].sum() > 0:
        observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    else:
        observed, expected = observed[~is_rare], expected[~is_rare]
    freedom = len(expected) - 1
    return float(((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_tokens_come_from_the_softmax_at_the_temperature(either):
    prompt = make_prompts((7,))[0]
    tokens, logprobs = draw_once(either, prompt, 1500, temperature=0.7)
    probabilities = next_token_probabilities(either, prompt, 0.7)
    assert abs(chi_square(tokens, probabilities)) < 4
    assert chi_square(tokens, next_token_probabilities(either, prompt, 1.0)) > 10  # the test can tell
    torch.testing.assert_close(logprobs, probabilities[tokens].log(), atol=1e-4, rtol=0)


def nucleus(p, mass):
    """The smallest set of most likely tokens that holds the mass."""
    order = p.argsort(descending=True)
    return order[: int((p[order].cumsum(0) < mass).sum()) + 1].tolist()


@few(2)
@pytest.mark.parametrize(
    ("options", "allowed_of"),
    [
        ({"top_k": 5}, lambda p: p.topk(5).indices.tolist()),
        ({"top_p": 0.4}, lambda p: nucleus(p, 0.4)),
        ({"min_p": 0.3}, lambda p: (p >= 0.3 * p.max()).nonzero()[:, 0].tolist()),
        ({"suppress_tokens": list(range(2, 115))}, lambda p: [0, 1, *range(115, VOCAB)]),
    ],
)
def test_filters_draw_from_what_they_leave(either, options, allowed_of):
    prompt = make_prompts((7,))[0]
    probabilities = next_token_probabilities(either, prompt, 0.7)
    allowed = allowed_of(probabilities)
    assert 2 <= len(allowed) <= 40
    tokens, logprobs = draw_once(either, prompt, 500, temperature=0.7, **options)
    filtered = torch.zeros(VOCAB).index_copy(0, torch.tensor(allowed), probabilities[allowed])
    filtered /= filtered.sum()
    assert set(tokens.tolist()) <= set(allowed)
    assert abs(chi_square(tokens, filtered)) < 4
    torch.testing.assert_close(logprobs, filtered[tokens].log(), atol=1e-4, rtol=0)


def test_what_the_model_suggests_does_not_reshape(either):
    """Instruction-tuned checkpoints come with sampling settings of their own; ours alone count."""
    prompts, sampling = make_prompts(), SamplingParams(max_completion_length=6)
    want = connected(either).generate(prompts, 3, sampling, seeds=[0, 1, 2])
    suggested = {
        "temperature": 0.1,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.5,
        "repetition_penalty": 2.0,
        "suppress_tokens": list(range(2, 90)),
        "no_repeat_ngram_size": 1,
        "bad_words_ids": [[token] for token in range(30, 119)],
        "do_sample": True,
        "max_length": 3,
    }
    for name, value in suggested.items():
        setattr(either.generation_config, name, value)
    assert connected(either).generate(prompts, 3, sampling, seeds=[0, 1, 2]) == want
    want = connected(tiny_model(either.config.model_type, num_hidden_layers=2)).generate(
        prompts, 1, greedy(), seeds=[0, 1, 2]
    )
    assert connected(either).generate(prompts, 1, greedy(), seeds=[0, 1, 2]) == want


# ------------------------------------------------------------------------------------------------------------ stops


def ids_of(text):
    return tiny_tokenizer()(text)["input_ids"]


@few(4)
@pytest.mark.parametrize(
    ("prompt", "drawn", "stop_strings", "want", "reason"),
    [
        ("hi", "abENDcd", ["END"], "abEND", "stop"),
        ("the EN", "D and END.", ["END"], "D and END", "stop"),  # half of it in the prompt
        ("END", "xyz and mo", ["END"], "xyz and mo", "length"),  # all of it in the prompt
        ("hi", "abENDcd", ["nd", "b", "ENDc"], "ab", "stop"),  # several: the first to come
        ("hi", "abENabENab", ["END"], "abENabENab", "length"),
        ("hi", "ab,EN<eos>D", ["END"], "ab,EN", "stop"),
        ("hi", "abcdefghi.", ["."], "abcdefghi.", "stop"),  # with the last token there is room for
    ],
)
def test_stop_strings(either, prompt, drawn, stop_strings, want, reason):
    script = ids_of(drawn) + [UNUSED] * 10
    sampling = SamplingParams(max_completion_length=10, stop_strings=stop_strings)
    engine = connected(scripted(either, script))
    for completion in engine.generate([ids_of(prompt)], 2, sampling, seeds=[0])[0]:
        assert completion.text == want
        assert completion.token_ids == script[: len(completion.token_ids)]
        assert completion.finish_reason == reason
        assert len(completion.logprobs) == len(completion.token_ids)
        assert max(map(abs, completion.logprobs)) < 1e-4


def test_a_stop_string_that_ends_inside_a_token(either):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["Dxyz"])
    script = [*ids_of("aEN"), tokenizer.convert_tokens_to_ids("Dxyz"), *ids_of("more than this")]
    sampling = SamplingParams(max_completion_length=10, stop_strings=["END"])
    ((completion,),) = connected(scripted(either, script), tokenizer).generate([ids_of("hi")], 1, sampling, seeds=[0])
    assert completion.token_ids == script[:4]
    assert completion.text == "aENDxyz"
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("length", "count", "reason"), [(5, 4, "stop"), (4, 4, "stop"), (3, 3, "length"), (1, 1, "length")]
)
def test_finish_reasons(either, length, count, reason):
    script = [*ids_of("abc"), EOS, *ids_of("def")]
    sampling = SamplingParams(max_completion_length=length)
    groups = connected(scripted(either, script)).generate([ids_of("hi"), ids_of("longer")], 2, sampling, seeds=[0, 1])
    for completion in itertools.chain(*groups):
        assert completion.token_ids == script[:count]
        assert completion.finish_reason == reason
        assert completion.text == "abc"[:count]


def test_padding_never_ends_a_completion(either):
    """The pad token may be drawn like any other; only stop tokens end a row."""
    script = [*ids_of("ab"), PAD, *ids_of("c"), EOS]
    sampling = SamplingParams(max_completion_length=8)
    ((completion,),) = connected(scripted(either, script)).generate([ids_of("hi")], 1, sampling, seeds=[0])
    assert completion.token_ids == script


def test_a_model_without_a_stop_token_warns(either, caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    either.generation_config.eos_token_id = None
    engine = connected(either, tokenizer)
    assert [record.getMessage() for record in caplog.records if "stop token" in record.getMessage()] == [
        "Neither the generation config nor the tokenizer has a stop token: every completion will be truncated."
    ]
    groups = engine.generate(make_prompts(), 2, SamplingParams(max_completion_length=5), seeds=[0, 1, 2])
    assert {(len(c.token_ids), c.finish_reason) for group in groups for c in group} == {(5, "length")}


def test_a_model_with_a_stop_token_does_not_warn(caplog):
    connected(tiny_model("qwen2"))
    assert not caplog.records


# ------------------------------------------------------------------------------------------------------ modes, faults


def test_eval_inside_and_every_mode_restored(either):
    either.train()
    next(either.children()).eval()
    modes = [module.training for module in either.modules()]
    assert len(set(modes)) == 2
    inside = []
    either.register_forward_hook(lambda module, *args: inside.extend(m.training for m in module.modules()))
    connected(either).generate(make_prompts(), 2, greedy(max_completion_length=2), seeds=[0, 1, 2])
    assert inside
    assert not any(inside)
    assert [module.training for module in either.modules()] == modes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_said(either, temperature):
    either.train()
    with torch.no_grad():
        next(either.parameters()).fill_(torch.nan)
    sampling = SamplingParams(max_completion_length=4, temperature=temperature)
    with pytest.raises(FloatingPointError, match=r"logits are NaN.*diverged"):
        connected(either).generate(make_prompts(), 2, sampling, seeds=[0, 1, 2])
    assert either.training


def test_no_graph_is_kept(either):
    seen = []
    either.register_forward_hook(lambda module, args, output: seen.append(output.logits.requires_grad))
    connected(either).generate(make_prompts(), 2, greedy(max_completion_length=2), seeds=[0, 1, 2])
    assert seen
    assert not any(seen)


def test_without_a_cache_to_fan_out_it_says_so_once_and_uses_generate(caplog):
    caplog.set_level(logging.INFO)
    model, prompts = tiny_model("mamba2"), make_prompts()
    model.generation_config.eos_token_id = list(range(2, 14))
    engine = connected(model, max_rows=6)
    sampling = SamplingParams(max_completion_length=12, temperature=0.7)
    groups = [engine.generate(prompts, 3, sampling, seeds=seeds) for seeds in ([0, 1, 2], [3, 4, 5])][1]
    assert [r.getMessage() for r in caplog.records if "generate" in r.getMessage()] == [
        "Sampling with transformers' `generate`, which prefills each prompt G times: Mamba2ForCausalLM has no KV cache."
    ]
    assert [len(group) for group in groups] == [3, 3, 3]
    completions = list(itertools.chain(*groups))
    assert len({len(completion.token_ids) for completion in completions}) > 2
    for completion in completions:
        is_stopped = completion.token_ids[-1] in engine.stop_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(completion.token_ids) == 12
        assert not set(completion.token_ids[:-1]) & set(engine.stop_ids)
    torch.testing.assert_close(*scored(model, prompts, groups, "dense", 0.7), atol=1e-4, rtol=0)


# ----------------------------------------------------------------------------------------- sampling agrees with scoring


def moved(monkeypatch, name, nats):
    """Have a way of decoding give log-probs that are off."""
    decode = getattr(LocalEngine, name)

    def decode_wrongly(self, *args):
        return [
            dataclasses.replace(row, logprobs=[value + nats for value in row.logprobs]) for row in decode(self, *args)
        ]

    monkeypatch.setattr(LocalEngine, name, decode_wrongly)


@pytest.mark.parametrize("family", families([*FAMILIES, "mamba2"]))
def test_sampling_of_every_family_agrees_with_its_scoring(family):
    model = tiny_model(family)
    model.generation_config.eos_token_id = list(range(2, 14))
    engine = connected(model)
    before = engine.path
    engine.check_logprobs(Scorer(choose_path(model)[0], never=(5, 119)))
    assert engine.path == before


def test_a_cache_that_gives_other_logprobs_gives_way_to_generate(monkeypatch, caplog):
    moved(monkeypatch, "decode", 0.01)
    engine = connected(tiny_model("qwen2"))
    engine.check_logprobs(Scorer())
    assert engine.path == "generate"
    assert "a probe of sampling with a KV cache that keeps each prompt once differs by 1.0e-02 nats" in caplog.text
    assert "a probe of sampling with a KV cache that repeats each prompt G times differs by 1.0e-02" in engine.reason
    assert "Sampling with transformers' `generate`" in caplog.text


def test_sampling_that_cannot_agree_is_refused_by_name(monkeypatch):
    moved(monkeypatch, "decode", 0.01)
    moved(monkeypatch, "decode_with_generate", 0.02)
    with pytest.raises(
        ValueError, match=r"model type qwen2 cannot be trained with the local engine: .* by 2.0e-02 nats"
    ):
        connected(tiny_model("qwen2")).check_logprobs(Scorer())


def test_padding_that_enters_the_state_is_found(monkeypatch):
    """RWKV's way, in the engine alone: prompts of one length would agree."""
    monkeypatch.setattr(
        "grpo_lightning.rollout.local_engine.left_pad",
        lambda *arguments: (left_pad(*arguments)[0], left_pad(*arguments)[1] | True),
    )
    engine = connected(tiny_model("qwen2"))
    with pytest.raises(ValueError, match="model type qwen2 cannot be trained with the local engine"):
        engine.check_logprobs(Scorer())


def test_a_cache_that_a_model_refuses_gives_way_to_its_own():
    config = AutoConfig.for_model(
        "minimax", **BASE, num_local_experts=2, num_experts_per_tok=2, block_size=16, head_dim=16
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = connected(model)
    engine.check_logprobs(Scorer("dense"))
    assert "raised ValueError: MiniMax uses cache of its own" in engine.reason


def test_a_model_that_cannot_be_sampled_from_is_refused_by_name(monkeypatch):
    def broken(*_):
        raise ValueError("wrong shape.")

    monkeypatch.setattr(LocalEngine, "decode_with_generate", broken)
    with pytest.raises(ValueError, match=r"type mamba2 cannot be sampled: .* `generate` raised ValueError: wrong sh"):
        connected(tiny_model("mamba2")).check_logprobs(Scorer("dense"))


def test_a_run_checks_its_engine_and_leaves_no_trace(monkeypatch):
    state = torch.get_rng_state()
    module = make_module()
    module.configure_model()
    assert torch.equal(torch.get_rng_state(), state)
    moved(monkeypatch, "decode", 0.01)
    module = make_module()
    module.configure_model()
    assert "differs by 1.0e-02 nats" in module.engine.reason


def test_a_copy_of_an_engine_captures_its_own_graphs():
    """CUDA graphs cannot be copied; neither can this lock."""
    engine = LocalEngine()
    engine.captured = threading.Lock()
    assert copy.deepcopy(engine).captured is None
