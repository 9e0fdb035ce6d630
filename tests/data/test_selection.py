"""A strategy chooses rows by the seed alone, on every machine the same ones."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.selection import parse_strategy, select


@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("first:2", [0, 1]),
        ("first:0", []),
        ("first:5", [0, 1, 2, 3, 4]),
        ("end:2", [3, 4]),
        ("end:0", []),  # rows[-0:] would be all of them
        ("end:5", [0, 1, 2, 3, 4]),
        ("random:0", []),
        ("random:5", [0, 1, 2, 3, 4]),
        ("first:40%", [0, 1]),
        ("first:41%", [0, 1, 2]),  # 2.05 rows round up
        ("end:0.001%", [4]),
        ("end:0%", []),
        ("random:100%", [0, 1, 2, 3, 4]),
    ],
)
def test_select_by_hand(strategy: str, chosen: list[int]):
    assert select(5, strategy, seed=0, name="f") == chosen


def test_percentages_are_exact():
    # In floats 0.07 * 100 is 7.000000000000001 and would round up to 8.
    assert [len(select(100, f"first:{percent}%", seed=0, name="f")) for percent in range(101)] == list(range(101))
    assert len(select(1000, "first:12.5%", seed=0, name="f")) == 125
    assert len(select(1000, "first:12.51%", seed=0, name="f")) == 126


@pytest.mark.parametrize("strategy", ["first:9", "end:9", "random:9"])
def test_asking_for_too_many_rows_gives_all_and_says_so(strategy: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert select(5, strategy, seed=0, name="gsm8k") == [0, 1, 2, 3, 4]
    assert f"gsm8k: {strategy} asks for more than the 5 rows there are" in caplog.text
    caplog.clear()
    select(5, strategy.replace("9", "5"), seed=0, name="gsm8k")
    assert not caplog.records


@pytest.mark.parametrize(
    "strategy",
    [
        "first",
        "first:",
        "first:-2",
        "first:1.5",
        "first:x",
        "first:1:2",
        "a:b:c",
        "First:2",
        "half:2",
        ":2",
        "2",
        "first:101%",
        "first:-1%",
        "first:%",
        "first:1/2",
        "first:1e2",
        "first:٣",
        "all:2",
        "first:2\n",
        "",
        " all",
        "first: 2",
        2,
        None,
        {"first": 2},
    ],
)
def test_what_is_no_strategy_is_an_error(strategy: Any):
    with pytest.raises(ValueError, match=r"sampling_strategy of 'train\.json' is") as caught:
        parse_strategy(strategy, name="train.json")
    assert f"is {strategy!r};" in str(caught.value)
    assert "all, first:N, end:N or random:N" in str(caught.value)


strategies = st.builds(
    lambda take, number, percent: f"{take}:{number}{percent}",
    st.sampled_from(["first", "end", "random"]),
    st.integers(0, 100),
    st.sampled_from(["", "%"]),
)


@given(st.integers(0, 60), strategies, st.integers(0, 5), st.sampled_from(["a", "b"]))
def test_select_takes_the_right_number_of_different_rows_in_order(count: int, strategy: str, seed: int, name: str):
    chosen = select(count, strategy, seed=seed, name=name)
    number = int(strategy.partition(":")[2].removesuffix("%"))
    # ceil as the least whole number that is enough
    wanted = next(n for n in range(count + 1) if n * 100 >= number * count) if strategy.endswith("%") else number
    assert len(chosen) == min(wanted, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(count))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 10**6))
def test_random_depends_on_seed_and_name_only(count: int, number: int, seed: int):
    first = select(count, f"random:{number}", seed=seed, name="f")
    random.seed(seed + 1)
    state = random.getstate()
    assert select(count, f"random:{number}", seed=seed, name="f") == first
    assert random.getstate() == state


def test_random_is_pinned():
    # Another machine, Python or release must draw the same rows: these numbers never change.
    assert select(1000, "random:5", seed=0, name="gsm8k") == [266, 319, 554, 789, 812]


@given(st.integers(1, 60), st.integers(0, 59), st.integers(0, 100))
def test_a_larger_random_choice_holds_the_smaller_one(count: int, number: int, seed: int):
    smaller = select(count, f"random:{number}", seed=seed, name="f")
    assert set(smaller) <= set(select(count, f"random:{number + 1}", seed=seed, name="f"))


def test_random_differs_by_seed_and_by_name_and_is_fair():
    draws = {tuple(select(1000, "random:10", seed=seed, name=name)) for seed in range(5) for name in "ab"}
    assert len(draws) == 10
    counts = [0] * 10
    for seed in range(2000):
        for row in select(10, "random:3", seed=seed, name="f"):
            counts[row] += 1
    assert sum(counts) == 6000
    assert all(500 < count < 700 for count in counts)  # 600 each, standard deviation 20


@given(st.integers(0, 500), st.fractions(0, 100, max_denominator=8).filter(lambda p: p.denominator in (1, 2, 4, 8)))
def test_percent_is_the_ceiling(count: int, percent: Fraction):
    strategy = parse_strategy(f"first:{float(percent)}%", name="f")
    assert strategy.num_rows(count) == -((-percent * count) // 100)


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_random_is_the_same_in_every_process(hash_seed: str):
    program = "from grpo_lightning.data.selection import select; print(select(1000, 'random:5', seed=0, name='gsm8k'))"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[266, 319, 554, 789, 812]"
