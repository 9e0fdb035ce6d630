"""Is the answer mathematically equal to the right one?

Comparing is math-verify's work, in a process that can be killed: sympy may compute for ever, and not even a signal
interrupts a large power (signals also work in the main thread only).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from grpo_lightning.rewards.answers import (
    AnswerReward,
    after_thought,
    between_answer_tags,
    chat_answer,
    in_box,
    readable,
    right_answer,
)
from grpo_lightning.rewards.base import Content, Reward, WeightedReward, completion_text
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool

logger = logging.getLogger(__name__)

MOST_UNDECIDED = 4
"""Comparisons with one right answer that may fail or take too long in a call."""

MAX_NESTING = 30
"""Deeper brackets are no answer, and the LaTeX parser takes seconds on "((((((" instead of failing."""

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


class Accuracy(AnswerReward):
    r"""1 if the completion's answer equals the row's answer as mathematics, else 0: `\frac{1}{2}` is 0.5.

    The answer of a completion is what its last `<answer>...</answer>` holds, else its last `\boxed{...}`, else what is
    announced near the end ("the final answer is $x$"), follows `####`, or is bold, else the end of its last line, if it
    is not truncated. No answer is a wrong one, and so is what cannot be read, and what tries several: "3 and 4", or a
    line each. A row whose right answer cannot be read as mathematics is not scorable, nor is a completion whose
    comparison fails or takes too long; both give a warning.

    Comparing is done by math-verify (extra `math`) in a process of its own, from any thread. After four answers to a
    question whose comparisons took too long, further ones are not compared, and not scorable: a call must end.

    Args:
        answer_column: The data column with the right answer, text or a number: all of it, or the part after `####`,
            between answer tags or in `\boxed{}`.
        timeout_seconds: For one comparison.
        max_answer_characters: A longer answer is not read; an announced one must be among the last so many.
    """

    def __init__(
        self, answer_column: str = "solution", *, timeout_seconds: float = 5.0, max_answer_characters: int = 1000
    ) -> None:
        """Raises: ImportError if math-verify is missing; ValueError if a limit is not positive."""
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("Accuracy needs math-verify: pip install 'grpo-lightning[math]'.")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}.")
        if max_answer_characters < 1:
            raise ValueError(f"max_answer_characters must be at least 1, got {max_answer_characters}.")
        super().__init__(answer_column)
        self.timeout_seconds = timeout_seconds
        self.max_answer_characters = max_answer_characters

    def __call__(
        self, completions: Sequence[Content], finish_reasons: Sequence[str] | None = None, **columns: Any
    ) -> list[float | None]:
        """Compare. Args: completions, finish_reasons: [B]. Returns: [B], None where it is not scorable."""
        golds = [right_answer(answer, self.answer_column) for answer in columns[self.answer_column]]
        texts = [completion_text(completion) for completion in completions]
        decided: dict[tuple[str, str], float | None] = {}  # completions of a group often agree
        undecided: Counter[str] = Counter()  # by right answer
        values = []
        for text, gold, reason in zip(texts, golds, finish_reasons or ["stop"] * len(texts), strict=True):
            question = (gold, self._answer(text, reason))
            if question not in decided:
                is_asked = bool(gold) and undecided[gold] < MOST_UNDECIDED
                decided[question] = self._score(*question, undecided) if is_asked else None
            values.append(decided[question])
        return values

    def warm_up(self) -> None:
        """Start the process that compares."""
        start_comparing()

    def compare(self, gold: str, answer: str) -> bool | None:
        """Compare an answer with the right one. Returns, Raises: as `compare`; a long answer is not read."""
        limit = self.max_answer_characters
        if len(gold) > limit:
            return None
        return compare(readable(gold), readable(answer) if len(answer) <= limit else "", self.timeout_seconds)

    def _answer(self, text: str, finish_reason: str) -> str:
        """A completion's answer; may be empty."""
        tagged, said = between_answer_tags(text), after_thought(text)
        boxed = in_box(tagged if tagged is not None else said if said.strip() else text)
        answer = boxed if boxed is not None else tagged
        return (chat_answer(said[-self.max_answer_characters :], finish_reason) if answer is None else answer) or ""

    def _score(self, gold: str, answer: str, undecided: Counter[str]) -> float | None:
        """One reward; what cannot be scored is logged, and counted in `undecided`."""
        try:
            is_right = self.compare(gold, answer)
        except UndecidedError as error:
            undecided[gold] += 1
            last = " No other answers to this question are compared." if undecided[gold] == MOST_UNDECIDED else ""
            logger.warning("Accuracy: %.80r could not be compared with %.80r: %s.%s", answer, gold, error, last)
            return None
        if is_right is None:
            logger.warning("Accuracy: the right answer %.80r cannot be read as mathematics.", gold)
        return None if is_right is None else float(is_right)


class UndecidedError(RuntimeError):
    """The comparison failed or took too long."""


class Comparison(Reward):
    """Compares expressions, as the only reward of a pool of one worker. Its import and first use are the slow ones."""

    def __reduce__(self) -> Any:
        """Get ready where it is loaded."""
        return _ready_comparison, ()

    def __call__(self, gold: str, answer: str) -> bool | None:
        """Compare. Args, Returns: as `compare`."""
        from math_verify import verify

        right = parse_short(gold)
        if not right:
            return None
        given = parse_short(answer)
        is_refused = names_several(answer, given) or is_negated(answer)
        if is_refused and answer.casefold().split() != gold.casefold().split():
            return False
        # `verify` is not symmetric: the right answer comes first.
        return bool(verify(right, given, timeout_seconds=None, raise_on_error=True))


def _ready_comparison() -> Comparison:
    """One whose parsers are built."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    comparison = Comparison()
    comparison("1/2", "0.5")
    return comparison


COMPARISON = WeightedReward(Comparison())


@functools.cache
def _pool(process_id: int) -> WorkerPool:
    """A worker that may allocate 4 GB: `9^{9^9}` must not take the machine down before its time is over.

    Args:
        process_id: A fork has none of its parent's threads, and gets a pool of its own.
    """
    return WorkerPool(
        [COMPARISON], RewardWorkers(num_workers=1, timeout_seconds=math.inf, step_timeout_seconds=math.inf, memory_gb=4)
    )


def start_comparing() -> WorkerPool:
    """Start the process that compares, once per process. Raises: RuntimeError if it does not start."""
    pool = _pool(os.getpid())
    pool.wait()
    if not pool.has(COMPARISON):
        raise RuntimeError("The process that compares mathematical answers did not start; why is in the log.")
    return pool


def compare(gold: str, answer: str, timeout_seconds: float) -> bool | None:
    """Compare an answer with the right one, within a time limit, from any thread.

    Args:
        gold: The right answer.
        answer: An answer.
        timeout_seconds: After which the process is killed.

    Returns:
        Whether they are equal (False too if the answer cannot be read); None if `gold` cannot be read.

    Raises:
        UndecidedError: If the comparison failed or took too long.
        RuntimeError: If the process does not start.
    """
    given = {"gold": gold, "answer": answer}
    found = start_comparing().submit(COMPARISON, given, seconds=timeout_seconds).result()
    if found.failure:
        raise UndecidedError(f"took longer than {timeout_seconds:g} s" if found.failure == "timeout" else found.problem)
    value: bool | None = found.result
    return value


def parse_short(text: str) -> list[Any]:
    r"""The expressions that a short answer may stand for; none if it is no mathematics.

    A bare formula is delimited: `math_verify` reads the number 2 off a bare `2\pi` or `(1, 2)`.
    """
    from math_verify import parse

    text = prepare(text)
    if nesting(text) > MAX_NESTING:
        return []
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text), "f")
    is_bare = is_formula(text) and not _DELIMITED.search(text)
    return list(parse(f"${text}$" if is_bare else text, parsing_timeout=None))


def prepare(text: str) -> str:
    r"""The text as LaTeX that `math_verify` reads: no currency, bold or spaces in numbers; `2*sqrt(3)` as LaTeX."""
    text = _UNIT.sub("", _CURRENCY.sub("", _MINUS.sub("-", text.strip().translate(_SYMBOLS))))
    if text.count("$") == 1:  # of money: delimiters come in pairs
        text = text.replace("$", "")
    text = _GROUPED.sub(lambda found: _SEPARATOR.sub("", found[0]), _BOLD.sub(r"\1", text)).strip()
    if "\\" not in text and not _WORD.search(_FUNCTION.sub("", text)):
        return replace_parentheses(_FUNCTION.sub(r"\\\1", text).replace("**", "^"))
    return text if _DELIMITED.search(text) else delimit(text)


def replace_parentheses(text: str) -> str:
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


def delimit(text: str) -> str:
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
    text = prepare(text)
    parts = _APART.split(text)
    if "\\" not in text and not (is_formula(text) and len(parts) == 1):
        parts = [piece for part in parts for piece in _WORDS.split(part)]
    if len({read_number(part) for part in parts if any(char.isdigit() for char in part)}) > 1:
        return True
    linked = [read_number(piece) for part in parts for piece in _LINKED.split(part)]
    return len({piece for piece in linked if isinstance(piece, float)}) > 1


def is_negated(text: str) -> bool:
    """Whether a text says what the answer is not ("not 54"): `math_verify` would take the number."""
    return "\\" not in text and _NEGATED.search(text) is not None


def read_number(part: str) -> float | str:
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
