"""An entry says exactly one place, and contradictions are named."""

from pathlib import Path

import pytest

from grpo_lightning.data.entry import DatasetEntry, Location, parse_location


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
        ({"json_path": "a.json", "subset": "main"}, "subset of 'a.json' goes with dataset"),
        ({"json_path": "a.json", "revision": "v1", "split": "test"}, "revision, split of 'a.json'"),
        ({"json_path": "a.json", "sampling_strategy": "first:-2"}, "sampling_strategy of 'a.json' is 'first:-2'"),
        ({"json_path": "a.json", "sampling_strategy": "first:120%"}, "is 'first:120%'"),
        ({"dataset": "a", "sampling_strategy": "half"}, "sampling_strategy of 'a' is 'half'"),
        ({"dataset": "a#ten"}, "a number of rows must follow '#', as in 'name#1000', got 'ten'"),
        ({"dataset": "a#10", "sampling_strategy": "first:3"}, "10 random rows, sampling_strategy for 'first:3'"),
        ({"dataset": "a:main", "subset": "other"}, "names a subset, subset is 'other'"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "random:3"}, "'random:3' cannot be chosen"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "end:3"}, "'end:3' cannot be chosen"),
        ({"dataset": "a", "streaming": True, "sampling_strategy": "first:3%"}, "'first:3%' cannot be chosen"),
        ({"json_path": "a.json", "boxes": "pixels"}, "boxes of 'a.json' must be one of auto, .*, got 'pixels'"),
        ({"dataset": "a#10", "streaming": True}, "'random:10' cannot be chosen"),
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
        ("a", r"'a' is no data file \(\.json, .*write {dataset: a}"),
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
