"""Images of a data set are read when they are used, not with their row."""

from __future__ import annotations

import io
import pickle
import re
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import datasets
import numpy as np
import pyarrow
import pytest
from PIL import Image

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.images.references import RowsWithCells, openable_value, with_cells, without_decoding
from grpo_lightning.data.mixture import load_mixture, stream_mixture
from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.tiny_vlms import picture

LISTS = {"one": datasets.Image(), "several": datasets.Sequence(datasets.Image())}


def dataset(count=6):
    """Rows of an image and of a list of images; the last row has neither."""
    pictures = [picture(n) for n in range(count - 1)]
    columns = {
        "problem": [f"q{n}" for n in range(count)],
        "one": [*pictures, None],
        "several": [*([one, one] for one in pictures), None],
    }
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features({"problem": datasets.Value("string")} | LISTS)
    )


def pixels(image):
    return np.asarray(image)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A saved data set, with the column `image`."""
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    dataset().remove_columns("several").rename_column("one", "image").save_to_disk("saved")
    return tmp_path


def test_rows_have_references_and_the_cells_their_images():
    rows = with_cells(dataset(), "d")
    assert len(rows) == 6
    row = rows[2]
    assert list(row) == ["problem", "one", "several"]
    assert row["problem"] == "q2"
    assert np.array_equal(pixels(row["one"].read()), pixels(picture(2)))
    assert [np.array_equal(pixels(ref.read()), pixels(picture(2))) for ref in row["several"]] == [True, True]
    assert (row["one"].where, row["several"][1].name) == ("d, row 3", "of column 'several', number 2")
    assert rows[5] == {"problem": "q5", "one": None, "several": None}
    with pytest.raises(IndexError):
        rows[6]


def test_no_image_is_decoded_or_copied_with_its_row():
    large = picture(0, 600, 600)  # a megabyte as PNG
    features = datasets.Features({"problem": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"problem": ["a", "b"], "image": [large, large]}, features=features).save_to_disk(
        "large"
    )
    rows = with_cells(datasets.load_from_disk("large"), "d")
    assert isinstance(rows[0]["image"], ImageRef)  # what is allocated once only is allocated
    allocated = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    with mock.patch("PIL.Image.open", side_effect=AssertionError):
        found = [rows[n] for n in (0, 1)]
    assert tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()
    assert pyarrow.total_allocated_bytes() - allocated < 300_000
    assert found[1]["image"].size() == (600, 600)


@pytest.mark.parametrize("select", [lambda d: d.select([4, 1]), lambda d: d.shuffle(seed=0).select([0, 1])])
def test_rows_in_another_order(select):
    rows = with_cells(select(dataset(5)), "d")
    for n in range(2):
        row = rows[n]
        if row["one"] is not None:
            assert np.array_equal(pixels(row["one"].read()), pixels(picture(int(row["problem"][1:]))))


def test_data_sets_without_images_and_those_with_a_format_stay_as_they_are():
    plain = dataset().remove_columns(["one", "several"])
    assert with_cells(plain, "d") is plain
    changed = dataset().with_transform(lambda rows: rows)
    assert with_cells(changed, "d") is changed
    assert with_cells([1, 2], "d") == [1, 2]


def test_a_column_of_images_alone():
    rows = RowsWithCells(dataset().remove_columns(["problem", "several"]), ["one"], "d")
    assert (len(rows), list(rows[0])) == (6, ["one"])


def test_threads_read_cells_at_the_same_time():
    rows = with_cells(dataset(5), "d")
    refs = [rows[n % 4]["one"] for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(ImageRef.decode, refs))
    assert all(np.array_equal(pixels(image), pixels(picture(n % 4))) for n, image in enumerate(images))


def test_cells_come_back_from_other_processes_as_they_were():
    rows = with_cells(dataset(), "d")
    ref = rows[0]["one"]
    there = pickle.loads(pickle.dumps(ref))
    assert there == ref
    assert there.key == ref.key
    assert there.source.table is ref.source.table
    assert rows[1]["one"] != ref
    assert with_cells(dataset(), "d")[0]["one"].key != ref.key
    with mock.patch("grpo_lightning.data.images.references._TABLES", {}):
        elsewhere = pickle.loads(pickle.dumps(ref))
    assert elsewhere.source.table is not ref.source.table
    assert np.array_equal(pixels(elsewhere.read()), pixels(picture(0)))


def test_bytes_paths_and_nothing(folder):
    assert openable_value({"bytes": b"x", "path": "a.png"}) == b"x"
    assert openable_value({"bytes": None, "path": "a.png"}).name == "a.png"
    for nothing in ({"bytes": None, "path": None}, None):
        with pytest.raises(ValueError, match="neither bytes nor a path"):
            openable_value(nothing)
    with zipfile.ZipFile("a.zip", "w") as archive:
        file = io.BytesIO()
        picture(3).save(file, "PNG")
        archive.writestr("in/a.png", file.getvalue())
    image = openable_value({"bytes": None, "path": f"zip://in/a.png::{folder}/a.zip"})
    assert np.array_equal(pixels(image), pixels(picture(3)))


# ----------------------------------------------------------------------------------------------------- in a mixture


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_mixture_of_a_saved_data_set(num_proc):
    prompts = load_mixture([DatasetEntry(dataset="saved")], seed=0, num_proc=num_proc)
    assert [len(prompt.images) for prompt in prompts] == [1] * 5 + [0]
    assert [part["type"] for part in prompts[0].content[0]["content"]] == ["image", "text"]
    assert np.array_equal(pixels(prompts[3].images[0].read()), pixels(picture(3)))
    assert prompts[0].columns["image"] == prompts[0].images[0]
    assert len({id(prompt.images[0].source.table) for prompt in prompts[:5]}) == 1


def test_a_stream_has_the_same_images():
    listed = load_mixture([DatasetEntry(dataset="saved")], seed=0)
    stream = stream_mixture([DatasetEntry(dataset="saved", streaming=True)], seed=0).order(None).take(0, 10)[0]
    assert [p.content for p in stream] == [p.content for p in listed]
    for one, other in zip(stream[:5], listed[:5], strict=True):
        assert np.array_equal(pixels(one.images[0].read()), pixels(other.images[0].read()))
        assert isinstance(one.images[0].source, bytes)


def test_a_stream_is_not_decoded():
    stream = dataset().to_iterable_dataset()
    with mock.patch("PIL.Image.open", side_effect=AssertionError):
        row = next(iter(without_decoding(stream)))
    assert (set(row["one"]), len(row["several"])) == ({"bytes", "path"}, 2)
    assert without_decoding([1]) == [1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_source_reads_a_data_set_lazily(is_stream):
    data = dataset().rename_column("one", "image").remove_columns("several")
    with mock.patch("PIL.Image.open", side_effect=AssertionError("an image was decoded")):
        source = PromptSource(data.to_iterable_dataset() if is_stream else data, 6, shuffle=False)
        prompts = next(iter(source)).prompts
    assert [np.array_equal(pixels(prompts[n].images[0].read()), pixels(picture(n))) for n in range(5)] == [True] * 5


def test_a_corrupt_cell_is_named():
    rows = {"problem": ["a"], "image": [{"bytes": b"no image", "path": None}]}
    features = datasets.Features({"problem": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("bad")
    with pytest.raises(ValueError, match="bad, row 1: image of column 'image': not an image"):
        load_mixture([DatasetEntry(dataset="bad")], seed=0)
    with pytest.raises(ImageError, match="neither bytes nor a path"):
        ImageRef(lambda: openable_value({})).read()


@pytest.fixture
def cell_with_a_path(folder):
    """A Parquet file in the folder `hf`, whose cell has a path relative to `hf`; the current folder has another file.

    Returns:
        The picture in `hf`.
    """
    for place, number in ((folder / "hf" / "pics", 1), (folder / "pics", 2)):
        place.mkdir(parents=True)
        picture(number).save(place / "x.png")
    row = {"problem": "a", "image": {"bytes": None, "path": "pics/x.png"}}
    row["several"] = [row["image"]]
    features = datasets.Features({"problem": datasets.Value("string"), "image": datasets.Image()} | LISTS)
    features.pop("one")
    datasets.Dataset.from_list([row], features=features).to_parquet("hf/train.parquet")
    return picture(1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "entry", [{"json_path": "hf/train.parquet"}, {"dataset": "hf"}, {"dataset": "./hf", "image_root": "hf"}]
)
def test_paths_in_cells_are_relative_to_the_folder_of_the_entry(cell_with_a_path, entry, streaming):
    entries = [DatasetEntry(**entry, streaming=streaming)]
    prompts = stream_mixture(entries, seed=0).head() if streaming else load_mixture(entries, seed=0)
    assert np.array_equal(pixels(prompts[0].images[0].read()), pixels(cell_with_a_path))


def test_a_cell_keeps_its_folder_in_other_processes(cell_with_a_path, monkeypatch, tmp_path_factory):
    (prompt,) = load_mixture([DatasetEntry(dataset="hf")], seed=0)
    there = pickle.loads(pickle.dumps([prompt.images[0], *prompt.columns["several"]]))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert [np.array_equal(pixels(ref.read()), pixels(cell_with_a_path)) for ref in there] == [True, True]


def test_a_missing_file_of_a_cell_is_named(cell_with_a_path, folder):
    (folder / "hf" / "pics" / "x.png").unlink()
    message = re.escape(f"hf, row 1: image of column 'image' ({folder}/hf/pics/x.png): no such file")
    with pytest.raises(ValueError, match=message):
        load_mixture([DatasetEntry(dataset="hf")], seed=0)


def test_a_path_in_a_cell_may_begin_with_the_home_folder(cell_with_a_path, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "hf"))
    image = openable_value({"bytes": None, "path": "~/pics/x.png"}, folder)
    assert image == folder / "hf" / "pics" / "x.png"


def test_a_renamed_column_of_images():
    dataset().remove_columns("several").save_to_disk("other")
    (prompt,) = load_mixture(
        [DatasetEntry(dataset="other", sampling_strategy="first:1", columns={"one": "image"})], seed=0
    )
    assert np.array_equal(pixels(prompt.images[0].read()), pixels(picture(0)))
    (prompt,) = load_mixture([DatasetEntry(dataset="other", sampling_strategy="first:1")], seed=0)
    assert list(prompt.images) == []
    assert isinstance(prompt.columns["one"], ImageRef), "for the rewards"
    assert isinstance(prompt.columns["one"].read(), Image.Image)
