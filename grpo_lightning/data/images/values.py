"""What rows hold for an image: a path, bytes, an image, a data: URI; and the references made of it."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.data.images.cells import RemoteFile, is_remote

IMAGE_COLUMNS = ("image", "images")
"""The columns that hold a prompt's images: VLM-R1's, and that of TRL and ms-swift."""

_ALIKE = re.compile(r"(?:\w*_)?(?:image|img|picture|photo)s?(?:_\w*)?", re.IGNORECASE)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")

EMPTY: tuple[Any, ...] = (None, "", [], ())
"""What a column without an image holds; a CSV file has no other way to say it than an empty cell."""


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
            What raises ImageError when it is read, if the value is none of these or a URL of the web: then all bad
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
        """What a path or URL names. Raises: ValueError if it is empty, on the web, or no URL."""
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
        return RemoteFile(text) if is_remote(text) else self._path(expanded(Path(text)))

    def _path(self, path: Path) -> Path:
        """A path that does not depend on the current folder."""
        return Path(os.path.abspath((self.folder or Path()) / path))


def is_empty(value: Any) -> bool:
    """True if a column holds no image."""
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in EMPTY)


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


def expanded(path: Path) -> Path:
    """The path with `~` for the home folder, where there is a home of that name."""
    try:
        return path.expanduser()
    except RuntimeError:  # a file whose name begins so, a lock for example
        return path
