"""Lazy references to the images of prompts. Reading a reference decodes the image to upright RGB."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
"""The EXIF orientation tag."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The transpose that makes an image upright, by orientation value (EXIF 2.3, 4.6.4)."""

LYING = (5, 6, 7, 8)
"""Orientation values whose transpose swaps width and height."""


def is_pil_image(value: Any) -> bool:
    """True for an image of PIL. This function does not import PIL."""
    return type(value).__module__.startswith("PIL.")


class ImageError(ValueError):
    """The error for an unreadable image."""


@dataclass(unsafe_hash=True, repr=False)  # not frozen: Lightning rejects frozen dataclasses in a batch
class ImageRef:
    """Lazy reference to an image."""

    source: Any
    """A `Path`, the bytes of a file, a PIL image, or a function that returns one of these."""

    where: str = ""
    """File and line of the image's row, for error messages."""

    shared: Callable[[], Image] | None = field(default=None, init=False, compare=False)
    """Function that `read` calls instead of decoding `source`. References to the same image in a batch have the same
    function, so that the image is decoded once. The function is never pickled."""

    known_size: tuple[int, int] | None = field(default=None, init=False, compare=False)
    """Cached (width, height); None until first requested."""

    is_whole: bool = field(default=False, init=False, compare=False)
    """True once any rank has read all pixels."""

    is_copy: bool = field(default=False, init=False, compare=False)
    """True if `copy_in_memory` has made the source."""

    def read(self) -> Image:
        """Read the image, turn it upright, convert it to RGB, and replace transparency by white.

        Copy the returned image before you draw on it, because other prompts can share the same object.

        Raises:
            ImageError: If the image cannot be read.
        """
        return self.decode() if self.shared is None else self.shared()

    def decode(self) -> Image:
        """Read the image like `read`, but always from `source`, never by calling `shared`."""
        with self._open() as image:
            _check_pixels(image)
            return _rgb(_upright(image))

    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image, in pixels. Raises: ImageError if the image cannot be read."""
        if self.known_size is None:
            with self._open() as image:
                self.remember(_upright_size(image))
        assert self.known_size is not None
        return self.known_size

    def remember(self, size: tuple[int, int], *, is_whole: bool = False) -> None:
        """Store a known (width, height), and whether all pixels have been read."""
        self.known_size, self.is_whole = size, self.is_whole or is_whole

    def check(self) -> tuple[int, int]:
        """Check that all pixels can be read. Returns: (width, height). Raises: ImageError if not."""
        with self._open() as image:
            size = _upright_size(image)
            if image is not self.source:
                image.draft("RGB", (1, 1))  # decodes a JPEG at 1/8 of its size, but still reads all its bytes
            image.load()
        self.remember(size, is_whole=True)
        return size

    def copy_in_memory(self) -> ImageRef:
        """Copy the image to a PNG file in memory. Returns: a reference to the copy. Raises: ImageError."""
        if self.is_copy:
            return self
        file = io.BytesIO()
        self.read().save(file, "PNG", compress_level=1)
        ref = ImageRef(file.getvalue(), self.where)
        ref.is_copy = True
        return ref

    def data_url(self) -> str:
        """The image as a data: URL. Raises: ImageError."""
        return "data:image/png;base64," + base64.b64encode(self.copy_in_memory().source).decode()

    def shared_by(self, read: Callable[[], Image]) -> ImageRef:
        """Return a copy of this reference. The method `read` of the copy calls the given function."""
        ref = copy.copy(self)
        ref.shared = read
        return ref

    @property
    def key(self) -> Hashable:
        """Key of the image's source. All references to the same file or dataset cell have the same key."""
        if isinstance(self.source, Path) or callable(self.source):
            source: Hashable = self.source
            return source
        return id(self.source)

    @property
    def name(self) -> str:
        """The image's name in messages, which is the path or a description of the source."""
        if isinstance(self.source, bytes):
            return f"of {len(self.source)} bytes"
        if isinstance(self.source, Path) or callable(self.source):
            return str(self.source)
        return "in memory"

    def __str__(self) -> str:
        """Return the path of a file, or the row and name of an image from another source."""
        return self.name if isinstance(self.source, Path) or not self.where else f"{self.where}, image {self.name}"

    def __repr__(self) -> str:
        """Return a short representation, without the image's bytes."""
        return f"ImageRef({self})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without `shared`, for pickling and copying."""
        return vars(self) | {"shared": None}

    @contextmanager
    def _open(self) -> Iterator[Image]:
        """Open the image, reading its header. Raises: ImageError for any error in opening it or in the `with` block."""
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("images need pillow: pip install 'grpo-lightning[vision]'.") from error
        source: Any = self.source
        try:
            source = source() if callable(source) else source
            if isinstance(source, Image.Image):
                yield source
                return
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                yield image
        except ImageError:  # the source's own message is more precise
            raise
        except Exception as error:  # Pillow's decoders raise errors without a common base class
            place = f"{self.where}: " if self.where else ""
            file = f" ({source})" if isinstance(source, Path) and source is not self.source else ""
            raise ImageError(f"{place}image {self.name}{file}: {_reason(error, source)}.") from error


def _reason(error: Exception, source: Any) -> str:
    """The reason why an image cannot be read, without a full stop."""
    from PIL import UnidentifiedImageError

    if isinstance(error, FileNotFoundError) and isinstance(source, Path):
        missing = next((folder for folder in reversed(source.parents) if not folder.exists()), None)
        return "no such file" if missing is None else f"no such file, and no folder {missing}"
    if isinstance(error, UnidentifiedImageError):
        begin = source[:12] if isinstance(source, bytes) else _beginning(source)
        return f"not an image, or in an unsupported format: it begins with {begin!r}" if begin else "it is empty"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    if isinstance(error, _UnusableError):
        return str(error)
    return f"it cannot be decoded: {str(error).rstrip('.') or type(error).__name__}"


def _beginning(source: Any) -> bytes:
    """The first 12 bytes of a file."""
    with open(source, "rb") as file:
        return file.read(12)


class _UnusableError(ValueError):
    """The error for an image that opens, but cannot be trained on."""


def _check_pixels(image: Image) -> None:
    """Raises: _UnusableError if the image has no pixels, or the values of black and white are unknown."""
    if 0 in image.size:
        raise _UnusableError(f"it has no pixels ({image.width} x {image.height})")
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise _UnusableError(
            f"it has 32-bit pixels (mode {image.mode!r}) with unknown values of black and white. Convert it to 8 bits"
        )


def _upright_size(image: Image) -> tuple[int, int]:
    """(width, height) of the image after turning it upright."""
    if image.format == "TIFF":
        image.load()  # also turns it upright
    _check_pixels(image)
    width, height = image.size
    return (height, width) if _orientation(image) in LYING else (width, height)


def _upright(image: Image) -> Image:
    """Apply the EXIF orientation.

    Pillow's `exif_transpose` is not used, because it rewrites all tags, and fails if a tag has the wrong type.
    """
    from PIL.Image import Transpose

    turn = TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(Transpose[turn])


def _orientation(image: Image) -> int:
    """The EXIF orientation; 1 is upright."""
    # Pillow turns a TIFF upright when loading it. A PNG without EXIF before its pixels counts as upright, because
    # Pillow would have to decode the pixels to search for EXIF after them.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    found = image.getexif().get(ORIENTATION, 1)
    return found if isinstance(found, int) else 1  # some files store text


def _rgb(image: Image) -> Image:
    """Convert an image to RGB. Transparency becomes white, and 16-bit gray becomes 8-bit."""
    from PIL import Image

    if image.mode.startswith("I"):  # convert("RGB") would clip all but the darkest values to white
        image = image.convert("I").point(lambda gray: gray / 257).convert("L")
    if "A" not in image.mode and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")
