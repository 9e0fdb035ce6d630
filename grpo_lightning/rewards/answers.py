r"""Extracting the answer from a text: in answer tags, `\boxed{}`, after `####`, announced, bold, on the last line.

Completions are untrusted text, so all of it takes linear time: `str` methods and patterns that cannot backtrack.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"  # Chinese, Japanese, Korean
)
"""Letters of scripts that put no spaces between words, or between words and numbers: to go into `[...]`."""

_FULL_WIDTH = str.maketrans(
    {0xFF01 + place: chr(0x21 + place) for place in range(94)} | {"\u3000": " ", "\u3001": ",", "\u3002": "."}
)
_SEAM = re.compile(rf"(?<=[{UNSPACED}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9.,!?:])(?=[{UNSPACED}])")

_GROUPED_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_CURRENCY = r"[$\u20a0-\u20bf\u00a3\u00a5\u0e3f]"  # dollar, euro, pound, yen and others
_AMOUNT = re.compile(
    rf"([+-]?)(?:{_CURRENCY}\s{{0,4}})?([+-]?)"
    r"([0-9]{1,3}(?:(,|[ \u00a0\u2009\u202f]|\\[,! ;])[0-9]{3}(?:\4[0-9]{3})*)?(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?)"
    rf"(?:\s{{0,4}}{_CURRENCY})?"
)
_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of the answer


_ANNOUNCED = re.compile(
    r"\banswers?\b(?:[^.:=\n]|\.(?=[0-9])){0,60}?(?:[:=]|\b(?:(?:is|are|be)(?:\s{1,8}equal\s{1,8}to)?|equals?)\b|\n)"
    r"|(?:答案|结果)(?:应该|应)?[是为:]",  # "the answer", "the result" is
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.!](?=[\s*\"')]|\Z)|,?\s(?:because|since|which)\b", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_LINK = re.compile(r"=|\b(?:is|are|equals?(?:\s{1,8}to)?|makes?|gives?)\b", re.IGNORECASE)
_SO = re.compile(r"[,;]\s{1,8}(?:and\s{1,8})?(?:so|thus|hence|therefore)\b", re.IGNORECASE)
_FENCE = re.compile(r"\\[\[\]]|\$\$|```\w{0,20}")
_LISTED = re.compile(r"[,;&|]|\b(?:and|or)\b", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n['\u2019]t\b|不", re.IGNORECASE)
_DISPLAY = {"\\[": "\\]", "$$": "$$"}


def readable(text: str) -> str:
    r"""The text with full-width characters as ASCII, and a space wherever Chinese and the like touch a word or number.

    Python's `\b` and `\w` take all of "3个" (three pieces) for one word.
    """
    return _SEAM.sub(" ", text.translate(_FULL_WIDTH))


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


def chat_answer(text: str, finish_reason: str = "stop") -> str | None:
    r"""The answer where chat models put it; None if there is none.

    The first of these that the text has: the last `<answer>...</answer>`; and behind the thought, the last `\boxed{}`;
    the last announcement ("The answer is 7.", "Answer: 7") or `#### 7`; the last bold text (**7**) with no number
    behind it; the last line, behind its last "=" or "is". One place is chosen, whatever the right answer is, and all
    that is said there is the answer: "3 or 4" is neither 3 nor 4, and what is said not to be the answer is none.

    Args:
        text: A completion.
        finish_reason: "length" if it was truncated: then its last line counts only for closed tags and boxes, as it may
            hold half an answer.
    """
    tagged = between_answer_tags(text)
    said = readable(after_thought(text) if tagged is None else tagged)
    boxed = in_box(said)
    if boxed is not None or tagged is not None:
        return said if boxed is None else boxed
    if finish_reason == "length":
        said = said[: said.rfind("\n") + 1]
    for found in (_announced(said), _in_bold(said)):
        if found is not None:
            return found
    return None if finish_reason == "length" else _last_line(said)


def _announced(said: str) -> str | None:
    """What is announced as the answer, or stands after `####`, whichever comes last."""
    *_, last = None, *_ANNOUNCED.finditer(said)
    hashes = said.rfind("####")
    if hashes > (last.start() if last else -1):
        line, _, rest = said[hashes + 4 :].strip().partition("\n")
        if line and not (rest.strip() and any(char.isalpha() for char in line)):  # else it is a headline
            return line
    if last is None:
        return None
    rest = said[last.end() :].lstrip("*_:= \t\r\n")
    line = rest.partition("\n")[0].rstrip()
    if (closing := _DISPLAY.get(line)) is not None:
        return rest[len(line) :].partition(closing)[0].strip()
    answer = _sentence(rest)
    return None if not answer or _NEGATED.search(last[0]) or _NEGATED.match(answer) else answer


def _in_bold(said: str) -> str | None:
    """The last bold text that is no headline, if no number follows it; its whole line, if that has several."""
    last = None
    for found in _BOLD.finditer(said):
        last = found if not found[1].rstrip().endswith(":") and said[found.end() : found.end() + 1] != ":" else last
    if last is None or any(char.isdigit() for char in said[last.end() :]):
        return None
    start = said.rfind("\n", 0, last.start()) + 1
    before = said[start : last.start()]
    if _NEGATED.search(before):
        return None
    return said[start:].partition("\n")[0].replace("**", "") if "**" in before else last[1]


def _last_line(said: str) -> str | None:
    """The last line that is not empty, behind its last "=" or "is" if it does not list several answers.

    Marks around a formula or code that stand on lines of their own are no lines; what "so" begins says it anew.
    """
    lines = (line.strip() for line in reversed(said.rstrip().split("\n")))
    line = next((line for line in lines if line and not _FENCE.fullmatch(line)), "")
    *_, so = None, *_SO.finditer(line)
    line = line[so.end() :] if so else line
    links = list(_LINK.finditer(line))
    if links:
        head = line[links[0].end() : links[-1].start()]
        answer = line if _LISTED.search(head) else line[links[-1].end() :]
    else:
        answer = line
    answer = answer.replace("**", "").strip(" \t_").rstrip(".!")
    return None if not answer or answer.endswith("?") or _NEGATED.search(answer) else answer


def _sentence(text: str) -> str:
    """The text up to the end of its first sentence, or to the reason that is given, without marks of bold text."""
    end = _SENTENCE_END.search(text)
    return (text if end is None else text[: end.start()]).replace("**", "").strip(" \t_")


EXTRACTORS: dict[str, Callable[[str, str], str | None]] = {
    "auto": chat_answer,
    "answer_tag": lambda text, _: between_answer_tags(text),
    "boxed": lambda text, _: in_box(text),
    "hashes": lambda text, _: after_hashes(text),
    "text": lambda text, _: text,
}
"""Where an answer can be, by the name used in settings; called with a completion and its finish reason."""


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
    r"""The text as it is compared: "1,000" without its commas, no full stop at the end, no marks around it.

    The marks are whitespace, `$`, `\$`, `\(...\)`, `\[...\]` and `**...**`. Full-width characters become ASCII.
    """
    text = _unmarked(readable(text).replace("\\$", "$"))
    for opening, closing in (("**", "**"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = _unmarked(text[len(opening) : -len(closing)])
    return text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text


def amount(text: str) -> str:
    r"""A number without its currency and the spaces between its digits: "€72" is "72", "10 000" and `10\,000` "10000".

    Any other text is returned as it is.
    """
    found = _AMOUNT.fullmatch(text)
    if found is None or (found[1] and found[2]):
        return text
    return found[1] + found[2] + re.sub(r"[^0-9.]", "", found[3])


def _unmarked(text: str) -> str:
    """The text without whitespace and `$` around it, and without a full stop at the end."""
    return text.strip(" \t\r\n$").rstrip(" \t\r\n$.")
