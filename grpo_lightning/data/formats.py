"""Row formats: the columns that can hold the prompt of a row, and the conversion of the row to a `Prompt`.

`PROMPT_COLUMNS` lists the columns that can hold the prompt, in order of precedence.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Allowed roles of chat messages. Many chat templates silently skip messages with other roles ("human", "gpt")."""

SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Chat roles by the value of `from` in a `conversations` column."""

SWIFT_COLUMNS = ("query", "messages", "conversations")
"""Prompt columns of ms-swift. If the prompt is in one of these columns, the columns `system` and `history` belong to
the prompt."""

PLACEHOLDERS = ("<ref-object>", "<bbox>")
"""Texts that ms-swift replaces by the names and boxes in the column `objects`."""

NOTHING = ("", "None", "null", "[]", "()", "{}")
"""Texts of empty values, as in a CSV file."""

MEDIA_COLUMNS = ("video", "videos", "audio", "audios")
"""Columns of unsupported media."""


def to_prompt(
    row: Mapping[str, Any],
    *,
    where: str,
    index: int = -1,
    source: str = "",
    template: PromptTemplate | None = None,
    folder: Path | None = None,
) -> Prompt:
    """Convert a row to a prompt.

    The prompt is the first of `PROMPT_COLUMNS` that the row has. `problem` takes precedence over `messages`, so that
    the question template applies. The rewards get all columns of the row, except a prompt column that is not kept
    (`PromptColumn.is_kept`).

    If a prompt in `SWIFT_COLUMNS` has no system message, the text in the column `system` becomes the system message of
    the prompt, as in ms-swift. The pairs in the column `history` are the turns before a `query`.

    Images come from the column `image` or `images`, or from message parts (see `place_images`). No image file is
    opened. A row with images always becomes a chat (`prompt_as: text` is an error), and gets the system prompt like
    other rows.

    Raises:
        ValueError: If the row has no prompt, that is, if each of `PROMPT_COLUMNS` is missing, null or NaN.
        ValueError: If the prompt is invalid.
        ValueError: If the prompt contains half of a character (a lone surrogate in Unicode).
        ValueError: If the number of images does not match the placeholders in the prompt.
        ValueError: If a row with a prompt in `SWIFT_COLUMNS` has `tools`.
        ValueError: If a row with a prompt in `SWIFT_COLUMNS` has `objects`, and the prompt contains one of
            `PLACEHOLDERS`.
    """
    row = nan_to_null(row)
    found = [column for column in PROMPT_COLUMNS if row.get(column) is not None]
    if not found:
        if empty := [repr(column) for column in PROMPT_COLUMNS if column in row]:
            verb = "is" if len(empty) == 1 else "are"
            raise ValueError(
                f"{where}: the row has no prompt: {' and '.join(empty)} {verb} null. Give the row a prompt, or remove "
                "the row."
            )
        raise ValueError(
            f"{where}: the row has no prompt column; its columns are: {', '.join(map(str, row)) or 'none'}. "
            f"One of {', '.join(PROMPT_COLUMNS)} must be there: rename a column (columns: {{old: new}})."
        )
    template = template or PromptTemplate()
    column = PROMPT_COLUMNS[found[0]]
    finder = ImageFinder(where, folder)
    columns, images = finder.columns({name: value for name, value in row.items() if column.is_kept or name != found[0]})
    if found[0] in SWIFT_COLUMNS:
        _refuse_tools(row, where)
    if found[0] == "conversations":
        content, answer = _conversation(row, template, where)
        if answer is not None and columns.get("solution") is None:
            columns["solution"] = answer
    elif found[0] == "query":
        question: Message = {"role": "user", "content": _text(row["query"], f"{where}: column 'query'")}
        messages = [*_history(row.get("history"), f"{where}: column 'history'"), question]
        content = _ask(_with_row_system(messages, row, where), template, f"{where}: column 'query'")
    else:
        content = column.read(row[found[0]], f"{where}: column {found[0]!r}")
        if found[0] == "messages":
            content = _with_row_system(content, row, where)  # type: ignore[arg-type]
        # Text that the policy continues cannot hold an image. In a row with images, text therefore is a question.
        content = template.render(content, is_question=column.is_question or bool(images), where=where)
    if not images:
        _check_no_image_is_lost(row, found, where)
    content, images = _place(content, images, finder)
    # After `_place`, the content has no image: a file name may have half of a character, and bytes are long.
    if found[0] in SWIFT_COLUMNS:
        _refuse_objects(row, content, where)
    _check_characters(content, f"{where}: column {found[0]!r}")
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


def nan_to_null(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN in a column by None, because pandas writes NaN for an empty cell, and `json.dumps` keeps NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def unused_prompt_columns(prompt: Prompt) -> list[str]:
    """Names of the row's columns that come later in `PROMPT_COLUMNS` than its prompt."""
    if not prompt.prompt_column:
        return []
    names = list(PROMPT_COLUMNS)
    later = names[names.index(prompt.prompt_column) + 1 :]
    return [name for name in later if prompt.columns.get(name) is not None]


def log_prompt_columns(prompts: Iterable[Prompt], logged: set[str]) -> None:
    """Log what `describe_prompts` returns, except lines in `logged`, and add the lines to `logged`."""
    for line in describe_prompts(prompts, logged):
        log.info("%s", line)


def describe_prompts(prompts: Iterable[Prompt], known: set[str] | None = None) -> Iterator[str]:
    """Yield lines that describe the prompts of each dataset.

    A line names the prompt column, and states whether the prompts are chats or plain text, and in which form reward
    functions get a completion. If other columns could also be the prompt, another line names these columns. Lines in
    `known` are left out, and new lines are added to it.
    """
    known = set() if known is None else known
    for prompt in prompts:
        source, column = prompt.source or "the data", prompt.prompt_column
        if not column:
            continue
        form, given = prompt_form(prompt)
        found = [f"{source}: prompts are {form} (column {column!r}); reward functions get a completion as {given}."]
        if unused := unused_prompt_columns(prompt):
            found.append(
                f"{source}: the prompt column is {column!r}, not {' or '.join(map(repr, unused))} (passed to the "
                f"rewards). To change this, drop it: columns: {{{column}: null}}."
            )
        for line in found:
            if line not in known:
                known.add(line)
                yield line


def prompt_form(prompt: Prompt) -> tuple[str, str]:
    """Describe the form of a prompt, and the form in which reward functions get a completion of this prompt."""
    return ("plain text", "a string") if isinstance(prompt.content, str) else ("chats", "a list of messages")


def _check_characters(content: str | list[Message], where: str) -> None:
    """Raises: ValueError if a text has a lone surrogate, which JSON can contain and tokenizers cannot encode."""
    try:
        json.dumps(content, ensure_ascii=False, default=lambda _: None).encode()  # bytes and paths are not text
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 40) : error.end].rpartition('"')[2]
        raise ValueError(
            f"{where} has half of a character (a lone surrogate, from a text that was cut off in the middle of a "
            f"character), which tokenizers cannot encode: got {text!r}. Remove the half from the text, or the row from "
            "the data."
        ) from None


def _check_no_image_is_lost(row: Mapping[str, Any], found: Sequence[str], where: str) -> None:
    """Raises: ValueError if the prompt has no images, but another prompt column of the row has images."""
    for name in found[1:]:
        if isinstance(row[name], Sequence) and any(map(_has_image, row[name])):
            raise ValueError(
                f"{where}: the prompt is the column {found[0]!r}, which has no image, but the column {name!r} has "
                f"images. To use the images, drop the first: columns: {{{found[0]}: null}}. To train without them, "
                f"drop the second: columns: {{{name}: null}}."
            )


def _has_image(message: Any) -> bool:
    """True if a part of a message is an image."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def _place(
    content: str | list[Message], images: list[ImageRef], finder: ImageFinder
) -> tuple[str | list[Message], list[ImageRef]]:
    """Place images in chat content. Raises: ValueError if plain text has images or placeholders."""
    if not isinstance(content, str):
        return place_images(content, images, finder)
    if images:
        raise ValueError(f"{finder.where}: the row has an image, which prompt_as 'text' cannot hold. Set it to 'auto'.")
    place_images([{"role": "user", "content": content}], (), finder)
    return content, images


def refuse_media(prompt: Prompt, where: str) -> None:
    """Refuse video and audio. Raises: ValueError if a column or a message has video or audio."""
    parts = [part for message in _messages(prompt) for part in _parts(message)]
    found = [f"column {name!r}" for name in MEDIA_COLUMNS if prompt.columns.get(name) not in (None, "", [], ())]
    found += [f"a message part of type {part['type']!r}" for part in parts if part["type"] not in ("text", "image")]
    if found:
        raise ValueError(
            f"{where}: the row has {found[0]}, but only text and images are supported. Remove it from the rows that "
            "can be answered without it, and remove the other rows."
        )


@dataclass(frozen=True)
class PromptColumn:
    """Reader of one prompt column."""

    read: Callable[[Any, str], str | list[Message]]
    """(value, where) -> the prompt's content; raises ValueError if the value is invalid."""

    is_kept: bool
    """True if the column is also passed to the rewards."""

    is_question: bool = False
    """True for a question, which becomes a user turn; False for a text that the policy continues."""


def _text(value: Any, where: str) -> str:
    """The value itself. Raises: ValueError if it is not a non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be a non-empty text, got {value!r:.80}.")
    return value


def _chat(value: Any, where: str) -> list[Message]:
    """Check messages and join their text parts. Raises: ValueError if a message is invalid."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a non-empty list of messages, got {value!r:.80}.")
    messages = []
    for number, message in enumerate(value, start=1):
        _check_message(message, f"{where}, message {number}")
        messages.append(_with_text(message))
    return messages


def _text_or_chat(value: Any, where: str) -> str | list[Message]:
    """Read text or messages."""
    return _text(value, where) if isinstance(value, str) else _chat(value, where)


def _chat_without_answer(value: Any, where: str) -> list[Message]:
    """Read messages, and remove the assistant turns at their end.

    In data for supervised finetuning, the final assistant turn is the answer, but GRPO samples answers itself. The
    removed answer does not become the column `solution`, because a completion cannot be compared with a worked answer
    in prose.
    """
    messages = _chat(value, where)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where} has assistant turns only: there is no question to answer.")
    return messages


def _turns(value: Any, where: str) -> list[Message]:
    """Convert turns `{"from": "human", "value": "..."}` to messages. Raises: ValueError naming the invalid turn."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a non-empty list of turns, got {value!r:.80}.")
    messages: list[Message] = []
    for number, turn in enumerate(value, start=1):
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or speaker not in SPEAKERS or "value" not in turn:
            raise ValueError(
                f'{where}, turn {number} must look like {{"from": "human", "value": "..."}} with one of '
                f"{', '.join(SPEAKERS)}, got {turn!r:.80}."
            )
        content = turn["value"] if isinstance(turn["value"], str) else json.dumps(turn["value"])
        messages.append({"role": SPEAKERS[speaker], "content": content})
    return messages


PROMPT_COLUMNS = {
    "prompt": PromptColumn(_text_or_chat, is_kept=False),  # TRL
    "problem": PromptColumn(_text, is_kept=True, is_question=True),  # VLM-R1, MATH
    "question": PromptColumn(_text, is_kept=True, is_question=True),  # GSM8K
    "query": PromptColumn(_text, is_kept=True, is_question=True),  # ms-swift
    "messages": PromptColumn(_chat_without_answer, is_kept=False),  # ms-swift, OpenAI
    "conversations": PromptColumn(_turns, is_kept=False, is_question=True),  # VLM-R1, LLaVA
}
"""Prompt columns in order of precedence: the first one that a row has is the prompt."""


def _conversation(
    row: Mapping[str, Any], template: PromptTemplate, where: str
) -> tuple[str | list[Message], str | None]:
    """The prompt in a `conversations` column, and the final answer (or None) in the form that VLM-R1's rewards read.

    Raises:
        ValueError: If the conversation ends neither with a question nor with a question and its answer.
    """
    value, column = row["conversations"], f"{where}: column 'conversations'"
    messages = _turns(value, column)
    answer = None
    if messages[-1]["role"] == "assistant":
        bare = messages.pop()["content"].replace("<answer>", "").replace("</answer>", "").strip()
        answer = f"<answer> {bare} </answer>"
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"{column} must end with a question, or a question and its answer: got {value!r:.80}.")
    return _ask(_with_row_system(messages, row, where), template, column), answer


def _ask(messages: Sequence[Message], template: PromptTemplate, where: str) -> str | list[Message]:
    """Render messages of which the last is a question. Raises: ValueError if `prompt_as: text` cannot hold them."""
    question = _text(messages[-1]["content"], f"{where}, the last question")
    if len(messages) == 1:
        return template.render(question, is_question=True, where=where)
    if template.prompt_as == "text":
        raise ValueError(f"{where} has several messages, which prompt_as 'text' cannot hold. Set it to 'auto'.")
    return template.with_system([*messages[:-1], {"role": "user", "content": template.question(question)}])


def _with_row_system(messages: list[Message], row: Mapping[str, Any], where: str) -> list[Message]:
    """Prepend the text in the column `system`, unless the messages start with a system or developer message.

    Raises:
        ValueError: If the column is not a text.
    """
    system = row.get("system")
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    if not isinstance(system, str):
        raise ValueError(
            f"{where}: the column 'system' is the system message of the prompt and must be a text, got {system!r:.80}. "
            "To leave it out, drop the column: columns: {system: null}."
        )
    return [{"role": "system", "content": system}, *messages] if system else messages


def _history(value: Any, where: str) -> list[Message]:
    """Convert pairs `[query, response]` to messages. Raises: ValueError if the value is not a list of such pairs."""
    pairs = () if str(value) in NOTHING else value
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not all(map(_is_pair, pairs)):
        raise ValueError(
            f"{where} must be a list of pairs [query, response] of texts, got {value!r:.80}. To leave it out, drop the "
            "column: columns: {history: null}."
        )
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_pair(value: Any) -> bool:
    """True for a list of two texts."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _refuse_tools(row: Mapping[str, Any], where: str) -> None:
    """Raises: ValueError if the row has tools, which ms-swift shows to the policy."""
    if str(row.get("tools")) not in NOTHING:
        raise ValueError(
            f"{where}: the column 'tools' is not shown to the policy, so its prompt would lack the tools: got "
            f"{row['tools']!r:.80}. Describe the tools in the system message, or set model.environment. Then drop the "
            "column (columns: {tools: null}), or rename it for the rewards."
        )


def _refuse_objects(row: Mapping[str, Any], content: str | Sequence[Message], where: str) -> None:
    """Raises: ValueError if the prompt has placeholders that ms-swift replaces by the row's objects."""
    has_objects = isinstance(row.get("objects"), Mapping | str) and str(row["objects"]) not in NOTHING
    if has_objects and (found := [text for text in PLACEHOLDERS if text in str(content)]):
        raise ValueError(
            f"{where}: the prompt has the placeholder {found[0]}, which is not replaced by the column 'objects': got "
            f"{row['objects']!r:.80}. Write the name or the box into the prompt. If {found[0]} is meant literally, "
            "rename the column (columns: {objects: boxes})."
        )


def _messages(prompt: Prompt) -> Sequence[Message]:
    """The messages of a chat; empty for plain text."""
    return () if isinstance(prompt.content, str) else prompt.content


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    """The parts of a message's content; empty if the content is text."""
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _with_text(message: Message) -> Message:
    """Join the parts of a message into one text if all parts are text.

    The chat templates of text-only models cannot render a list of parts.
    """
    parts = _parts(message)
    if not parts or any(part["type"] != "text" for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _check_message(message: Any, where: str) -> None:
    """Raises: ValueError if `message` has an unknown role, or content that no chat template can render."""
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
