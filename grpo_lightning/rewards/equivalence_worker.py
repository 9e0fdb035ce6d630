r"""The process that compares mathematical expressions: reads one JSON line per question, writes one per answer.

It runs as a script of its own and imports nothing of this package, so that it starts quickly and holds little memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
"""What an expression may allocate: `9^{9^9}` must not take the machine down before its time is over."""

MAX_NESTING = 30
"""Deeper brackets are no answer, and the LaTeX parser takes seconds on "((((((" instead of failing."""

GRACE_SECONDS = 1.0
"""How long after its time a comparison may still run: the process that asks ends it before, unless that was killed."""

_DELIMITED = re.compile(r"\$|\\\(|\\\[")
_SCIENTIFIC = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")
_WITH_UNIT = re.compile(r"[+-]?[0-9.,]+\s+[A-Za-z]+\.?")
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean
_WORD = re.compile(rf"[A-Za-z]{{3}}|[{_UNSPACED}]")
_FUNCTION = re.compile(r"(?<![A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])")
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?!(?:sqrt|sin|cos|tan|log|exp)\b)(?:[A-Za-z]{3,}|[Ii]s|of|[Ss]o|[Ww]e|or|in|to|be|by|at|[Ii]t|as|[Ii]f)"
    rf"(?![A-Za-z])|[{_UNSPACED}]+"
)
_NEGATED = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n['\u2019]t\b|不", re.IGNORECASE)
_MINUS = re.compile(r"(?:\b(?:minus|negative)\s{1,8}|负\s{0,8})(?=[0-9])", re.IGNORECASE)
_LENGTH = "(?:mm|cm|dm|km|m|ft|in|yd|mi)"
_UNIT = re.compile(  # cm^2, km/h, m/s^2: with fewer parts, units are words
    rf"(?<=[0-9])\s{{1,8}}(?:{_LENGTH}\^\{{?[23]\}}?|(?:{_LENGTH}|g|kg|L)/(?:s|sec|min|h|hr)(?:\^\{{?2\}}?)?)\.?\Z"
)
_CURRENCY = re.compile(
    r"\\{1,2}\$|[\u20a0-\u20bf\u00a3\u00a5\u0e3f]"
)  # \$, and the signs of euro, pound, yen and others
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]+)(?<!\s)\*\*(?![\w(])")
_SEPARATOR = re.compile(r"[ \u00a0\u2009\u202f]|\\[,! ;]")
_GROUPED = re.compile(rf"(?<![0-9.,^_])[0-9]{{1,3}}(?:(?:{_SEPARATOR.pattern})[0-9]{{3}})+(?![0-9])")
_APART = re.compile(r"\\?\$|\\[()\[\]]|[\n\r\u2028](?![ \t]{0,8}=)|[.?]\s")
_WORDS = re.compile(rf"[A-Za-z]{{2,}}|[{_UNSPACED}]+")
_LINKED = re.compile(r"=>?|\||&|->|\u2192|\\\\|\\(?:to|rightarrow|Rightarrow|implies|cup)(?![A-Za-z])")
_EDGES = " \t*:,;.=()"
_SYMBOLS = str.maketrans(
    {
        **{"\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u03c0": r"\pi ", "\u221a": r"\sqrt "},
        **{
            "\u00b2": "^{2}",
            "\u00b3": "^{3}",
            "\u00bd": r"\frac{1}{2}",
            "\u00bc": r"\frac{1}{4}",
            "\u00be": r"\frac{3}{4}",
            "\u221e": r"\infty ",
        },
    }
)


def main() -> None:
    """Answer until the questions end."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):  # they are for the process that asks
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not pass for an answer
    limit_memory()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    verdict("1/2", "0.5")  # the first comparison builds parsers, which is no question's fault
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        limit_time(question.pop("timeout_seconds") + GRACE_SECONDS)
        answer = json.dumps(verdict(**question))
        limit_time(0)
        print(answer, file=answers, flush=True)


def end_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone.

    The end of `stdin` would not tell while it computes, or if another child of that process holds the pipe too.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def limit_time(seconds: float) -> None:
    """Let the system end this process after so long; 0 takes that back.

    A large power is one step of the interpreter, in which no thread of ours gets its turn. (The parent-death signal of
    Linux would come when the *thread* that started this process ends, in the middle of another thread's question.)
    """
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def limit_memory() -> None:
    """Let this process fail instead of the machine, where the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def verdict(gold: str, answer: str, announced_in: str = "") -> dict[str, Any]:
    """Whether an answer equals the right one.

    Args:
        gold: The right answer.
        answer: The answer of a completion.
        announced_in: A text; the formula that it announces ("the final answer is $x$"), if there is one, is taken
            instead of `answer`.

    Returns:
        `value`: True or False; None if `gold` cannot be read, or with an `error`, if the comparison failed.
    """
    from math_verify import verify

    right = parsed(gold)
    if not right:
        return {"value": None}
    given = announced(announced_in)
    if not given:
        given = parsed(answer)
        is_refused = names_several(answer, given) or is_negated(answer)
        if is_refused and answer.casefold().split() != gold.casefold().split():
            return {"value": False}
    try:
        # `verify` is not symmetric: the right answer comes first.
        return {"value": bool(verify(right, given, timeout_seconds=None, raise_on_error=True))}
    except Exception as error:  # noqa: BLE001 (sympy raises anything; the other side decides)
        return {"value": None, "error": f"{type(error).__name__}: {error}"[:200]}


def parsed(text: str) -> list[Any]:
    r"""The expressions that a short answer may stand for; none if it is no mathematics.

    A bare formula is delimited: `math_verify` reads the number 2 off a bare `2\pi` or `(1, 2)`.
    """
    from math_verify import parse

    text = prepared(text)
    if nesting(text) > MAX_NESTING:
        return []
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text), "f")
    is_bare = is_formula(text) and not _DELIMITED.search(text)
    return list(parse(f"${text}$" if is_bare else text, parsing_timeout=None))


def prepared(text: str) -> str:
    r"""The text as LaTeX that `math_verify` reads: no currency, bold or spaces in numbers; `2*sqrt(3)` as LaTeX."""
    text = _UNIT.sub("", _CURRENCY.sub("", _MINUS.sub("-", text.strip().translate(_SYMBOLS))))
    if text.count("$") == 1:  # of money: delimiters come in pairs
        text = text.replace("$", "")
    text = _GROUPED.sub(lambda found: _SEPARATOR.sub("", found[0]), _BOLD.sub(r"\1", text)).strip()
    if "\\" not in text and not _WORD.search(_FUNCTION.sub("", text)):
        return in_braces(_FUNCTION.sub(r"\\\1", text).replace("**", "^"))
    return text if _DELIMITED.search(text) else delimited(text)


def in_braces(text: str) -> str:
    r"""The text with braces in place of the parentheses of `\sqrt(...)` and `^(...)`."""
    pieces, closing = [], []
    for place, char in enumerate(text):
        if char == "(":
            has_braces = text.endswith(("\\sqrt", "^"), 0, place)
            pieces.append("{" if has_braces else "(")
            closing.append("}" if has_braces else ")")
        else:
            pieces.append(closing.pop() if char == ")" and closing else char)
    return "".join(pieces)


def delimited(text: str) -> str:
    r"""A sentence with `$` around the LaTeX in it; what has less than two words is a formula, and stays as it is."""
    if "\\" not in text:
        return text
    depths = list(itertools.accumulate((char == "{") - (char == "}") for char in text))
    words = [found for found in _PROSE.finditer(text) if depths[found.start()] <= 0]
    if len(words) < 2:
        return text
    ends = [0, *(word.end() for word in words)]
    starts = [*(word.start() for word in words), len(text)]
    pieces = [text[end:start].strip(" ,.:;=") for end, start in zip(ends, starts, strict=True)]
    formulas = [f"${piece}$" if "\\" in piece else piece for piece in pieces]
    mixed = itertools.chain.from_iterable(zip(formulas, [*(word[0] for word in words), ""], strict=True))
    return " ".join(piece for piece in mixed if piece)


def is_formula(text: str) -> bool:
    """Whether all of a text is mathematics, not a text with a number in it.

    Words are none, though they parse as products of letters, in which "god" would equal "dog"; nor are units.
    """
    if "\\" in text:
        return True
    if _WORD.search(text) or _WITH_UNIT.fullmatch(text):
        return False
    return any(char.isdigit() or char in "^_=+-*/()[]{}<>|" for char in text)


def names_several(text: str, expressions: list[Any]) -> bool:
    """Whether a text tries more than one answer ("3 and 4", a line each): `math_verify` would take one of them.

    Args:
        text: An answer.
        expressions: What was read off it. A set is one answer, whatever it holds.
    """
    if "\\begin" in text or any(getattr(expression, "is_FiniteSet", False) for expression in expressions):
        return False
    text = prepared(text)
    parts = _APART.split(text)
    if "\\" not in text and not (is_formula(text) and len(parts) == 1):
        parts = [piece for part in parts for piece in _WORDS.split(part)]
    if len({reading(part) for part in parts if any(char.isdigit() for char in part)}) > 1:
        return True
    linked = [reading(piece) for part in parts for piece in _LINKED.split(part)]
    return len({piece for piece in linked if isinstance(piece, float)}) > 1


def is_negated(text: str) -> bool:
    """Whether a text says what the answer is not ("not 54"): `math_verify` would take the number."""
    return "\\" not in text and _NEGATED.search(text) is not None


def reading(part: str) -> float | str:
    """A part of a text, as a number if it is one."""
    part = part.strip(_EDGES)
    try:
        return float(part.replace(",", ""))
    except ValueError:
        return part


def nesting(text: str) -> int:
    """How deep brackets are opened."""
    depths = itertools.accumulate((char in "([{") - (char in ")]}") for char in text)
    return max(depths, default=0)


def announced(text: str) -> list[Any]:
    """The formula that a text announces as its answer."""
    from math_verify import LatexExtractionConfig, parse

    if nesting(text) > MAX_NESTING:
        return []
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return list(parse(text, [config], extraction_mode="first_match", parsing_timeout=None))


if __name__ == "__main__":
    folder = Path(__file__).parent  # its files must not be taken for other packages
    sys.path = [path for path in sys.path if Path(path) != folder]
    main()
