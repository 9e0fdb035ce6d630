"""Placing the images of a prompt in its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Message
from grpo_lightning.data.images.references import ImageFinder, is_empty

IMAGE = "<image>"
"""The placeholder of an image in text."""

SOURCES = ("image", "path", "url", "image_url")
"""Keys under which a message part can hold its own image."""


def place_images(
    messages: Sequence[Message], images: Sequence[ImageRef], finder: ImageFinder
) -> tuple[list[Message], list[ImageRef]]:
    """Add a part `{"type": "image"}` to the messages for every image.

    A message part can hold an image of its own. The images of the row's image column are assigned, in order, to the
    placeholders `<image>` in the text and to the image parts that hold no image. If the messages have neither
    placeholders nor image parts, all images are prepended to the first user turn.

    Returns:
        Two lists. The first one has the messages, with every content converted to a list of parts. The second one has
        all images, in the order of the image parts. For a chat without images, the messages are unchanged, and the
        second list is empty.

    Raises:
        ValueError: If the number of images in the image column differs from the number of places for them in the
            messages, or there is no user turn for them.
    """
    placed = [_with_parts(message, finder, f"message {number}") for number, message in enumerate(messages, start=1)]
    slots = [part for message in placed for part in _image_parts(message)]
    if not slots and not images:
        return list(messages), []
    if not slots:
        slots = [{"type": "image"} for _ in images]
        _put_first(placed, slots, finder.where)
    num_open = sum("ref" not in slot for slot in slots)
    if num_open != len(images):
        raise ValueError(_count_error(num_open, len(images), finder.where))
    left = iter(images)
    refs = [slot.pop("ref") if "ref" in slot else next(left) for slot in slots]
    done: list[Message] = [*placed]
    return done, refs


def _count_error(num_places: int, num_images: int, where: str) -> str:
    """The error for a row with more or fewer placeholders than images."""
    counts = f"{where}: the prompt has {num_places} image placeholders ({IMAGE}, or image parts) and the row"
    if not num_images:
        return (
            f"{counts} has no image (column 'image' or 'images'). Add it, or remove the placeholder if the question "
            "can be answered without it."
        )
    return (
        f"{counts} has {num_images} images in its column. Write one {IMAGE} per image, or none to prepend all images."
    )


def _with_parts(message: Message, finder: ImageFinder, name: str) -> dict[str, Any]:
    """Convert a message's content to a list of parts, and placeholders to image parts."""
    content = message.get("content")
    if content is None:
        return dict(message)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    split: list[dict[str, Any]] = []
    for number, part in enumerate(parts, start=1):
        if part["type"] == "text":
            split += _split(part["text"])
        elif part["type"] in ("image", "image_url"):
            split.append(_own_image(part, finder, f"{name}, part {number}"))
        else:
            split.append(dict(part))
    return {**message, "content": split}


def _split(text: str) -> Iterator[dict[str, Any]]:
    """Split a text at its placeholders into text and image parts."""
    for number, piece in enumerate(text.split(IMAGE)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _own_image(part: Mapping[str, Any], finder: ImageFinder, what: str) -> dict[str, Any]:
    """Convert an image part. If the part holds an image of its own, the result has a reference to it under `ref`."""
    given = [part[name] for name in SOURCES if not is_empty(part.get(name))]
    if not given:
        if part["type"] == "image_url":
            raise ValueError(
                f'{finder.where}: {what} must look like {{"type": "image_url", "image_url": {{"url": ...}}}}, got '
                f"{dict(part)!r:.80}."
            )
        return {"type": "image"}
    # `image_url` may be nested; other mappings are images in the storage format of `datasets`.
    value = given[0]["url"] if isinstance(given[0], Mapping) and "url" in given[0] else given[0]
    return {"type": "image", "ref": finder.ref(value, what)}


def _image_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The image parts of a message."""
    return [part for part in message.get("content") or () if part["type"] == "image"]


def _put_first(messages: Sequence[dict[str, Any]], slots: Sequence[dict[str, Any]], where: str) -> None:
    """Prepend image parts to the first user turn. Raises: ValueError if there is no user turn."""
    turn = next((message for message in messages if message["role"] == "user" and message.get("content")), None)
    if turn is None:
        raise ValueError(f"{where}: the row has an image, but no user turn to put it in.")
    turn["content"] = [*slots, *turn["content"]]
