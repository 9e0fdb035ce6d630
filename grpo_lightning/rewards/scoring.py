"""Scoring a rollout: every reward is called, and what they give becomes one total per completion.

A call has the completions of one prompt, in a worker and in this process: workers make several calls at a time, and one
that hangs or dies takes no other with it. A reward that is in this process by its own word (`in_process`, or async)
gets the whole batch in one call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import logging
import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Completion, Group, Message, Prompt
from grpo_lightning.rewards.base import (
    ALIASES,
    RESERVED_NAMES,
    Content,
    WeightedReward,
    completion_in_form,
    completion_text,
)
from grpo_lightning.rewards.validation import applies
from grpo_lightning.rewards.workers import Answer, WorkerPool, call_reward

logger = logging.getLogger(__name__)

FAILURES = ("exception", "timeout", "crash", "wrong_length", "invalid_value", "not_scorable")
"""Failures, counted for every reward in completions: the call raised; it took too long; its process was gone; it
returned the wrong number of values; a value was NaN, infinite or no number; no value although other completions of the
group have one."""

GRACE_SECONDS = 5.0
"""How long after the end of a step's time workers may take to report it."""

T = TypeVar("T")


@dataclass
class Scores:
    """The values of all rewards for N groups of G completions, and their total."""

    total: Tensor
    """[N, G] float32: the weighted sum of the rewards that apply; NaN where a completion is not scorable."""

    by_reward: dict[str, Tensor]
    """[N, G] float32 per reward, before its weight; NaN where it gave None."""

    metrics: dict[str, float]
    """The mean of the values each name was given by `log_metric`."""

    extras: dict[str, list[Any]]
    """[N * G] values per column, from `log_extra`; None where the reward does not apply. A column that several rewards
    log is `<reward>/<column>` for each."""

    failures: dict[str, int]
    """Completions per `reward/failure` (see `FAILURES`); every key is always there."""

    @classmethod
    def of_totals(cls, total: Tensor) -> Scores:
        """The scores [N, G] of something that knows the totals alone."""
        return cls(total, {}, {}, {}, {})

    def select(self, rows: Sequence[int]) -> Scores:
        """Those of some of the groups, in the order given; metrics and failures stay those of all."""
        rows, size = list(rows), self.total.shape[1]
        return replace(
            self,
            total=self.total[rows],
            by_reward={name: values[rows] for name, values in self.by_reward.items()},
            extras={
                name: [value for row in rows for value in values[row * size : (row + 1) * size]]
                for name, values in self.extras.items()
            },
        )


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of groups that were scored in several calls, one part after the other.

    A metric is the mean over the calls that logged it.
    """
    columns = dict.fromkeys(name for part in parts for name in part.extras)
    metrics: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            metrics.setdefault(name, []).append(value)
    return Scores(
        total=torch.cat([part.total for part in parts]),
        by_reward={name: torch.cat([part.by_reward[name] for part in parts]) for name in parts[0].by_reward},
        metrics={name: statistics.fmean(values) for name, values in metrics.items()},
        extras={
            name: [value for part in parts for value in part.extras.get(name, [None] * part.total.numel())]
            for name in columns
        },
        failures={name: sum(part.failures[name] for part in parts) for name in parts[0].failures},
    )


class Scoring:
    """The calls of all rewards on a batch.

    Calls in workers and asynchronous ones go on while the training process does something else, until `finish`.

    Args:
        groups: N groups of G completions.
        weights: Of the rewards, by name.
        size: (N, G).
        circumstances: What is the same for all completions.
        pool: Where the rewards run.

    Raises:
        RuntimeError: If the workers do not start.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        weights: Mapping[str, float],
        size: tuple[int, int],
        circumstances: Circumstances,
        pool: WorkerPool,
    ) -> None:
        self.weights, self.size, self.pool = weights, size, pool
        self.rows = {
            reward.name: [n for n, group in enumerate(groups) if applies(group.prompt, reward.name)]
            for reward in pool.rewards
        }
        pool.wait()  # the time of the step begins once the rewards are loaded
        limits = pool.limits
        deadline = math.inf if limits is None else time.monotonic() + limits.step_timeout_seconds
        self.calls = [
            RewardCall(reward, [groups[n] for n in self.rows[reward.name]], circumstances, pool, deadline)
            for reward in pool.rewards
            if self.rows[reward.name]
        ]
        at_home = [call for call in self.calls if not call.start_in_workers()]
        for call in sorted(at_home, key=lambda call: not call.reward.is_async):  # while the others run
            call.start_here()

    def finish(self) -> Scores:
        """Wait for all rewards; if one stops the run, for none.

        Raises:
            RuntimeError: If a reward failed and its `on_error` is "raise"; the cause is chained.
            ValueError: Likewise for what it returned; or if it logs a metric under a name that is taken.
        """
        try:
            values = {call.reward.name: call.finish() for call in self.calls}
        except BaseException:
            self.pool.stop()
            for call in self.calls:
                call.cancel()
            raise
        by_reward = {name: torch.full(self.size, math.nan, dtype=torch.float32) for name in self.weights}
        failures = {f"{name}/{kind}": 0 for name in self.weights for kind in FAILURES}
        for call in self.calls:
            name = call.reward.name
            by_reward[name][self.rows[name]] = values[name]
            failures.update({f"{name}/{kind}": count for kind, count in call.failures.items()})
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float32)
        return Scores(
            total=weighted_total(torch.stack(list(by_reward.values())), weights),
            by_reward=by_reward,
            metrics=self._merge_metrics(),
            extras=self._merge_extras(),
            failures=failures,
        )

    def _merge_metrics(self) -> dict[str, float]:
        """The mean of all values each metric was given. Raises: ValueError if a name has another meaning."""
        merged: dict[str, list[float]] = {}
        for call in self.calls:
            for name, values in call.metrics.items():
                if name in RESERVED_NAMES or name in self.weights:
                    raise ValueError(
                        f"Reward {call.reward.name!r} calls log_metric({name!r}), which the logs have another meaning "
                        f"for: rename it, for example {call.reward.name}_{name}."
                    )
                merged.setdefault(name, []).extend(values)
        return {name: statistics.fmean(values) for name, values in merged.items()}

    def _merge_extras(self) -> dict[str, list[Any]]:
        """The columns of all rewards, over all groups; one that several log is `<reward>/<column>` for each."""
        num_groups, size = self.size
        logged_by = Counter(column for call in self.calls for column in call.extras)
        merged: dict[str, list[Any]] = {}
        for call in self.calls:
            for column, values in call.extras.items():
                name = column if logged_by[column] == 1 else f"{call.reward.name}/{column}"
                merged[name] = [None] * (num_groups * size)
                for position, n in enumerate(self.rows[call.reward.name]):
                    merged[name][n * size : (n + 1) * size] = values[position * size : (position + 1) * size]
        return merged


def weighted_total(values: Tensor, weights: Tensor) -> Tensor:
    """Add up the rewards that apply to each group.

    Args:
        values: [R, N, G] one layer per reward; NaN is None.
        weights: [R]; rewards of weight 0 do not count.

    Returns:
        [N, G] totals; NaN where a reward that applies to the group has no value, or none applies.
    """
    applies = ~values.isnan().all(dim=2, keepdim=True) & (weights != 0).view(-1, 1, 1)  # [R, N, 1]
    total = torch.where(applies, values * weights.view(-1, 1, 1), 0.0).sum(dim=0)
    return total.masked_fill(~applies.any(dim=0), math.nan)


class RewardCall:
    """One reward on one batch of groups.

    Args:
        reward: The reward.
        groups: N groups of G completions.
        circumstances: What is the same for all of them.
        pool: Where it runs.
        deadline: Of `time.monotonic`, for what can be waited for with a limit.
    """

    def __init__(
        self,
        reward: WeightedReward,
        groups: Sequence[Group],
        circumstances: Circumstances,
        pool: WorkerPool,
        deadline: float,
    ) -> None:
        self.reward, self.groups, self.circumstances = reward, groups, circumstances
        self.pool, self.deadline = pool, deadline
        self._reset()

    def _reset(self) -> None:
        """Begin without any answers."""
        self.answers: list[tuple[Sequence[Group], Future[Answer]]] = []
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.failures = dict.fromkeys(FAILURES, 0)
        self._records: Counter[tuple[str, int, str]] = Counter()
        self._warnings: dict[str, list[str]] = {}

    def start_in_workers(self) -> bool:
        """Ask the workers, group by group. Returns: False if the reward stays in this process."""
        if not self.pool.has(self.reward):
            return False
        for group in self.groups:
            # Random numbers of a call depend on what is scored alone: a resumed run has the same.
            seed = derived_seed("reward", self.reward.name, *(completion.text for completion in group.completions))
            given = arguments(self.reward, [group], self.circumstances)
            self.answers.append(([group], self.pool.submit(self.reward, given, seed, deadline=self.deadline)))
        return True

    def start_here(self) -> None:
        """Run a sync reward; start an async one. An exception of the reward waits for `finish`."""
        for groups in [self.groups] if self.reward.in_process else [[group] for group in self.groups]:
            answer = call_reward(self.reward, arguments(self.reward, groups, self.circumstances))
            future: Future[Answer] = Future()
            if isinstance(answer.result, Awaitable):
                future = asyncio.run_coroutine_threadsafe(_finish(answer), _event_loop(os.getpid()))
            else:
                future.set_result(answer)
            self.answers.append((groups, future))
            if answer.failure and self.reward.on_error == "raise":
                return  # `finish` raises: the other calls would be for nothing

    def cancel(self) -> None:
        """Stop the asynchronous calls."""
        for _, future in self.answers:
            future.cancel()

    def finish(self) -> Tensor:
        """Wait for the reward. Returns: [N, G] float32, NaN for None.

        Raises:
            RuntimeError: If it raised, took too long or lost its process, and `on_error` is "raise".
            ValueError: Likewise for what it returned.
        """
        size = len(self.groups[0].completions)
        numbers: list[list[float]] = []
        for groups, future in self.answers:
            answer = self._wait(future)
            if answer.failure == "stays":
                self.pool.keep(self.reward.name, answer.problem)
                self._reset()
                self.start_here()
                return self.finish()
            rows = self._read(answer, groups, size)
            first = len(numbers)
            numbers += [
                [self._number(value, group, g) for g, value in enumerate(row)]
                for group, row in zip(groups, rows, strict=True)
            ]
            for column, extra in answer.extras.items():
                whole = self.extras.setdefault(column, [None] * (len(self.groups) * size))
                whole[first * size : len(numbers) * size] = extra
            for name, logged in answer.metrics.items():
                self.metrics.setdefault(name, []).extend(logged)
        values = torch.tensor(numbers, dtype=torch.float32)
        missing = values.isnan()
        self.failures["not_scorable"] = int((missing & ~missing.all(dim=1, keepdim=True)).sum())
        self._log()
        return values

    def _wait(self, future: Future[Answer]) -> Answer:
        """The answer to a call, also if it does not come in time."""
        # Workers keep the limit themselves, and have a moment to say so.
        left = None if math.isinf(self.deadline) else max(0.0, self.deadline + GRACE_SECONDS - time.monotonic())
        try:
            answer = future.result(left)
        except concurrent.futures.TimeoutError:
            future.cancel()
            assert self.pool.limits is not None
            return Answer().fail("timeout", f"was stopped: {self.pool.limits.step_limit}")
        except Exception as error:  # noqa: BLE001 (an answer that cannot be read)
            return Answer().fail_by(error)
        self._records.update(answer.records)
        return answer

    def _read(self, answer: Answer, groups: Sequence[Group], size: int) -> list[list[Any]]:
        """[n][G] values as the reward gave them, or as the failure policy has it for the whole call."""
        if not answer.failure:
            rows = _as_rows(answer.result, len(groups), size, per_group=self.reward.per_group)
            count = len(groups) * size
            wrong = {column: len(extra) for column, extra in answer.extras.items() if len(extra) != count}
            if rows is not None and not wrong:
                return rows
            wanted = f"{len(groups)} lists of {size} values" if self.reward.per_group else f"{count} values"
            problem = f"must return a list of {wanted}, and returned {_describe(answer.result)}"
            if rows is not None:
                column, length = next(iter(wrong.items()))
                problem = f"must give log_extra({column!r}) {count} values, and gave {length}"
            answer.fail("wrong_length", problem)
        failed = self._failed(answer.failure, answer.problem, groups, len(groups) * size, answer.cause)
        return [[failed] * size] * len(groups)

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
        failed = self._failed("invalid_value", problem, [group], 1)
        return math.nan if failed is None else failed

    def _failed(
        self, kind: str, problem: str, groups: Sequence[Group], count: int, cause: BaseException | None = None
    ) -> float | None:
        """Count a failure, then raise, or give the value that `on_error` puts in its place.

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
            fix = "Fix it, raise the limit," if kind == "timeout" else "Fix it,"
            remedy = f"{fix} or wrap it in WeightedReward with on_error 'none' or 'value' to go on without it."
            error = ValueError if kind in ("wrong_length", "invalid_value") else RuntimeError
            raise error(f"{message} {remedy}") from cause
        self._warnings.setdefault(kind, []).append(message)
        return self.reward.error_value

    def _log(self) -> None:
        """Log the first failure of every kind, how many there were, and what workers logged."""
        for (name, level, message), times in self._records.items():
            often = f" ({times} times)" if times > 1 else ""
            logging.getLogger(name).log(level, "Reward %r: %s%s", self.reward.name, message, often)
        for kind, messages in self._warnings.items():
            often = f" The first of {len(messages)} of its kind, {self.failures[kind]} completions in all."
            often = often if len(messages) > 1 else ""
            logger.warning("%s Going on with %r.%s", messages[0], self.reward.error_value, often)


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


def _describe(result: Any) -> str:
    """The returned value, as an error message shows it."""
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


async def _finish(answer: Answer) -> Answer:
    """Wait for the values of an asynchronous reward."""
    try:
        answer.result = await answer.result
    except Exception as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
        answer.fail_by(error)
    return answer


@dataclass
class Circumstances:
    """Arguments that are the same for all completions of a call."""

    columns: Sequence[str]
    """Data columns that rewards are given."""

    trainer_state: Any = None
    max_completion_length: int | None = None
    """Tokens."""


def arguments(reward: WeightedReward, groups: Sequence[Group], circumstances: Circumstances) -> dict[str, Any]:
    """All that a reward takes of what there is, but for what it logs with.

    Fresh lists: a reward that changes them changes nothing for anybody else.

    Args:
        reward: Takes lists with one element per completion, or per group if it is `per_group`.
        groups: N groups of G completions.
        circumstances: Of the call.
    """
    group_size = len(groups[0].completions)

    def per_prompt(values: list[T]) -> list[T]:
        return values if reward.per_group else [value for value in values for _ in range(group_size)]

    def in_form(rows: list[list[T]]) -> list[T] | list[list[T]]:
        return rows if reward.per_group else list(itertools.chain.from_iterable(rows))

    def per_completion(read: Callable[[Group, Completion], T]) -> list[T] | list[list[T]]:
        return in_form([[read(group, completion) for completion in group.completions] for group in groups])

    prompts = [group.prompt for group in groups]
    columns = {name: per_prompt([prompt.columns.get(name) for prompt in prompts]) for name in circumstances.columns}
    prompts_given = per_prompt([p.content if isinstance(p.content, str) else list(p.content) for p in prompts])
    ids = per_completion(lambda _, completion: list(completion.token_ids))
    reasons = per_completion(lambda _, completion: completion.finish_reason)
    names = [f"{prompt.source}/{prompt.index}" for prompt in prompts]
    sources = [[image.source for image in prompt.images] for prompt in prompts]
    paths = per_prompt([[str(path) if isinstance(path, Path) else None for path in of_row] for of_row in sources])
    aliases = {
        "completions_ids": ids,
        "response_token_ids": ids,
        "messages": per_completion(_messages),
        "finish_reason": reasons,
        "is_truncated": per_completion(lambda _, completion: completion.is_truncated),
        "prompt_id": per_prompt(names),
        "request_id": in_form([[f"{name}/{g}" for g in range(group_size)] for name in names]),
        "rollout_infos": per_completion(lambda *_: {}),
        "images": paths,
        "image_path": [of_row or None for of_row in paths],
        "problem": per_prompt([_question(prompt) for prompt in prompts]),
    }
    assert aliases.keys() == set(ALIASES)
    return reward.select(
        aliases
        | columns
        | {
            "prompts": prompts_given,
            "completions": per_completion(lambda group, completion: _in_form(reward, group, completion)),
            "completion_ids": ids,
            "finish_reasons": reasons,
            "image_views": per_prompt([list(group.image_views) for group in groups]),
            "max_completion_length": circumstances.max_completion_length,
            "trainer_state": circumstances.trainer_state,
        }
    )


def _messages(group: Group, completion: Completion) -> list[Message]:
    """The chat, with the completion at its end: one turn with the start of the answer, if the prompt has that."""
    content, text = group.prompt.content, completion.text
    asked = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if asked[-1]["role"] != "assistant":
        return [*asked, {"role": "assistant", "content": text}]
    start = asked[-1]["content"] or ""
    whole = f"{start}{text}" if isinstance(start, str) else [*start, {"type": "text", "text": text}]
    return [*asked[:-1], {**asked[-1], "content": whole}]


def _question(prompt: Prompt) -> str:
    """The text of the last user message."""
    if isinstance(prompt.content, str):
        return prompt.content
    asked = [message for message in prompt.content if message["role"] == "user"]
    return completion_text(asked[-1:])


def _in_form(reward: WeightedReward, group: Group, completion: Completion) -> Content:
    """A completion in the form of its prompt, or in the one the reward asks for."""
    is_text = isinstance(group.prompt.content, str)
    as_prompt = completion_in_form(completion.text, "text" if is_text else "messages")
    return completion_in_form(as_prompt, reward.completions_as)
