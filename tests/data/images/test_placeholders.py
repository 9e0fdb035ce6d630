"""Images stand where the text says, and are as many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core.images import ImageRef
from grpo_lightning.data.images.placeholders import IMAGE, place_images
from grpo_lightning.data.images.references import ImageFinder

FINDER = ImageFinder("f:1")


def refs(count):
    return [ImageRef(bytes([number])) for number in range(count)]


def words(message):
    """A message as it was written."""
    return "".join(part.get("text", IMAGE) for part in message["content"])


@given(st.lists(st.text(max_size=5).filter(lambda text: IMAGE not in text), min_size=2, max_size=6))
def test_nothing_of_a_text_is_lost(pieces):
    images = refs(len(pieces) - 1)
    (message,), placed = place_images([{"role": "user", "content": IMAGE.join(pieces)}], images, FINDER)
    assert words(message) == IMAGE.join(pieces)
    assert placed == images
    assert all(part["text"] for part in message["content"] if part["type"] == "text")


@given(st.integers(1, 4), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4))
def test_without_a_place_they_come_first(count, texts):
    messages = [{"role": "system", "content": "s"}, *({"role": "user", "content": text} for text in texts)]
    found, placed = place_images(messages, refs(count), FINDER)
    assert [words(message) for message in found] == ["s", IMAGE * count + texts[0], *texts[1:]]
    assert placed == refs(count)


def test_a_chat_without_images_comes_back_as_it_is():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [1]}]
    found, placed = place_images(messages, [], FINDER)
    assert (found, placed) == (messages, [])
    assert found[0] is messages[0]


def test_own_images_of_parts_and_those_of_the_column_keep_their_order():
    own = {"type": "image", "image": b"own", "text": None}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": f"a{IMAGE}b"}, own, {"type": "image", "url": None}]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "user", "content": f"c{IMAGE}"},
    ]
    found, placed = place_images(messages, refs(3), FINDER)
    assert [ref.source for ref in placed] == [b"\0", b"own", b"\1", b"\2"]
    assert [words(message) for message in (found[0], found[2])] == [f"a{IMAGE}b{IMAGE}{IMAGE}", f"c{IMAGE}"]
    assert {tuple(part) for m in found for part in m["content"] or () if part["type"] == "image"} == {("type",)}
    assert own == {"type": "image", "image": b"own", "text": None}, "the row must stay as it is"


def test_a_part_with_bytes_as_datasets_writes_them():
    part = {"type": "image", "image": {"bytes": b"own", "path": None}}
    assert place_images([{"role": "user", "content": [part]}], [], FINDER)[1][0].source == b"own"


@given(st.integers(0, 4), st.integers(0, 4))
def test_as_many_places_as_images(num_places, num_images):
    messages = [{"role": "user", "content": "x" + IMAGE * num_places}]
    if num_places in (0, num_images):
        assert len(place_images(messages, refs(num_images), FINDER)[1]) == num_images
        return
    message = rf"^f:1: the prompt has {num_places} image placeholders .* the row has {num_images or 'no image'}"
    with pytest.raises(ValueError, match=message):
        place_images(messages, refs(num_images), FINDER)
