"""Chunks of completions: the cheapest way to cut them, found by trying every way."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer, auto_chunks, chunk_sizes
from tests.policy.scored import ragged_batch

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=9).map(lambda lengths: sorted(lengths, reverse=True))


def cost(sizes, lengths, pass_tokens, max_tokens=None):
    """Computed tokens and passes, by a loop; infinite if a chunk is too large."""
    total, start = 0.0, 0
    for size in sizes:
        tokens = size * lengths[start]
        if max_tokens is not None and size > 1 and tokens > max_tokens:
            return float("inf")
        total, start = total + tokens + pass_tokens, start + size
    return total


def all_cuts(count):
    """Every way to cut `count` rows into chunks."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield [b - a for a, b in itertools.pairwise(edges)]


@given(LENGTHS, st.integers(0, 200), st.none() | st.integers(1, 500))
def test_no_cut_costs_less(lengths, pass_tokens, max_tokens):
    sizes = AutoChunks(pass_tokens, max_tokens).sizes(lengths)
    assert sum(sizes) == len(lengths)
    assert min(sizes) >= 1
    least = min(cost(cut, lengths, pass_tokens, max_tokens) for cut in all_cuts(len(lengths)))
    assert cost(sizes, lengths, pass_tokens, max_tokens) == least


def test_by_hand():
    # In one pass 6 x 100 tokens; cut after the long ones 2 x 100 + 4 x 10 and one more pass of 32.
    lengths = [100, 90, 10, 10, 10, 9]
    assert AutoChunks(32).sizes(lengths) == [2, 4]
    assert AutoChunks(400).sizes(lengths) == [6]
    assert AutoChunks(0).sizes(lengths) == [1, 1, 3, 1]
    assert AutoChunks(32).sizes([50] * 8) == [8]
    assert max(AutoChunks(32, max_tokens=100).sizes([50] * 8)) == 2
    assert AutoChunks(32, max_tokens=10).sizes([50, 50]) == [1, 1]


@given(LENGTHS, st.integers(1, 12), st.sampled_from([AutoChunks(20), AutoChunks(1e9), AutoChunks(0, 40), None, 2]))
def test_ranks_run_equally_many_chunks(lengths, number, chunk_size):
    own = chunk_sizes(lengths, chunk_size)
    sizes = chunk_sizes(lengths, chunk_size, number)
    assert len(sizes) == max(len(own), number)
    assert sum(sizes) == len(lengths)
    assert sorted(sizes, key=bool, reverse=True) == sizes  # empty chunks come last
    if number <= len(lengths):
        assert min(sizes) >= 1
    if number <= len(own):
        assert sizes == own


@given(st.integers(1, 40), st.integers(1, 50))
def test_equal_lengths_are_one_chunk(count, length):
    assert AutoChunks().sizes([length] * count) == [count]


def test_padding_counts_what_the_passes_compute():
    batch = ragged_batch(generations=4)
    prompts = batch.prompt_mask.numel() - int(batch.prompt_mask.sum())
    for scorer in (Scorer(), Scorer(chunk_size=5), Scorer(chunk_size=AutoChunks(0)), Scorer(chunk_size=AutoChunks(3))):
        computed = sum(
            batch.completion_ids.numel() if rows is None else len(rows) * int(batch.attention_mask[rows].sum(1).max())
            for rows in scorer.chunks(batch)
        )
        real = int(batch.attention_mask.sum())
        assert scorer.padding(batch) == (computed - real + prompts, computed + batch.prompt_mask.numel())
    assert Scorer(chunk_size=AutoChunks(0)).padding(batch)[0] == prompts
    padding, tokens = Scorer("dense").padding(batch)
    rows, width = batch.completion_ids.shape
    assert tokens == rows * (width + batch.prompt_ids.shape[1])
    assert padding == tokens - int(batch.attention_mask.sum()) - int(batch.prompt_mask[batch.prompt_index].sum())


QWEN_05B = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}


def test_a_pass_of_a_small_model_costs_a_gpu_more_tokens_than_one_of_a_large_model():
    small, large = Qwen2Config(**QWEN_05B), Qwen2Config(**QWEN_7B)
    plain = {"is_sharded": False, "is_checkpointed": False}
    assert auto_chunks(small, "cuda", **plain).pass_tokens == pytest.approx(1_800, rel=0.2)
    assert auto_chunks(large, "cuda", **plain).pass_tokens == pytest.approx(150, rel=0.2)
    assert auto_chunks(large, "cuda", is_sharded=True, is_checkpointed=False).pass_tokens > 4_000
    assert auto_chunks(large, "cpu", is_sharded=True, is_checkpointed=True) == AutoChunks(max_tokens=2_232)
    assert auto_chunks(large, "cpu", **plain) == AutoChunks()
