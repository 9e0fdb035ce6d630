"""Mathematical equality of an answer and the ground truth, by math-verify.

math-verify uses sympy, and sympy can compute forever. Therefore math-verify runs in a separate process, which is killed
if a comparison exceeds its time limit. A time limit by signal is not enough, because a signal does not interrupt the
computation of a large power, and works only in the main thread.
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
    GROUPED_NUMBER,
    AnswerReward,
    after_reasoning,
    between_answer_tags,
    chat_answer,
    gold_answer,
    in_box,
    numbers_in,
    readable,
)
from grpo_lightning.rewards.base import Content, Reward, WeightedReward, completion_text
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool

log = logging.getLogger(__name__)

MOST_UNDECIDED = 4
"""Maximum number of failed or timed-out comparisons with one ground truth, in one call of the reward."""

MAX_NESTING = 30
"""Maximum nesting depth of brackets in a text. A text with deeper nesting is not parsed, because the LaTeX parser would
take seconds."""

_DELIMITED = re.compile(r"\$|\\\(|\\\[")
_SCIENTIFIC = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")
_WITH_UNIT = re.compile(r"[+-]?[0-9.,]+\s+[A-Za-z]+\.?")
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean
_WORD = re.compile(rf"[A-Za-z]{{3}}|[{_UNSPACED}]")
_FACTORIAL = re.compile(r"(?<![A-Za-z])[a-z]!")  # not of a capital letter: "B!" is an option
_FUNCTION = re.compile(r"(?<![A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])")
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?!(?:sqrt|sin|cos|tan|log|exp)\b)(?:[A-Za-z]{3,}|[Ii]s|of|[Ss]o|[Ww]e|or|in|to|be|by|at|[Ii]t|as|[Ii]f)"
    rf"(?![A-Za-z])|[{_UNSPACED}]+"
)
_NEGATED = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n['\u2019]t\b|不", re.IGNORECASE)
_MINUS = re.compile(r"(?:\b(?:minus|negative)\s{1,8}|负\s{0,8})(?=[0-9])", re.IGNORECASE)
_LENGTH = "(?:mm|cm|dm|km|m|ft|in|yd|mi)"
_UNIT = re.compile(  # cm^2, km/h, m/s^2; units of letters alone are handled as words
    rf"(?<=[0-9])\s{{1,8}}(?:{_LENGTH}\^\{{?[23]\}}?|(?:{_LENGTH}|g|kg|L)/(?:s|sec|min|h|hr)(?:\^\{{?2\}}?)?)\.?\Z"
)
_CURRENCY = re.compile(
    r"\\{1,2}\$|[\u20a0-\u20bf\u00a3\u00a5\u0e3f]"
)  # \$, and the symbols of euro, pound, yen and others
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]+)(?<!\s)\*\*(?![\w(])")
_SEPARATOR = re.compile(r"[ \u00a0\u2009\u202f]|\\[,! ;]")
_GROUPED = re.compile(rf"(?<![0-9.,^_])[0-9]{{1,3}}(?:(?:{_SEPARATOR.pattern})[0-9]{{3}})+(?![0-9])")
_APART = re.compile(r"\\?\$|\\[()\[\]]|[\n\r\u2028](?![ \t]{0,8}=)|[.?]\s")
_SENTENCES = re.compile(r"[\n\r\u2028]|[.?!]\s")
_SEVERAL = re.compile(r"[,;]\s|;|\b(?:and|or)\b")
_WORDS = re.compile(rf"[A-Za-z]{{2,}}|[{_UNSPACED}]+")
_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_OPTION = re.compile(r"(?<![^\s,])\(([A-Za-z])\)(?![^\s,])")
_LETTERS_COMMA = re.compile(r"(?<=[A-Za-z]),(?=[A-Za-z])")
_LINKED = re.compile(r"=>?|\||&|->|\u2192|\\\\|\\(?:to|rightarrow|Rightarrow|implies)(?![A-Za-z])")
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])")
_BAR = re.compile(r"\\[lr]?vert(?![A-Za-z])")
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
            "\u222a": r"\cup ",
        },
    }
)


class Accuracy(AnswerReward):
    r"""1 if the completion's answer is mathematically equal to the ground truth, and 0 if not.

    The answer of a completion is the content of the last `<answer>...</answer>`. If this content has a `\boxed{...}`,
    the answer is the content of the last box in it. Without tags, the answer is the content of the last box. Without
    tags and boxes, these places are tried in order:

    1. an announced answer ("the final answer is $x$") or the text after `####`, whichever comes last in the completion;
    2. bold text;
    3. the end of the last line, if the completion is not truncated.

    A missing or unparsable answer is wrong. An answer with the same words as the ground truth is right. A set ("3, 4",
    "3 or 4") equals the same set in any order. Any other answer with several numbers ("3 and 4") is right only if it
    has the same words as the ground truth. If the ground truth is an equation of numbers ("2 + 4 = 6"), its right-hand
    side ("6") counts as the ground truth. Units and other words next to a number are ignored: "5 m" equals "5 km". A
    "!" that ends a sentence is not a factorial: "So it is 7!" is 7.

    The reward does not apply to a row without ground truth.

    The rules above have three exceptions. In each exception, some or all answers get no value (None). The reward logs a
    warning about these answers. These are the exceptions:

    1. If the ground truth cannot be parsed as mathematics, or is longer than `max_answer_characters`, no answer gets a
       value.
    2. If the ground truth has several different numbers, and is not one expression such as a set or a sum, these cases
       are tried in order:

       - The answer has the same words as the ground truth: right.
       - The ground truth has several sentences or lines (a worked solution): no value.
       - The answer consists of several numbers ("10 and 5"), or is negated ("not 10"): wrong.
       - The ground truth is one calculation ("3x = 12 => x = 4"), and the answer equals the result: right.
       - The answer equals the number that math-verify reads from the ground truth: no value. For example, math-verify
         reads 10 from "10 apples (5 red)", and the answer "20/2" equals 10.
       - The answer has numbers, and every number of the answer occurs in the ground truth: no value. For example, the
         answer "5" gets no value for the ground truth "10 apples (5 red)".
       - Otherwise: wrong.

    3. If the comparison of an answer fails or times out, this answer gets no value.

    The extra `math` installs math-verify, which runs in a separate process. If four comparisons with the same ground
    truth end in an error or a timeout in one call of the reward, this call compares no further answers with that ground
    truth. The further answers get no value.

    Args:
        answer_column: The data column with the ground truth, which is text or a number. If the text marks a part by
            `####`, by answer tags or by `\boxed{}`, only this part is the ground truth.
        timeout_seconds: Time limit of one comparison.
        max_answer_characters: Maximum number of characters in an answer. Longer answers are wrong. If a completion has
            neither answer tags nor a box, only the last `max_answer_characters` characters of the completion are
            searched.
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
        """Score completions. Returns: [B] 0 or 1, None where the reward gives no value."""
        golds = [gold_answer(answer, self.answer_column) for answer in columns[self.answer_column]]
        texts = [completion_text(completion) for completion in completions]
        decided: dict[tuple[str, str], float | None] = {}  # completions of a group often agree
        undecided: Counter[str] = Counter()  # by ground truth
        values = []
        for text, gold, reason in zip(texts, golds, finish_reasons or ["stop"] * len(texts), strict=True):
            question = (gold, self._answer(text, reason))
            if question not in decided:
                is_compared = bool(gold) and undecided[gold] < MOST_UNDECIDED
                decided[question] = self._score(*question, undecided) if is_compared else None
            values.append(decided[question])
        return values

    def warm_up(self) -> None:
        """Start the comparison process."""
        start_comparing()

    def compare(self, gold: str, answer: str) -> bool | None:
        """Call the function `compare`; None if `gold` is longer than `max_answer_characters`."""
        limit = self.max_answer_characters
        if len(gold) > limit:
            return None
        return compare(readable(gold), readable(answer) if len(answer) <= limit else "", self.timeout_seconds)

    def _answer(self, text: str, finish_reason: str) -> str:
        tagged, final = between_answer_tags(text), after_reasoning(text)
        boxed = in_box(tagged if tagged is not None else final if final.strip() else text)
        answer = boxed if boxed is not None else tagged
        return (chat_answer(final[-self.max_answer_characters :], finish_reason) if answer is None else answer) or ""

    def _score(self, gold: str, answer: str, undecided: Counter[str]) -> float | None:
        """Score one answer; count a failed comparison in `undecided`."""
        try:
            is_right = self.compare(gold, answer)
        except UndecidedError as error:
            undecided[gold] += 1
            last = " Further answers to this question are not compared." if undecided[gold] == MOST_UNDECIDED else ""
            log.warning("Accuracy: %.80r could not be compared with %.80r: %s.%s", answer, gold, error, last)
            return None
        if is_right is None:
            log.warning(
                "Accuracy: the ground truth %.80r cannot be parsed as one mathematical answer. If it is a worked "
                "solution, put the answer into \\boxed{}.",
                gold,
            )
        return None if is_right is None else float(is_right)


class UndecidedError(RuntimeError):
    """The comparison failed or timed out."""


class Comparison(Reward):
    """Comparison of two expressions, in the form of a `Reward`, so that a `WorkerPool` can run it."""

    def __reduce__(self) -> Any:
        """Unpickle by a call of `_ready_comparison`, so that the worker builds the parsers before its first call."""
        return _ready_comparison, ()

    def __call__(self, gold: str, answer: str) -> bool | None:
        """Compare, as the function `compare` does."""
        from math_verify import verify

        expected = results(parse_short(gold))
        if not expected:
            return None
        if words(answer) == words(gold):
            return True
        # If the ground truth has several numbers, math-verify compares one of them. For a calculation ("3x = 12 => x =
        # 4"), this is the result. Otherwise it may be the wrong number.
        has_several = names_several(gold, expected)
        if has_several and _SENTENCES.search(gold.strip()):
            return None  # a worked solution
        given = parse_short(answer)
        if names_several(answer, given) or is_negated(answer):
            return False
        # `verify` is not symmetric: the ground truth comes first.
        is_equal = bool(verify(expected, given, timeout_seconds=None, raise_on_error=True))
        if not has_several:
            return is_equal
        if is_equal:
            return True if is_calculation(gold) else None
        numbers = numbers_in(answer)
        return None if numbers and numbers <= numbers_in(gold) else False


def _ready_comparison() -> Comparison:
    """Make a `Comparison` with built parsers."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    comparison = Comparison()
    comparison("1/2", "0.5")
    return comparison


COMPARISON = WeightedReward(Comparison())


@functools.cache
def _pool(process_id: int) -> WorkerPool:
    """Make a pool of one worker. The cache key is the process id, because a fork lacks its parent's threads.

    Without the memory limit, `9^{9^9}` could exhaust the memory of the machine before the timeout.
    """
    return WorkerPool(
        [COMPARISON], RewardWorkers(num_workers=1, timeout_seconds=math.inf, step_timeout_seconds=math.inf, memory_gb=4)
    )


def start_comparing() -> WorkerPool:
    """Start the comparison process, once per process. Raises: RuntimeError if it does not start."""
    pool = _pool(os.getpid())
    pool.wait()
    if not pool.has(COMPARISON):
        raise RuntimeError("The process that compares mathematical answers did not start; see the log for the reason.")
    return pool


def compare(gold: str, answer: str, timeout_seconds: float) -> bool | None:
    """Compare an answer with the ground truth within a time limit. Any thread can call this function.

    Returns:
        True if `answer` equals `gold`. False if it does not, or if `answer` cannot be parsed as one answer. None if
        `gold` cannot be parsed as one answer (exceptions 1 and 2 of `Accuracy`).

    Raises:
        UndecidedError: If the comparison failed or timed out.
        RuntimeError: If the process does not start.
    """
    given = {"gold": gold, "answer": answer}
    found = start_comparing().submit(COMPARISON, given, seconds=timeout_seconds).result()
    if found.failure:
        raise UndecidedError(f"took longer than {timeout_seconds:g} s" if found.failure == "timeout" else found.problem)
    value: bool | None = found.result
    return value


def parse_short(text: str) -> list[Any]:
    r"""Parse a short answer into its possible expressions. The list is empty if the answer is not mathematics.

    A formula without delimiters is put between `$` signs, because `math_verify` would otherwise parse both `2\pi` and
    `(1, 2)` as the number 2.
    """
    from math_verify import parse

    text = prepare(text)
    if nesting(text) > MAX_NESTING:
        return []
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text), "f")
    is_bare = is_formula(text) and not _DELIMITED.search(text)
    return list(parse(f"${text}$" if is_bare else text, parsing_timeout=None))


def results(expressions: list[Any]) -> list[Any]:
    """Replace an equation of numbers ("2 + 4 = 6") by its right-hand side.

    Without this replacement, `verify` would accept the answer "1 = 1" for "2 + 4 = 6", and reject "6".
    """
    equations = [each for each in expressions if getattr(each, "is_Equality", False) and not each.free_symbols]
    return [each.rhs for each in equations] or expressions


def prepare(text: str) -> str:
    r"""Convert a text to LaTeX for `math_verify`, and remove units, currency, bold marks, and spaces in numbers."""
    text = _UNIT.sub("", _CURRENCY.sub("", _MINUS.sub("-", text.strip().translate(_SYMBOLS))))
    if text.count("$") == 1:  # a currency symbol: delimiters come in pairs
        text = text.replace("$", "")
    text = _GROUPED.sub(lambda found: _SEPARATOR.sub("", found[0]), _BOLD.sub(r"\1", text)).strip()
    if "\\" not in text and not _WORD.search(_FUNCTION.sub("", text)):
        return replace_parentheses(_FUNCTION.sub(r"\\\1", text).replace("**", "^"))
    return text if _DELIMITED.search(text) else delimit(text)


def replace_parentheses(text: str) -> str:
    r"""Replace the parentheses of `\sqrt(...)` and `^(...)` by braces."""
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
    r"""Put `$` around the LaTeX in a sentence. A text with fewer than two words is left unchanged."""
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
    """Whether the whole text is mathematics, rather than text with a number in it.

    If the text has a word but no LaTeX command, the result is False. math-verify would parse the word as a product of
    letters ("god" would equal "dog").
    """
    if "\\" in text:
        return True
    if _WORD.search(text) or _WITH_UNIT.fullmatch(text):
        return False
    return any(char.isdigit() or char in "^_=+-*/()[]{}<>|" for char in text) or _FACTORIAL.search(text) is not None


def names_several(text: str, expressions: list[Any]) -> bool:
    """Whether a text has several answers ("3 and 4"). A finite set counts as one answer."""
    if "\\begin" in text or any(getattr(expression, "is_FiniteSet", False) for expression in expressions):
        return False
    text = prepare(text)
    parts = _APART.split(text)
    if "\\" not in text and not (is_formula(text) and len(parts) == 1):
        parts = [piece for part in parts for piece in _WORDS.split(part)]
    if len({read_numbers(part) for part in parts if any(char.isdigit() for char in part)}) > 1:
        return True
    linked = [read_numbers(piece) for part in parts for piece in _LINKED.split(part)]
    if len({piece for piece in linked if isinstance(piece, tuple)}) > 1:
        return True
    return any(map(joins_answers, parts)) and not is_set_operation(expressions)


def joins_answers(part: str) -> bool:
    r"""Whether a part of a text has a set operation that joins answers, as in `(1, 2) \cup 4`.

    An operation inside brackets or bars does not count if an equals sign follows the brackets or bars. For example, the
    result for `P(A \cup B) = 0.7` is False.
    """
    if not any(char.isdigit() for char in part):
        return False
    part = _BAR.sub("|", part)
    depths = list(itertools.accumulate((char in "([{") - (char in ")]}") for char in part))
    bars = list(itertools.accumulate(char == "|" for char in part))
    equals = max((place for place, char in enumerate(part) if char == "=" and depths[place] <= 0), default=-1)
    places = [found.start() for found in _SET_OPERATION.finditer(part)]
    return any(place > equals or (depths[place] <= 0 and bars[place] % 2 == 0) for place in places)


def is_set_operation(expressions: list[Any]) -> bool:
    r"""Whether `math_verify` parsed a whole set operation. From `(1, 2) \cup 4`, it parses only the 4.

    The result is also True if `math_verify` could not parse the text.
    """
    from sympy import Basic, Set

    parsed = [expression for expression in expressions if isinstance(expression, Basic)]
    return not parsed or any(expression.has(Set) for expression in parsed)


def is_calculation(text: str) -> bool:
    """Whether a ground truth is one calculation with its result ("3x = 12 => x = 4")."""
    text = text.strip()
    return "=" in text and not _SEVERAL.search(text)


def is_negated(text: str) -> bool:
    """Whether a text negates its answer ("not 54"); `math_verify` would ignore the negation."""
    return "\\" not in text and _NEGATED.search(text) is not None


def read_numbers(part: str) -> tuple[float, ...] | str:
    """Parse a text as one or several numbers ("1,000", "(1, 2)"), else return it."""
    part = part.strip(_EDGES)
    numbers = [part.replace(",", "")] if GROUPED_NUMBER.fullmatch(part) else part.split(",")
    try:
        return tuple(map(float, numbers))
    except ValueError:
        return part


def words(text: str) -> list[str]:
    r"""Split a text into words in lower case, without LaTeX's commands for text; `\text{(B)}` becomes "b"."""
    text = _OPTION.sub(r"\1", _FONT.sub(r"\1", text))
    return _LETTERS_COMMA.sub(", ", text).casefold().split()


def nesting(text: str) -> int:
    """Maximum nesting depth of the brackets in a text."""
    depths = itertools.accumulate((char in "([{") - (char in ")]}") for char in text)
    return max(depths, default=0)
