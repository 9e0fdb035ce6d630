"""Whatever a row holds for an image becomes a reference, or is named."""

import base64
import pickle
from pathlib import Path

import pytest

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.data.images.references import ImageFinder, RemoteFile, has_empty_column, is_empty, unread_column
from tests.helpers.tiny_vlms import picture

FINDER = ImageFinder("f.jsonl:3", Path("/data"))
URI = "data:image/png;base64," + base64.b64encode(b"pixels").decode()


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("a.png", Path("/data/a.png")),
        ("in/../a.png", Path("/data/a.png")),
        ("/b/a.png", Path("/b/a.png")),
        (Path("a.png"), Path("/data/a.png")),
        ("~/a.png", Path("~/a.png").expanduser()),
        ("file:///b/a%20b.png", Path("/b/a b.png")),
        ("file:a.png", Path("/data/file:a.png")),
        ({"bytes": None, "path": "a.png"}, Path("/data/a.png")),
        ({"bytes": b"pixels", "path": "a.png"}, b"pixels"),
        (b"pixels", b"pixels"),
        (bytearray(b"pixels"), b"pixels"),
        (URI, b"pixels"),
        ("zip://a.png::/b.zip", RemoteFile("zip://a.png::/b.zip")),
    ],
)
def test_what_an_image_may_be(value, source):
    ref = FINDER.ref(value, "column 'image'")
    assert (ref.source, ref.where) == (source, "f.jsonl:3")


def test_paths_begin_in_the_current_folder_without_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ref = ImageFinder("f").ref("a.png", "it")
    monkeypatch.chdir("/")
    assert ref.source == tmp_path / "a.png"


def test_images_in_memory_and_references_stay_themselves():
    image = picture(0)
    assert FINDER.ref(image, "it").source is image
    ref = ImageRef(image, "other:1")
    assert FINDER.ref(ref, "it") is ref
    assert FINDER.ref(ImageRef(image), "it").where == "f.jsonl:3"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"must be an image \(a path, .* got 3"),
        (None, "must be an image .* got None"),
        (["a.png"], r"must be an image .* got \['a.png'\]"),
        ("  ", "must be the path of an image, got '  '"),
        ({"bytes": None, "path": None}, "must look like .* and have one of them"),
        ({"url": "a.png"}, "must look like"),
        ("https://x.org/a.png", "is on the web .* Download the images once"),
        ("HTTP://x.org/a.png", "is on the web"),
        ("file://[abc/x.png", r"must be the URL of a file, got 'file://\[abc/x\.png': .*IPv6"),
        ("data:text/plain;base64,QQ==", "must look like data:image/png;base64"),
        ("data:image/png,QQ==", "must look like data:image/png;base64"),
        ("data:image/png;base64,Q!", "is a data: URI with invalid base64"),
    ],
)
def test_what_it_may_not_be(value, message):
    ref = FINDER.ref(value, "column 'image'")
    for read in (ref.check, ref.size, ref.read, pickle.loads(pickle.dumps(ref)).read):
        with pytest.raises(ImageError, match=rf"^f\.jsonl:3: column 'image' {message}"):
            read()
    assert str(ref) == "f.jsonl:3, image (invalid)"


def test_long_values_are_cut_in_messages():
    for value in ("data:" + "x" * 10_000, "https://" + "x" * 10_000, ["x"] * 10_000):
        with pytest.raises(ImageError, match=r"f\.jsonl") as caught:
            FINDER.ref(value, "it").read()
        assert len(str(caught.value)) < 350


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), ("", True), ([], True), ((), True), ("a", False), (b"", False), (0, False)]
)
def test_empty_columns(value, expected):
    assert is_empty(value) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, False),
        ({"image": None}, True),
        ({"images": [], "other": 1}, True),
        ({"image": "", "images": []}, True),
        ({"image": "", "images": ["a.png"]}, False),
    ],
)
def test_rows_with_a_place_for_an_image_and_none(columns, expected):
    assert has_empty_column(columns) == expected


def test_columns_keep_their_shape():
    columns = {"image": "a.png", "other": 1}
    found, images = FINDER.columns(columns)
    assert (found, images) == ({"image": images[0], "other": 1}, [ImageRef(Path("/data/a.png"), "f.jsonl:3")])
    assert columns["image"] == "a.png"
    found, images = FINDER.columns({"images": ("a.png", "b.png")})
    assert found == {"images": images}
    assert [image.source.name for image in images] == ["a.png", "b.png"]
    assert FINDER.columns({"image": "", "images": ["a.png"]})[0]["image"] == ""


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ({"image_path": "a.png"}, "image_path"),
        ({"img": "a.JPG", "n": 1}, "img"),
        ({"input_images": ["a.webp", "b.webp"]}, "input_images"),
        ({"image": None, "image_path": "a.png"}, None),  # a column for images, which is empty
        ({"image_path": "the path"}, None),
        ({"imagination": "a.png", "figure": "b.png", "images_count": 3}, None),
        ({"photos": []}, None),
    ],
)
def test_columns_that_look_like_images(columns, column):
    assert unread_column(columns) == column
