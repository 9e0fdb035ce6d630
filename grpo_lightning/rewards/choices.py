"""The option that a text chooses: "(B)", "B) because", "the answer is b" are all B.

Completions are untrusted text, so all of it takes linear time: patterns look a few characters far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo_lightning.rewards.answers import readable

_LONE = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_FIRST = re.compile(r"[\s*_(\[$\"']*(?:([A-Z])(?=[.):,\]*])|([a-z])(?=[.):\]*](?:\W|$)))")
_ANSWER = re.compile(  # in Chinese: the answer (is); choose
    r"(?:\banswers?(?:\s{1,8}(?:is|must\s{1,8}be|would\s{1,8}be))?\b"
    r"|答案(?:应该|应)?[是为选]?|选择?)[\s:=*_(\[$\"']{0,8}"
    r"([A-Za-z])(?![\w'\u2019])",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(?:\b(?:option|choice)s?(?:\s{1,8}is)?\b|选项)[\s:*_(\[$\"']{0,8}([A-Za-z])(?![\w'\u2019])", re.IGNORECASE
)
_MARKED = re.compile(r"(?<!\w)[(\[]([A-Za-z])[)\]]|\*\*\(?([A-Za-z])\)?[.:]?\*\*|\b([A-Z])\)")
_CAPITAL = re.compile(r"\b[A-Z]\b(?!['\u2019])")
_WORD_FOLLOWS = re.compile(r"\s{1,8}(?!(?:and|or)\b)[a-z]")
_NEXT = re.compile(
    r"[\s)\]*_$\"'.:,;/&|]{0,8}(?:(?:\b(?:and|or)\b|[和或与及]者?)\s{0,8})?"
    r"[\s(\[*_$\"']{0,8}([A-Za-z])(?![\w'\u2019])",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|except)|n['\u2019]t)\s{1,8}"
    r"(?:(?:pick|choose|select|take|be|the|an?|answer|option|choice)\s{1,8}){0,4}[(\[*_\"']{0,4}\Z"
    r"|(?:不(?:应该|应|能)?[选是]|并非|排除)择?\s{0,8}[(\[*_\"']{0,4}\Z",
    re.IGNORECASE,
)
_REFUSED_CHARACTERS = 80
"""How far before a letter it is looked for."""

_WRONG = re.compile(
    r"[)\]*_\"'.]{0,4}\s{1,8}(?:is|would\s{1,8}be|must\s{1,8}be|seems)\s{1,8}"
    r"(?:clearly\s{1,8}|definitely\s{1,8}|also\s{1,8})?(?:not|wrong|incorrect|false)\b"
    r"|[)\]*_\"']{0,4}\s{1,8}isn['\u2019]t\b"
    r"|[)\]*_\"'.]{0,4}\s{0,8}(?:选项)?(?:是|也)?(?:错|不对|不正确|不是|有误)",
    re.IGNORECASE,
)


def choice(text: str) -> str | None:
    """The option a text chooses, as a capital letter; None if it chooses none, or lists several.

    In this order: it is one letter; the last that is said to be the answer ("the answer is B"); the one it begins with,
    marked ("B) because", "A, because I ..."), unless others are marked alike ("(A) 1 (B) 2"); the only one that is
    marked ("(B)") or called an option; the only capital that stands alone. A letter that another follows at once
    ("A, B", "A or B") is part of a list; one that is said to be wrong ("not B", "B is wrong") is not chosen.
    """
    text = readable(text)
    if lone := _LONE.fullmatch(text):
        return lone[1].upper()
    answer = None
    for found in _ANSWER.finditer(text):
        answer = found if _is_option(found, text) and not _is_refused(found, text) else answer
    if answer:
        return None if _is_listed(answer, text) else answer[1].upper()
    if (first := _FIRST.match(text)) and not _is_refused(first, text):
        return None if _is_listed(first, text) or _others_alike(first, text) else (first[1] or first[2]).upper()
    options = {found[1].upper() for found in _allowed(_OPTION, text) if _is_option(found, text)}
    marked = options | {(found[1] or found[2] or found[3]).upper() for found in _allowed(_MARKED, text)}
    capitals = (found for found in _allowed(_CAPITAL, text) if found[0] != "I")
    alone = marked or {None if _is_article(found, text) else found[0] for found in capitals}
    return alone.pop() if len(alone) == 1 else None


def _allowed(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Where a pattern finds a letter that is not said to be wrong."""
    return (found for found in pattern.finditer(text) if not _is_refused(found, text))


def _is_refused(found: re.Match[str], text: str) -> bool:
    """Whether a letter is said to be wrong ("not B", "I would not pick (B)", "B is wrong")."""
    start, end = found.span(found.lastindex or 0)
    before = text[max(0, start - _REFUSED_CHARACTERS) : start]
    return _REFUSED.search(before) is not None or _WRONG.match(text, end) is not None


def _is_option(found: re.Match[str], text: str) -> bool:
    """Whether a named letter is an option, not the word "a" or "i" ("the answer is a dog")."""
    return found[1] not in ("a", "i") or not _WORD_FOLLOWS.match(text, found.end())


def _is_article(found: re.Match[str], text: str) -> bool:
    """Whether a lone capital may as well be the article ("A cat", but also "A or B")."""
    following = text[found.end() : found.end() + 2]
    return found[0] == "A" and following[:1] == " " and following[1:].islower()


def _is_listed(found: re.Match[str], text: str) -> bool:
    """Whether another letter follows at once, and no word says something about that one ("A. B is wrong")."""
    following = _NEXT.match(text, found.end())
    if following is None or _WORD_FOLLOWS.match(text, following.end()):
        return False
    chosen, other = found[found.lastindex or 1], following[1]
    return other.isupper() >= chosen.isupper() and other.upper() != chosen.upper() and other != "I"


def _others_alike(first: re.Match[str], text: str) -> bool:
    """Whether other letters have the mark of the first."""
    letter = first[first.lastindex or 1]
    alike = re.finditer(rf"(?<![\w'\u2019])([A-Za-z]){re.escape(text[first.end()])}(?!\w)", text[first.end() :])
    others = {found[1] for found in alike if found[1].isupper() == letter.isupper()}
    return bool(others - {letter, "I"})
