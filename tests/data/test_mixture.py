from __future__ import annotations

import json
import logging
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.data.mixture import DatasetEntry, load_mixture, parse_strategy, read_mixture_yaml, select


def rows(*names: str) -> list[dict[str, str]]:
    return [{"prompt": name, "answer": name.upper()} for name in names]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, content: Any) -> str:
    """A file in the current folder: rows are written as its suffix asks, text as it is."""
    if not isinstance(content, str):
        content = "\n".join(map(json.dumps, content)) if name.endswith(".jsonl") else json.dumps(content)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content, encoding="utf-8")
    return name


def contents(*entries: DatasetEntry, seed: int = 0) -> list[Any]:
    return [prompt.content for prompt in load_mixture(entries, seed=seed)]


# --- strategies


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
    with pytest.raises(ValueError, match="sampling_strategy of"):
        DatasetEntry("train.json", strategy)


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


# --- files


def test_a_mixture_by_hand():
    write("data/a.json", rows("a0", "a1", "a2"))
    write("b.jsonl", rows("b0", "b1"))
    prompts = load_mixture([DatasetEntry("b.jsonl", "end:1"), DatasetEntry("data/a.json", "first:50%")], seed=0)
    assert [(p.content, p.columns, p.index, p.source) for p in prompts] == [
        ("b1", {"answer": "B1"}, 0, "b"),
        ("a0", {"answer": "A0"}, 1, "a"),
        ("a1", {"answer": "A1"}, 2, "a"),
    ]


def test_entries_of_one_stem_keep_apart_and_draw_apart():
    names = [str(number) for number in range(100)]
    write("x/train.json", rows(*names))
    write("y/train.jsonl", rows(*names))
    entries = [DatasetEntry(path, "random:10") for path in ("x/train.json", "y/train.jsonl", "x/train.json")]
    prompts = load_mixture(entries, seed=0)
    assert [p.source for p in prompts] == ["train"] * 10 + ["train#2"] * 10 + ["train#3"] * 10
    draws = {tuple(p.content for p in prompts[start : start + 10]) for start in (0, 10, 20)}
    assert len(draws) == 3


def test_where_a_file_lies_does_not_change_the_draw(folder: Path):
    write("data/train.json", rows(*"abcdefghij"))
    relative = contents(DatasetEntry("data/train.json", "random:5"))
    assert contents(DatasetEntry(str(folder / "data/train.json"), "random:5")) == relative
    assert any(contents(DatasetEntry("data/train.json", "random:5"), seed=seed) != relative for seed in range(1, 5))


def test_lines_are_lines_whatever_is_in_them():
    text = '\ufeff{"prompt": "one\u2028line\x85"}\r\n\r\n   \n{"prompt": "two"}'
    Path("f.jsonl").write_bytes(text.encode())
    assert contents(DatasetEntry("f.jsonl")) == ["one\u2028line\x85", "two"]


def test_rows_that_are_not_chosen_need_not_be_right():
    write("f.jsonl", '{"prompt": "good"}\n{broken')
    assert contents(DatasetEntry("f.jsonl", "first:1")) == ["good"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.jsonl", '{"prompt": "a"}\n\n{"prompt": ', r"^f\.jsonl:3: not valid JSON"),
        ("f.jsonl", '{"prompt": "a"}\n["b"]', r"^f\.jsonl:2: a row must be an object .* got \['b'\]"),
        ("f.jsonl", '{"prompt": "a"}\n{"text": "b"}', r"^f\.jsonl:2: the row has no prompt column"),
        ("f.jsonl", " \n\n", r"f\.jsonl is empty"),
        ("f.json", "", r"f\.json is empty"),
        ("f.json", "[]", r"f\.json is empty"),
        ("f.json", '[{"prompt": "a"}, "b"]', r"^f\.json, element 2: a row must be an object .* got 'b'"),
        ("f.json", '[{"prompt": "a"}, {"text": "b"}]', r"^f\.json, element 2: the row has no prompt column"),
        ("f.json", '[{"prompt": "a"}', r"^f\.json: not valid JSON: .*line 1"),
        ("f.json", '{"prompt": "a"}\n{"prompt": "b"}', r"^f\.json: not valid JSON: Extra data.*is \.jsonl"),
        ("f.json", '{"prompt": "a"}', r"f\.json must be a list of objects, got \{'prompt'"),
        ("f.csv", "prompt\na", r"f\.csv must end in \.json or \.jsonl"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(name: str, text: str, message: str):
    write(name, text)
    with pytest.raises(ValueError, match=message):
        load_mixture([DatasetEntry(name)], seed=0)


def test_a_file_that_is_not_utf8_is_named():
    Path("f.jsonl").write_bytes('{"prompt": "\xe9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"f\.jsonl is not UTF-8"):
        load_mixture([DatasetEntry("f.jsonl")], seed=0)


def test_a_missing_file_is_named_with_the_current_folder(folder: Path):
    with pytest.raises(FileNotFoundError) as caught:
        load_mixture([DatasetEntry("data/f.json")], seed=0)
    for part in ("'data/f.json'", str(folder / "data" / "f.json"), f"current folder is {folder}."):
        assert part in str(caught.value)


def test_an_empty_mixture_is_an_error():
    write("f.json", rows("a"))
    with pytest.raises(ValueError, match=r"no rows: f\.json \(first:0\)"):
        load_mixture([DatasetEntry("f.json", "first:0")], seed=0)
    with pytest.raises(ValueError, match="no rows: no entries"):
        load_mixture([], seed=0)


# --- YAML


def test_a_mixture_in_yaml():
    write("a.json", rows("a0", "a1"))
    write("b.json", rows("b0", "b1"))
    text = "datasets:\n  - json_path: b.json\n    sampling_strategy: end:1\n  - json_path: a.json\n"
    for name in ("mixture.yaml", "mixture.yml"):
        entries = read_mixture_yaml(write(name, text))
        assert entries == [DatasetEntry("b.json", "end:1"), DatasetEntry("a.json", "all")]
        assert [p.content for p in load_mixture(Path(name), seed=0)] == ["b1", "a0", "a1"]


def test_paths_in_yaml_are_seen_from_the_current_folder_then_from_the_yaml(folder: Path):
    path = write("mixtures/m.yaml", "datasets:\n  - json_path: data/a.json\n")
    with pytest.raises(FileNotFoundError) as caught:
        read_mixture_yaml(path)
    assert str(folder / "data/a.json") in str(caught.value)
    assert str(folder / "mixtures/data/a.json") in str(caught.value)
    write("mixtures/data/a.json", rows("beside the yaml"))
    assert [p.content for p in load_mixture(path, seed=0)] == ["beside the yaml"]
    write("data/a.json", rows("current folder"))
    assert [p.content for p in load_mixture(path, seed=0)] == ["current folder"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the key 'datasets'"),
        ("datasets:\n", "must have the key 'datasets'"),
        ("datasets: []\n", "must have the key 'datasets'"),
        ("datasets: a.json\n", "must have the key 'datasets' with a list"),
        ("- json_path: a.json\n", "must have the key 'datasets'"),
        ("datasets:\n  - a.json\n", "entry 1 must have the key 'json_path'"),
        ("datasets:\n  - json_path: 3\n", "entry 1 must have the key 'json_path'"),
        (
            "datasets:\n  - json_path: a.json\n    sampling: all\n",
            "unknown keys sampling; allowed are json_path, sampling_strategy",
        ),
        ("datasets:\n  - json_path: a.json\nseed: 1\n", "unknown keys seed; allowed are datasets"),
        ("datasets:\n  - json_path: a.json\n    sampling_strategy: first\n", "'a.json' is 'first'"),
        ("datasets:\n  - json_path: a.json\n    sampling_strategy: {first: 2}\n", "'a.json' is {'first': 2}"),
        ("datasets: [\n", "is not YAML"),
    ],
)
def test_a_wrong_yaml_is_an_error(text: str, message: str):
    write("a.json", rows("a"))
    with pytest.raises(ValueError, match=message):
        read_mixture_yaml(write("m.yaml", text))


def test_a_data_file_is_no_yaml():
    with pytest.raises(ValueError, match=r"must end in \.yaml or \.yml.*DatasetEntry\('a\.json'\)"):
        load_mixture(write("a.json", rows("a")), seed=0)
