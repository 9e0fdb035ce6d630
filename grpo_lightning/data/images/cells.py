"""Images in the columns of a `datasets.Dataset`: cells that are read when their image is, not when their row is."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from grpo_lightning.core.images import ImageRef


class ImageCells:
    """The image columns of a data set. Nothing of an image is read before a cell is.

    Args:
        dataset: A `datasets.Dataset`, of any format.
        columns: Those of its columns that hold images or lists of images.
        label: What to call it in errors.
        key: Of the same cells in another process.
    """

    def __init__(self, dataset: Any, columns: Sequence[str], label: str, key: str | None = None) -> None:
        self.columns, self.label, self.key = list(columns), label, key or uuid.uuid4().hex
        # As Arrow has them: no image is decoded, and a slice of a file that is mapped into memory is not read.
        self.table = dataset.select_columns(self.columns).with_format("arrow")
        _OPEN.setdefault(self.key, self)

    def row(self, number: int) -> dict[str, ImageRef | list[ImageRef] | None]:
        """The images of a row by column; None for an empty cell."""
        where = f"{self.label}, row {number + 1}"
        cells = self.table[number : number + 1]
        found: dict[str, ImageRef | list[ImageRef] | None] = {}
        for column in self.columns:
            cell = cells.column(column)[0]
            if not cell.is_valid:
                found[column] = None
            elif hasattr(cell, "keys"):
                found[column] = ImageRef(Cell(self, number, column), where)
            else:
                found[column] = [ImageRef(Cell(self, number, column, place), where) for place in range(len(cell))]
        return found

    def __reduce__(self) -> Any:
        """What is pickled: in the process that it comes from, it becomes itself again."""
        return _same_cells, (self.key, self.table, self.columns, self.label)


class RowsWithCells:
    """The rows of a `datasets.Dataset`, with references to cells for images. Nothing of an image is read with its row.

    Args:
        dataset: A `datasets.Dataset`.
        images: Its columns with images.
        label: What to call it in errors.
    """

    def __init__(self, dataset: Any, images: Sequence[str], label: str) -> None:
        self.names = list(dataset.column_names)
        self.num_rows = len(dataset)
        self.cells = ImageCells(dataset, images, label)
        self.others = dataset.remove_columns(list(images)) if len(images) < len(self.names) else None

    def __len__(self) -> int:
        """Rows."""
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row's columns, in the data set's order."""
        columns = {**self.cells.row(index), **(self.others[index] if self.others is not None else {})}
        return {name: columns[name] for name in self.names}


def with_cells(dataset: Any, label: str) -> Any:
    """The rows of a data set, with references for images where its features say which columns hold some.

    Rows that are changed as they are read (`set_transform`, `with_format`) stay as they come.
    """
    if (getattr(dataset, "format", None) or {}).get("type") is not None:
        return dataset
    images = [name for name, feature in _features(dataset) if _is_image(feature) or _is_list(feature)]
    return RowsWithCells(dataset, images, label) if images else dataset


_OPEN: WeakValueDictionary[str, ImageCells] = WeakValueDictionary()
"""The cells of this process by key: prompts that come back from other processes share them."""


def _same_cells(key: str, table: Any, columns: Sequence[str], label: str) -> ImageCells:
    """The cells of a key."""
    return _OPEN.get(key) or ImageCells(table, columns, label, key)


@dataclass(frozen=True, eq=False)
class Cell:
    """One image of a cell: called, it gives what can be opened."""

    cells: ImageCells
    row: int
    column: str
    place: int | None = None
    """In the cell's list; None if the cell is the image."""

    def __call__(self) -> Any:
        """The bytes, the file or the image itself. Raises: ValueError if there is nothing."""
        cell = self.cells.table[self.row : self.row + 1].column(self.column)[0]
        return opened_value((cell if self.place is None else cell[self.place]).as_py())

    def __eq__(self, other: object) -> bool:
        """True for the same place in the same data set."""
        return isinstance(other, Cell) and self._place() == other._place()

    def __hash__(self) -> int:
        """Of the place."""
        return hash(self._place())

    def __str__(self) -> str:
        """The column, and the number in its list."""
        return f"of column {self.column!r}" + ("" if self.place is None else f", number {self.place + 1}")

    def _place(self) -> tuple[Any, ...]:
        """What makes it this cell."""
        return self.cells.key, self.row, self.column, self.place


@dataclass(frozen=True)
class RemoteFile:
    """A file that only `datasets` can open: on the hub, or inside an archive."""

    path: str

    def __call__(self) -> Any:
        """The image."""
        import datasets

        return datasets.Image().decode_example({"path": self.path, "bytes": None})

    def __str__(self) -> str:
        """The path."""
        return self.path


def opened_value(value: Any) -> Any:
    """What can be opened of `{"bytes": ..., "path": ...}`, the form in which `datasets` stores an image.

    Raises:
        ValueError: If both are empty.
    """
    content, path = (value or {}).get("bytes"), (value or {}).get("path")
    if content is not None:
        return content
    if not path:
        raise ValueError("the cell has neither bytes nor a path")
    return RemoteFile(path)() if is_remote(path) else Path(path)


def is_remote(path: str) -> bool:
    """True for what `datasets` names by a URL (`hf://...`) or as a file in an archive (`zip://a.png::b.zip`)."""
    return "://" in path


def without_decoding(stream: Any) -> Any:
    """A `datasets.IterableDataset` whose images come as bytes or paths."""
    import datasets

    for name, feature in _features(stream):
        image = datasets.Image(decode=False)
        if _is_image(feature):
            stream = stream.cast_column(name, image)
        elif _is_list(feature):
            stream = stream.cast_column(name, datasets.Sequence(image))
    return stream


def _features(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Column names and types, where they are known."""
    return iter((getattr(dataset, "features", None) or {}).items())


def _is_image(feature: Any) -> bool:
    """True for a column of images."""
    return type(feature).__name__ == "Image"


def _is_list(feature: Any) -> bool:
    """True for a column of lists of images, in any of the ways to say so."""
    if isinstance(feature, list):
        return len(feature) == 1 and _is_image(feature[0])
    return _is_image(getattr(feature, "feature", None))
