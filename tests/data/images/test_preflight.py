"""All images are looked at before a run; bad ones are named or left out, and the same on every rank."""

from __future__ import annotations

import logging
import pickle
import threading
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images import preflight
from grpo_lightning.data.images.preflight import Preflight, check_given, survey
from grpo_lightning.data.images.references import ImageFinder
from grpo_lightning.data.lengths import Measured
from tests.helpers.tiny_vlms import picture


@pytest.fixture
def folder(tmp_path):
    """Two good images, one that is cut and one that is none."""
    for n in range(2):
        picture(n).save(tmp_path / f"{n}.jpg")
    whole = (tmp_path / "0.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no image")
    return tmp_path


def prompt_of(folder, *names, row=1, source="s", **columns):
    """A prompt of file f with these images."""
    where = f"f:{row}"
    return Measured(
        Prompt(
            "q", images=[ImageRef(folder / name, where) for name in names], columns=columns, source=source, index=row
        ),
        where=where,
    )


def rows(folder, *names):
    return [prompt_of(folder, name, row=number) for number, name in enumerate(names, start=1)]


def kept(found):
    return [m.prompt.index for m in found if m.prompt]


BAD = ["cut.jpg", "0.jpg", "gone.jpg", "1.jpg", "text.jpg"]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_every_bad_image_is_named(folder, num_workers):
    with pytest.raises(ValueError, match=r"^3 rows have unreadable images .*\(3 of 's'\):") as caught:
        Preflight(num_workers=num_workers).all(rows(folder, *BAD), {"s": "auto"})
    lines = str(caught.value).splitlines()
    assert [line[:6] for line in lines[1:-1]] == ["- f:1:", "- f:3:", "- f:5:"]
    for line, reason in zip(lines[1:-1], ["truncated", "no such file", "not an image"], strict=True):
        assert reason in line
    assert "image_root" in lines[-1]
    assert "data.bad_images 'drop'" in lines[-1]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_bad_images_are_dropped_and_counted_by_source(folder, caplog, num_workers):
    data = [*rows(folder, *BAD), prompt_of(folder, "0.jpg", "gone.jpg", row=6, source="t")]
    found = Preflight("drop", num_workers).all(data, {"s": "auto", "t": "auto"})
    assert kept(found) == [2, 4]
    assert [m.where for m in found] == [m.where for m in data]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "4 rows with bad images or boxes are dropped (3 of 's', 1 of 't'):" in record.getMessage()
    assert record.getMessage().count("\n- ") == 3, "an image that two rows have is said once"
    assert "gone.jpg: no such file. It is in 1 more rows." in record.getMessage()


def test_good_images_change_nothing(folder):
    data = [*rows(folder, "0.jpg", "1.jpg"), Measured(Prompt("text", index=3)), Measured(None)]
    found = Preflight().all(data, {"s": "auto"})
    assert found == data
    assert all(one.prompt is other.prompt for one, other in zip(found, data, strict=True))


def test_text_alone_is_not_looked_at():
    with mock.patch.object(preflight, "survey", side_effect=AssertionError):
        assert Preflight().all([Measured(Prompt("text"))], {}) == [Measured(Prompt("text"))]


def test_a_message_has_an_end(folder):
    names = [f"{n}.png" for n in range(100, 130)]
    with pytest.raises(ValueError, match="30 rows have unreadable images") as caught:
        Preflight().all(rows(folder, *names), {"s": "auto"})
    assert str(caught.value).count("\n- f:") == 20
    assert "\n- and 10 more.\n" in str(caught.value)


def test_an_image_of_many_rows_is_read_once(folder):
    with mock.patch.object(Image, "open", wraps=Image.open) as opened:
        Preflight().all(rows(folder, *["0.jpg", "1.jpg"] * 10), {"s": "auto"})
    assert opened.call_count == 2


def test_sizes_are_known_afterwards(folder):
    data = rows(folder, "0.jpg", "0.jpg")
    Preflight().all(data, {"s": "auto"})
    with mock.patch.object(Image, "open", side_effect=AssertionError):
        assert [m.prompt.images[0].size() for m in data] == [(84, 56)] * 2


def test_threads_read_at_the_same_time(folder, monkeypatch):
    meeting = threading.Barrier(3, timeout=20)
    monkeypatch.setattr(preflight, "_look_at", lambda _: (meeting.wait(), (1, 1))[1])
    images = [ImageRef(folder / f"{n}") for n in range(6)]
    assert list(survey(images, 3).values()) == [(1, 1)] * 6


def test_a_progress_bar_for_many(folder, monkeypatch, capfd):
    monkeypatch.setattr(preflight, "MANY", 2)
    for names, is_shown in ((["0.jpg", "1.jpg"], False), (["0.jpg", "1.jpg", "cut.jpg"], True)):
        survey([ImageRef(folder / name) for name in names], 0)
        assert ("Checking images" in capfd.readouterr().err) == is_shown


def test_what_is_no_image_stands_in_the_list(folder):
    data = rows(folder, "cut.jpg", "0.jpg")
    for number, value in enumerate([3, {"foo": 1}, "https://x.org/a.png"], start=3):
        image = ImageFinder(f"f:{number}").ref(value, "column 'image'")
        data.append(Measured(Prompt("q", images=[image], source="s", index=number), where=f"f:{number}"))
    with pytest.raises(ValueError, match=r"^4 rows have unreadable images") as caught:
        Preflight().all(data, {"s": "auto"})
    lines = str(caught.value).splitlines()[1:-1]
    assert [line[:6] for line in lines] == ["- f:1:", "- f:3:", "- f:4:", "- f:5:"]
    for line, reason in zip(lines[1:], ["got 3.", "got {'foo': 1}.", "is on the web"], strict=True):
        assert reason in line
    assert kept(Preflight("drop").all(data, {"s": "auto"})) == [2]


def test_prompts_without_a_mixture_are_read_once(folder):
    prompts = [m.prompt for m in rows(folder, "0.jpg", "1.jpg")]
    prompts.append(prompt_of(folder, "0.jpg", solution=[9, 9, 1, 1]).prompt)  # which is for a reward to say
    with mock.patch.object(Image, "open", wraps=Image.open) as opened:
        for _ in range(2):
            check_given(prompts, 0)
    assert opened.call_count == 2
    check_given([Prompt("text alone")], 0)


def test_images_whose_size_was_asked_for_are_still_read(folder):
    """A filter of the user's may have done it, or a check of lengths; the header of one that is cut is whole."""
    prompts = [m.prompt for m in rows(folder, "0.jpg", "cut.jpg")]
    assert [prompt.images[0].size() for prompt in prompts] == [(84, 56)] * 2
    with pytest.raises(ValueError, match=r"^1 row has unreadable images[^\n]*\n- f:2: .*truncated"):
        check_given(prompts, 0)


def test_what_a_mixture_has_read_is_not_read_again(folder):
    """Whichever of the rows with an image it read: those of another rank too."""
    data = rows(folder, "0.jpg", "1.jpg", "0.jpg")
    with mock.patch.multiple(preflight, world_size=lambda: 2, gather_objects=lambda own: [own, {}]):
        Preflight().all(data, {"s": "auto"})
    with mock.patch.object(preflight, "survey", side_effect=AssertionError):
        check_given([m.prompt for m in data], 0)


def test_what_one_rank_has_not_looked_at_all_look_at(folder, monkeypatch):
    """Looking has a collective, so that one rank must not leave it to the others."""
    prompts = [m.prompt for m in rows(folder, "0.jpg", "1.jpg")]
    check_given(prompts, 0)
    asked = []
    monkeypatch.setattr(preflight, "any_over_ranks", lambda is_own: asked.append(is_own) or True)
    with mock.patch.object(preflight, "survey", wraps=survey) as surveyed:
        check_given(prompts, 0)
    assert asked == [False]
    assert surveyed.call_count == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_without_a_mixture_are_named(folder, num_workers):
    prompts = [m.prompt for m in rows(folder, *BAD)]
    with pytest.raises(ValueError, match=r"^3 rows have unreadable images .* \(3 of 's'\):\n- f:1: ") as caught:
        check_given(prompts, num_workers)
    assert str(caught.value).endswith("\nFix them, or remove their rows.")
    with pytest.raises(ValueError, match=r"^1 row has unreadable images or invalid boxes:\n- f:1: "):
        check_given([replace(prompts[0], source="")], num_workers)


# -------------------------------------------------------------------------------------------------------------- ranks


@given(st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_every_rank_finds_what_one_finds(world_size, count):
    """Each decodes its share, all look at every header, and what is cut is known to all."""
    whole = ImageRef(picture(0).tobytes()).source  # no image at all
    images = [ImageRef(bytes([n]) + whole, f"f:{n}") for n in range(count)]
    decoded = []
    own = []

    def as_rank(rank, gather):
        def look_at(task):
            image, is_whole = task
            if not is_whole:
                return 1, 1
            decoded.append(image.where)
            return ImageError(f"{image.where} is cut.")

        patches = {
            "rank": lambda: rank,
            "world_size": lambda: world_size,
            "gather_objects": gather,
            "_look_at": look_at,
        }
        with mock.patch.multiple(preflight, **patches):
            return survey(images, 0)

    for rank in range(world_size):
        as_rank(rank, lambda value: own.append(value) or [value])
    assert sorted(decoded) == sorted(image.where for image in images), "every image is decoded by one rank"
    found = [as_rank(rank, lambda _: own) for rank in range(world_size)]
    expected = [f"{image.where} is cut." for image in images]
    assert [[str(error) for error in of_rank.values()] for of_rank in found] == [expected] * world_size


def test_a_file_that_only_one_rank_lacks_is_left_out_everywhere(folder):
    def gather(own):
        return [own, {1: "f:2: image b: no such file."}]

    with mock.patch.multiple(preflight, world_size=lambda: 2, gather_objects=gather):
        assert kept(Preflight("drop").all(rows(folder, "0.jpg", "1.jpg"), {"s": "auto"})) == [1]


# -------------------------------------------------------------------------------------------------------------- boxes


def test_boxes_are_checked_with_their_images(folder):
    data = [
        prompt_of(folder, "0.jpg", row=1, solution=[0, 0, 84, 56]),
        prompt_of(folder, "0.jpg", row=2, solution=[0, 0, 100, 56]),
        prompt_of(folder, "gone.jpg", row=3, solution=[9, 9, 1, 1]),
        prompt_of(folder, "0.jpg", row=4, solution=[1, 2, 3, "4"]),
        prompt_of(folder, row=5, solution=[9, 9, 1, 1]),
    ]
    with pytest.raises(ValueError, match="3 rows have unreadable images or invalid boxes") as caught:
        Preflight().all(data, {"s": "auto"})
    lines = str(caught.value).splitlines()[1:-1]
    assert "f:2: the box [0, 0, 100, 56] is not inside its image, which is 84 x 56." in lines[0]
    assert "set boxes: none" in lines[0]
    assert "f:3: image" in lines[1]
    assert "f:4: the box [1, 2, 3, '4'] must be four finite numbers, got '4'" in lines[2]
    assert kept(Preflight("drop").all(data, {"s": "auto"})) == [1, 5]
    with pytest.raises(ValueError, match="1 row has"):
        Preflight().all(data, {"s": "none"})


def test_boxes_by_what_their_source_has(folder):
    data = [
        prompt_of(folder, "0.jpg", solution=[0, 500, 500, 1000]),
        prompt_of(folder, "0.jpg", source="t", solution="B"),
    ]
    found = Preflight().all(data, {"s": "norm1000", "t": "auto"})
    assert [m.prompt.columns["solution"] for m in found] == [[0, 28, 42, 56], "B"]
    assert data[0].prompt.columns["solution"] == [0, 500, 500, 1000], "the row must stay as it is"
    with pytest.raises(ValueError, match="2 rows"):
        Preflight().all(data, {"s": "auto", "t": "original"})


# ------------------------------------------------------------------------------------------------------------ streams


def test_one_row_of_a_stream(folder, caplog):
    good, bad = rows(folder, "0.jpg", "cut.jpg")
    assert Preflight().one(good, "auto") is good
    with pytest.raises(ValueError, match=r"^f:2: image .*truncated"):
        Preflight().one(bad, "auto")
    assert Preflight("drop").one(bad, "auto") == Measured(None, where="f:2")
    assert "Dropped by data.bad_images: f:2: image" in caplog.text
    boxed = prompt_of(folder, "0.jpg", solution=[0, 0, 500, 1000])
    with pytest.raises(ValueError, match=r"^f:1: the box"):
        Preflight().one(boxed, "original")
    assert Preflight().one(boxed, "norm1000").prompt.columns["solution"] == [0, 0, 42, 56]


def test_it_goes_to_other_processes():
    assert pickle.loads(pickle.dumps(Preflight("drop", 3))) == Preflight("drop", 3)


def test_a_wrong_setting_is_named():
    with pytest.raises(ValueError, match=r"data\.bad_images must be one of error, drop, got 'replace'"):
        Preflight("replace")
