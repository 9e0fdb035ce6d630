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
_WORD = re.compile(r"[A-Za-z]{3}")
_APART = re.compile(r"\\?\$|\\[()\[\]]|[\n\r\u2028](?![ \t]{0,8}=)|[.?]\s")
_WORDS = re.compile(r"[A-Za-z]{2,}")
_LINKED = re.compile(r"=>?|\||&|->|\u2192|\\\\|\\(?:to|rightarrow|Rightarrow|implies|cup)(?![A-Za-z])")
_EDGES = " \t*:,;.=()"
_SYMBOLS = str.maketrans(
    {"\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u03c0": r"\pi ", "\u221a": r"\sqrt "}
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
    verdict("1/2", "0.5", is_anchored=False)  # the first comparison builds parsers, which is no question's fault
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


def verdict(gold: str, answer: str, *, is_anchored: bool) -> dict[str, Any]:
    """Whether an answer equals the right one.

    Args:
        gold: The right answer.
        answer: The answer of a completion, or a text that announces one.
        is_anchored: True if only an announced formula counts ("the final answer is $x$").

    Returns:
        `value`: True or False; None if `gold` cannot be read, or with an `error`, if the comparison failed.
    """
    from math_verify import verify

    right = parsed(gold)
    if not right:
        return {"value": None}
    given = announced(answer) if is_anchored else parsed(answer)
    if not is_anchored and names_several(answer, given) and answer.casefold().split() != gold.casefold().split():
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

    text = text.strip().translate(_SYMBOLS)
    if nesting(text) > MAX_NESTING:
        return []
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text), "f")
    is_bare = is_formula(text) and not _DELIMITED.search(text)
    return list(parse(f"${text}$" if is_bare else text, parsing_timeout=None))


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
    text = text.strip().translate(_SYMBOLS)
    parts = _APART.split(text)
    if "\\" not in text and not (is_formula(text) and len(parts) == 1):
        parts = [piece for part in parts for piece in _WORDS.split(part)]
    if len({reading(part) for part in parts if any(char.isdigit() for char in part)}) > 1:
        return True
    linked = [reading(piece) for part in parts for piece in _LINKED.split(part)]
    return len({piece for piece in linked if isinstance(piece, float)}) > 1


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
