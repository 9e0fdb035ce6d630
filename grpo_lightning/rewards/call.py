"""One reward called on one batch: what it is given, what it logs, what comes back, and what goes wrong."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.rewards.base import Content, WeightedReward, completion_in_form
from grpo_lightning.types import Completion, Group

logger = logging.getLogger(__name__)

FAILURES = ("exception", "wrong_length", "invalid_value", "not_scorable")
"""What is counted for every reward, in completions: the call raised; it returned the wrong number of values; a value
was NaN, infinite or no number; no value although other completions of the group have one."""

T = TypeVar("T")


@dataclass
class RewardCall:
    """One reward on one batch of groups: what it logs, what comes back, what goes wrong."""

    reward: WeightedReward
    groups: Sequence[Group]
    columns: Sequence[str]
    trainer_state: Any = None
    max_completion_length: int | None = None
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))

    def start(self) -> None:
        """Run a sync reward; set an async one going. What it raises waits for `finish`."""
        self._result: Future[Any] = Future()
        try:
            result = self.reward(**self._arguments())
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
            self._result.set_exception(error)
            return
        if inspect.isawaitable(result):
            self._result = asyncio.run_coroutine_threadsafe(_finished(result), _event_loop(os.getpid()))
        else:
            self._result.set_result(result)

    def finish(self) -> Tensor:
        """Wait for the reward. Returns: [N, G] float32, NaN for None."""
        numbers = [[self._number(value, n, g) for g, value in enumerate(row)] for n, row in enumerate(self._rows())]
        values = torch.tensor(numbers, dtype=torch.float32)
        missing = values.isnan()
        self.failures["not_scorable"] = int((missing & ~missing.all(dim=1, keepdim=True)).sum())
        return values

    @property
    def size(self) -> tuple[int, int]:
        """(N, G)."""
        return len(self.groups), len(self.groups[0].completions)

    def _arguments(self) -> dict[str, Any]:
        """All a reward can take. Fresh lists: a reward that changes them changes nothing for anybody else."""
        group_size = self.size[1]

        def per_prompt(values: list[T]) -> list[T]:
            return values if self.reward.per_group else [value for value in values for _ in range(group_size)]

        def per_completion(read: Callable[[Group, Completion], T]) -> list[T] | list[list[T]]:
            rows = [[read(group, completion) for completion in group.completions] for group in self.groups]
            return rows if self.reward.per_group else list(itertools.chain.from_iterable(rows))

        prompts = [group.prompt for group in self.groups]
        columns = {name: per_prompt([prompt.columns.get(name) for prompt in prompts]) for name in self.columns}
        return columns | {
            "prompts": per_prompt([p.content if isinstance(p.content, str) else list(p.content) for p in prompts]),
            "completions": per_completion(self._completion),
            "completion_ids": per_completion(lambda _, completion: list(completion.token_ids)),
            "finish_reasons": per_completion(lambda _, completion: completion.finish_reason),
            "image_views": per_prompt([list(group.image_views) for group in self.groups]),
            "max_completion_length": self.max_completion_length,
            "trainer_state": self.trainer_state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _completion(self, group: Group, completion: Completion) -> Content:
        """A completion in the form of its prompt, or in the one the reward asks for."""
        is_text = isinstance(group.prompt.content, str)
        as_prompt = completion_in_form(completion.text, "text" if is_text else "messages")
        return completion_in_form(as_prompt, self.reward.completions_as)

    def _log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Put a column beside the completions in the logs: one value per completion."""
        self.extras.setdefault(column, []).extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        """Log a number; the mean of those given in a step is shown."""
        self.metrics.setdefault(name, []).append(float(value))

    def _rows(self) -> list[list[Any]]:
        """[N][G] values as the reward gave them, or as the failure policy has it for the whole call."""
        num_groups, group_size = self.size
        count = num_groups * group_size
        try:
            result = self._result.result()
        except Exception as error:  # noqa: BLE001 (see `start`)
            problem = f"raised {type(error).__name__}: {error}"
            return [[self._failed("exception", problem, self.groups, count, error)] * group_size] * num_groups
        rows = _as_rows(result, num_groups, group_size, per_group=self.reward.per_group)
        if rows is None:
            wanted = f"{num_groups} lists of {group_size} values" if self.reward.per_group else f"{count} values"
            problem = f"must return a list of {wanted}, and returned {_described(result)}"
            return [[self._failed("wrong_length", problem, self.groups, count)] * group_size] * num_groups
        for column, extra in self.extras.items():
            if len(extra) != count:
                problem = f"must give log_extra({column!r}) {count} values, and gave {len(extra)}"
                return [[self._failed("wrong_length", problem, self.groups, count)] * group_size] * num_groups
        return rows

    def _number(self, value: Any, n: int, g: int) -> float:
        """One completion's value; NaN for None."""
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if abs(number) <= torch.finfo(torch.float32).max:
            return number
        problem = f"returned {value!r:.80} for completion {g}; only a finite number or None is allowed"
        stand_in = self._failed("invalid_value", problem, [self.groups[n]], 1)
        return math.nan if stand_in is None else stand_in

    def _failed(
        self, kind: str, problem: str, groups: Sequence[Group], count: int, cause: Exception | None = None
    ) -> float | None:
        """Count a failure, then raise or give the value that stands in.

        Args:
            kind: One of `FAILURES`.
            problem: What the reward did.
            groups: Whose completions are concerned.
            count: How many completions are concerned.
            cause: What the reward raised.
        """
        self.failures[kind] += count
        where = "; ".join(group.prompt.label for group in groups[:8])
        more = "; ..." if len(groups) > 8 else ""
        message = f"Reward {self.reward.name!r} {problem} ({where}{more})."
        if self.reward.on_error == "raise":
            remedy = "Mend it, or wrap it in WeightedReward with on_error 'none' or 'value' to go on without it."
            raise (ValueError if cause is None else RuntimeError)(f"{message} {remedy}") from cause
        if self.failures[kind] == count:  # the first of its kind in this call; the counts tell how many there were
            logger.warning("%s Going on with %r.", message, self.reward.error_value)
        return self.reward.error_value


def _as_rows(result: Any, num_groups: int, group_size: int, *, per_group: bool) -> list[list[Any]] | None:
    """[N][G] of what a reward returned; None if it has another shape."""
    if per_group:
        rows = [_as_list(row) for row in _as_list(result) or []]
    else:
        flat = _as_list(result) or []
        rows = [flat[start : start + group_size] for start in range(0, len(flat), group_size)]
    complete = [row for row in rows if row is not None and len(row) == group_size]
    return complete if len(complete) == len(rows) == num_groups else None


def _as_list(values: Any) -> list[Any] | None:
    """The values as a list, also of a tensor or array; None if it is no sequence of values."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


def _described(result: Any) -> str:
    """What a reward returned, as an error message shows it."""
    size = f" of {len(result)}" if hasattr(result, "__len__") and not isinstance(result, Tensor) else ""
    return f"a {type(result).__name__}{size}: {result!r:.80}"


@functools.cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """The loop async rewards run on, in a thread of its own: notebooks have a running loop in the main thread.

    Args:
        process_id: A forked process gets a loop of its own; the thread of the old one is not in it.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"rewards-{process_id}", daemon=True).start()
    return loop


async def _finished(awaitable: Awaitable[T]) -> T:
    """What an awaitable gives, as a coroutine."""
    return await awaitable
