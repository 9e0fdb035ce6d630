"""An entry says exactly one place, and contradictions are named."""

import logging
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.dataset_entry import DatasetEntry, Location, parse_location, parse_strategy, select
from tests.marks import SLOW


@pytest.mark.parametrize(
    ("dataset", "location"),
    [
        ("gsm8k", Location("gsm8k")),
        ("openai/gsm8k:main", Location("openai/gsm8k", "main")),
        ("openai/gsm8k#1000", Location("openai/gsm8k", None, 1000)),
        ("openai/gsm8k:main#1000", Location("openai/gsm8k", "main", 1000)),
    ],
)
def test_a_hub_name_is_taken_apart(dataset, location):
    assert parse_location(dataset) == location


def test_a_folder_is_taken_as_it_is_named(tmp_path):
    folder = tmp_path / "data:v1#2"
    folder.mkdir()
    assert parse_location(str(folder)) == Location(str(folder))


def test_where_relative_paths_of_images_begin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    assert DatasetEntry("data/a.json").image_folder() == Path("data")
    assert DatasetEntry(dataset="hub").image_folder() == Path("hub")
    assert DatasetEntry(dataset="some/hub").image_folder() is None
    assert DatasetEntry("data/a.json", image_root="hub").image_folder() == Path("hub")
    assert DatasetEntry("data/a.json", image_root="~").image_folder() == Path.home()
    (tmp_path / "run").mkdir()
    assert DatasetEntry("data/a.json").image_folder("run") == Path("run")
    assert DatasetEntry(dataset="hub").image_folder("run") == Path("run")
    assert DatasetEntry("data/a.json", image_root="hub").image_folder("run") == Path("hub"), "an entry's own wins"
    with pytest.raises(FileNotFoundError, match=r"image_root 'no' of 'data/a.json': no folder"):
        DatasetEntry("data/a.json").image_folder("no")


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (DatasetEntry("data/train.jsonl"), "train"),
        (DatasetEntry("data/train.jsonl", name="counting"), "counting"),
        (DatasetEntry(dataset="openai/gsm8k:main#10"), "gsm8k"),
        (DatasetEntry(dataset="data/folder/"), "folder"),
        (DatasetEntry(dataset="AI-MO/NuminaMath-1.5"), "NuminaMath-1.5"),
        (DatasetEntry(dataset="AI-MO/NuminaMath-1.5:main#10"), "NuminaMath-1.5"),
        (DatasetEntry("data/math-1.5.jsonl"), "math-1.5"),
    ],
)
def test_names_in_logs(entry, source):
    assert entry.source == source


def test_the_current_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert DatasetEntry(dataset=".").source == "mine"


def test_a_count_after_the_name_is_a_random_choice():
    assert DatasetEntry(dataset="gsm8k#1000").strategy == "random:1000"
    assert DatasetEntry(dataset="gsm8k").strategy == "all"
    assert DatasetEntry("a.jsonl", "end:3").strategy == "end:3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either json_path .* or dataset .*got json_path=None, dataset=None"),
        ({"json_path": "a.json", "dataset": "a"}, "got json_path='a.json', dataset='a'"),
        ({"json_path": "a.json", "subset": "main"}, "subset of 'a.json' is for dataset"),
        ({"json_path": "a.json", "revision": "v1", "split": "test"}, "revision, split of 'a.json'"),
        ({"json_path": "a.json", "sampling_strategy": "first:-2"}, "sampling_strategy of 'a.json' is 'first:-2'"),
        ({"json_path": "a.json", "sampling_strategy": "first:120%"}, "is 'first:120%'"),
        ({"dataset": "a", "sampling_strategy": "half"}, "sampling_strategy of 'a' is 'half'"),
        ({"dataset": "a#ten"}, "a number of rows must follow '#', as in 'name#1000', got 'ten'"),
        ({"dataset": "a#10", "sampling_strategy": "first:3"}, "10 random rows, but sampling_strategy is 'first:3'"),
        ({"dataset": "a:main", "subset": "other"}, "names a subset, but subset is 'other'"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "random:3"}, "'random:3' cannot be selected"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "end:3"}, "'end:3' cannot be selected"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "first:3%"}, "'first:3%' cannot be selected"),
        ({"json_path": "a.json", "boxes": "pixels"}, "boxes of 'a.json' must be one of auto, .*, got 'pixels'"),
        ({"dataset": "a#10", "streaming": True}, "'random:10' cannot be selected"),
        ({"json_path": "a.json", "streaming": True}, "'a.json' must be read as a whole"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DatasetEntry(**settings)


def test_an_entry_from_its_keys():
    keys = {"dataset": "a", "subset": "main", "columns": {"query": "question"}, "rewards": ["exact"], "streaming": True}
    assert DatasetEntry.of(keys, where="m.yaml") == DatasetEntry(**keys)
    assert DatasetEntry.of({"dataset": "a", "columns": {"messages": None}}, where="m.yaml").columns == {
        "messages": None
    }
    entry = DatasetEntry("a.json")
    assert DatasetEntry.of(entry, where="m.yaml") is entry
    assert DatasetEntry.of({"json_path": "a.json", "name": None}, where="m.yaml") == entry


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (3, "must be a data file, or have the key json_path or dataset, got 3"),
        ("a", r"'a' is not a data file \(\.json, .*write {dataset: a}"),
        ({"json_path": "a", "sampling_stratgy": "all"}, r"'sampling_stratgy' \(did you mean 'sampling_strategy'\?\)"),
        ({"path": "a"}, r"'path' \(did you mean 'json_path'\?\)"),
        ({"json_path": "a", "xyz": 1}, "unknown keys 'xyz'; allowed are json_path"),
        ({"json_path": "a", "reward": 1, "column": 2}, r"'reward' \(did.*'rewards'\?\), 'column' \(did.*'columns'"),
        ({"json_path": 3}, "json_path must be text, got 3"),
        ({"dataset": "a", "streaming": "yes"}, "streaming must be true or false, got 'yes'"),
        ({"dataset": "a", "columns": ["a"]}, r"columns must be a mapping, got \['a'\]"),
        ({"dataset": "a", "columns": {"a": 3}}, "columns must map names to names, or to null to drop .*, got {'a': 3}"),
        ({"dataset": "a", "rewards": "exact"}, "rewards must be a list, got 'exact'"),
        ({"dataset": "a", "split": None}, "split must be text, got None"),
    ],
)
def test_a_wrong_key_or_value_is_named(item, message):
    with pytest.raises(ValueError, match=rf"^m\.yaml, entry 2:? .*{message}"):
        DatasetEntry.of(item, where="m.yaml, entry 2")


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
    assert f"gsm8k: {strategy} requests more than the 5 available rows" in caplog.text
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


@SLOW
def test_random_is_the_same_in_every_process():
    program = (
        "from grpo_lightning.data.dataset_entry import select; print(select(1000, 'random:5', seed=0, name='gsm8k'))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[266, 319, 554, 789, 812]"
