"""Lazy references to the images of a row."""

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

from grpo_lightning.core.images import ImageError, ImageRef, is_pil_image


class RowsWithCells:
    """The rows of a `datasets.Dataset`, with references in place of images. Reading a row does not read its images."""

    def __init__(self, dataset: Any, images: Sequence[str], label: str, folder: Path | None = None) -> None:
        self.names, self.images, self.label = list(dataset.column_names), list(images), label
        self.folder = absolute_path(folder or Path())  # the current folder may change before an image is read
        # In Arrow format, no image is decoded, and slicing a memory-mapped file does not read it.
        self.table = dataset.select_columns(self.images).with_format("arrow")
        self.key = uuid.uuid4().hex
        _TABLES[self.key] = self.table
        self.others = dataset.remove_columns(self.images) if len(images) < len(self.names) else None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a row: its columns, in the dataset's order."""
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
        """Create the reference to an image of a row."""
        return ImageRef(Cell(self.key, self.table, self.folder, index, column, place), f"{self.label}, row {index + 1}")


def with_cells(dataset: Any, label: str, folder: Path | None = None) -> Any:
    """Wrap a dataset so that its columns of images, and of lists of images, yield references.

    A dataset without such columns, or with a transform or format (`set_transform`, `with_format`), is returned
    unchanged.
    """
    if (getattr(dataset, "format", None) or {}).get("type") is not None:
        return dataset
    images = [name for name, feature in _features(dataset) if _is_image(feature) or _is_list(feature)]
    return RowsWithCells(dataset, images, label, folder) if images else dataset


_TABLES: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The tables of the datasets of this process, by `RowsWithCells.key`."""


@dataclass(frozen=True)
class Cell:
    """Reference to an image in a cell of a dataset, used as the `source` of an `ImageRef`."""

    key: str
    table: Any = field(compare=False, repr=False)
    folder: Path = field(compare=False)
    """Base folder of relative paths."""

    row: int
    column: str
    place: int | None = None
    """Index in the cell's list; None if the cell is a single image."""

    def __call__(self) -> Any:
        """Read the cell, and resolve it with `openable_value`. Raises: ValueError if the cell is empty."""
        cell = self.table[self.row : self.row + 1].column(self.column)[0]
        return openable_value((cell if self.place is None else cell[self.place]).as_py(), self.folder)

    def __str__(self) -> str:
        """Name the column; for an image in a list, also its position in the list, counted from 1."""
        return f"of column {self.column!r}" + ("" if self.place is None else f", number {self.place + 1}")

    def __reduce__(self) -> Any:
        """Pickle the cell (see `_cell`)."""
        return _cell, (self.key, self.table, self.folder, self.row, self.column, self.place)


def _cell(key: str, table: Any, folder: Path, row: int, column: str, place: int | None) -> Cell:
    """Unpickle a cell. If this process already has a table with the same key, the cell uses that table."""
    return Cell(key, _TABLES.setdefault(key, table), folder, row, column, place)


@dataclass(frozen=True)
class RemoteFile:
    """The source of an image that only `datasets` can open, because it is on the hub or inside an archive."""

    path: str

    def __call__(self) -> Any:
        """Read the image."""
        import datasets

        return datasets.Image().decode_example({"path": self.path, "bytes": None})

    def __str__(self) -> str:
        """Return the path."""
        return self.path


def openable_value(value: Any, folder: Path | None = None) -> Any:
    """Resolve `{"bytes": ..., "path": ...}`, the format in which `datasets` stores an image.

    Returns:
        - If `value` has bytes, the bytes.
        - If `value` has no bytes, and only `datasets` can open the path (`is_remote`), the decoded image.
        - Otherwise, the absolute path.

    Raises:
        ValueError: If `value` has neither bytes nor a path.
    """
    content, path = (value or {}).get("bytes"), (value or {}).get("path")
    if content is not None:
        return content
    if not path:
        raise ValueError("the cell has neither bytes nor a path")
    return RemoteFile(path)() if is_remote(path) else absolute_path(expand_home(Path(path)), folder)


def is_remote(path: str) -> bool:
    """True for a path that only `datasets` can open."""
    return "://" in path


def without_decoding(stream: Any) -> Any:
    """Turn off image decoding of a `datasets.IterableDataset`, which then yields bytes or paths."""
    import datasets

    for name, feature in _features(stream):
        image = datasets.Image(decode=False)
        if _is_image(feature):
            stream = stream.cast_column(name, image)
        elif _is_list(feature):
            stream = stream.cast_column(name, datasets.Sequence(image))
    return stream


def _features(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Column names and types, if the dataset has them."""
    return iter((getattr(dataset, "features", None) or {}).items())


def _is_image(feature: Any) -> bool:
    """True for a column of images."""
    return type(feature).__name__ == "Image"


def _is_list(feature: Any) -> bool:
    """True for a column of lists of images, in any notation of `datasets`."""
    if isinstance(feature, list):
        return len(feature) == 1 and _is_image(feature[0])
    return _is_image(getattr(feature, "feature", None))


IMAGE_COLUMNS = ("image", "images")
"""Columns with a prompt's images: `image` in VLM-R1, `images` in TRL and ms-swift."""

_ALIKE = re.compile(r"(?:\w*_)?(?:image|img|picture|photo)s?(?:_\w*)?", re.IGNORECASE)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class NoImage:
    """The `source` of an `ImageRef` whose image is invalid.

    The error is raised only when the image is read, so that all bad images are reported together.
    """

    problem: str
    """The error message, with file and line."""

    def __call__(self) -> Any:
        """Raises: ImageError: always."""
        raise ImageError(self.problem)

    def __str__(self) -> str:
        """Return a placeholder."""
        return "(invalid)"


@dataclass(frozen=True)
class ImageFinder:
    """Finds the images of a row and creates references to them."""

    where: str
    """File and line, for error messages."""

    folder: Path | None = None
    """Base folder of relative paths; None for the current folder."""

    def columns(self, columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[ImageRef]]:
        """Replace the images of a row by references. Returns: the columns, and the references in order.

        Raises:
            ValueError: If both `image` and `images` have images.
        """
        found = [name for name in IMAGE_COLUMNS if not is_empty(columns.get(name))]
        if len(found) > 1:
            raise ValueError(f"{self.where}: the row has images in 'image' and in 'images': remove one of them.")
        if not found:
            return dict(columns), []
        value, what = columns[found[0]], f"column {found[0]!r}"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            refs = [self.ref(one, f"{what}, image {number}") for number, one in enumerate(value, start=1)]
            return {**columns, found[0]: refs}, refs
        ref = self.ref(value, what)
        return {**columns, found[0]: ref}, [ref]

    def ref(self, value: Any, what: str) -> ImageRef:
        """Create the reference to one image. Nothing is read.

        Args:
            value: A path, a data: or file: URL, bytes, `{"bytes": ..., "path": ...}`, a PIL image or a reference.
            what: The value's place in the row, for error messages.

        Returns:
            The reference. If `value` is invalid or a web URL, this method raises no error. An error is raised when the
            reference is read.
        """
        if isinstance(value, ImageRef):
            return value if value.where else replace(value, where=self.where)
        try:
            return ImageRef(self._source(value, what), self.where)
        except ValueError as error:
            return ImageRef(NoImage(str(error)), self.where)

    def _source(self, value: Any, what: str) -> Any:
        """Convert a value to the source of a reference. Raises: ValueError if the value is not an image."""
        if isinstance(value, Mapping):
            value = self._of_mapping(value, what)
        if isinstance(value, str):
            return self._of_text(value, what)
        if isinstance(value, os.PathLike):
            return absolute_path(Path(value), self.folder)
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if is_pil_image(value):
            return value
        raise ValueError(
            f'{self.where}: {what} must be an image (a path, bytes, {{"bytes": ..., "path": ...}} or a PIL image), or '
            f"a list of them, got {value!r:.80}."
        )

    def _of_mapping(self, value: Mapping[str, Any], what: str) -> Any:
        """The bytes or path in the storage format of `datasets`. Raises: ValueError if it has neither."""
        content = value.get("bytes")
        found = value.get("path") if content is None else content
        if not isinstance(found, bytes | bytearray | str) or not found:
            raise ValueError(
                f'{self.where}: {what} must look like {{"bytes": ..., "path": ...}} and have one of them, got '
                f"{dict(value)!r:.80}."
            )
        return found

    def _of_text(self, text: str, what: str) -> Any:
        """Convert a path or URL to a source. Raises: ValueError if it is empty, on the web, or an invalid URL."""
        if not text.strip():
            raise ValueError(f"{self.where}: {what} must be the path of an image, got {text!r}.")
        if text[:5].lower() == "data:":
            return _of_data_uri(text, f"{self.where}: {what}")
        scheme = text.partition("://")[0].lower()
        if scheme in ("http", "https"):
            raise ValueError(
                f"{self.where}: {what} is on the web ({text:.80}), where it may change or disappear during a run. "
                "Download the images once and give their paths."
            )
        if scheme == "file":
            try:
                path = urlsplit(text).path
            except ValueError as error:
                raise ValueError(
                    f"{self.where}: {what} must be the URL of a file, got {text!r:.80}: {error}. Give its path."
                ) from error
            return absolute_path(Path(unquote(path)), self.folder)
        return RemoteFile(text) if is_remote(text) else absolute_path(expand_home(Path(text)), self.folder)


def is_empty(value: Any) -> bool:
    """True for None, "", [] and ()."""
    return value is None or (isinstance(value, str | list | tuple) and not value)


def has_empty_column(columns: Mapping[str, Any]) -> bool:
    """True if a row has image columns, but they are all empty."""
    found = [columns[name] for name in IMAGE_COLUMNS if name in columns]
    return bool(found) and all(map(is_empty, found))


def unread_column(columns: Mapping[str, Any]) -> str | None:
    """Name of a column that possibly holds images but is not read as images; None if there is no such column.

    If the row has a column `image` or `images`, the result is None. Columns such as `image_path` and `img` are not read
    as images, because they can be meant for a reward.
    """
    if any(name in columns for name in IMAGE_COLUMNS):
        return None
    return next((name for name, value in columns.items() if _ALIKE.fullmatch(name) and _is_image_path(value)), None)


def _is_image_path(value: Any) -> bool:
    """True for the name of an image file, or a list whose first item is such a name."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, str) and first.lower().endswith(_SUFFIXES)


def _of_data_uri(text: str, what: str) -> bytes:
    """Decode a data: URI. Raises: ValueError if it is not a base64 image."""
    found = re.match(r"data:image/[\w.+-]+;base64,", text[:100], re.IGNORECASE)
    if not found:
        raise ValueError(f"{what} must look like data:image/png;base64,..., got {text!r:.80}.")
    try:
        return base64.b64decode(text[found.end() :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{what} is a data: URI with invalid base64 ({error}).") from error


def expand_home(path: Path) -> Path:
    """Expand `~` and `~user` to the home folder. If there is no such user, return the path unchanged."""
    try:
        return path.expanduser()
    except RuntimeError:  # a file name may start with `~`, a lock file for example
        return path


def absolute_path(path: Path, folder: Path | None = None) -> Path:
    """Make a path absolute. A relative path starts at `folder`, or at the current folder if `folder` is None."""
    return Path(os.path.abspath((folder or Path()) / path))
