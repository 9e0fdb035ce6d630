"""One reward on one batch: where it runs, what it logs, what comes back, and what goes wrong.

A call has the completions of one prompt, in a worker and in this process: workers make several calls at a time, and one
that hangs or dies takes no other with it. A reward that is in this process by its own word (`in_process`, or async)
gets the whole batch in one call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Group
from grpo_lightning.rewards.arguments import Circumstances, arguments
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.worker_process import told
from grpo_lightning.rewards.workers import CrashError, OverdueError, RaisedError, WorkerPool, checked

logger = logging.getLogger(__name__)

FAILURES = ("exception", "timeout", "crash", "wrong_length", "invalid_value", "not_scorable")
"""What is counted for every reward, in completions: the call raised; it took too long; its process was gone; it
returned the wrong number of values; a value was NaN, infinite or no number; no value although other completions of the
group have one."""

SAYING_SECONDS = 5.0
"""Grace period for workers to report a timeout."""

T = TypeVar("T")


class StaysError(RuntimeError):
    """The reward cannot run in a worker and must run in the training process."""


@dataclass
class Part:
    """One call: its groups, what it gave, and what it logged."""

    groups: Sequence[Group]
    answer: Future[Any]
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Put a column beside the completions in the logs: one value per completion."""
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; the mean of those given in a step is shown."""
        self.metrics.setdefault(name, []).append(float(value))

    @property
    def count(self) -> int:
        """Completions."""
        return sum(len(group.completions) for group in self.groups)


class RewardCall:
    """One reward on one batch of groups.

    Args:
        reward: The reward.
        groups: N groups of G completions.
        circumstances: What is the same for all of them.
        deadline: Of `time.monotonic`, for what can be waited for with a limit; None waits for ever.
        limit: What is said where it is over.
    """

    def __init__(
        self,
        reward: WeightedReward,
        groups: Sequence[Group],
        circumstances: Circumstances,
        deadline: float | None = None,
        limit: str = "",
    ) -> None:
        self.reward = reward
        self.groups = groups
        self.circumstances = circumstances
        self.deadline = deadline
        self.limit = limit
        self.records: Counter[tuple[str, int, str]] = Counter()
        self.parts: list[Part] = []
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.failures = dict.fromkeys(FAILURES, 0)
        self._warnings: dict[str, list[str]] = {}

    def start_in(self, pool: WorkerPool, number: int) -> None:
        """Ask the workers, group by group.

        Args:
            pool: The workers.
            number: Of the reward among those that they have loaded.
        """
        assert self.deadline is not None
        logs = [*self.reward.taken({"log_extra": None, "log_metric": None})]
        for group in self.groups:
            texts = [completion.text for completion in group.completions]
            message = {
                "reward": number,
                "arguments": arguments(self.reward, [group], self.circumstances),
                "logs": logs,
                # What is drawn at random depends on what is scored alone: a resumed run draws the same.
                "seed": derived_seed("reward", self.reward.name, *texts),
            }
            self.parts.append(Part([group], pool.submit(message, self.deadline)))

    def start_here(self) -> None:
        """Run a sync reward; set an async one going. What it raises waits for `finish`."""
        calls = [self.groups] if self.reward.in_process else [[group] for group in self.groups]
        for groups in calls:
            part = self._begun_here(groups)
            self.parts.append(part)
            if self.reward.on_error == "raise" and part.answer.done() and part.answer.exception() is not None:
                return  # `finish` raises: the other calls would be for nothing

    def _begun_here(self, groups: Sequence[Group]) -> Part:
        """A call in this process, on its way or over."""
        part = Part(groups, Future())
        logs = self.reward.taken({"log_extra": part.log_extra, "log_metric": part.log_metric})
        try:
            result = self.reward(**arguments(self.reward, groups, self.circumstances), **logs)
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
            part.answer.set_exception(error)
            return part
        if inspect.isawaitable(result):
            part.answer = asyncio.run_coroutine_threadsafe(_finished(result), _event_loop(os.getpid()))
        else:
            part.answer.set_result({"result": result})
        return part

    def cancel(self) -> None:
        """Wait for nothing of it any more: what has not begun does not begin."""
        for part in self.parts:
            part.answer.cancel()

    def finish(self) -> Tensor:
        """Wait for the reward. Returns: [N, G] float32, NaN for None.

        Raises:
            StaysError: If it was called in a worker, and has to be called in the training process.
            RuntimeError: If it raised, took too long or lost its process, and `on_error` is "raise".
            ValueError: Likewise for what it returned.
        """
        size = len(self.groups[0].completions)
        numbers: list[list[float]] = []
        for part in self.parts:
            rows, begin = self._rows(part, size), len(numbers)
            numbers += [
                [self._number(value, group, g) for g, value in enumerate(row)]
                for group, row in zip(part.groups, rows, strict=True)
            ]
            for column, extra in part.extras.items():
                whole = self.extras.setdefault(column, [None] * (len(self.groups) * size))
                whole[begin * size : len(numbers) * size] = extra
            for name, logged in part.metrics.items():
                self.metrics.setdefault(name, []).extend(logged)
        values = torch.tensor(numbers, dtype=torch.float32)
        missing = values.isnan()
        self.failures["not_scorable"] = int((missing & ~missing.all(dim=1, keepdim=True)).sum())
        self._warn()
        return values

    def _rows(self, part: Part, size: int) -> list[list[Any]]:
        """[n][G] values as the reward gave them, or as the failure policy has it for the whole call."""
        try:
            answer = self._answer(part)
            rows = _as_rows(answer["result"], len(part.groups), size, per_group=self.reward.per_group)
        except StaysError:
            raise
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
            kind, problem = _told(error)
            return self._failed_rows(part, kind, problem, size, error)
        if rows is None:
            wanted = f"{len(part.groups)} lists of {size} values" if self.reward.per_group else f"{part.count} values"
            problem = f"must return a list of {wanted}, and returned {_described(answer['result'])}"
            return self._failed_rows(part, "wrong_length", problem, size)
        for column, extra in part.extras.items():
            if len(extra) != part.count:
                problem = f"must give log_extra({column!r}) {part.count} values, and gave {len(extra)}"
                return self._failed_rows(part, "wrong_length", problem, size)
        return rows

    def _answer(self, part: Part) -> dict[str, Any]:
        """What a call gave. Raises: what went wrong in it, or on the way."""
        # Workers keep the limit themselves, and have a moment to say so.
        left = None if self.deadline is None else max(0.0, self.deadline + SAYING_SECONDS - time.monotonic())
        try:
            answer: dict[str, Any] = part.answer.result(left)
        except concurrent.futures.TimeoutError:
            if part.answer.done():  # the reward's own
                raise
            part.answer.cancel()
            raise OverdueError(f"was stopped: {self.limit}") from None
        self.records.update(answer.get("records", ()))
        if "stays" in answer:
            raise StaysError(answer["stays"])
        checked(answer)
        part.extras |= answer.get("extras", {})
        part.metrics |= answer.get("metrics", {})
        return answer

    def _failed_rows(
        self, part: Part, kind: str, problem: str, size: int, cause: Exception | None = None
    ) -> list[list[Any]]:
        """What stands in for all values of a call that failed; nothing of what it logged counts."""
        part.extras, part.metrics = {}, {}
        return [[self._failed(kind, problem, part.groups, part.count, cause)] * size] * len(part.groups)

    def _number(self, value: Any, group: Group, g: int) -> float:
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
        stand_in = self._failed("invalid_value", problem, [group], 1)
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
            mend = "Fix it, raise the limit," if kind == "timeout" else "Fix it,"
            remedy = f"{mend} or wrap it in WeightedReward with on_error 'none' or 'value' to go on without it."
            inside = cause if kind == "exception" else None  # of the others, all is said
            raise (ValueError if cause is None else RuntimeError)(f"{message} {remedy}") from inside
        self._warnings.setdefault(kind, []).append(message)
        return self.reward.error_value

    def _warn(self) -> None:
        """Say of every kind of failure what the first was, and how often there was one; and what workers logged."""
        for (name, level, message), times in self.records.items():
            often = f" ({times} times)" if times > 1 else ""
            logging.getLogger(name).log(level, "Reward %r: %s%s", self.reward.name, message, often)
        for kind, messages in self._warnings.items():
            count = self.failures[kind]
            often = f" The first of {len(messages)} of its kind, {count} completions in all."
            often = often if len(messages) > 1 else ""
            logger.warning("%s Going on with %r.%s", messages[0], self.reward.error_value, often)


def _told(error: Exception) -> tuple[str, str]:
    """Which of `FAILURES` an exception is, and what is said of it."""
    if isinstance(error, OverdueError):
        return "timeout", str(error)
    if isinstance(error, CrashError):
        return "crash", f"did not return: {error}"
    problem = error.args[0] if isinstance(error, RaisedError) else told(error)[0]
    return "exception", f"raised {problem}"


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


async def _finished(awaitable: Awaitable[T]) -> dict[str, T]:
    """What an awaitable gives, as an answer."""
    return {"result": await awaitable}
