"""Rows from what the `datasets` package loads: the hub, folders of data files, and folders of `save_to_disk`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from grpo_lightning.data.images.cells import with_cells, without_decoding
from grpo_lightning.data.rows import Row

if TYPE_CHECKING:
    from grpo_lightning.data.entry import DatasetEntry


def open_dataset(entry: DatasetEntry) -> Any:
    """The data set of an entry: a `datasets.Dataset`, or an `IterableDataset` if it is streaming.

    Raises:
        FileNotFoundError: If there is none of that name or in that folder, or the hub cannot be reached.
        ValueError: If it has no such subset or split, or cannot be read.
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
    """What `save_to_disk` wrote: one data set, or one per split."""
    import datasets

    given = [key for key, value in {"subset": entry.subset, "revision": entry.revision}.items() if value is not None]
    if given:
        raise ValueError(
            f"dataset {entry.dataset!r} was written by save_to_disk: it has no {given[0]}. Remove the key."
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except IndexError as error:  # what `datasets` raises for one without rows
        raise ValueError(f"dataset {entry.dataset!r} is empty: it must have at least one row.") from error
    if isinstance(found, datasets.DatasetDict):
        if entry.split not in found:
            raise ValueError(f"dataset {entry.dataset!r} has no split {entry.split!r}; it has {', '.join(found)}.")
        return found[entry.split]
    if entry.split not in ("train", str(found.split)):
        raise ValueError(f"dataset {entry.dataset!r} is a single split ({found.split}), got split {entry.split!r}.")
    return found


class DatasetRows(Sequence[Row]):
    """The rows of a `datasets.Dataset`, read when they are asked for; of images, references to their cells."""

    def __init__(self, dataset: Any, label: str) -> None:
        self.dataset = with_cells(dataset, label)
        self.label = label

    def __len__(self) -> int:
        """Rows."""
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """One row, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Row(f"{self.label}, row {index + 1}", self.dataset[index])


def stream_dataset(dataset: Any, label: str) -> Iterator[Row]:
    """The rows of a data set, one after the other; images as bytes or paths."""
    for number, columns in enumerate(without_decoding(dataset), start=1):
        yield Row(f"{label}, row {number}", columns)
