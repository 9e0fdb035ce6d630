"""A stream is shuffled within a buffer, by the seed alone, and goes on from any position."""

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.lengths import LengthCount, LengthLimit, Measured
from grpo_lightning.data.shuffling import LazyPrompts, ListedOrder, PromptStream, mix_parts, shuffle_rows, stream_rows
from grpo_lightning.policy.encoder import Encoder
from tests.helpers.tiny_models import tiny_tokenizer
from tests.marks import SLOW


def as_prompt(row, number):
    return Prompt(row, index=number)


def stream(count, **options):
    return stream_rows([f"p{i}" for i in range(count)], as_prompt, **options)


def names(prompts):
    return [prompt.content for prompt in prompts]


@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 1000))
def test_shuffling_draws_each_row_from_the_next_ones(count, buffer_size, seed):
    order = list(shuffle_rows(range(count), buffer_size, seed))
    assert sorted(order) == list(range(count))
    assert all(row < place + buffer_size for place, row in enumerate(order))
    assert order == list(shuffle_rows(iter(range(count)), buffer_size, seed))


def test_shuffling_is_pinned_and_fair():
    # Another machine, Python or release must draw the same order: these numbers never change.
    assert list(shuffle_rows(range(8), 4, 7)) == [1, 0, 2, 5, 6, 4, 7, 3]
    assert list(shuffle_rows(range(8), 1, 7)) == list(range(8))
    firsts = [next(shuffle_rows(range(4), 4, seed)) for seed in range(4000)]
    assert all(850 < firsts.count(row) < 1150 for row in range(4))  # 1000 each, standard deviation 27


@SLOW
@given(st.integers(1, 30), st.integers(1, 10), st.one_of(st.none(), st.integers(0, 9)), st.data())
def test_blocks_by_position(count, buffer_size, seed, data):
    whole, end = stream(count, shuffle_buffer=buffer_size).order(seed).take(0, count + 1)
    assert (sorted(p.index for p in whole), end) == (list(range(count)), count)
    order = stream(count, shuffle_buffer=buffer_size, num_workers=data.draw(st.integers(0, 2))).order(seed)
    for _ in range(3):  # forward, back, and again the same
        start, size = data.draw(st.integers(0, count)), data.draw(st.integers(0, count))
        block, end = order.take(start, size)
        assert block == whole[start : start + size]
        assert end == start + len(block)


def test_positions_count_what_is_left_out():
    def even(row, number):
        return Measured(Prompt(row, index=number) if number % 2 == 0 else None)

    order = PromptStream([lambda: ((f"p{i}", even) for i in range(7))]).order(None)
    block, end = order.take(0, 2)
    assert (names(block), end) == (["p0", "p2"], 3)
    block, end = order.take(end, 9)
    assert (names(block), end) == (["p4", "p6"], 7)
    assert order.take(end, 1) == ([], 7)


def test_a_row_is_parsed_only_when_it_is_used():
    parsed = []

    def convert(row, number):
        parsed.append(number)
        return Prompt(row, index=number)

    order = stream_rows([f"p{i}" for i in range(100)], convert).order(None)
    assert names(order.take(50, 2)[0]) == ["p50", "p51"]
    assert parsed == [50, 51]


def test_parts_follow_each_other_and_show_their_beginnings():
    def part(name, count):
        return lambda: ((f"{name}{i}", lambda row, number: Measured(Prompt(row, index=number))) for i in range(count))

    both = PromptStream([part("a", 3), part("b", 2)])
    assert [(p.content, p.index) for p in both.order(None).take(0, 9)[0]] == [
        ("a0", 0),
        ("a1", 1),
        ("a2", 2),
        ("b0", 3),
        ("b1", 4),
    ]
    assert names(both.head(2)) == ["a0", "a1", "b0", "b1"]


def counted(count, has_length):
    """A part of `count` rows with the names 0, 1, ...; its number of rows is known if `has_length`."""
    return list(range(count)) if has_length else (row for row in range(count))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.booleans(), st.integers(0, 1000))
def test_a_mix_has_every_row_once_and_in_the_order_of_its_part(counts, has_length, seed):
    mixed = list(mix_parts([counted(count, has_length) for count in counts], seed))
    for place, count in enumerate(counts):
        own = [(number, row) for number, row in mixed if number % len(counts) == place]
        assert own == [(row * len(counts) + place, row) for row in range(count)]
    assert len(mixed) == sum(counts)
    assert mixed == list(mix_parts([counted(count, has_length) for count in counts], seed))


def part_of(number):
    return "abc"[number % 3]


def test_a_mix_of_known_sizes_is_in_proportion():
    sizes = [3000, 1000, 0]
    mixed = "".join(part_of(number) for number, _ in mix_parts([range(size) for size in sizes], 1))
    for start in range(0, 4000, 1000):  # 250 rows of b in each thousand, standard deviation 12
        assert 200 < mixed[start : start + 1000].count("b") < 300


def test_a_mix_of_unknown_sizes_takes_every_part_equally_until_its_end():
    parts = [counted(3000, has_length=False), counted(300, has_length=True), counted(3000, has_length=False)]
    mixed = "".join(part_of(number) for number, _ in mix_parts(parts, 1))
    assert all(150 < mixed[:600].count(name) < 250 for name in "abc")  # 200 each, standard deviation 12
    assert mixed.count("b") == 300
    assert all(900 < mixed[1200:3200].count(name) < 1100 for name in "ac")  # 1000 each, standard deviation 22


def test_the_mix_is_pinned():
    # Another machine, Python or release must draw the same order: these numbers never change.
    assert [number for number, _ in mix_parts([range(3), range(5)], 7)] == [0, 2, 1, 4, 3, 5, 7, 9]


def test_a_shuffled_stream_mixes_its_parts_and_continues_at_any_position():
    def part(name, count):
        return lambda: ((f"{name}{i}", lambda row, number: Measured(Prompt(row, index=number))) for i in range(count))

    both = PromptStream([part("a", 500), part("b", 500)], shuffle_buffer=10)
    whole, _ = both.order(3).take(0, 1000)
    assert 60 < sum(name.startswith("a") for name in names(whole[:150])) < 90  # 75, standard deviation 6
    assert both.order(3).take(70, 30)[0] == whole[70:100]
    other, _ = both.order(4).take(0, 1000)
    assert names(other) != names(whole)
    assert sorted((p.content, p.index) for p in other) == sorted((p.content, p.index) for p in whole)
    assert len({p.index for p in whole}) == 1000


def test_an_error_is_no_end():
    def convert(row, number):
        if number == 2:
            raise ValueError("bad row")
        return Prompt(row, index=number)

    order = stream_rows([f"p{i}" for i in range(5)], convert).order(None)
    assert names(order.take(0, 2)[0]) == ["p0", "p1"]
    for _ in range(2):
        with pytest.raises(ValueError, match="bad row"):
            order.take(2, 1)


def limited(start, stop, overlong="drop"):
    """A stream of `p8`, `p9`, ..., of which those of more than two letters are too long."""
    limit = LengthLimit(Encoder(tiny_tokenizer()), 2, overlong)

    def convert(row, number):
        return limit.measure(Prompt(row, index=number), f"row {number}")

    return PromptStream([lambda: ((f"p{i}", convert) for i in range(start, stop))], limit=limit)


def said(caplog):
    """(too long, of so many) of every warning, and what they are of."""
    found = [re.match(r"(\d+) of (\d+) prompts of (.*) have", record.getMessage()) for record in caplog.records]
    return [(int(match[1]), int(match[2]), match[3]) for match in found]


def test_what_is_too_long_is_said_at_the_first_at_doubling_counts_and_at_the_end(caplog):
    order = limited(8, 18).order(None)
    assert names(order.take(0, 2)[0]) == ["p8", "p9"]
    assert not caplog.records
    assert order.take(2, 5) == ([], 2)
    order.take(2, 5)
    assert said(caplog) == [(n, n + 2, "the stream so far") for n in (1, 2, 4, 8)]
    caplog.clear()
    order = limited(8, 15, "truncate").order(None)
    assert len(order.take(0, 4)[0]) == 4  # a run that ends here has said it
    assert said(caplog) == [(1, 3, "the stream so far"), (2, 4, "the stream so far")]
    order.take(4, 99)
    order.take(4, 99)
    assert said(caplog)[2:] == [(4, 6, "the stream so far"), (5, 7, "the stream")]
    assert caplog.records[-1].getMessage() == (
        "5 of 7 prompts of the stream have more than 2 tokens and "
        "are truncated to their last tokens; the longest has 3."
    )


def test_rows_that_are_read_again_do_not_count_twice(caplog):
    order = limited(8, 13).order(None)
    for start in (0, 1, 0, 1, 0):  # every step back reads from the start
        order.take(start, 9)
    assert said(caplog)[-1] == (3, 5, "the stream")
    assert len(caplog.records) == 3  # at 1, at 2 and at the end, once
    assert order.lengths == LengthCount(5, 3, 3)


def test_the_beginning_is_read_once():
    opened = []

    def part():
        opened.append(1)
        return ((f"p{i}", lambda row, number: Measured(Prompt(row, index=number))) for i in range(3))

    both = PromptStream([part])
    both.head(2).clear()
    assert names(both.head(2)) == ["p0", "p1"]
    assert len(opened) == 1
    assert names(both.head()) == ["p0", "p1", "p2"]


def test_a_stream_goes_to_other_processes():
    there = pickle.loads(pickle.dumps(stream(5)))
    assert there.order(3).take(0, 5) == stream(5).order(3).take(0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_buffer": 0}, "shuffle_buffer must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be 0 or more, got -1"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        stream(3, **options)


def test_lazy_prompts_are_a_sequence():
    prompts = LazyPrompts(["a", "b", "c"], lambda row, number: Prompt(row, index=number))
    assert len(prompts) == 3
    assert [(p.content, p.index) for p in prompts] == [("a", 0), ("b", 1), ("c", 2)]
    assert (prompts[-1].content, prompts[-1].index) == ("c", 2)
    assert [p.content for p in prompts.head(2)] == ["a", "b"]
    with pytest.raises(IndexError):
        prompts[3]


def test_the_beginning_of_a_data_set_is_read_once():
    read = []
    prompts = LazyPrompts(["a", "b", "c"], lambda row, number: read.append(row) or Prompt(row, index=number))
    prompts.head(2).clear()
    assert [p.content for p in prompts.head(2)] == ["a", "b"]
    assert read == ["a", "b"]


def test_the_order_is_pinned():
    # A resumed run of another release must go on in the same order: these numbers never change.
    prompts = [Prompt(f"p{i}") for i in range(6)]
    order = ListedOrder(prompts, 7)
    assert order.take(0, 6) == ([3, 0, 1, 5, 2, 4], 6)
    assert order.take(4, 6) == ([2, 4], 6)
    assert order.share([4, 2]) == [prompts[4], prompts[2]]
    assert list(ListedOrder(prompts, None).take(1, 2)[0]) == [1, 2]
