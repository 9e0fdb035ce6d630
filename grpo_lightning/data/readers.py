"""Reading rows of data files and of `datasets`, and converting them to prompts."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_lightning.core.log_messages import similar_file
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.dataset_entry import DATA_FILES, DatasetEntry
from grpo_lightning.data.formats import refuse_media, to_prompt
from grpo_lightning.data.images.preflight import Preflight
from grpo_lightning.data.images.references import with_cells, without_decoding
from grpo_lightning.data.lengths import LengthLimit, Measured
from grpo_lightning.data.templates import PromptTemplate


@dataclass(frozen=True)
class Row:
    """One row as read from a file or dataset.

    A line of JSON is parsed only if `DatasetEntry.strategy` selects the row.
    """

    where: str
    """File and line, for error messages."""

    content: Any
    """A line of JSON, or columns by name."""

    is_line: bool = False

    def parse(self) -> dict[str, Any]:
        """The row's columns. Raises: ValueError if the row is not a JSON object."""
        value = self.content
        if self.is_line:
            try:
                # Without rstrip, a missing brace would be reported in the next line.
                value = json.loads(value.rstrip(), object_pairs_hook=_unique)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.where}: not valid JSON: {error.msg} at column {error.colno}. Correct the line."
                ) from None
            except (ValueError, RecursionError) as error:  # a key twice, integers of thousands of digits, deep nesting
                raise ValueError(f"{self.where}: this JSON cannot be read: {error}.") from error
        if not isinstance(value, dict):
            raise ValueError(f'{self.where}: a row must be an object like {{"prompt": "..."}}, got {value!r:.80}.')
        return value


@dataclass(frozen=True)
class RowReader:
    """Converts the rows of one mixture entry to prompts. Picklable, for worker processes."""

    source: str
    entry: DatasetEntry
    template: PromptTemplate = field(default_factory=PromptTemplate)
    folder: Path | None = None
    """Base folder of relative image paths; None for the current folder."""

    limit: LengthLimit | None = None
    preflight: Preflight | None = None
    """Check of images and boxes. None if the caller checks the images of all rows together, and measures the prompts
    with images after that check."""

    def __call__(self, row: Row, index: int) -> Measured:
        """Convert, check and measure a row.

        Raises:
            ValueError: If `prompt`, `Preflight.one` or `LengthLimit.measure_kept` raises it.
        """
        prompt = self.prompt(row, index)
        measured = Measured(prompt, where=row.where)
        if prompt.images:
            if self.preflight is None:
                return measured
            measured = self.preflight.one(measured, self.entry.boxes)
        return measured if self.limit is None else self.limit.measure_kept(measured)

    def read(self, item: tuple[Row, int]) -> Measured:
        """Call the reader with a (row, index) pair."""
        return self(*item)

    def prompt(self, row: Row, index: int) -> Prompt:
        """Convert a row to a prompt.

        Raises:
            ValueError: If the row is invalid, has video or audio, or lacks a column that `entry.columns` renames or
                drops.
        """
        content = self._rename_columns(row.parse(), row.where)
        prompt = to_prompt(
            content, where=row.where, index=index, source=self.source, template=self.template, folder=self.folder
        )
        refuse_media(prompt, row.where)
        method = self.entry.accu_reward_method
        # In a CSV file, an empty cell is the only way to write null.
        if method is not None and prompt.columns.get("accu_reward_method") in (None, ""):
            prompt = replace(prompt, columns={**prompt.columns, "accu_reward_method": method})
        return prompt if self.entry.rewards is None else replace(prompt, rewards=list(self.entry.rewards))

    def _rename_columns(self, content: dict[str, Any], where: str) -> dict[str, Any]:
        """Rename and drop columns. Raises: ValueError if a column is missing, or two columns get the same name."""
        columns = self.entry.columns
        if not columns:
            return dict(content)
        if missing := [old for old in columns if old not in content]:
            verb = "drops" if columns[missing[0]] is None else "renames"
            raise ValueError(
                f"{where}: columns {verb} {missing[0]!r}, which the row does not have; it has: {', '.join(content)}."
            )
        kept = {name: value for name, value in content.items() if columns.get(name, name) is not None}
        renamed = {columns.get(name) or name: value for name, value in kept.items()}
        if len(renamed) < len(kept):
            raise ValueError(
                f"{where}: after renaming by columns ({columns}), two columns have the same name; the row has: "
                f"{', '.join(content)}. Choose other names, or rename the other column too."
            )
        return renamed


def read_file(path: Path) -> Iterator[Row]:
    """Read the rows of a data file, one by one.

    Raises:
        ValueError: If the suffix is unknown, or the content is invalid or empty.
    """
    if path.suffix.lower() not in DATA_FILES:
        raise ValueError(f"{path} must end in {' or '.join(DATA_FILES)}: convert the file, or rename it.")
    is_empty = True
    try:
        for row in READERS[path.suffix.lower()](path):
            is_empty = False
            yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert the file.") from error
    if is_empty:
        raise ValueError(f"{path} is empty: it must have at least one row.")


def find_file(path: str | os.PathLike[str], *folders: Path) -> Path:
    """Find a file in the current folder, then in `folders`. Raises: FileNotFoundError."""
    given = Path(path).expanduser()
    tried = [given, *(folder / given for folder in folders)]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    places = " or ".join(dict.fromkeys(str(candidate.resolve()) for candidate in tried))
    hint = next(filter(None, (similar_file(file, (*DATA_FILES, given.suffix)) for file in tried)), "")
    raise FileNotFoundError(f"{str(path)!r}: no file {places}. The current folder is {Path.cwd()}.{hint}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    """One row per line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Row(f"{path}:{number}", line, is_line=True)


def _read_json(path: Path) -> Iterator[Row]:
    """One row per element of the list."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    try:
        elements = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        hint = " One object per line is .jsonl, not .json." if error.msg == "Extra data" else ""
        place = f"{path}:{error.lineno}"
        raise ValueError(f"{place}: not valid JSON: {error.msg} at column {error.colno}.{hint}") from None
    except (ValueError, RecursionError) as error:  # a key twice, integers of thousands of digits, deep nesting
        raise ValueError(f"{path}: this JSON cannot be read: {error}.") from error
    if not isinstance(elements, list):
        raise ValueError(f"{path} must be a list of objects, got {elements!r:.80}. One object per line is .jsonl.")
    for number, element in enumerate(elements, start=1):
        yield Row(f"{path}, element {number}", element)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises: ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        key = _duplicate([name for name, _ in pairs])
        values = ", ".join(f"{value!r:.80}" for name, value in pairs if name == key)
        raise ValueError(f"an object has the key {key!r} twice ({values}): rename or remove one of them")
    return content


def _duplicate(names: Sequence[str]) -> str | None:
    """The first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


LONGEST_CELL = 2**31 - 1
"""Maximum number of characters of a CSV cell. The default of `csv`, 131,072, is too short for images as data: URIs."""


def _read_csv(path: Path) -> Iterator[Row]:
    """One row per record, with the column names of the first line. All values are strings."""
    csv.field_size_limit(LONGEST_CELL)  # for the whole process
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            duplicate = _duplicate([name for name in names if name])  # spreadsheets write empty columns without a name
            if duplicate is not None:
                raise ValueError(
                    f"{path}:1: {names.count(duplicate)} columns have the name {duplicate!r}. Rename or remove one of "
                    "them."
                )
            for record in reader:
                if not record:
                    continue
                if len(record) != len(names):
                    raise ValueError(
                        f"{path}:{reader.line_num}: {len(record)} fields, the first line names {len(names)}: "
                        f"{', '.join(names)}. Put fields with a comma or line break in quotes."
                    )
                yield Row(f"{path}:{reader.line_num}", dict(zip(names, record, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not valid CSV: {error}.") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    """One row per record, read a batch at a time."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for columns in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", columns)


READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
"""Readers by file suffix."""


def open_dataset(entry: DatasetEntry) -> Any:
    """Open the dataset of an entry, as a `datasets.Dataset`, or as an `IterableDataset` if the entry is streaming.

    A folder written by `save_to_disk` is opened as a `datasets.Dataset` even if the entry is streaming.

    Raises:
        FileNotFoundError: If the dataset or folder does not exist, or the hub cannot be reached.
        ValueError: If the subset or split does not exist, or the dataset cannot be read.
    """
    import datasets

    location = entry.location
    folder = Path(location.name).expanduser()
    if location.name.startswith((".", "/", "~")) and not folder.is_dir():
        raise FileNotFoundError(
            f"dataset {entry.dataset!r}: no folder {folder.resolve()}. The current folder is {Path.cwd()}."
        )
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _from_disk(entry, folder)
    try:
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else location.name,
            name=entry.subset or location.subset,
            split=entry.split,
            revision=entry.revision,
            streaming=entry.streaming,
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(f"dataset {entry.dataset!r}: {error}") from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {entry.dataset!r} (split {entry.split!r}) cannot be loaded: {error}") from error


def _from_disk(entry: DatasetEntry, folder: Path) -> Any:
    """Load the split of an entry from a folder written by `save_to_disk` (one dataset, or one per split)."""
    import datasets

    given = [key for key, value in {"subset": entry.subset, "revision": entry.revision}.items() if value is not None]
    if given:
        raise ValueError(
            f"dataset {entry.dataset!r} was written by save_to_disk: it has no {given[0]}. Remove the key."
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except IndexError as error:  # `datasets` raises it for a dataset without rows
        raise ValueError(f"dataset {entry.dataset!r} is empty: it must have at least one row.") from error
    if isinstance(found, datasets.DatasetDict):
        if entry.split not in found:
            raise ValueError(f"dataset {entry.dataset!r} has no split {entry.split!r}; it has {', '.join(found)}.")
        return found[entry.split]
    if entry.split not in ("train", str(found.split)):
        raise ValueError(f"dataset {entry.dataset!r} is a single split ({found.split}), got split {entry.split!r}.")
    return found


class DatasetRows:
    """The rows of a `datasets.Dataset`. Images are references to their cells."""

    def __init__(self, dataset: Any, label: str, folder: Path | None = None) -> None:
        self.dataset = with_cells(dataset, label, folder)
        self.label = label

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        """Read a row."""
        return Row(f"{self.label}, row {index + 1}", self.dataset[index])


def stream_dataset(dataset: Any, label: str) -> Iterator[Row]:
    """Read the rows of a dataset one by one, with images as bytes or paths."""
    for number, columns in enumerate(without_decoding(dataset), start=1):
        yield Row(f"{label}, row {number}", columns)
