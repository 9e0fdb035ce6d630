"""Mixtures of datasets.

A mixture is a list of entries. Each entry selects all rows, the first rows, the last rows, or random rows of one
dataset. The mixture has the selected rows, one entry after the other.

All ranks, and all runs with the same entries and seed, select the same rows.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from grpo_lightning.core import unique_keys
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.dataset_entry import (
    DATA_FILES,
    DatasetEntry,
    check_keys,
    is_data_file,
    parse_strategy,
    select,
)
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.images.box_checks import Boxes
from grpo_lightning.data.images.preflight import ImageCounts, Preflight
from grpo_lightning.data.lengths import LengthLimit, Measured
from grpo_lightning.data.parallel import in_processes
from grpo_lightning.data.readers import DatasetRows, Row, RowReader, find_file, open_dataset, read_file, stream_dataset
from grpo_lightning.data.shuffling import PromptStream
from grpo_lightning.data.templates import PromptTemplate

log = logging.getLogger(__name__)

Entries: TypeAlias = Sequence[DatasetEntry | Mapping[str, Any] | str] | str | os.PathLike[str]
"""A list of entries, or the path of one data file or of a YAML file with entries. Each entry is a `DatasetEntry`, a
mapping with the fields of `DatasetEntry`, or the path of a data file."""


def load_mixture(
    entries: Entries,
    *,
    seed: int,
    template: PromptTemplate | None = None,
    limit: LengthLimit | None = None,
    num_proc: int = 1,
    preflight: Preflight | None = None,
    image_root: str | None = None,
) -> list[Prompt]:
    """Load the selected rows as prompts, in the order of the entries and of the rows in each entry.

    Returns:
        The prompts. `Prompt.index` is the position among the selected rows of all entries, including rows dropped
        later. `Prompt.source` is the name of the entry. A second entry named `train` is called `train#2`.

    Raises:
        FileNotFoundError: If a file or dataset does not exist.
        ValueError: If a file, row or image is invalid, or no prompt is left.
    """
    named = _name_entries(as_entries(entries))
    measured: list[Measured] = []
    boxes: dict[str, Boxes] = {}
    for source, entry in named:
        folder = entry.image_folder(image_root)
        rows = _all_rows(entry, folder)
        chosen = select(len(rows), entry.strategy, seed=seed, name=source)
        log.info("%s: %d of %d rows of %s (%s)", source, len(chosen), len(rows), entry.label, entry.strategy)
        reader = RowReader(source, entry, template or PromptTemplate(), folder, limit)
        boxes[source] = entry.boxes
        items = [(rows[number], len(measured) + place) for place, number in enumerate(chosen)]
        measured += in_processes(reader.read, items, num_proc)
    listed = ", ".join(f"{entry.label} ({entry.strategy})" for _, entry in named) or "no entries"
    if not measured:
        raise ValueError(f"The mixture has no rows: {listed}. Add a file, or select more of its rows.")
    _check_roots(named, image_root, [m.prompt for m in measured if m.prompt is not None]).warn()
    # Images first: token counts depend on their sizes.
    measured = (preflight or Preflight()).all(measured, boxes)
    if limit is not None:
        places = [place for place, m in enumerate(measured) if m.prompt is not None and m.prompt.images]
        with_images = in_processes(limit.measure_kept, [measured[place] for place in places], num_proc)
        for place, m in zip(places, with_images, strict=True):
            measured[place] = m
        limit.check(measured, of="the mixture")
    prompts = [m.prompt for m in measured if m.prompt is not None]
    log_prompt_columns(prompts, set())
    if not prompts:
        raise ValueError(
            f"All prompts of the mixture ({listed}) were dropped: the warnings above name those dropped for their "
            "length (max_prompt_length) and those dropped for their images or boxes (bad_images)."
        )
    return prompts


def stream_mixture(
    entries: Entries,
    *,
    seed: int,
    template: PromptTemplate | None = None,
    limit: LengthLimit | None = None,
    shuffle_buffer: int = 1000,
    num_workers: int = 0,
    preflight: Preflight | None = None,
    image_root: str | None = None,
) -> PromptStream:
    """Create a stream of a mixture, in which the rows of streaming entries are read when they are used.

    A shuffled stream mixes the rows of the entries (`mix_parts`). An entry that does not set `streaming` is loaded
    completely when the stream opens it, and supports every sampling strategy. The images of a row are checked when the
    row is read.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If an entry is invalid. An invalid row raises an error when the stream reads it.
    """
    parts = []
    named = _name_entries(as_entries(entries))
    for source, entry in named:
        if entry.json_path is not None:
            find_file(entry.json_path)
        folder = entry.image_folder(image_root)
        reader = RowReader(source, entry, template or PromptTemplate(), folder, limit, preflight or Preflight())
        parts.append(functools.partial(_open_part, reader, seed))
    return PromptStream(
        parts,
        shuffle_buffer=shuffle_buffer,
        num_workers=num_workers,
        limit=limit,
        sources=[source for source, _ in named],
        check_head=functools.partial(_check_roots, named, image_root, has_more_rows=True),
    )


def is_streaming(entries: Entries) -> bool:
    """True if any entry is streaming, which makes the whole mixture a stream."""
    return any(entry.streaming for entry in as_entries(entries))


def download(entries: Entries) -> None:
    """Download the hub datasets that are not streamed, so that all ranks later find them in the cache."""
    for entry in as_entries(entries):
        if entry.dataset is not None and not entry.streaming:
            open_dataset(entry)


def as_entries(entries: Entries, key: str = "datasets") -> list[DatasetEntry]:
    """Parse the entries of a mixture.

    Raises:
        FileNotFoundError: As in `read_mixture_yaml`.
        ValueError: If `entries` is invalid.
    """
    if isinstance(entries, str | os.PathLike):
        return [DatasetEntry(os.fspath(entries))] if is_data_file(entries) else read_mixture_yaml(entries)
    if not isinstance(entries, Sequence):
        raise ValueError(f"{key} must be a list of entries or the path of a YAML file, got {entries!r:.80}.")
    return [DatasetEntry.of(item, where=f"{key}, entry {number}") for number, item in enumerate(entries, start=1)]


def read_mixture_yaml(path: str | os.PathLike[str]) -> list[DatasetEntry]:
    """Read the entries of a mixture from a YAML file with the key `datasets` (VLM-R1's form).

    Relative paths (`json_path`, `image_root`, and `dataset` if it is a folder) are looked up in the current folder
    first, then in the folder of the YAML file.

    Raises:
        FileNotFoundError: If the YAML file or one of its data files does not exist.
        ValueError: If the file is not YAML.
        ValueError: If the value of `datasets` is not a list with at least one entry.
        ValueError: If a key is unknown.
        ValueError: If an entry is invalid.
    """
    file = find_file(path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(
            f"datasets: {str(path)!r} must be a data file ({', '.join(DATA_FILES)}), a YAML file with the key datasets "
            "(.yaml, .yml), or a list of entries: [{json_path: FILE}], [{dataset: HUB_NAME}]."
        )
    try:
        content = unique_keys.load(file.read_text(encoding="utf-8"), str(file))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), list) or not content["datasets"]:
        raise ValueError(f"{file} must have the key 'datasets' with a list of entries, got {content!r:.80}.")
    check_keys(content, ["datasets"], where=str(file))
    entries = []
    for number, item in enumerate(content["datasets"], start=1):
        entry = DatasetEntry.of(item, where=f"{file}, entry {number}")
        if entry.json_path is not None:
            entry = replace(entry, json_path=str(find_file(entry.json_path, file.parent)))
        elif entry.dataset is not None and _is_next_to(entry, file.parent):
            entry = replace(entry, dataset=str(file.parent / entry.dataset))
        root = entry.image_root
        if root is not None and not Path(root).expanduser().is_dir() and (file.parent / root).is_dir():
            entry = replace(entry, image_root=str(file.parent / root))
        entries.append(entry)
    return entries


def _check_roots(
    named: Sequence[tuple[str, DatasetEntry]],
    image_root: str | None,
    prompts: Sequence[Prompt],
    *,
    has_more_rows: bool = False,
) -> ImageCounts:
    """Call `ImageCounts.check_root` for every entry. Returns: the counts of the prompts."""
    counts = ImageCounts()
    for prompt in prompts:
        counts.add(prompt)
    for source, entry in named:
        counts.check_root(source, entry.image_root, image_root, has_more_rows=has_more_rows)
    return counts


def _is_next_to(entry: DatasetEntry, folder: Path) -> bool:
    """True if an entry's `dataset` names a folder that exists in `folder`, but not in the current folder."""
    names = (entry.label, entry.location.name)  # the full name too: a folder may be called `a#1`
    return not any(Path(name).is_dir() for name in names) and any((folder / name).is_dir() for name in names)


def _name_entries(entries: Sequence[DatasetEntry]) -> list[tuple[str, DatasetEntry]]:
    """Give every entry a unique name."""
    own = {entry.source for entry in entries}
    named: dict[str, DatasetEntry] = {}
    for entry in entries:
        name, number = entry.source, 1
        while name in named or (number > 1 and name in own):
            number += 1
            name = f"{entry.source}#{number}"
        named[name] = entry
    return list(named.items())


def _all_rows(entry: DatasetEntry, folder: Path | None) -> Sequence[Row] | DatasetRows:
    """Read all rows of an entry; relative image paths start at `folder`. Raises: ValueError if there are no rows."""
    if entry.json_path is not None:
        return list(read_file(find_file(entry.json_path)))
    rows = DatasetRows(open_dataset(entry), entry.label, folder)
    if not len(rows):
        raise ValueError(f"dataset {entry.dataset!r} (split {entry.split!r}) is empty: it must have at least one row.")
    return rows


@dataclass(frozen=True)
class SelectedRows:
    """The selected rows of an entry, each with its reader."""

    rows: Iterable[Row]
    reader: RowReader
    num_rows: int | None
    """Number of rows; None if it is not known. For a streaming entry with `first:N`, the number is N, even if the
    dataset has fewer rows."""

    def __iter__(self) -> Iterator[tuple[Row, RowReader]]:
        """Yield the rows with their reader."""
        return ((row, self.reader) for row in self.rows)

    def __length_hint__(self) -> int:
        """Number of rows, for `operator.length_hint`."""
        return NotImplemented if self.num_rows is None else self.num_rows


def _open_part(reader: RowReader, seed: int) -> SelectedRows:
    """Open an entry."""
    entry = reader.entry
    if entry.streaming:
        strategy = parse_strategy(entry.strategy, name=entry.label)
        is_file = entry.json_path is not None
        rows = read_file(find_file(entry.label)) if is_file else stream_dataset(open_dataset(entry), entry.label)
        num_rows = None if strategy.take == "all" else int(strategy.amount)
        return SelectedRows(itertools.islice(rows, num_rows), reader, num_rows)
    everything = _all_rows(entry, reader.folder)
    chosen = select(len(everything), entry.strategy, seed=seed, name=reader.source)
    return SelectedRows((everything[number] for number in chosen), reader, len(chosen))
