"""Rows from files: `.jsonl`, `.json`, `.csv` and `.parquet`."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_lightning.data.rows import Row


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a file, one after the other.

    Raises:
        ValueError: If it is no such file, or not what its name says.
    """
    if path.suffix.lower() not in READERS:
        raise ValueError(f"{path} must end in {' or '.join(READERS)}: convert the file, or rename it.")
    is_empty = True
    try:
        for row in READERS[path.suffix.lower()](path):
            is_empty = False
            yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert the file.") from error
    if is_empty:
        raise ValueError(f"{path} is empty: it must have at least one row.")


def existing(path: str | os.PathLike[str], *folders: Path) -> Path:
    """The file, looked up in the current folder, then in `folders`. Raises: FileNotFoundError naming all tried."""
    given = Path(path).expanduser()
    tried = [given, *(folder / given for folder in folders)]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    places = " or ".join(dict.fromkeys(str(candidate.resolve()) for candidate in tried))
    raise FileNotFoundError(f"{str(path)!r}: no file {places}. The current folder is {Path.cwd()}.")


def _read_jsonl(path: Path) -> Iterator[Row]:
    """One row per line; blank lines are skipped but counted."""
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
        elements = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object per line is .jsonl, not .json." if error.msg == "Extra data" else ""
        place = f"{path}:{error.lineno}"
        raise ValueError(f"{place}: not valid JSON: {error.msg} at column {error.colno}.{hint}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, nesting without end
        raise ValueError(f"{path}: this JSON cannot be read: {error}.") from error
    if not isinstance(elements, list):
        raise ValueError(f"{path} must be a list of objects, got {elements!r:.80}. One object per line is .jsonl.")
    for number, element in enumerate(elements, start=1):
        yield Row(f"{path}, element {number}", element)


def _read_csv(path: Path) -> Iterator[Row]:
    """One row per record, by the names of the first line; every value is text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
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
"""What reads a file, by the end of its name."""
