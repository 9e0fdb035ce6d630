"""Images of rows: what a column may hold for one, and the references made of it, which are read when needed."""

from __future__ import annotations

import base64
import binascii
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from grpo_lightning.core.images import ImageError, ImageRef


class RowsWithCells:
    """The rows of a `datasets.Dataset`, with references to cells for images: no image is read with its row.

    Args:
        dataset: A `datasets.Dataset`.
        images: Its columns with images or lists of images.
        label: What to call it in errors.
    """

    def __init__(self, dataset: Any, images: Sequence[str], label: str) -> None:
        self.names, self.images, self.label = list(dataset.column_names), list(images), label
        # As Arrow has them: no image is decoded, and a slice of a file that is mapped into memory is not read.
        self.table = dataset.select_columns(self.images).with_format("arrow")
        self.key = uuid.uuid4().hex
        _TABLES[self.key] = self.table
        self.others = dataset.remove_columns(self.images) if len(images) < len(self.names) else None

    def __len__(self) -> int:
        """Rows."""
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row's columns, in the data set's order."""
        columns = dict(self.others[index]) if self.others is not None else {}
        cells = self.table[index : index + 1]
        for column in self.images:
            cell = cells.column(column)[0]
            if not cell.is_valid:
                columns[column] = None
            elif hasattr(cell, "keys"):
                columns[column] = self._ref(index, column)
            else:
                columns[column] = [self._ref(index, column, place) for place in range(len(cell))]
        return {name: columns[name] for name in self.names}

    def _ref(self, index: int, column: str, place: int | None = None) -> ImageRef:
        """The reference to an image of a row."""
        return ImageRef(Cell(self.key, self.table, index, column, place), f"{self.label}, row {index + 1}")


def with_cells(dataset: Any, label: str) -> Any:
    """The rows of a data set, with references for images where its features say which columns hold some.

    Rows that are changed as they are read (`set_transform`, `with_format`) stay as they come.
    """
    if (getattr(dataset, "format", None) or {}).get("type") is not None:
        return dataset
    images = [name for name, feature in _features(dataset) if _is_image(feature) or _is_list(feature)]
    return RowsWithCells(dataset, images, label) if images else dataset


_TABLES: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The tables of this process by key: cells that come back from other processes share them."""


@dataclass(frozen=True)
class Cell:
    """One image of a cell: called, it gives what can be opened. Equal for the same place of the same data set."""

    key: str
    table: Any = field(compare=False, repr=False)
    row: int
    column: str
    place: int | None = None
    """In the cell's list; None if the cell is the image."""

    def __call__(self) -> Any:
        """The bytes, the file or the image itself. Raises: ValueError if there is nothing."""
        cell = self.table[self.row : self.row + 1].column(self.column)[0]
        return openable_value((cell if self.place is None else cell[self.place]).as_py())

    def __str__(self) -> str:
        """The column, and the number in its list."""
        return f"of column {self.column!r}" + ("" if self.place is None else f", number {self.place + 1}")

    def __reduce__(self) -> Any:
        """Pickle; in the process that it comes from, it finds its table again."""
        return _cell, (self.key, self.table, self.row, self.column, self.place)


def _cell(key: str, table: Any, row: int, column: str, place: int | None) -> Cell:
    """A cell with the table of its key."""
    return Cell(key, _TABLES.setdefault(key, table), row, column, place)


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


def openable_value(value: Any) -> Any:
    """The bytes, path or image of `{"bytes": ..., "path": ...}`, the form in which `datasets` stores an image.

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


IMAGE_COLUMNS = ("image", "images")
"""The columns that hold a prompt's images: VLM-R1's, and that of TRL and ms-swift."""

_ALIKE = re.compile(r"(?:\w*_)?(?:image|img|picture|photo)s?(?:_\w*)?", re.IGNORECASE)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class NoImage:
    """The source of a reference to what is no image. It is named with the other bad images when images are read."""

    problem: str
    """With file and line."""

    def __call__(self) -> Any:
        """Raises: ImageError: always."""
        raise ImageError(self.problem)

    def __str__(self) -> str:
        """In the place of a name."""
        return "that is none"


@dataclass(frozen=True)
class ImageFinder:
    """Makes references of what a row holds for its images."""

    where: str
    """File and line, for error messages."""

    folder: Path | None = None
    """Where relative paths begin; None for the current folder."""

    def columns(self, columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[ImageRef]]:
        """A row's columns with references for images, and these images in their order.

        Raises:
            ValueError: If both image columns hold some.
        """
        found = [name for name in IMAGE_COLUMNS if not is_empty(columns.get(name))]
        if len(found) > 1:
            raise ValueError(f"{self.where}: the row has images in 'image' and in 'images': leave one of them out.")
        if not found:
            return dict(columns), []
        value, what = columns[found[0]], f"column {found[0]!r}"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            refs = [self.ref(one, f"{what}, image {number}") for number, one in enumerate(value, start=1)]
            return {**columns, found[0]: refs}, refs
        ref = self.ref(value, what)
        return {**columns, found[0]: ref}, [ref]

    def ref(self, value: Any, what: str) -> ImageRef:
        """The reference to one image; nothing is read.

        Args:
            value: A path, a data: or file: URL, bytes, `{"bytes": ..., "path": ...}`, a PIL image or a reference.
            what: The value's place in the row, for error messages.

        Returns:
            The reference. If the value is none of these or a URL of the web, reading it raises ImageError: so all bad
            images of the data are named at once, whatever is wrong with each.
        """
        if isinstance(value, ImageRef):
            return value if value.where else replace(value, where=self.where)
        try:
            return ImageRef(self._source(value, what), self.where)
        except ValueError as error:
            return ImageRef(NoImage(str(error)), self.where)

    def _source(self, value: Any, what: str) -> Any:
        """The source of a reference. Raises: ValueError if the value is no image."""
        if isinstance(value, Mapping):
            value = self._of_mapping(value, what)
        if isinstance(value, str):
            return self._of_text(value, what)
        if isinstance(value, os.PathLike):
            return self._path(Path(value))
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if type(value).__module__.startswith("PIL."):
            return value
        raise ValueError(
            f'{self.where}: {what} must be an image (a path, bytes, {{"bytes": ..., "path": ...}} or a PIL image), or '
            f"a list of them, got {value!r:.80}."
        )

    def _of_mapping(self, value: Mapping[str, Any], what: str) -> Any:
        """The bytes or the path of an image as `datasets` writes it. Raises: ValueError if there is neither."""
        content = value.get("bytes")
        found = value.get("path") if content is None else content
        if not isinstance(found, bytes | bytearray | str) or not found:
            raise ValueError(
                f'{self.where}: {what} must look like {{"bytes": ..., "path": ...}} and have one of them, got '
                f"{dict(value)!r:.80}."
            )
        return found

    def _of_text(self, text: str, what: str) -> Any:
        """The source that a path or URL names. Raises: ValueError if it is empty, on the web, or no URL."""
        if not text.strip():
            raise ValueError(f"{self.where}: {what} must be the path of an image, got {text!r}.")
        if text[:5].lower() == "data:":
            return _of_data_uri(text, f"{self.where}: {what}")
        scheme = text.partition("://")[0].lower()
        if scheme in ("http", "https"):
            raise ValueError(
                f"{self.where}: {what} is on the web ({text:.80}), where it may change or be gone in the middle of a "
                "run. Download the images once and give their paths."
            )
        if scheme == "file":
            try:
                path = urlsplit(text).path
            except ValueError as error:
                raise ValueError(
                    f"{self.where}: {what} must be the URL of a file, got {text!r:.80}: {error}. Give its path."
                ) from error
            return self._path(Path(unquote(path)))
        return RemoteFile(text) if is_remote(text) else self._path(expand_home(Path(text)))

    def _path(self, path: Path) -> Path:
        """A path that does not depend on the current folder."""
        return Path(os.path.abspath((self.folder or Path()) / path))


def is_empty(value: Any) -> bool:
    """True for None, "", [] and (): a CSV file has no other way to say "no image" than an empty cell."""
    return value is None or (isinstance(value, str | list | tuple) and not value)


def has_empty_column(columns: Mapping[str, Any]) -> bool:
    """True if a row has a column for images, and none in it."""
    found = [columns[name] for name in IMAGE_COLUMNS if name in columns]
    return bool(found) and all(map(is_empty, found))


def unread_column(columns: Mapping[str, Any]) -> str | None:
    """A column that holds the path of an image, in a row without a column for images; None if there is none.

    `image_path`, `img` and the like are not read: they may be there for a reward.
    """
    if any(name in columns for name in IMAGE_COLUMNS):
        return None
    return next((name for name, value in columns.items() if _ALIKE.fullmatch(name) and _is_image_path(value)), None)


def _is_image_path(value: Any) -> bool:
    """True for the name of an image's file, or a list that begins with one."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, str) and first.lower().endswith(_SUFFIXES)


def _of_data_uri(text: str, what: str) -> bytes:
    """The bytes in a data: URI. Raises: ValueError if it holds none."""
    found = re.match(r"data:image/[\w.+-]+;base64,", text[:100], re.IGNORECASE)
    if not found:
        raise ValueError(f"{what} must look like data:image/png;base64,..., got {text!r:.80}.")
    try:
        return base64.b64decode(text[found.end() :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{what} is a data: URI whose base64 is broken ({error}).") from error


def expand_home(path: Path) -> Path:
    """The path with `~` for the home folder, where there is a home of that name."""
    try:
        return path.expanduser()
    except RuntimeError:  # a file whose name begins so, a lock for example
        return path
