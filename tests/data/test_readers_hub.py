"""Data sets that `datasets` loads: folders of files, folders of `save_to_disk`, streams."""

import json

import datasets
import pytest

from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.mixture import download, load_mixture, read_mixture_yaml, stream_mixture
from grpo_lightning.data.readers import DatasetRows, open_dataset

ROWS = [{"question": f"q{n}", "answer": n} for n in range(6)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Three local data sets: files by split, one split on disk, several splits on disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "files").mkdir()
    for split, rows in {"train": ROWS, "test": ROWS[:2]}.items():
        (tmp_path / f"files/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(ROWS).save_to_disk("single")
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[:3])}
    ).save_to_disk("several")
    return tmp_path


def questions(entry):
    return [p.columns["question"] for p in load_mixture([entry], seed=0)]


@pytest.mark.parametrize(
    ("entry", "numbers"),
    [
        (DatasetEntry(dataset="files"), range(6)),
        (DatasetEntry(dataset="files", split="test"), range(2)),
        (DatasetEntry(dataset="single", sampling_strategy="end:2"), [4, 5]),
        (DatasetEntry(dataset="several"), range(6)),
        (DatasetEntry(dataset="./several/", split="dev"), range(3)),
    ],
)
def test_local_data_sets(entry, numbers):
    assert questions(entry) == [f"q{n}" for n in numbers]


def test_a_count_after_the_name_draws_by_the_seed():
    drawn = {seed: load_mixture([DatasetEntry(dataset="single#3")], seed=seed) for seed in range(4)}
    assert {len(prompts) for prompts in drawn.values()} == {3}
    assert len({tuple(p.columns["question"] for p in prompts) for prompts in drawn.values()}) > 1
    assert load_mixture([DatasetEntry(dataset="single#3")], seed=1) == drawn[1]
    assert {p.source for p in drawn[0]} == {"single"}


def test_only_chosen_rows_are_read():
    reads = []

    class Counted:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            reads.append(index)
            return ROWS[index]

    rows = DatasetRows(Counted(), "d")
    assert (len(rows), rows[2].where, rows[5].parse()) == (6, "d, row 3", ROWS[5])
    assert reads == [2, 5]


@pytest.mark.parametrize("name", ["files", "single", "several"])
def test_streaming_gives_the_same_prompts(name):
    stream = stream_mixture([DatasetEntry(dataset=name, streaming=True, sampling_strategy="first:4")], seed=0)
    prompts = stream.order(None).take(0, 10)[0]
    assert prompts == load_mixture([DatasetEntry(dataset=name, sampling_strategy="first:4")], seed=0)


def test_streaming_a_folder_reads_it_as_it_goes():
    assert isinstance(open_dataset(DatasetEntry(dataset="files", streaming=True)), datasets.IterableDataset)


def test_a_bad_row_is_named():
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk("bad")
    message = r"^bad, row 1: the row has no prompt column; its columns are: text"
    with pytest.raises(ValueError, match=message):
        load_mixture([DatasetEntry(dataset="bad")], seed=0)
    with pytest.raises(ValueError, match=message):
        stream_mixture([DatasetEntry(dataset="bad", streaming=True)], seed=0).head()


def test_a_folder_beside_the_yaml(folder):
    (folder / "m").mkdir()
    datasets.Dataset.from_list(ROWS[:1]).save_to_disk("m/near")
    (folder / "m/m.yaml").write_text("datasets:\n  - dataset: near\n  - dataset: single\n")
    assert [entry.dataset for entry in read_mixture_yaml("m/m.yaml")] == ["m/near", "single"]


def test_a_folder_beside_the_yaml_with_a_count_or_subset(folder):
    (folder / "m").mkdir()
    datasets.Dataset.from_list(ROWS).save_to_disk("m/near")
    datasets.Dataset.from_list(ROWS).save_to_disk("m/single")
    datasets.Dataset.from_list(ROWS).save_to_disk("m/odd#2")
    (folder / "m/m.yaml").write_text(
        "datasets:\n  - dataset: near#5\n  - dataset: near:main\n  - dataset: single#2\n  - dataset: odd#2\n"
    )
    near, subset, current, odd = read_mixture_yaml("m/m.yaml")
    assert [entry.dataset for entry in (near, subset)] == ["m/near#5", "m/near:main"]
    assert current.dataset == "single#2"  # the current folder goes first
    assert [len(questions(entry)) for entry in (near, current, odd)] == [5, 2, 6]


def test_download_loads_what_is_not_streamed(monkeypatch):
    opened = []
    monkeypatch.setattr("grpo_lightning.data.mixture.open_dataset", lambda entry: opened.append(entry.dataset))
    download([DatasetEntry(dataset="a"), DatasetEntry(dataset="b", streaming=True), DatasetEntry("c.json")])
    assert opened == ["a"]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (
            DatasetEntry(dataset="./nowhere"),
            FileNotFoundError,
            "dataset './nowhere': no folder /.*nowhere. The current",
        ),
        (
            DatasetEntry(dataset="files", split="dev"),
            ValueError,
            "dataset 'files' .split 'dev'. cannot be loaded: .*dev",
        ),
        (DatasetEntry(dataset="several", split="test"), ValueError, "no split 'test'; it has train, dev"),
        (DatasetEntry(dataset="single", split="test"), ValueError, "is a single split .*got split 'test'"),
        (DatasetEntry(dataset="single", subset="main"), ValueError, "it has no subset"),
        (DatasetEntry(dataset="no/such_data_set"), (FileNotFoundError, ValueError), "dataset 'no/such_data_set'"),
    ],
)
def test_what_is_not_there_is_named(entry, error, message):
    with pytest.raises(error, match=message):
        load_mixture([entry], seed=0)


def test_an_empty_data_set_is_an_error(monkeypatch):
    empty = datasets.Dataset.from_dict({"prompt": []})
    empty.save_to_disk("empty")
    with pytest.raises(ValueError, match=r"dataset 'empty' is empty"):
        load_mixture([DatasetEntry(dataset="empty")], seed=0)
    monkeypatch.setattr("grpo_lightning.data.mixture.open_dataset", lambda entry: empty)
    with pytest.raises(ValueError, match=r"dataset 'empty' \(split 'train'\) is empty"):
        load_mixture([DatasetEntry(dataset="empty")], seed=0)
