"""An image is read upright and in RGB, or says why it cannot be."""

from __future__ import annotations

import io
import pickle
import struct
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_lightning.core.images import ImageError, ImageRef
from tests.helpers.tiny_vlms import picture
from tests.marks import SLOW

ORIENTATIONS = range(1, 9)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


PNG = encoded(picture(0))
JPEG = encoded(picture(0), "JPEG")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(PNG)
    return tmp_path / "a.png"


def test_every_source_gives_the_same_image(path: Path):
    sources = [path, PNG, picture(0), lambda: path, lambda: PNG]
    for source in sources:
        ref = ImageRef(source)
        assert (ref.read().mode, ref.size(), ref.check()) == ("RGB", (84, 56), (84, 56))
        assert np.array_equal(pixels(ref.read()), pixels(picture(0)))


def test_an_image_in_memory_is_left_as_it_is():
    image = picture(0).convert("L")
    before = pixels(image).copy()
    ref = ImageRef(image)
    ref.check()
    ref.read().paste(0, (0, 0, 10, 10))
    assert image.mode == "L"
    assert np.array_equal(pixels(image), before)


def test_checking_a_jpeg_that_somebody_has_open_does_not_shrink_it(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(JPEG)
    with Image.open(tmp_path / "a.jpg") as image:
        assert ImageRef(image).check() == (84, 56)
        assert ImageRef(image).read().size == (84, 56)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_images_are_upright(kind: str, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = Image.new("RGB", (64, 32), "black")
    upright.paste("white", (0, 0, 16, 16))  # at the top, to the left
    turns = [None, 0, 3, 1, 5, 2, 6, 4]  # what each orientation undoes
    turned = upright if orientation == 1 else upright.transpose(turns[orientation - 1])
    ref = ImageRef(encoded(turned, kind, exif=exif))
    seen = ref.read()
    assert seen.size == ref.size() == ref.check() == (64, 32)
    assert pixels(seen)[8, 8, 0] > 200
    assert pixels(seen)[:, 32:].max() < 50
    assert pixels(seen)[24:].max() < 50


def test_the_size_of_a_file_is_in_its_header(path: Path):
    with mock.patch("PIL.ImageFile.ImageFile.load", side_effect=AssertionError("the pixels were read")):
        assert ImageRef(path).size() == ImageRef(JPEG).size() == (84, 56)
        with pytest.raises(ImageError, match="the pixels were read"):
            ImageRef(path).read()


def test_the_header_is_read_once(path: Path):
    for first in (ImageRef.size, ImageRef.check):
        ref = ImageRef(path)
        first(ref)
        copies = [ref, pickle.loads(pickle.dumps(ref)), ref.shared_by(ref.decode)]
        with mock.patch.object(Image, "open", side_effect=AssertionError):
            assert [copy.size() for copy in copies] == [(84, 56)] * 3


def test_whether_all_of_an_image_was_read_is_known():
    """Its size says nothing of it: that of one that is cut can be read."""
    ref = ImageRef(JPEG[: len(JPEG) // 2])
    ref.size()
    with pytest.raises(ImageError):
        ref.check()
    assert not ref.is_whole
    ref = ImageRef(JPEG)
    ref.size()
    assert not ref.is_whole
    ref.check()
    ref.size()
    assert [copy.is_whole for copy in (ref, pickle.loads(pickle.dumps(ref)), ref.shared_by(ref.decode))] == [True] * 3


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((1, 1), (200, 0, 0, 255))
    palette = clear.convert("P")
    palette.info["transparency"] = bytes([0, *[255] * 255])
    for image in (clear, clear.convert("LA"), ImageRef(encoded(clear)).source):
        seen = pixels(ImageRef(image).read())
        assert (seen[0, 0] == 255).all()
        assert not (seen[1, 1] == 255).all()
    assert (pixels(ImageRef(palette).read())[0, 0] == 255).all()


def test_sixteen_bits_of_gray():
    deep = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    assert pixels(ImageRef(encoded(deep)).read())[0, :, 0].tolist() == [0, 100, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16"])
def test_every_mode_is_rgb(mode: str):
    assert ImageRef(Image.new(mode, (4, 3))).read().mode == "RGB"


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"<html>not found</html>", r"not an image, or in an unsupported format: it begins with b'<html>not fo'"),
        (PNG[:-40], "it cannot be decoded: image file is truncated"),
        (JPEG[: len(JPEG) // 2], r"it cannot be decoded: image file is truncated \(\d+ bytes not processed\)"),
        (JPEG[:40], "."),
        (encoded(Image.new("F", (4, 4)), "TIFF"), "it has 32-bit pixels \\(mode 'F'\\)"),
        (encoded(Image.new("I", (4, 4)), "TIFF"), "it has 32-bit pixels \\(mode 'I'\\)"),
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_a_broken_image_is_named_with_row_and_reason(tmp_path: Path, content: bytes, reason: str, is_file: bool):
    (tmp_path / "a.png").write_bytes(content)
    ref = ImageRef(tmp_path / "a.png" if is_file else content, "train.jsonl:7")
    name = str(tmp_path / "a.png") if is_file else f"of {len(content)} bytes"
    for look in (ref.read, ref.check):
        with pytest.raises(ImageError, match=f"^train.jsonl:7: image {name}: {reason}.*\\.$"):
            look()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("gone.png", "no such file"),
        ("no/folder/a.png", "no such file, and no folder {folder}/no"),
        (".", "is a directory"),
        (Image.new("RGB", (0, 5)), r"it has no pixels \(0 x 5\)"),
        (lambda: 1 / 0, "it cannot be decoded: division by zero"),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, source: Any, reason: str):
    ref = ImageRef(tmp_path / source if isinstance(source, str) else source, "f:1")
    for look in (ref.read, ref.check, ref.size):
        with pytest.raises(ImageError, match=rf"^f:1: image .*: {reason.format(folder=tmp_path)}\.$"):
            look()


def test_a_file_that_is_too_large_is_named(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 84 * 56 // 2 - 1)
    with pytest.raises(ImageError, match="exceeds limit"):
        ImageRef(path).read()


@SLOW
@given(st.sampled_from([PNG, JPEG]), st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_wrong_with_a_file_is_an_image_error(content: bytes, data: st.DataObject):
    broken = bytearray(content[: data.draw(st.integers(1, len(content)))])
    for place in data.draw(st.lists(st.integers(0, len(broken) - 1), max_size=4)):
        broken[place] = data.draw(st.integers(0, 255))
    ref = ImageRef(bytes(broken), "f:1")
    with mock.patch("warnings.warn"):  # Pillow's, of odd files that it can read
        try:
            size = ref.check()
        except ImageError as error:
            assert str(error).startswith("f:1: image of")  # noqa: PT017 - most are broken, and all are named
        else:
            assert ref.read().size == size


def test_every_cut_of_a_jpeg_is_found():
    for length in range(1, len(JPEG) - 2, 17):  # the last two bytes only say that it ends
        with pytest.raises(ImageError):
            ImageRef(JPEG[:length]).check()


# ------------------------------------------------------------------------------------------------- names and copies


def test_what_logs_say(path: Path):
    assert str(ImageRef(path, "f:1")) == str(path)
    assert str(ImageRef(PNG, "f:1")) == f"f:1, image of {len(PNG)} bytes"
    assert str(ImageRef(PNG)) == f"of {len(PNG)} bytes"
    assert str(ImageRef(picture(0), "f:1")) == "f:1, image in memory"
    assert repr(ImageRef(path)) == f"ImageRef({path})"
    assert len(repr(ImageRef(b"x" * 10_000))) < 50


def test_one_file_has_one_key(path: Path):
    assert ImageRef(path, "f:1").key == ImageRef(Path(str(path)), "f:2").key
    assert ImageRef(path).key != ImageRef(path.with_name("b.png")).key
    image = picture(0)
    assert ImageRef(image).key == ImageRef(image).key != ImageRef(picture(0)).key


def test_it_goes_to_other_processes_without_what_it_shares(path: Path):
    for source in (path, PNG):
        ref = ImageRef(source, "f:1").shared_by(time.time)
        there = pickle.loads(pickle.dumps(ref))
        assert (there, there.shared) == (ref, None)
        assert there.read().size == (84, 56)


def test_shared_images_are_read_by_who_shares_them(path: Path):
    ref = ImageRef(path, "f:1")
    other = picture(1)
    shared = ref.shared_by(lambda: other)
    assert shared.read() is other
    assert (ref.shared, shared == ref, shared.key == ref.key) == (None, True, True)
    assert np.array_equal(pixels(shared.decode()), pixels(picture(0)))


def test_a_missing_package_is_named(path: Path):
    with mock.patch.dict("sys.modules", {"PIL": None}), pytest.raises(ImportError, match=r"grpo-lightning\[vision\]"):
        ImageRef(path).read()


def exif(*entries):
    """The bytes of an EXIF block: (tag, type, count, four bytes) each."""
    rows = b"".join(struct.pack("<HHI4s", *entry) for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + rows + b"\0\0\0\0"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_wrong_tag_beside_the_orientation_does_no_harm(tmp_path, orientation):
    """Cameras write such; turning by writing all tags anew fails on it, in the middle of a run."""
    upright = 0x0112, 3, 1, struct.pack("<HH", orientation, 0)
    plain = PIL.Image.fromarray(np.random.RandomState(0).randint(0, 255, (10, 20, 3), dtype=np.uint8))
    for name, entries in (("good", [upright]), ("odd", [(0x0100, 2, 4, b"wid\0"), upright])):
        plain.save(tmp_path / f"{name}.jpg", exif=exif(*entries))
    with PIL.Image.open(tmp_path / "good.jpg") as image:
        want = PIL.ImageOps.exif_transpose(image)
    for name in ("good", "odd"):
        found = ImageRef(tmp_path / f"{name}.jpg")
        assert found.size() == want.size
        assert found.read().tobytes() == want.tobytes()


def test_an_orientation_that_is_text_is_none(tmp_path):
    PIL.Image.new("RGB", (20, 10)).save(tmp_path / "text.jpg", exif=exif((0x0112, 2, 2, b"6\0\0\0")))
    found = ImageRef(tmp_path / "text.jpg")
    assert found.size() == found.read().size == (20, 10)
