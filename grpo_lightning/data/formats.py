"""Row formats: which column of a row is the prompt, and how it is read.

One line of `PROMPT_COLUMNS` per format: a new format is a new line. The first one that a row has is the prompt.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Message, Prompt
from grpo_lightning.data.images.placeholders import place_images
from grpo_lightning.data.images.references import ImageFinder
from grpo_lightning.data.templates import PromptTemplate

log = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a chat. Others ("human", "gpt") are skipped without a word by many chat templates."""

SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""The roles of a `conversations` column by its own words."""

MEDIA_COLUMNS = ("video", "videos", "audio", "audios")
"""Columns that hold what no policy here can take."""


def to_prompt(
    row: Mapping[str, Any],
    *,
    where: str,
    index: int = -1,
    source: str = "",
    template: PromptTemplate | None = None,
    folder: Path | None = None,
) -> Prompt:
    """Turn one row of data into a prompt; the columns that are not the prompt go to the rewards.

    The prompt is the first of `PROMPT_COLUMNS` that the row has. Math data sets have their question both as `problem`
    and as `messages` with a worked answer: the text wins, so that a question template can be put around it.

    Images come from the column `image` or `images`, or are parts of messages (see `place_images`). No file is opened:
    prompt and column have references. A row with images is always a chat, and has the system prompt like any other
    (VLM-R1 gives it to rows without images only).

    Args:
        row: The row, by column name. A prompt column that is None counts as absent.
        where: File and line, for error messages.
        index: The prompt's position in the data set.
        source: The mixture entry the row came from.
        template: What is put around the text.
        folder: Where relative paths of images begin; None for the current folder.

    Raises:
        ValueError: If none of `PROMPT_COLUMNS` is there, its content is not a prompt, or its images do not go with its
            text.
    """
    found = [column for column in PROMPT_COLUMNS if row.get(column) is not None]
    if not found:
        raise ValueError(
            f"{where}: the row has no prompt column; its columns are: {', '.join(map(str, row)) or 'none'}. "
            f"One of {', '.join(PROMPT_COLUMNS)} must be there: rename a column (columns: {{old: new}})."
        )
    template = template or PromptTemplate()
    column = PROMPT_COLUMNS[found[0]]
    finder = ImageFinder(where, folder)
    columns, images = finder.columns({name: value for name, value in row.items() if column.is_kept or name != found[0]})
    if found[0] == "conversations":
        content, answer = _conversation(row[found[0]], template, f"{where}: column {found[0]!r}")
        if answer is not None and columns.get("solution") is None:
            columns["solution"] = answer
    else:
        content = column.read(row[found[0]], f"{where}: column {found[0]!r}")
        # Text to go on with has no place for an image: with one, it is a question.
        content = template.render(content, is_question=column.is_question or bool(images), where=where)
    if not images:
        _check_no_image_is_lost(row, found, where)
    content, images = _placed(content, images, finder)
    return Prompt(
        content=content,
        images=images,
        columns=columns,
        index=index,
        source=source,
        chat_template_kwargs=dict(template.chat_template_kwargs),
        where=where,
        prompt_column=found[0],
    )


def unused_prompt_columns(prompt: Prompt) -> list[str]:
    """The columns of a row that hold a prompt as well, and are not the one that was taken."""
    if not prompt.prompt_column:
        return []
    names = list(PROMPT_COLUMNS)
    later = names[names.index(prompt.prompt_column) + 1 :]
    return [name for name in later if prompt.columns.get(name) is not None]


def log_prompt_columns(prompts: Iterable[Prompt], logged: set[str]) -> None:
    """Log once per data set which column is the prompt, where rows have several.

    Args:
        prompts: Of any number of data sets.
        logged: The sources that were logged before; those logged now are added.
    """
    for prompt in prompts:
        if prompt.source not in logged and (unused := unused_prompt_columns(prompt)):
            logged.add(prompt.source)
            log.info(
                "%s: the prompt column is %r, not %s (passed to the rewards). To change this, drop it: columns: "
                "{%s: null}.",
                prompt.source or "the data",
                prompt.prompt_column,
                " or ".join(map(repr, unused)),
                prompt.prompt_column,
            )


def _check_no_image_is_lost(row: Mapping[str, Any], found: Sequence[str], where: str) -> None:
    """Raises: ValueError if a prompt column that is not taken has images, in a row whose prompt has none."""
    for name in found[1:]:
        if isinstance(row[name], Sequence) and any(map(_has_image, row[name])):
            raise ValueError(
                f"{where}: the prompt is the column {found[0]!r}, which has no image, and the column {name!r} has "
                f"images. To ask the question with them, drop the other: columns: {{{found[0]}: null}}. Without them, "
                f"columns: {{{name}: null}}."
            )


def _has_image(message: Any) -> bool:
    """True if a part of a message is an image."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def _placed(
    content: str | list[Message], images: list[ImageRef], finder: ImageFinder
) -> tuple[str | list[Message], list[ImageRef]]:
    """The content with its images where they stand. Raises: ValueError if text is to hold some."""
    if not isinstance(content, str):
        return place_images(content, images, finder)
    if images:
        raise ValueError(f"{finder.where}: the row has an image, prompt_as 'text' asks for text. Set it to 'auto'.")
    place_images([{"role": "user", "content": content}], (), finder)
    return content, images


def refuse_media(prompt: Prompt, where: str) -> None:
    """Check that a prompt is text and images alone.

    Raises:
        ValueError: If a column or a message has a video or sound: trained without it, the question would have no answer
            and nothing would say so.
    """
    parts = [part for message in _messages(prompt) for part in _parts(message)]
    found = [f"column {name!r}" for name in MEDIA_COLUMNS if prompt.columns.get(name) not in (None, "", [], ())]
    found += [f"a message part of type {part['type']!r}" for part in parts if part["type"] not in ("text", "image")]
    if found:
        raise ValueError(
            f"{where}: the row has {found[0]}, and policies are given text and images only. Remove it from the rows "
            "that can be answered without it, and leave the others out."
        )


@dataclass(frozen=True)
class PromptColumn:
    """How one column becomes a prompt."""

    read: Callable[[Any, str], str | list[Message]]
    """(value, where) -> the prompt's content; ValueError if it is none."""

    is_kept: bool
    """True if the rewards receive the column too."""

    is_question: bool = False
    """True for text that is asked of somebody, False for text to go on with."""


def _text(value: Any, where: str) -> str:
    """The value itself. Raises: ValueError if it is not a string with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be text that is not empty, got {value!r:.80}.")
    return value


def _chat(value: Any, where: str) -> list[Message]:
    """The messages, checked, their text parts joined. Raises: ValueError naming the message that is not one."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a list of messages that is not empty, got {value!r:.80}.")
    messages = []
    for number, message in enumerate(value, start=1):
        _check_message(message, f"{where}, message {number}")
        messages.append(_with_text(message))
    return messages


def _text_or_chat(value: Any, where: str) -> str | list[Message]:
    """Text or messages, whichever it is."""
    return _text(value, where) if isinstance(value, str) else _chat(value, where)


def _chat_without_answer(value: Any, where: str) -> list[Message]:
    """The messages up to the final assistant turn: that is the answer of supervised data, which GRPO samples itself.

    It is no `solution` either: a worked answer in prose is nothing a completion can be compared with. Nor is it a
    prefill, which only the column `prompt` can have.
    """
    messages = _chat(value, where)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where} has an assistant turn only: there is no question to answer.")
    return messages


def _turns(value: Any, where: str) -> list[Message]:
    """`{"from": "human", "value": "..."}` turns as messages. Raises: ValueError naming the turn that is none."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a list of turns that is not empty, got {value!r:.80}.")
    messages: list[Message] = []
    for number, turn in enumerate(value, start=1):
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or speaker not in SPEAKERS or "value" not in turn:
            raise ValueError(
                f'{where}, turn {number} must look like {{"from": "human", "value": "..."}} with one of '
                f"{', '.join(SPEAKERS)}, got {turn!r:.80}."
            )
        said = turn["value"] if isinstance(turn["value"], str) else json.dumps(turn["value"])
        messages.append({"role": SPEAKERS[speaker], "content": said})
    return messages


PROMPT_COLUMNS = {
    "prompt": PromptColumn(_text_or_chat, is_kept=False),  # TRL
    "problem": PromptColumn(_text, is_kept=True, is_question=True),  # VLM-R1, MATH
    "question": PromptColumn(_text, is_kept=True, is_question=True),  # GSM8K
    "query": PromptColumn(_text, is_kept=True, is_question=True),  # ms-swift
    "messages": PromptColumn(_chat_without_answer, is_kept=False),  # ms-swift, OpenAI
    "conversations": PromptColumn(_turns, is_kept=False, is_question=True),  # VLM-R1, LLaVA
}
"""The columns a prompt may be in: of several in one row, the first is the prompt."""


def _conversation(value: Any, template: PromptTemplate, where: str) -> tuple[str | list[Message], str | None]:
    """The prompt of a `conversations` column, and its final answer as VLM-R1's rewards read it.

    Raises:
        ValueError: If it does not end with a question and perhaps its answer.
    """
    messages = _turns(value, where)
    answer = None
    if messages[-1]["role"] == "assistant":
        bare = messages.pop()["content"].replace("<answer>", "").replace("</answer>", "").strip()
        answer = f"<answer> {bare} </answer>"
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"{where} must end with a question, or a question and its answer: got {value!r:.80}.")
    question = _text(messages[-1]["content"], f"{where}, the last question")
    if len(messages) == 1:
        return template.render(question, is_question=True, where=where), answer
    if template.prompt_as == "text":
        raise ValueError(f"{where} has several turns, prompt_as 'text' asks for text. Set it to 'auto'.")
    return template.with_system([*messages[:-1], {"role": "user", "content": template.question(question)}]), answer


def _messages(prompt: Prompt) -> Sequence[Message]:
    """The messages of a chat; none of a text."""
    return () if isinstance(prompt.content, str) else prompt.content


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    """The parts of a message's content; none where it is text."""
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _with_text(message: Message) -> Message:
    """The message with text for content if its parts are text alone.

    The chat templates of text models write parts as nothing, or as Python would print the list.
    """
    parts = _parts(message)
    if not parts or any(part["type"] != "text" for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _check_message(message: Any, where: str) -> None:
    """Raises: ValueError if `message` has no known role, or no content that a chat template can render."""
    if not isinstance(message, Mapping):
        raise ValueError(f'{where} must look like {{"role": "user", "content": "..."}}, got {message!r:.80}.')
    if message.get("role") not in ROLES:
        raise ValueError(f"{where}: the role must be one of {', '.join(ROLES)}, got {message.get('role')!r:.80}.")
    content = message.get("content")
    is_parts = (
        bool(content) and isinstance(content, Sequence) and all(isinstance(p, Mapping) and "type" in p for p in content)
    )
    is_call = content is None and bool(message.get("tool_calls"))
    if not (isinstance(content, str) or is_parts or is_call):
        raise ValueError(
            f'{where}: the content must be text or a list of parts like {{"type": "text", "text": "..."}}, '
            f"got {content!r:.80}."
        )
    for number, part in enumerate(_parts(message), start=1):
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ValueError(f"{where}, part {number} is of type 'text' and must have a text, got {part!r:.80}.")
