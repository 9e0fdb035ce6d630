"""A row is parsed when it is chosen, and says its place when it is wrong."""

import csv
import json
import math
import pickle

import pyarrow
import pyarrow.parquet
import pytest

from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.data.readers import Row, RowReader, find_file, read_file
from grpo_lightning.data.templates import PromptTemplate


def test_a_line_and_columns():
    assert Row("f:1", '{"prompt": "a"}', is_line=True).parse() == {"prompt": "a"}
    assert Row("f, row 1", {"prompt": "a"}).parse() == {"prompt": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Row("f:3", '{"prompt": }', is_line=True),
            r"^f:3: not valid JSON: Expecting value at column 12\. Correct the line\.$",
        ),
        (Row("f:3", "[1]", is_line=True), r"^f:3: a row must be an object .* got \[1\]"),
        (Row("f:3", "1" * 5000, is_line=True), r"^f:3: this JSON cannot be read: .*digits"),
        (Row("f:3", "[" * 100_000, is_line=True), r"^f:3: this JSON cannot be read: .*recursion"),
        (Row("f:3", "text"), r"^f:3: a row must be an object .* got 'text'"),
    ],
)
def test_what_is_no_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        row.parse()


ENTRY = DatasetEntry("f.jsonl", columns={"q": "question"}, rewards=["exact"], accu_reward_method="math")


def test_a_reader_leaves_the_row_as_it_is_and_goes_to_other_processes():
    content = {"q": "1?", "accu_reward_method": None}
    reader = RowReader("s", ENTRY, PromptTemplate("Be brief."))
    prompt = pickle.loads(pickle.dumps(reader)).prompt(Row("f:1", content), 4)
    assert content == {"q": "1?", "accu_reward_method": None}
    assert prompt.columns == {"question": "1?", "accu_reward_method": "math"}
    assert [message["content"] for message in prompt.content] == ["Be brief.", "1?"]
    assert (prompt.index, prompt.source, prompt.rewards) == (4, "s", ["exact"])


@pytest.mark.parametrize(("cell", "method"), [(None, "math"), ("", "math"), ("iou", "iou")])
def test_an_empty_cell_says_no_reward_method(cell, method):
    reader = RowReader("s", DatasetEntry("f.jsonl", accu_reward_method="math"))
    assert (
        reader.prompt(Row("f:2", {"prompt": "a", "accu_reward_method": cell}), 0).columns["accu_reward_method"]
        == method
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_nan_is_null_in_every_format(folder, name):
    """Python's json.dumps writes NaN, and pandas writes it for an empty cell."""
    row = {"prompt": "a", "answer": math.nan, "accu_reward_method": math.nan}
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / name)
    else:
        (folder / name).write_text(json.dumps([row] if name == "a.json" else row))
    (read_row,) = read_file(folder / name)
    reader = RowReader("s", DatasetEntry(name, accu_reward_method="math"))
    assert reader.prompt(read_row, 0).columns == {"answer": None, "accu_reward_method": "math"}


def test_a_missing_brace_is_said_at_its_column():
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not valid JSON: .* at column 15\. Correct the line\."):
        Row("x.jsonl:2", '{"prompt": "b"\n', is_line=True).parse()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(row.where.removeprefix(str(path)), row.parse()) for row in read_file(path)]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", '{"p": 1}\n\n{"p": 2}', [(":1", {"p": 1}), (":3", {"p": 2})]),
        ("a.JSON", '[{"p": 1}, {"p": 2}]', [(", element 1", {"p": 1}), (", element 2", {"p": 2})]),
        ("a.csv", 'p,q\n1,"x, y"\n\n2,"a\nb"\n', [(":2", {"p": "1", "q": "x, y"}), (":5", {"p": "2", "q": "a\nb"})]),
        ("a.csv", "\ufeffp\r\nä\r\n", [(":2", {"p": "ä"})]),
        ("a.csv", "p,,\n1,,\n", [(":2", {"p": "1", "": ""})]),
    ],
)
def test_rows_and_their_places(folder, name, content, rows):
    assert read(folder, name, content) == rows


@pytest.mark.parametrize("start_limit", [131_072, 10])
def test_a_cell_of_a_csv_file_may_be_long(folder, start_limit):
    """A data: URI of an image is longer than the default limit of the module `csv`, which is one for the process."""
    limit = csv.field_size_limit(start_limit)
    try:
        assert read(folder, "a.csv", f"p,q\n{'x' * 200_000},1\n") == [(":2", {"p": "x" * 200_000, "q": "1"})]
    finally:
        csv.field_size_limit(limit)


def test_parquet(folder):
    rows = [
        {"p": "a", "n": 1, "messages": [{"role": "user", "content": "x"}]},
        {"p": None, "n": 2, "messages": []},
    ] * 700
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    found = list(read_file(folder / "a.parquet"))
    assert [row.parse() for row in found] == rows
    assert found[1100].where == f"{folder}/a.parquet, row 1101"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "p,q\n1,2\n1\n", r"a\.csv:3: 1 fields, the first line names 2: p, q\."),
        ("a.csv", "p,q\n1,2,3\n", r"a\.csv:2: 3 fields"),
        ("a.csv", 'p\n"open\n', r"a\.csv:2: not valid CSV"),
        ("a.csv", "p,q,p\n1,2,3\n", r"a\.csv:1: 2 columns have the name 'p'\. Rename or remove one of them\.$"),
        (
            "a.json",
            '[{"p": 1}, {"p": "x", "q": 3, "p": "y"}]',
            r"a\.json: .*: an object has the key 'p' twice \('x', 'y'\)",
        ),
        ("a.jsonl", '{"p": 1}\n{"p": "x", "p": "y"}', r"a\.jsonl:2: .*: an object has the key 'p' twice \('x', 'y'\)"),
        ("a.jsonl", '{"p": [{"q": 1, "q": 2}]}', r"a\.jsonl:1: .*: an object has the key 'q' twice \(1, 2\)"),
        ("a.csv", "", r"a\.csv is empty"),
        ("a.csv", "p,q\n", r"a\.csv is empty"),
        ("a.csv", b"p\n\xe9\n", r"a\.csv is not UTF-8"),
        ("a.parquet", "p\n1", r"a\.parquet is not a Parquet file"),
        ("a.txt", "p\n1", r"a\.txt must end in \.json or \.jsonl or \.csv or \.parquet"),
        ("a.json", '[{"p": 1},\n {"p" 2}]', r"a\.json:2: not valid JSON: Expecting ':' delimiter at column 7\.$"),
        (
            "a.jsonl",
            '{"p": 1}\n{"p" 2}',
            r"a\.jsonl:2: not valid JSON: Expecting ':' delimiter at column 6\. Correct the line\.$",
        ),
        ("a.json", '[{"p": ' + "1" * 5000 + "}]", r"a\.json: this JSON cannot be read: .*digits"),
        ("a.json", "[" * 100_000, r"a\.json: this JSON cannot be read: .*recursion"),
        ("a.jsonl", "[1]", r"a\.jsonl:1: a row must be an object"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(folder, name, content, message):
    with pytest.raises(ValueError, match=message):
        read(folder, name, content)


def test_a_missing_file_names_every_place_it_was_looked_for(folder):
    with pytest.raises(FileNotFoundError, match=f"'a.json': no file {folder}/a.json or {folder}/x/a.json"):
        find_file("a.json", folder / "x")


def test_a_misspelt_file_gets_a_suggestion(tmp_path):
    for name in ("rows.jsonl", "rows.txt", "mixture.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=f"Did you mean '{tmp_path}/rows.jsonl'"):
        find_file(tmp_path / "row.jsonl")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'mixture\.yaml'"):
        find_file("mixtures.yaml", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"folder is \S+$"):
        find_file(tmp_path / "validation.parquet")
