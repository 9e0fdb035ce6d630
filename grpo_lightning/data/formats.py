"""What a row of data looks like, and which of its columns is the prompt.

One line of `PROMPT_COLUMNS` per format: a new format is a new line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a chat. Others ("human", "gpt") are skipped without a word by many chat templates."""


def to_prompt(row: Mapping[str, Any], *, where: str, index: int = -1, source: str = "") -> Prompt:
    """Turn one row of data into a prompt; the columns that are not the prompt go to the rewards.

    Args:
        row: The row, by column name. A prompt column that is None counts as absent.
        where: File and line, for error messages.
        index: The prompt's position in the data set.
        source: The mixture entry the row came from.

    Raises:
        ValueError: If not exactly one of `PROMPT_COLUMNS` is there, or its content is not a prompt.
    """
    found = [column for column in PROMPT_COLUMNS if row.get(column) is not None]
    if len(found) != 1:
        problem = f"{len(found)} prompt columns ({', '.join(found)})" if found else "no prompt column"
        raise ValueError(
            f"{where}: the row has {problem}; its columns are: {', '.join(map(str, row)) or 'none'}. "
            f"Exactly one of {', '.join(PROMPT_COLUMNS)} must be there: rename or remove columns."
        )
    column = PROMPT_COLUMNS[found[0]]
    content = column.read(row[found[0]], f"{where}: column {found[0]!r}")
    columns = {name: value for name, value in row.items() if column.is_kept or name != found[0]}
    return Prompt(content=content, columns=columns, index=index, source=source)


@dataclass(frozen=True)
class PromptColumn:
    """How one column becomes a prompt."""

    read: Callable[[Any, str], str | list[Message]]
    """(value, where) -> the prompt's content; ValueError if it is none."""

    is_kept: bool
    """True if the rewards receive the column too."""


def _text(value: Any, where: str) -> str:
    """The value itself. Raises: ValueError if it is not a string with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be text that is not empty, got {value!r:.80}.")
    return value


def _chat(value: Any, where: str) -> list[Message]:
    """The messages, checked. Raises: ValueError naming the message that is not one."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a list of messages that is not empty, got {value!r:.80}.")
    for number, message in enumerate(value, start=1):
        _check_message(message, f"{where}, message {number}")
    return list(value)


def _text_or_chat(value: Any, where: str) -> str | list[Message]:
    """Text or messages, whichever it is."""
    return _text(value, where) if isinstance(value, str) else _chat(value, where)


def _chat_without_answer(value: Any, where: str) -> list[Message]:
    """The messages up to the final assistant turn: that is the answer of supervised data, which GRPO samples itself."""
    messages = _chat(value, where)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where} has an assistant turn only: there is no question to answer.")
    return messages


PROMPT_COLUMNS = {
    "prompt": PromptColumn(_text_or_chat, is_kept=False),  # TRL
    "problem": PromptColumn(_text, is_kept=True),  # VLM-R1, MATH
    "question": PromptColumn(_text, is_kept=True),  # GSM8K
    "messages": PromptColumn(_chat_without_answer, is_kept=False),  # ms-swift, OpenAI
}
"""The columns a prompt may be in."""


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
