"""One reward that scores every row by the method its data name (VLM-R1's `accu_reward_method`)."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from grpo_lightning.rewards.base import (
    METHOD_COLUMN,
    SHARED,
    Content,
    ImageSize,
    Reward,
    RewardLike,
    completion_in_form,
    inner_reward,
)
from grpo_lightning.rewards.boxes.detection import DetectionMAP, OdLength, WeightedSum
from grpo_lightning.rewards.boxes.iou import IoU
from grpo_lightning.rewards.methods import TEXT_METHODS

METHODS: dict[str, Callable[[str], RewardLike]] = {
    **TEXT_METHODS,
    "iou": IoU,
    "rec": IoU,
    "map": DetectionMAP,
    "od_ap": DetectionMAP,
    "od_ap50": functools.partial(DetectionMAP, iou_threshold=0.5),
    "odLength": OdLength,
    "weighted_sum": WeightedSum,
}
"""The methods shipped, by their name in the column `accu_reward_method`: called with the column of the right answer."""

_JUDGE = "llm"


class ByMethod(Reward):
    """Scores every row by the method that its column `accu_reward_method` names.

    Shipped are `default` (`AnyAnswer`), `math` (`Accuracy`), `mcq` (`MultipleChoice`), `yes_no` (`YesNo`), `all_match`
    (`AllMatch`), `counting` (`Counting`); for boxes `iou` and `rec` (`IoU`), `map` and `od_ap` (`DetectionMAP`),
    `od_ap50` (the same with `iou_threshold=0.5`), `odLength` (`OdLength`) and `weighted_sum` (`WeightedSum`). `llm` is
    an `LLMJudge`, which has to be among `methods`. A method whose package is missing is an error where it is named.

    Args:
        methods: More methods by name, or others instead of shipped ones: any rewards but those for whole groups.
        default: The method of rows that name none (no such column, None or empty).
        method_column: The data column with the name of the method.
        answer_column: The data column with the right answer, for the shipped methods.
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
        """Raises: ValueError if `default` is no method, or a method cannot be inside another reward; ImportError."""
        made: dict[str, RewardLike] = {}
        self._missing: dict[str, str] = {}
        for name, make in METHODS.items():
            if name in (methods or {}):
                continue
            try:
                made[name] = make(answer_column)
            except ImportError as error:  # of a package that only rows of this method need
                self._missing[name] = str(error)
        made |= methods or {}
        self.methods = {name: inner_reward(method, "ByMethod", name) for name, method in made.items()}
        self.method_column = method_column
        self.default = self._known(default)
        self.required_columns = self.methods[default].required_columns
        self.optional_columns = (method_column,)
        self.in_process = any(method.in_process for method in self.methods.values())

    @property
    def name(self) -> str:
        """What VLM-R1 calls it."""
        return "accuracy"

    def __call__(
        self, completions: Sequence[Content], **available: Any
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score every row by its method. Args: completions: [B]. Returns: [B].

        Raises:
            ValueError: If a row names an unknown method, a column is missing for a method, or a method returns the
                wrong number of values.
            ImportError: If a row names a method whose package is missing.
        """
        named = available.get(self.method_column) or [None] * len(completions)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(named):
            rows.setdefault(self._known(name) if name else self.default, []).append(row)
        available["completions"] = completions
        log_extra = available.get("log_extra", _to_nowhere)
        logged: dict[str, dict[str, list[Any]]] = {}  # by column and method: each logs for its own rows
        results = {name: self._call(name, chosen, available, logged) for name, chosen in rows.items()}

        def finished(results: Mapping[str, Any]) -> list[float | None]:
            for column, by_method in logged.items():
                log_extra(column, _merged(by_method, rows, len(completions)))
            return _merged(results, rows, len(completions))

        waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
        if not waiting:
            return finished(results)

        async def later() -> list[float | None]:
            done = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
            return finished({**results, **done})

        return later()

    def check(self, max_completion_length: int) -> None:
        """Check every method. Raises: ValueError as the methods do."""
        for method in self.methods.values():
            method.check(max_completion_length)

    def check_row(self, columns: Mapping[str, Any], image_sizes: Sequence[ImageSize]) -> None:
        """Have the row's method check it.

        Raises:
            ValueError: As the method does, with its name in front; or if the row names an unknown method, or lacks a
                column that the method it names needs.
            ImportError: If it names a method whose package is missing.
        """
        method = self.method_of(columns)
        if columns.get(self.method_column):  # the default's columns are checked as those of every reward
            for column in self.methods[method].required_columns:
                if column not in columns:
                    raise ValueError(_lacks(method, column))
        try:
            self.methods[method].check_row(columns, image_sizes)
        except ValueError as error:
            raise ValueError(f"its method {method!r}: {error}") from error

    def warm_up(self) -> None:
        """Warm the default method up; the others may never be asked for."""
        self.methods[self.default].warm_up()

    def connect(self, device: torch.device) -> None:
        """Connect every method."""
        for method in self.methods.values():
            method.connect(device)

    def method_of(self, columns: Mapping[str, Any]) -> str:
        """The method of a row. Raises: ValueError if it is unknown; ImportError if its package is missing."""
        name = columns.get(self.method_column)
        return self._known(name) if name else self.default

    def _known(self, name: Any) -> str:
        """The name of a method. Raises: ValueError if there is none of that name; ImportError if it lacks a package."""
        if isinstance(name, str) and name in self.methods:
            return name
        if isinstance(name, str) and name in self._missing:
            raise ImportError(f"The method {name!r}: {self._missing[name]}")
        if name == _JUDGE:
            raise ValueError(
                f"The method {_JUDGE!r} needs to know which model judges: give ByMethod "
                "methods={'llm': LLMJudge(model=..., base_url=...)}."
            )
        close = difflib.get_close_matches(str(name), self.methods, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"There is no method {name!r} for the column {self.method_column!r}; there are: "
            f"{', '.join(self.methods)}.{hint}"
        )

    def _call(
        self,
        name: str,
        rows: Sequence[int],
        available: Mapping[str, Any],
        logged: dict[str, dict[str, list[Any]]],
    ) -> Any:
        """Call one method with its rows. What it gives `log_extra` goes to `logged`."""
        method = self.methods[name]
        for column in method.required_columns:
            if column not in available:
                raise ValueError(_lacks(name, column))
        arguments = {
            key: value if key in SHARED or value is None else [value[row] for row in rows]
            for key, value in available.items()
        }
        arguments["completions"] = [completion_in_form(c, method.completions_as) for c in arguments["completions"]]
        arguments["log_extra"] = lambda column, values: (
            logged.setdefault(column, {}).setdefault(name, []).extend(values)
        )
        return method(**arguments)


def _lacks(method: str, column: str) -> str:
    """What to say of a column that a method needs."""
    return f"The method {method!r} needs the data column {column!r}, which the data do not have."


def _to_nowhere(column: str, values: Iterable[Any]) -> None:
    """`log_extra` for a call outside a run."""


def _merged(results: Mapping[str, Any], rows: Mapping[str, Sequence[int]], count: int) -> list[float | None]:
    """[B] the values of all methods in the order of the rows."""
    merged: list[float | None] = [None] * count
    for name, result in results.items():
        values = list(result)
        if len(values) != len(rows[name]):
            raise ValueError(f"The method {name!r} must give {len(rows[name])} values, and gave {len(values)}.")
        for row, value in zip(rows[name], values, strict=True):
            merged[row] = value
    return merged
