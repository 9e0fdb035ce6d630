"""Images of prompts: where they are, read when they are needed."""

from __future__ import annotations

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
"""The EXIF tag that says how a camera was held."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The turn that puts an image upright, by the tag's value (EXIF 2.3, 4.6.4)."""

LYING = (5, 6, 7, 8)
"""Its values for images whose width and height change places when they are put upright."""


class ImageError(ValueError):
    """An image that cannot be read. The message names its row, the image and the reason."""


@dataclass(unsafe_hash=True, repr=False)  # Lightning takes no frozen ones in a batch
class ImageRef:
    """An image that is not read yet. Picklable where its source is."""

    source: Any
    """A `Path`, the bytes of a file, a PIL image, or a function that gives one of these."""

    where: str = ""
    """File and line of the row it belongs to, for error messages."""

    shared: Callable[[], Image] | None = field(default=None, init=False, compare=False)
    """Reads it for everybody who has it, perhaps ahead of time: set for the prompts of a batch, and never pickled."""

    known_size: tuple[int, int] | None = field(default=None, init=False, compare=False)
    """(width, height) once it was asked for."""

    is_whole: bool = field(default=False, init=False, compare=False)
    """True once all of its pixels were read, here or on another rank; its size alone is that of the header."""

    def read(self) -> Image:
        """The image in RGB and upright; transparent places are white.

        Do not draw on it: other prompts of the batch may have the same one. Copy it first.

        Raises:
            ImageError: If it cannot be read.
        """
        return self.decode() if self.shared is None else self.shared()

    def decode(self) -> Image:
        """The same, from the source itself."""
        with self._opened() as image:
            _check_pixels(image)
            return _rgb(_upright(image))

    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, upright, of the header alone, which is read once. Raises: ImageError as `read`."""
        if self.known_size is None:
            with self._opened() as image:
                self.remember(_upright_size(image))
        assert self.known_size is not None
        return self.known_size

    def remember(self, size: tuple[int, int], *, is_whole: bool = False) -> None:
        """Its (width, height), where it is known already, and whether all of its pixels were read to know it."""
        self.known_size, self.is_whole = size, self.is_whole or is_whole

    def check(self) -> tuple[int, int]:
        """(width, height) of an image all of whose pixels can be read. Raises: ImageError as `read`."""
        with self._opened() as image:
            size = _upright_size(image)
            if image is not self.source:
                image.draft("RGB", (1, 1))  # a JPEG at an eighth of its size: all its bytes are still gone through
            image.load()
        self.remember(size, is_whole=True)
        return size

    def shared_by(self, read: Callable[[], Image]) -> ImageRef:
        """The same image, read by `read`."""
        ref = copy.copy(self)
        ref.shared = read
        return ref

    @property
    def key(self) -> Hashable:
        """Equal for references to one file or cell."""
        if isinstance(self.source, Path) or callable(self.source):
            source: Hashable = self.source
            return source
        return id(self.source)

    @property
    def name(self) -> str:
        """Its name in messages: the path of a file, a description of other sources."""
        if isinstance(self.source, bytes):
            return f"of {len(self.source)} bytes"
        if isinstance(self.source, Path) or callable(self.source):
            return str(self.source)
        return "in memory"

    def __str__(self) -> str:
        """A file's path; other sources with their row."""
        return self.name if isinstance(self.source, Path) or not self.where else f"{self.where}, image {self.name}"

    def __repr__(self) -> str:
        """Short, whatever the source."""
        return f"ImageRef({self})"

    def __getstate__(self) -> dict[str, Any]:
        """All but `shared`: for pickle, and for a copy that somebody else shares."""
        return vars(self) | {"shared": None}

    @contextmanager
    def _opened(self) -> Iterator[Image]:
        """The image, its header read. Raises: ImageError for whatever goes wrong while it is open."""
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
        except ImageError:  # of a source that says for itself what is wrong
            raise
        except Exception as error:  # what Pillow's decoders raise for broken files has no common base
            place = f"{self.where}: " if self.where else ""
            raise ImageError(f"{place}image {self.name}: {_reason(error, source)}.") from error


def _reason(error: Exception, source: Any) -> str:
    """Why an image cannot be read, without a full stop."""
    from PIL import UnidentifiedImageError

    if isinstance(error, FileNotFoundError) and isinstance(source, Path):
        missing = next((folder for folder in reversed(source.parents) if not folder.exists()), None)
        return "no such file" if missing is None else f"no such file, and no folder {missing}"
    if isinstance(error, UnidentifiedImageError):
        begin = source[:12] if isinstance(source, bytes) else _beginning(source)
        return f"not an image, or of a kind that cannot be read: it begins with {begin!r}" if begin else "it is empty"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    if isinstance(error, _UnusableError):
        return str(error)
    return f"it cannot be decoded: {str(error).rstrip('.') or type(error).__name__}"


def _beginning(source: Any) -> bytes:
    """The first bytes of a file."""
    with open(source, "rb") as file:
        return file.read(12)


class _UnusableError(ValueError):
    """An image that could be opened, and still is none to train on."""


def _check_pixels(image: Image) -> None:
    """Raises: _UnusableError if there is not a single pixel, or nobody knows which values are black and white."""
    if 0 in image.size:
        raise _UnusableError(f"it has no pixels ({image.width} x {image.height})")
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise _UnusableError(f"its pixels are {image.mode!r}, of 32 bits: which are white? Convert it to 8 bits")


def _upright_size(image: Image) -> tuple[int, int]:
    """(width, height) of the image once it is upright."""
    if image.format == "TIFF":
        image.load()  # which turns it
    _check_pixels(image)
    width, height = image.size
    return (height, width) if _orientation(image) in LYING else (width, height)


def _upright(image: Image) -> Image:
    """The image as the camera was held.

    Turned here: Pillow's own `exif_transpose` writes all tags anew, and fails at one of the wrong type.
    """
    from PIL.Image import Transpose

    turn = TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(Transpose[turn])


def _orientation(image: Image) -> int:
    """The EXIF orientation; 1 is upright."""
    # Pillow turns a TIFF when it loads it. For a PNG that says nothing before its pixels, it would decode them to look.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    found = image.getexif().get(ORIENTATION, 1)
    return found if isinstance(found, int) else 1  # as text, it is no orientation


def _rgb(image: Image) -> Image:
    """The image in RGB: what is transparent becomes white, 16 bits of grey become 8."""
    from PIL import Image

    if image.mode.startswith("I"):  # converted as they are, all but the darkest would be white
        image = image.convert("I").point(lambda grey: grey / 257).convert("L")
    if "A" not in image.mode and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")
