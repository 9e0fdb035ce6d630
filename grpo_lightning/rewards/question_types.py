"""Score short answers by the type of question, which the column `accu_reward_method` names (VLM-R1)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_lightning.core.log_messages import did_you_mean
from grpo_lightning.rewards.accuracy import Accuracy, UndecidedError
from grpo_lightning.rewards.answers import (
    AnswerReward,
    as_option,
    choice,
    dates_in,
    given_answer,
    gold_answer,
    is_date,
    is_number,
    normalize,
    plain,
    readable,
    single_number,
    units_differ,
)
from grpo_lightning.rewards.base import (
    METHOD_COLUMN,
    SHARED,
    Content,
    ImageSize,
    Reward,
    RewardLike,
    completion_in_form,
    completion_text,
    inner_reward,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_YES_NO = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{3}")
_PI = re.compile(r"\b\u03c0\b")
_JUDGE = "llm"


class Method(AnswerReward):
    r"""Base class of rewards that compare the answer of a completion (`given_answer`) with the ground truth.

    Args:
        answer_column: The data column with the ground truth. If the text in this column has a marked part (by answer
            tags, `####` or `\boxed{}`), the ground truth is only this part. Otherwise, the ground truth is the whole
            text. The reward does not apply to a row in which the ground truth is None or empty.
    """

    def __init__(self, answer_column: str = "solution") -> None:
        super().__init__(answer_column)

    def __call__(self, completions: Sequence[Content], **columns: Any) -> list[float | None]:
        """Score completions. Returns: [B] in [0, 1], None where the reward does not apply to the row."""
        golds = [gold_answer(answer, self.answer_column) for answer in columns[self.answer_column]]
        answers = [given_answer(completion_text(completion)) for completion in completions]
        return [self.score(answer, gold) if gold else None for answer, gold in zip(answers, golds, strict=True)]

    @abstractmethod
    def score(self, given: str, right: str) -> float | None:
        """Return the score of an answer, from 0 to 1; None if the method does not fit the ground truth."""


class MultipleChoice(Method):
    """1 if the answer chooses the option of the ground truth, else 0.

    The answers `(B)`, `**B**`, `b` and "Option B is right" all choose B. An answer that names no option, or lists
    several options ("A, B", "(A) 1 (B) 2"), is wrong. The reward does not apply to a row without an option in its
    ground truth.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the letters."""
        letter = choice(right)
        return None if letter is None else float(choice(given) == letter)


class YesNo(Method):
    """1 if the answer has the same word as the ground truth ("yes" or "no") and does not have the opposite word.

    The reward applies only to a row with exactly one of the two words in its ground truth.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the words."""
        wanted, found = ({word.lower() for word in _YES_NO.findall(readable(text))} for text in (right, given))
        return float(found == wanted) if len(wanted) == 1 else None


class AllMatch(Method):
    """1 if the answer equals the ground truth, ignoring case, the amount of whitespace, and full stops at the end."""

    def score(self, given: str, right: str) -> float | None:
        """Compare the texts."""
        return float(plain(given) == plain(right))


class Counting(Method):
    """1 if the only number in the answer equals the number of the ground truth ("There are 3." is 3).

    The reward does not apply to a row with no number or several numbers in its ground truth.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the numbers."""
        number = single_number(right)
        return None if number is None else float(single_number(given) == number)


class TextSimilarity(Method):
    """Similarity of the answer a and the ground truth b: 2 * LCS / (len(a) + len(b)), in characters.

    LCS is the length of the longest common subsequence. Case, the amount of whitespace, and full stops at the end are
    ignored. Words of similar spelling get a high value, whatever they mean.
    """

    def score(self, given: str, right: str) -> float | None:
        """Compare the texts."""
        return similarity(plain(given), plain(right))


class AnyAnswer(Method):
    r"""1 if the answer is correct. The kind of ground truth (number, option, mathematics, text) selects the comparison.

    An answer that equals the ground truth as in `AllMatch` is correct. Otherwise:

    - An option ("B", "(B)", "B) Paris", "B. Paris"): the answer is compared as in `MultipleChoice`. An answer without
      the letter of an option is compared with the text of the ground truth ("Paris").
    - A number: an answer with exactly one number is correct if that number equals the ground truth ("There are 3." is
      3). An answer that is a formula ("3/4" for 0.75, "12 cm" for 12) is compared as mathematics.
    - Mathematics: the answer is compared as in `Accuracy`. An answer is wrong if its unit and the unit of the ground
      truth are well known and different ("5 m" for "5 km"). Other units are ignored.
    - A date in digits ("2024-05-01"): an answer with exactly one date is correct if that date equals the ground truth.
    - Other text: the answer gets 0 or, with `has_partial_credit`, the value of `TextSimilarity`. VLM-R1 always gives
      this partial credit.

    Args:
        answer_column: As in `Method`.
        has_partial_credit: If true, a wrong answer gets the value of `TextSimilarity` instead of 0. This setting
            applies to dates and other text.
    """

    def __init__(self, answer_column: str = "solution", *, has_partial_credit: bool = False) -> None:
        """Raises: ImportError if math-verify is missing."""
        super().__init__(answer_column)
        self.has_partial_credit = has_partial_credit
        self.accuracy = Accuracy(answer_column)

    def score(self, given: str, right: str) -> float | None:
        """Compare by the kind of the ground truth."""
        if plain(given) == plain(right):
            return 1.0
        if option := as_option(right):
            return self._score_option(given, *option)
        if is_date(normalize(given)) or dates_in(right):  # as mathematics, 2024-05-01 would be 2018
            is_right = is_date(normalize(right)) and dates_in(given) == dates_in(right)
            return 1.0 if is_right else self._score_text(given, right)
        return self._score_formula(given, right) if _is_formula(right) else self._score_text(given, right)

    def _score_option(self, given: str, letter: str, text: str) -> float | None:
        """Compare with the letter of an option, or with the option's text (may be empty)."""
        chosen = choice(given)
        if text and (chosen is None or plain(given) == plain(text)):
            return self.score(given, text)
        return float(chosen == letter)

    def _score_formula(self, given: str, right: str) -> float | None:
        """Compare with a number or other mathematics."""
        if units_differ(given, right):
            return 0.0
        if is_number(normalize(right)):
            if single_number(given) == single_number(normalize(right)):
                return 1.0
            if is_number(normalize(given)) or not _is_formula(given):
                return 0.0
        try:
            is_right = self.accuracy.compare(right, given)
        except UndecidedError as error:
            log.warning("AnyAnswer: %.80r could not be compared with %.80r: %s.", given, right, error)
            return None
        return self._score_text(given, right) if is_right is None else float(is_right)

    def _score_text(self, given: str, right: str) -> float:
        """Compare with a text that the answer does not equal."""
        return similarity(plain(given), plain(right)) if self.has_partial_credit else 0.0


def shipped_methods() -> dict[str, Callable[[str], RewardLike]]:
    """The built-in methods, by name. Each is called with the answer column."""
    from grpo_lightning.rewards.boxes.rewards import DetectionMAP, IoU, OdLength, WeightedSum  # they need torch

    return {
        "default": AnyAnswer,
        "math": Accuracy,
        "mcq": MultipleChoice,
        "yes_no": YesNo,
        "all_match": AllMatch,
        "counting": Counting,
        "iou": IoU,
        "rec": IoU,
        "map": DetectionMAP,
        "od_ap": DetectionMAP,
        "od_ap50": functools.partial(DetectionMAP, iou_threshold=0.5),
        "odLength": OdLength,
        "weighted_sum": WeightedSum,
    }


class ByMethod(Reward):
    """Scores each row with the scoring method (a reward) that the row names in its column `accu_reward_method`.

    The built-in methods for short answers are `default` (`AnyAnswer`), `math` (`Accuracy`), `mcq` (`MultipleChoice`),
    `yes_no` (`YesNo`), `all_match` (`AllMatch`) and `counting` (`Counting`). Those for boxes are `iou` and `rec`
    (`IoU`), `map` and `od_ap` (`DetectionMAP`), `od_ap50` (`DetectionMAP` with `iou_threshold=0.5`), `odLength`
    (`OdLength`) and `weighted_sum` (`WeightedSum`). The method `llm` needs an `LLMJudge` in `methods`. A missing
    package is an error only for the methods that are used.

    Args:
        methods: Further methods by name. A method with the name of a built-in method replaces the built-in method.
            Rewards for whole groups are not allowed.
        default: The method of rows that name no method (`method_column` is missing, None or empty).
        method_column: The data column in which each row names its method.
        answer_column: The data column with the ground truth, for the built-in methods.
    """

    says_solved = True

    def __init__(
        self,
        methods: dict[str, RewardLike] | None = None,
        *,
        default: str = "default",
        method_column: str = METHOD_COLUMN,
        answer_column: str = "solution",
    ) -> None:
        """Collect the scoring methods.

        Raises:
            ValueError: If `default` is unknown, or if `inner_reward` refuses a method.
            ImportError: If the package that `default` needs is missing.
        """
        made: dict[str, RewardLike] = {}
        self._missing: dict[str, str] = {}
        for name, make in shipped_methods().items():
            if name in (methods or {}):
                continue
            try:
                made[name] = make(answer_column)
            except ImportError as error:  # only rows of this method need that package
                self._missing[name] = str(error)
        made |= methods or {}
        self.methods = {name: inner_reward(method, "ByMethod", name) for name, method in made.items()}
        self.method_column = method_column
        self.default = self._check_name(default)
        self.required_columns = self.methods[default].required_columns
        self.optional_columns = (method_column,)
        self.in_process = any(method.in_process for method in self.methods.values())
        self.inner_rewards = tuple(self.methods.values())

    @property
    def name(self) -> str:
        """The name of this reward in VLM-R1."""
        return "accuracy"

    def __call__(
        self, completions: Sequence[Content], **available: Any
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score each row with its scoring method.

        Returns:
            [B] values, awaitable if at least one row has an async scoring method.

        Raises:
            ValueError: If a row names an unknown scoring method, if a column that a method needs is missing, or if a
                method returns the wrong number of values.
            ImportError: If a row names a scoring method whose package is missing.
        """
        named = available.get(self.method_column) or [None] * len(completions)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(named):
            rows.setdefault(self._check_name(name) if name else self.default, []).append(row)
        available["completions"] = completions
        log_extra = available.get("log_extra")
        logged: dict[str, dict[str, list[Any]]] = {}  # by column and method: each method logs its own rows
        results = {name: self._call(name, chosen, available, logged) for name, chosen in rows.items()}

        def finish(results: Mapping[str, Any]) -> list[float | None]:
            for column, by_method in logged.items():
                if log_extra is not None:
                    log_extra(column, _merge(by_method, rows, len(completions)))
            return _merge(results, rows, len(completions))

        waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}

        async def finish_later() -> list[float | None]:
            done = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
            return finish({**results, **done})

        return finish_later() if waiting else finish(results)

    async def prefetch(self, completions: Sequence[Content], **available: Any) -> None:
        """Run `prefetch` of the prompt's scoring method."""
        named = available.get(self.method_column) or [None]
        method = self.methods[self.method_of({self.method_column: named[0]})]
        if method.has_prefetch:
            in_form = [completion_in_form(completion, method.completions_as) for completion in completions]
            await method.prefetch(completions=in_form, **available)

    def check(self, max_completion_length: int) -> None:
        """Run `check` of all scoring methods. Raises: ValueError if a check fails."""
        for method in self.methods.values():
            method.check(max_completion_length)

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Run `check_row` of the row's scoring method.

        Raises:
            ValueError: If the scoring method is unknown, if a column that it needs is missing, or if its `check_row`
                fails.
            ImportError: If the row names a scoring method whose package is missing.
        """
        method = self.method_of(columns)
        if columns.get(self.method_column):  # the columns of the default are in `required_columns`
            for column in self.methods[method].required_columns:
                if column not in columns:
                    raise ValueError(_missing_column(method, column))
        try:
            self.methods[method].check_row(columns, image_sizes)
        except ValueError as error:
            raise ValueError(f"its method {method!r}: {error}") from error

    def warm_up(self) -> None:
        """Warm up only the default scoring method, because the others may never be called."""
        self.methods[self.default].warm_up()

    def connect(self, device: torch.device) -> None:
        """Run `connect` of all scoring methods."""
        for method in self.methods.values():
            method.connect(device)

    def method_of(self, columns: Mapping[str, Any]) -> str:
        """The name of a row's scoring method. Raises: ValueError if unknown; ImportError if its package is missing."""
        name = columns.get(self.method_column)
        return self._check_name(name) if name else self.default

    def _check_name(self, name: Any) -> str:
        """Check the name of a scoring method."""
        if isinstance(name, str) and name in self.methods:
            return name
        if isinstance(name, str) and name in self._missing:
            raise ImportError(f"The method {name!r}: {self._missing[name]}")
        if name == _JUDGE:
            raise ValueError(
                f"The method {_JUDGE!r} needs a judge model: pass "
                "methods={'llm': LLMJudge(model=..., base_url=...)} to ByMethod."
            )
        raise ValueError(
            f"Unknown method {name!r} in the column {self.method_column!r}; available: {', '.join(self.methods)}."
            f"{did_you_mean(str(name), self.methods)}"
        )

    def _call(
        self,
        name: str,
        rows: Sequence[int],
        available: Mapping[str, Any],
        logged: dict[str, dict[str, list[Any]]],
    ) -> Any:
        """Call a scoring method on its rows; collect its `log_extra` columns in `logged`."""
        method = self.methods[name]
        for column in method.required_columns:
            if column not in available:
                raise ValueError(_missing_column(name, column))
        arguments = {
            key: value if key in SHARED or value is None else [value[row] for row in rows]
            for key, value in available.items()
        }
        arguments["completions"] = [completion_in_form(c, method.completions_as) for c in arguments["completions"]]
        arguments["log_extra"] = lambda column, values: (
            logged.setdefault(column, {}).setdefault(name, []).extend(values)
        )
        return method(**arguments)


def _missing_column(method: str, column: str) -> str:
    return f"The method {method!r} needs the data column {column!r}, which is missing."


def _merge(results: Mapping[str, Any], rows: Mapping[str, Sequence[int]], count: int) -> list[float | None]:
    """Merge the values of all scoring methods in row order: [B]."""
    merged: list[float | None] = [None] * count
    for name, result in results.items():
        values = list(result)
        if len(values) != len(rows[name]):
            raise ValueError(f"The method {name!r} must return {len(rows[name])} values, got {len(values)}.")
        for row, value in zip(rows[name], values, strict=True):
            merged[row] = value
    return merged


def similarity(a: str, b: str) -> float:
    """Levenshtein ratio of two texts: 2 * LCS / (len(a) + len(b)); 1 for two empty texts.

    LCS is the length of the longest common subsequence. The bits of an integer store a row of the dynamic-programming
    table. A bit is zero where the LCS grows (Hyyrö, "Bit-Parallel LCS-length Computation Revisited", 2004).
    """
    if len(a) < len(b):
        a, b = b, a
    places: dict[str, int] = {}
    for place, char in enumerate(b):
        places[char] = places.get(char, 0) | 1 << place
    row = every = (1 << len(b)) - 1
    for char in a:
        matches = row & places.get(char, 0)
        row = (row + matches | row - matches) & every
    lcs = len(b) - row.bit_count()
    total = len(a) + len(b)
    return 1 - (total - 2 * lcs) / total if total else 1.0


def _is_formula(text: str) -> bool:
    """Whether a text is compared as mathematics. "Paris 2024" is not: math-verify would parse only the number."""
    is_math = any(char.isdigit() or char in "\\^_$" for char in text) or _PI.search(text)
    return bool(is_math) and ("\\" in text or not _WORD.search(text))
