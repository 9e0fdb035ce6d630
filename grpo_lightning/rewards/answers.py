r"""Where a text has its answer: between tags, after `####`, in `\boxed{}`.

Completions are untrusted text, so all of it takes linear time: `str` methods and patterns that cannot backtrack.
"""

from __future__ import annotations

import re
from typing import Any

_GROUPED_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of the answer


def between_answer_tags(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds, up to the first closing tag; None if there is none."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)]


def after_thought(text: str) -> str:
    """What follows the last `</think>`, else all of it.

    Behind a thought that is opened and never closed (a truncated completion) there is nothing.
    """
    _, closing, rest = text.rpartition("</think>")
    return "" if not closing and "<think>" in text else rest


def after_hashes(text: str) -> str | None:
    """What follows the last `####`, up to the end of the line; None if there is none (GSM8K)."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if hashes else None


def in_box(text: str) -> str | None:
    r"""What the last closed `\boxed{...}` holds, braces inside it matched; None if there is none.

    Data that were escaped once too often have `\\boxed{...}`, which is read too.
    """
    opened: list[int | None] = []  # for every brace still open: where a box begins, None for other braces
    last: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        if found.group().endswith("{") and found.group() != r"\{":
            opened.append(found.end() if len(found.group()) > 1 else None)
        elif found.group() == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, found.start())
    return None if last is None else text[last[0] : last[1]]


def whole(text: str) -> str | None:
    """The text itself."""
    return text


EXTRACTORS = {"answer_tag": between_answer_tags, "boxed": in_box, "hashes": after_hashes, "text": whole}
"""Where an answer can be, by the name used in settings."""


def given_answer(text: str) -> str:
    r"""The answer of a completion: in the last answer tags, else behind its thought.

    There, what the last `\boxed{}` holds, else all of it. What is only thought is no answer.
    """
    if (answer := between_answer_tags(text)) is not None:
        return answer
    said = after_thought(text)
    boxed = in_box(said)
    return said if boxed is None else boxed


def right_answer(answer: Any, column: str) -> str:
    r"""The right answer in a data row: after `####`, between answer tags, in `\boxed{}`, or all of it.

    Returns:
        Empty if the row has none.

    Raises:
        ValueError: If it is not text or a number.
    """
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # JSON has one kind of number: 72.0 is 72
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"column {column!r} must hold text or a number, got {answer!r:.80}.")
    text = str(answer)
    for extract in (after_hashes, between_answer_tags, in_box):
        found = extract(text)
        text = text if found is None else found
    return text.strip()


def normalized(text: str) -> str:
    """The text without surrounding whitespace and `$`, a full stop at the end, and the commas of "1,000"."""
    text = text.strip(" \t\r\n$").rstrip(" \t\r\n$.")
    return text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text
