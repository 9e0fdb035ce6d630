r"""Extract the answer from a text.

`chat_answer` and `gold_answer` are the main functions. Completions are untrusted text, so all functions take linear
time. They use `str` methods, and patterns that cannot backtrack or that look only a few characters ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.base import ImageSize, Reward

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"  # Chinese, Japanese, Korean
)
"""Letters of scripts without spaces between words, or between words and numbers."""

_FULL_WIDTH = str.maketrans(
    {0xFF01 + place: chr(0x21 + place) for place in range(94)} | {"\u3000": " ", "\u3001": ",", "\u3002": "."}
)
_SEAM = re.compile(rf"(?<=[{_UNSPACED}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9.,!?:])(?=[{_UNSPACED}])")

GROUPED_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_CURRENCY = r"[$\u20a0-\u20bf\u00a3\u00a5\u0e3f]"  # dollar, euro, pound, yen and others
_AMOUNT = re.compile(
    rf"([+-]?)(?:{_CURRENCY}\s{{0,4}})?([+-]?)"
    r"([0-9]{1,3}(?:(,|[ \u00a0\u2009\u202f]|\\[,! ;])[0-9]{3}(?:\4[0-9]{3})*)?(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?)"
    rf"(?:\s{{0,4}}{_CURRENCY})?"
)
_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)  # `\{` and `\}` are part of the answer

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
    r"""Convert full-width characters to ASCII, and put spaces around text in unspaced scripts (Chinese, ...).

    Without these spaces, `\b` and `\w` of patterns treat "3个" as one word.
    """
    return _SEAM.sub(" ", text.translate(_FULL_WIDTH))


def between_answer_tags(text: str) -> str | None:
    """The text between the last pair of `<answer>` and `</answer>` tags; None without such a pair."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)]


def after_reasoning(text: str) -> str:
    """The text after the last `</think>`.

    Without `<think>` and `</think>`, the result is the whole text. If `<think>` is never closed, the result is empty.
    """
    _, closing, rest = text.rpartition("</think>")
    return "" if not closing and "<think>" in text else rest


def after_hashes(text: str) -> str | None:
    """The text after the last `####` (GSM8K), up to the end of the line; None without `####`."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if hashes else None


def _after_hashes_unless_heading(text: str) -> str | None:
    """The result of `after_hashes`; None also for a Markdown heading (letters, and more text below)."""
    line = after_hashes(text)
    is_heading = any(char.isalpha() for char in line or "") and "\n" in text.rpartition("####")[2].strip()
    return None if is_heading else line


def in_box(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`; None if no box is closed.

    `\\boxed{...}` (data that was escaped twice) is accepted too.
    """
    opened: list[int | None] = []  # per open brace: where its box's content starts; None if it opens no box
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
    r"""Extract the answer from the places where chat models write answers; None if there is no answer.

    If the text has `<answer>...</answer>`, the answer is the content of the last pair of tags. If this content has a
    box, the answer is the content of the last box. In a text without these tags, the following places after the
    reasoning are tried in order, and the first that exists is used:

    1. the last `\boxed{}`;
    2. the last announcement ("The answer is 7.", "Answer: 7") or `#### 7`, whichever comes last;
    3. the last bold text (**7**), if no digit occurs anywhere after it;
    4. the text after the last "=" or "is" in the last line, or the whole line if it has neither.

    The whole text at that place is the answer. A negated answer ("not 7") is no answer.

    If the finish reason is "length", the last line may be incomplete. Places 2 and 3 are then searched for only in the
    lines before the last line, and place 4 is not tried.
    """
    tagged = between_answer_tags(text)
    final = readable(after_reasoning(text) if tagged is None else tagged)
    boxed = in_box(final)
    if boxed is not None or tagged is not None:
        return final if boxed is None else boxed
    if finish_reason == "length":
        final = final[: final.rfind("\n") + 1]
    for found in (_announced_answer(final), _in_bold(final)):
        if found is not None:
            return found
    return None if finish_reason == "length" else _last_line(final)


def _announced_answer(text: str) -> str | None:
    """The announced answer or the answer after `####`, whichever comes last."""
    *_, last = None, *_ANNOUNCED.finditer(text)
    if text.rfind("####") > (last.start() if last else -1) and (line := _after_hashes_unless_heading(text)):
        return line
    if last is None:
        return None
    rest = text[last.end() :].lstrip("*_:= \t\r\n")
    line = rest.partition("\n")[0].rstrip()
    if (closing := _DISPLAY.get(line)) is not None:
        return rest[len(line) :].partition(closing)[0].strip()
    answer = _sentence(rest)
    return None if not answer or _NEGATED.search(last[0]) or _NEGATED.match(answer) else answer


def _in_bold(text: str) -> str | None:
    """The last bold text that is not a heading; if its line has several bold texts, the whole line.

    None if there is no such text, if a digit occurs anywhere after it, or if a negation precedes it in its line.
    """
    last = None
    for found in _BOLD.finditer(text):
        last = found if not found[1].rstrip().endswith(":") and text[found.end() : found.end() + 1] != ":" else last
    if last is None or any(char.isdigit() for char in text[last.end() :]):
        return None
    start = text.rfind("\n", 0, last.start()) + 1
    before = text[start : last.start()]
    if _NEGATED.search(before):
        return None
    return text[start:].partition("\n")[0].replace("**", "") if "**" in before else last[1]


def _last_line(text: str) -> str | None:
    """The text after the last "=" or "is" in the last non-empty line; without "=" or "is", the whole line.

    If the line lists several answers ("x = 1, y = 2"), the result is the whole line. If the answer is empty, negated or
    a question, the result is None.
    """
    lines = (line.strip() for line in reversed(text.rstrip().split("\n")))
    line = next((line for line in lines if line and not _FENCE.fullmatch(line)), "")
    *_, so = None, *_SO.finditer(line)
    line = line[so.end() :] if so else line
    links = list(_LINK.finditer(line))
    if links:
        head = line[links[0].end() : links[-1].start()]
        answer = line if _LISTED.search(head) else line[links[-1].end() :]
    else:
        answer = line
    answer = answer.replace("**", "").strip(" \t_")
    answer = answer.rstrip("." if answer.endswith(".") else "!")  # before a full stop, "!" is a factorial
    return None if not answer or answer.endswith("?") or _NEGATED.search(answer) else answer


def _sentence(text: str) -> str:
    """The text up to the end of its first sentence or to a "because", without bold markers."""
    end = _SENTENCE_END.search(text)
    return (text if end is None else text[: end.start()]).replace("**", "").strip(" \t_")


EXTRACTORS: dict[str, Callable[[str, str], str | None]] = {
    "auto": chat_answer,
    "answer_tag": lambda text, _: between_answer_tags(text),
    "boxed": lambda text, _: in_box(text),
    "hashes": lambda text, _: after_hashes(text),
    "text": lambda text, _: text,
}
"""Extractors by their name in the config. The arguments are a completion and its finish reason."""


def given_answer(text: str) -> str:
    r"""Extract the answer of a completion from the last answer tags or, if there are none, the last `\boxed{}`.

    Without answer tags, only the text after `</think>` is searched for a box. If this text has no box, the whole text
    after `</think>` is the answer.
    """
    if (answer := between_answer_tags(text)) is not None:
        return answer
    final = after_reasoning(text)
    boxed = in_box(final)
    return final if boxed is None else boxed


def gold_answer(answer: Any, column: str) -> str:
    r"""Extract the ground-truth answer from `answer`, which is a row's value in the data column `column`.

    Three steps are done in order. Each step searches only the text that the previous step kept.

    1. If the text has `####`, keep only the text after the last `####`, up to the end of the line. Skip this step if
       the last `####` begins a Markdown heading.
    2. If the text has answer tags, keep only the text between the last pair of tags.
    3. If the text has `\boxed{}`, keep only the content of the last box.

    If `answer` is None, the result is empty.

    Raises:
        ValueError: If `answer` is neither None nor text nor a number.
    """
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # JSON has one kind of number: 72.0 is 72
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"column {column!r} must hold text or a number, got {answer!r:.80}.")
    text = str(answer)
    for extract in (_after_hashes_unless_heading, between_answer_tags, in_box):
        found = extract(text)
        text = text if found is None else found
    return text.strip()


def normalize(text: str) -> str:
    r"""Normalize a text by removing the commas of "1,000", full stops at the end, and outer delimiters.

    Full-width characters become ASCII.
    """
    text = _strip_marks(readable(text).replace("\\$", "$"))
    for opening, closing in (("**", "**"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = _strip_marks(text[len(opening) : -len(closing)])
    return text.replace(",", "") if GROUPED_NUMBER.fullmatch(text) else text


def amount(text: str) -> str:
    r"""Remove the currency symbol and digit separators of a number.

    "€72" becomes "72", and "10 000" becomes "10000". Any other text is returned unchanged.
    """
    found = _AMOUNT.fullmatch(text)
    if found is None or (found[1] and found[2]):
        return text
    return found[1] + found[2] + re.sub(r"[^0-9.]", "", found[3])


def _strip_marks(text: str) -> str:
    """Strip whitespace and `$` around a text, and full stops at its end."""
    return text.strip(" \t\r\n$").rstrip(" \t\r\n$.")


def plain(text: str) -> str:
    """Lowercase a text, collapse whitespace and strip full stops at the end."""
    return " ".join(text.casefold().split()).rstrip(". ")


_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?![\w]|\.[0-9])")


def numbers_in(text: str) -> set[float]:
    """The numbers in a text."""
    return {float(number.replace(",", "")) for number in _NUMBER.findall(readable(text))}


def single_number(text: str) -> float | None:
    """The number in a text; None if the text has no number, or if two numbers in the text differ."""
    values = numbers_in(text)
    return values.pop() if len(values) == 1 else None


def is_number(text: str) -> bool:
    """Whether the whole text is a number."""
    return _NUMBER.fullmatch(readable(text)) is not None


_DATE = re.compile(
    r"(?<![0-9])(?:[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|(?:19|20)[0-9]{2}-(?:0[1-9]|1[0-2])"
    r"|[0-9]{1,2}([-/.])[0-9]{1,2}\2(?:[0-9]{4}|[0-9]{2}))(?![0-9])"
)


def dates_in(text: str) -> set[tuple[int, ...]]:
    """The dates in digits in a text: {(2024, 5, 1)} for "on 2024-05-01"."""
    return {tuple(map(int, re.split("[-/.]", date[0]))) for date in _DATE.finditer(readable(text))}


def is_date(text: str) -> bool:
    """Whether the whole text is a date in digits."""
    return _DATE.fullmatch(readable(text)) is not None


_UNITS = {
    name: names.split()[0]
    for names in (
        *("km kilometer", "m meter", "cm centimeter", "mm millimeter", "l liter", "ml milliliter"),
        *("mi mile", "ft foot feet", "in inch inche", "km/h kmh kph", "mi/h mph", "kg kilogram kilo", "g gram", "lb"),
        *("h hour hr", "s second sec south", "am", "pm"),
        *("n north", "e east", "w west", "c celsius", "f fahrenheit", "% percent", "dollar", "\u20ac euro", "\u00a3"),
    )
    for name in names.split()
}
"""Units by name, in lower case and mostly without the plural's "s". Ambiguous names such as "min" (also "m"), "K" (also
"km") and "pound" are missing, because a right answer must not be refused."""

_TEXT_COMMAND = re.compile(r"\\(?:textbf|textit|text|mathrm|mathbf|mbox|[,;:! ])|\*\*")
_QUANTITY = re.compile(
    rf"({_CURRENCY})?\s?[+-]?(?<![\w.,:/^])[0-9]+(?:[.,:][0-9]+)*\s?(?:\u00b0|degrees?\b)?\s?"
    rf"((?!in\s[a-z])[A-Za-z][A-Za-z.]*(?:(?:/|\sper\s)[A-Za-z]+)?|%|{_CURRENCY})?"  # "5 in total" has no unit
)


def units_differ(a: str, b: str) -> bool:
    """Whether both texts have exactly one number each, with known and different units."""
    return any(one != other for one, other in zip(_unit(a), _unit(b), strict=False))


def _unit(text: str) -> list[str]:
    """The unit of the only number in a text, in parts (["km", "h"]); empty if there is no known unit."""
    text = readable(text).replace("{", "").replace("}", "").replace("^\\circ", "\u00b0").replace("$", "")
    text = _TEXT_COMMAND.sub(" ", text).replace("\\", "")
    quantities = [found[1] or found[2] or "" for found in _QUANTITY.finditer(" ".join(text.split()))]
    if len(quantities) != 1:
        return []
    name = re.sub("(met|lit)re", r"\1er", quantities[0].casefold().replace(".", ""))  # British spelling
    names = name.replace(" per ", "/").split("/")
    units = [_UNITS.get(name) or _UNITS.get(name.removesuffix("s"), "") for name in names]
    return "/".join(units).split("/") if all(units) else []


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
"""Number of characters before a letter that are searched for `_REFUSED`."""

_WRONG = re.compile(
    r"[)\]*_\"'.]{0,4}\s{1,8}(?:is|would\s{1,8}be|must\s{1,8}be|seems)\s{1,8}"
    r"(?:clearly\s{1,8}|definitely\s{1,8}|also\s{1,8})?(?:not|wrong|incorrect|false)\b"
    r"|[)\]*_\"']{0,4}\s{1,8}isn['\u2019]t\b"
    r"|[)\]*_\"'.]{0,4}\s{0,8}(?:选项)?(?:是|也)?(?:错|不对|不正确|不是|有误)",
    re.IGNORECASE,
)


def choice(text: str) -> str | None:
    """Extract the option that a text chooses, as a capital letter; None if it chooses none or several.

    These rules are tried in order, and the first that finds a letter decides:

    1. The letter that is the whole text.
    2. The last letter that is called the answer ("the answer is B").
    3. The marked letter at the start of the text ("B) because"). If other letters have the same mark ("(A) 1 (B) 2"),
       the result is None.
    4. The letters that are marked ("(B)") or called an option. If they are different letters, the result is None.
    5. The capital letters, except "I", that are separate words. If they are different letters, or if one of them can be
       the article ("A" before a lowercase word), the result is None.

    If a list of letters ("A or B", "A, B") starts with the letter of rule 2 or 3, the result is None.

    A letter that is called wrong ("not B", "B is wrong") is ignored by rules 2, 4 and 5. Rule 3 does not choose such a
    letter.
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
    options = {found[1].upper() for found in _allowed_matches(_OPTION, text) if _is_option(found, text)}
    marked = options | {(found[1] or found[2] or found[3]).upper() for found in _allowed_matches(_MARKED, text)}
    capitals = (found for found in _allowed_matches(_CAPITAL, text) if found[0] != "I")
    alone = marked or {None if _is_article(found, text) else found[0] for found in capitals}
    return alone.pop() if len(alone) == 1 else None


_LABEL = re.compile(
    r"(?:\*\*|[\s_$\"'])*"
    r"(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])\)|([A-H])[.:]|([A-Za-z])(?=(?:\*\*|[\s_$\"'.:])*\Z))"
    r"(?:\*\*|[_$\"'.:])*(?:\s|\Z|(?=[^\x00-\x7f]))"
)


def as_option(text: str) -> tuple[str, str] | None:
    """Read the capital letter and the text of a ground truth that is an option; None if it is not an option.

    The letter is the whole text ("B", "**B**") or precedes the option's text ("(B) Paris", "B. Paris"). Before a full
    stop or colon, only A to H are options, because "J. Smith" is a name.
    """
    text = readable(text)
    found = _LABEL.match(text)
    if found is None or choice(text) != found[found.lastindex or 0].upper():
        return None
    return found[found.lastindex or 0].upper(), text[found.end() :].strip(" \t\r\n*")


def _allowed_matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern whose letter is not called wrong."""
    return (found for found in pattern.finditer(text) if not _is_refused(found, text))


def _is_refused(found: re.Match[str], text: str) -> bool:
    """Whether a letter is called wrong ("not B", "B is wrong")."""
    start, end = found.span(found.lastindex or 0)
    before = text[max(0, start - _REFUSED_CHARACTERS) : start]
    return _REFUSED.search(before) is not None or _WRONG.match(text, end) is not None


def _is_option(found: re.Match[str], text: str) -> bool:
    """Whether a named letter is an option, not the word "a" or "i" ("the answer is a dog")."""
    return found[1] not in ("a", "i") or not _WORD_FOLLOWS.match(text, found.end())


def _is_article(found: re.Match[str], text: str) -> bool:
    """Whether a lone "A" may be the article, because a lowercase word follows ("A cat", even "A or B")."""
    following = text[found.end() : found.end() + 2]
    return found[0] == "A" and following[:1] == " " and following[1:].islower()


def _is_listed(found: re.Match[str], text: str) -> bool:
    """Whether another letter follows directly, and starts no new clause ("A. B is wrong")."""
    following = _NEXT.match(text, found.end())
    if following is None or _WORD_FOLLOWS.match(text, following.end()):
        return False
    chosen, other = found[found.lastindex or 1], following[1]
    return other.isupper() >= chosen.isupper() and other.upper() != chosen.upper() and other != "I"


def _others_alike(first: re.Match[str], text: str) -> bool:
    """Whether other letters have the same mark as the first."""
    letter = first[first.lastindex or 1]
    alike = re.finditer(rf"(?<![\w'\u2019])([A-Za-z]){re.escape(text[first.end()])}(?!\w)", text[first.end() :])
    others = {found[1] for found in alike if found[1].isupper() == letter.isupper()}
    return bool(others - {letter, "I"})


class AnswerReward(Reward):
    """Base class of rewards that compare a completion's answer with the ground truth of its row.

    Args:
        answer_column: The data column with the ground truth, which is text or a number.
    """

    says_solved = True

    def __init__(self, answer_column: str) -> None:
        self.answer_column = answer_column
        self.required_columns = (answer_column,)

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Check that the ground truth of a row is text, a number or None. Raises: ValueError if not."""
        gold_answer(columns.get(self.answer_column), self.answer_column)
