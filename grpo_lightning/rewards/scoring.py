"""Score a rollout with every reward, and add up the values of each completion.

By default, a call gets the completions of one prompt. An async reward, or a reward with `in_process = True`, gets the
whole batch in one call. A call runs in a worker process or in this process. A group's calls in workers start as soon as
the group is sampled (`EarlyCalls`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import math
import pickle
import re
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.core.event_loop import event_loop
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Completion, Group, Message, Prompt
from grpo_lightning.data.formats import prompt_form
from grpo_lightning.rewards.base import (
    ALIASES,
    ORM_ALIASES,
    RESERVED_NAMES,
    Content,
    WeightedReward,
    completion_in_form,
    message_text,
)
from grpo_lightning.rewards.workers import Answer, WorkerPool, call_reward, describe_error, describe_value

log = logging.getLogger(__name__)

FAILURES = ("exception", "timeout", "crash", "wrong_length", "invalid_value", "not_scorable")
"""Kinds of failures, in this order: the call raised an error; the call timed out; the worker process of the call died;
the call returned the wrong number of values; a value was NaN, infinite or not a number; a completion got no value
although other completions of its group did."""

GRACE_SECONDS = 5.0
"""Time after the step's deadline in which workers may still report a timeout."""

EXPECTS_MESSAGES = re.compile(
    r"raised (?:TypeError: string indices must be integers|AttributeError: 'str' object has no attribute 'get')"
)
"""The error of a reward that uses a string as a list of messages."""

EXPECTS_TEXT = re.compile(
    r"raised (?:TypeError: (?:expected string or bytes-like object|list indices must be integers or slices, not str)"
    r"|AttributeError: '(?:list|dict)' object has no attribute '(?:strip|split|splitlines|lower|startswith|endswith|"
    r"find|rfind|partition|rpartition|replace)')"
)
"""The error of a reward that uses a list of messages as a string."""

T = TypeVar("T")


@dataclass
class Scores:
    """The values of all rewards for N groups of G completions, and their total."""

    total: Tensor
    """[N, G] float32: the weighted sum; NaN where a completion is not scorable."""

    by_reward: dict[str, Tensor]
    """[N, G] float32 per reward, unweighted; NaN for None."""

    metrics: dict[str, float]
    """Mean of all values from `log_metric`, by metric."""

    extras: dict[str, list[Any]]
    """[N * G] values per column, from `log_extra`; None where the reward does not apply. A column that several rewards
    log is named `<reward>/<column>`."""

    failures: dict[str, int]
    """Number of completions per `<reward>/<failure>` (see `FAILURES`); all keys are always present."""

    @classmethod
    def of_totals(cls, total: Tensor) -> Scores:
        """Make scores from totals [N, G] alone, without values per reward."""
        return cls(total, {}, {}, {}, {})

    def without(self, excluded: Tensor) -> Scores:
        """Make completions not scorable.

        Args:
            excluded: [N, G] bool.
        """
        by_reward = {name: values.masked_fill(excluded, math.nan) for name, values in self.by_reward.items()}
        return replace(self, total=self.total.masked_fill(excluded, math.nan), by_reward=by_reward)

    def select(self, rows: Sequence[int]) -> Scores:
        """Select groups, in the given order. The metrics and failures remain those of all groups."""
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


def concatenate_scores(parts: Sequence[Scores]) -> Scores:
    """Concatenate the scores of groups that were scored separately.

    A metric is the mean over the parts that logged it, weighted by their numbers of completions.
    """
    columns = dict.fromkeys(name for part in parts for name in part.extras)
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        logged = [(part.metrics[name], part.total.numel()) for part in parts if name in part.metrics]
        metrics[name] = sum(value * size for value, size in logged) / max(1, sum(size for _, size in logged))
    return Scores(
        total=torch.cat([part.total for part in parts]),
        by_reward={name: torch.cat([part.by_reward[name] for part in parts]) for name in parts[0].by_reward},
        metrics=metrics,
        extras={
            name: [value for part in parts for value in part.extras.get(name, [None] * part.total.numel())]
            for name in columns
        },
        failures={name: sum(part.failures[name] for part in parts) for name in parts[0].failures},
    )


class EarlyCalls:
    """Starts reward calls on some groups of a batch before all groups of the batch have been sampled.

    When the batch is scored, `Scoring` uses the result of an early call in place of a call with the same reward,
    arguments and seed.
    """

    def __init__(self, context: CallContext, pool: WorkerPool) -> None:
        self.context, self.pool = context, pool
        self.is_scored = False
        """Whether the `Scoring` of the batch has begun."""
        self._num_calls = 0
        self._prefetches: list[tuple[WeightedReward, Future[None]]] = []
        pool.start()

    def start(self, group: Group) -> None:
        """Start the calls on a group."""
        if is_loaded := self.pool.is_loaded:  # sampling does not wait for the workers
            self.pool.wait()
        for reward in self.pool.rewards:
            if not applies(group.prompt, reward.name):
                continue
            if self.pool.has(reward):
                if is_loaded:
                    self.pool.submit_early(reward, *worker_call(reward, group, self.context))
                    self._num_calls += 1
            elif reward.has_prefetch:
                running = reward.prefetch(**arguments(reward, [group], self.context))
                future = asyncio.run_coroutine_threadsafe(running, event_loop())
                self._prefetches.append((reward, future))

    def cancel(self) -> bool:
        """Cancel the unused calls. Returns: False if there were calls, but none was used."""
        num_unused = self.pool.cancel_early()
        for reward, future in self._prefetches:
            if not future.cancel() and (error := future.exception()) is not None:
                log.warning("Reward %r: `prefetch` raised %s.", reward.name, describe_error(error)[0])
        is_used = self.is_scored and (self._num_calls == 0 or num_unused < self._num_calls)
        return is_used or not (self._num_calls or self._prefetches)


class Scoring:
    """The calls of all rewards on a batch.

    `finish` waits for the calls in workers and the async calls.

    Raises:
        RuntimeError: If the workers fail to start.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        weights: Mapping[str, float],
        size: tuple[int, int],
        context: CallContext,
        pool: WorkerPool,
    ) -> None:
        self.weights, self.size, self.pool = weights, size, pool
        self.rows = {
            reward.name: [n for n, group in enumerate(groups) if applies(group.prompt, reward.name)]
            for reward in pool.rewards
        }
        pool.wait()  # the step's time limit starts once the rewards are loaded
        limits = pool.limits
        deadline = math.inf if limits is None else time.monotonic() + limits.step_timeout_seconds
        self.calls = [
            RewardCall(reward, [groups[n] for n in self.rows[reward.name]], context, pool, deadline)
            for reward in pool.rewards
            if self.rows[reward.name]
        ]
        in_process = [call for call in self.calls if not call.start_in_workers()]
        for call in sorted(in_process, key=lambda call: not call.reward.is_async):  # async first: they run meanwhile
            call.start_here()

    def finish(self) -> Scores:
        """Wait for all rewards.

        Raises:
            RuntimeError: If a call raised an error, timed out or crashed its worker, and the reward's `on_error` is
                "raise". The cause is chained.
            ValueError: If a reward returned an invalid value or the wrong number of values, and its `on_error` is
                "raise".
            ValueError: If a reward logs a metric under a reserved name.
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
        """Average the logged values of each metric. Raises: ValueError if a name is reserved."""
        merged: dict[str, list[float]] = {}
        for call in self.calls:
            for name, values in call.metrics.items():
                if name in RESERVED_NAMES or name in self.weights:
                    raise ValueError(
                        f"Reward {call.reward.name!r} calls log_metric({name!r}), a name that the logs use for another "
                        f"metric: rename it, for example {call.reward.name}_{name}."
                    )
                merged.setdefault(name, []).extend(values)
        return {name: statistics.fmean(values) for name, values in merged.items()}

    def _merge_extras(self) -> dict[str, list[Any]]:
        """Merge the extra columns of all rewards."""
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
    """Weighted sum of the rewards that apply to each group.

    Args:
        values: [R, N, G] values per reward; NaN for None.
        weights: [R]; rewards of weight 0 are ignored.

    Returns:
        [N, G] totals; NaN where a reward that applies gives no value, or where no reward applies.
    """
    applies = ~values.isnan().all(dim=2, keepdim=True) & (weights != 0).view(-1, 1, 1)  # [R, N, 1]
    total = torch.where(applies, values * weights.view(-1, 1, 1), 0.0).sum(dim=0)
    return total.masked_fill(~applies.any(dim=0), math.nan)


class RewardCall:
    """One reward on one batch of groups.

    Calls in workers and async calls end at the deadline (`time.monotonic` seconds).
    """

    def __init__(
        self,
        reward: WeightedReward,
        groups: Sequence[Group],
        context: CallContext,
        pool: WorkerPool,
        deadline: float,
    ) -> None:
        self.reward, self.groups, self.context = reward, groups, context
        self.pool, self.deadline = pool, deadline
        self._reset()

    def _reset(self) -> None:
        """Discard all answers."""
        self.answers: list[tuple[Sequence[Group], Future[Answer]]] = []
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.failures = dict.fromkeys(FAILURES, 0)
        self._records: Counter[tuple[str, int, str]] = Counter()
        self._warnings: dict[str, list[str]] = {}

    def start_in_workers(self) -> bool:
        """Start or take over one call per group. Returns: False if the reward must run in this process."""
        if not self.pool.has(self.reward):
            return False
        for group in self.groups:
            inputs, seed = worker_call(self.reward, group, self.context)
            self.answers.append(([group], self.pool.submit(self.reward, inputs, seed, deadline=self.deadline)))
        return True

    def start_here(self) -> None:
        """Run or start the reward in this process. Exceptions are raised in `finish`."""
        for groups in [self.groups] if self.reward.in_process else [[group] for group in self.groups]:
            answer = call_reward(self.reward, arguments(self.reward, groups, self.context))
            future: Future[Answer] = Future()
            if isinstance(answer.result, Awaitable):
                future = asyncio.run_coroutine_threadsafe(_finish(answer), event_loop())
            else:
                future.set_result(answer)
            self.answers.append((groups, future))
            if answer.failure and self.reward.on_error == "raise":
                return  # `finish` raises: the other calls are not needed

    def cancel(self) -> None:
        """Cancel the async calls."""
        for _, future in self.answers:
            future.cancel()

    def finish(self) -> Tensor:
        """Wait for the reward. Returns: [N, G] float32, NaN for None.

        Raises:
            RuntimeError: As `Scoring.finish`.
            ValueError: As `Scoring.finish`.
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
            rows = self._read_values(answer, groups, size)
            first = len(numbers)
            numbers += [
                [self._number(value, group, g) for g, value in enumerate(row)]
                for group, row in zip(groups, rows, strict=True)
            ]
            for column, extra in answer.extras.items():
                values = self.extras.setdefault(column, [None] * (len(self.groups) * size))
                values[first * size : len(numbers) * size] = extra
            for name, logged in answer.metrics.items():
                self.metrics.setdefault(name, []).extend(logged)
        scores = torch.tensor(numbers, dtype=torch.float32)
        missing = scores.isnan()
        self.failures["not_scorable"] = int((missing & ~missing.all(dim=1, keepdim=True)).sum())
        self._log()
        return scores

    def _wait(self, future: Future[Answer]) -> Answer:
        """Wait for the answer to a call."""
        # Workers enforce the deadline themselves and get a grace period to report it.
        left = None if math.isinf(self.deadline) else max(0.0, self.deadline + GRACE_SECONDS - time.monotonic())
        try:
            answer = future.result(left)
        except concurrent.futures.TimeoutError:
            future.cancel()
            assert self.pool.limits is not None
            return Answer().fail("timeout", f"was stopped: {self.pool.limits.step_limit}")
        self._records.update(answer.records)
        return answer

    def _read_values(self, answer: Answer, groups: Sequence[Group], size: int) -> list[list[Any]]:
        """Read the [n][G] values of an answer."""
        if not answer.failure:
            rows = _as_rows(answer.result, len(groups), size, per_group=self.reward.per_group)
            count = len(groups) * size
            wrong = {column: len(extra) for column, extra in answer.extras.items() if len(extra) != count}
            if rows is not None and not wrong:
                return rows
            expected = f"{len(groups)} lists of {size} values" if self.reward.per_group else f"{count} values"
            problem = f"must return a list of {expected}, but returned {describe_value(answer.result)}"
            if rows is not None:
                column, length = next(iter(wrong.items()))
                problem = f"must pass {count} values to log_extra({column!r}), but passed {length}"
            answer.fail("wrong_length", problem)
        fallback = self._handle_failure(answer.failure, answer.problem, groups, len(groups) * size, answer.cause)
        return [[fallback] * size] * len(groups)

    def _number(self, value: Any, group: Group, g: int) -> float:
        """Convert one completion's value to a number; NaN for None."""
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if abs(number) <= torch.finfo(torch.float32).max:
            return number
        problem = f"returned {value!r:.80} for completion {g}; only a finite number or None is allowed"
        fallback = self._handle_failure("invalid_value", problem, [group], 1)
        return math.nan if fallback is None else fallback

    def _handle_failure(
        self, kind: str, problem: str, groups: Sequence[Group], count: int, cause: BaseException | None = None
    ) -> float | None:
        """Count a failure, and raise an error or return the fallback value."""
        self.failures[kind] += count
        where = "; ".join(group.prompt.label for group in groups[:8])
        more = "; ..." if len(groups) > 8 else ""
        message = f"Reward {self.reward.name!r} {problem} ({where}{more}).{_form_hint(self.reward, groups[0], problem)}"
        if self.reward.on_error == "raise":
            fix = "Fix it, raise the limit," if kind == "timeout" else "Fix it,"
            remedy = f"{fix} or wrap it in WeightedReward with on_error 'none' or 'value' to continue without it."
            error = ValueError if kind in ("wrong_length", "invalid_value") else RuntimeError
            raise error(f"{message} {remedy}") from cause
        self._warnings.setdefault(kind, []).append(message)
        return self.reward.error_value

    def _log(self) -> None:
        """Log the messages of workers, and the first failure of each kind."""
        for (name, level, message), times in self._records.items():
            repeats = f" ({times} times)" if times > 1 else ""
            logging.getLogger(name).log(level, "Reward %r: %s%s", self.reward.name, message, repeats)
        for kind, messages in self._warnings.items():
            repeats = f" The first of {len(messages)} such failures, {self.failures[kind]} completions in total."
            repeats = repeats if len(messages) > 1 else ""
            log.warning("%s Continuing with %r.%s", messages[0], self.reward.error_value, repeats)


def _as_rows(result: Any, num_groups: int, group_size: int, *, per_group: bool) -> list[list[Any]] | None:
    """Convert the return value of a reward to [N][G]; None if it has another shape."""
    if per_group:
        rows = [_as_list(row) for row in _as_list(result) or []]
    else:
        flat = _as_list(result) or []
        rows = [flat[start : start + group_size] for start in range(0, len(flat), group_size)]
    complete = [row for row in rows if row is not None and len(row) == group_size]
    return complete if len(complete) == len(rows) == num_groups else None


def _as_list(values: Any) -> list[Any] | None:
    """Convert a sequence, tensor or array to a list; None for other types."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


async def _finish(answer: Answer) -> Answer:
    """Wait for the values of an async reward."""
    try:
        answer.result = await answer.result
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - `on_error` decides
        answer.fail_by(error)
    return answer


@dataclass
class CallContext:
    """Arguments shared by all completions."""

    columns: Sequence[str]
    """Data columns passed to rewards."""

    trainer_state: Any = None
    max_completion_length: int | None = None
    """The run's limit on the length of a completion, in tokens; None means no limit."""


@dataclass
class ArgumentLists:
    """The lists of a reward call: one element per completion, or per group if `per_group`."""

    groups: Sequence[Group]
    """N groups of G completions."""

    per_group: bool

    @property
    def group_size(self) -> int:
        """G."""
        return len(self.groups[0].completions)

    def per_prompt(self, values: list[T]) -> list[T]:
        """[N] values of the prompts, repeated for their completions unless `per_group`."""
        return values if self.per_group else [value for value in values for _ in range(self.group_size)]

    def per_completion(self, read: Callable[[Group, Completion], T]) -> list[T] | list[list[T]]:
        """The values of the completions: flat, or [N][G] if `per_group`."""
        return self.in_form([[read(group, completion) for completion in group.completions] for group in self.groups])

    def in_form(self, rows: list[list[T]]) -> list[T] | list[list[T]]:
        """Values [N][G], flat unless `per_group`."""
        return rows if self.per_group else list(itertools.chain.from_iterable(rows))


def arguments(reward: WeightedReward, groups: Sequence[Group], context: CallContext) -> dict[str, Any]:
    """Build the keyword arguments of a reward call, except the logging functions.

    Arguments that are lists are copies, so a reward may modify them.
    """
    lists = ArgumentLists(groups, reward.per_group)
    prompts = [group.prompt for group in groups]
    contract = {
        "prompts": lists.per_prompt([p.content if isinstance(p.content, str) else list(p.content) for p in prompts]),
        "completions": lists.per_completion(lambda group, completion: _in_form(reward, group, completion)),
        "completion_ids": lists.per_completion(lambda _, completion: list(completion.token_ids)),
        "finish_reasons": lists.per_completion(lambda _, completion: completion.finish_reason),
        "image_views": lists.per_prompt([list(group.image_views) for group in groups]),
        "max_completion_length": context.max_completion_length,
        "trainer_state": context.trainer_state,
    }
    columns = {name: lists.per_prompt([prompt.columns.get(name) for prompt in prompts]) for name in context.columns}
    aliases = alias_arguments(reward, lists, contract)
    first = {name: aliases[name] for name in ORM_ALIASES} if reward.is_orm else {}
    if reward.names("images"):  # not through `**kwargs`, because the images would be sent to the worker
        in_column = [prompt.columns.get("images") for prompt in prompts]  # None in the rows of some of several datasets
        pairs = zip(in_column, prompts, strict=True)
        first["images"] = lists.per_prompt([list(p.images) if value is None else value for value, p in pairs])
    return reward.select(aliases | columns | first | contract)


def alias_arguments(reward: WeightedReward, lists: ArgumentLists, contract: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments in `ALIASES` except "images".

    An argument for conversations is built if the reward names this argument, or if a completion is a conversation.
    `environments` is built only if the reward names it.
    """
    groups, prompts = lists.groups, [group.prompt for group in lists.groups]
    names = [f"{prompt.source}/{prompt.index}" for prompt in prompts]
    sources = [[image.source for image in prompt.images] for prompt in prompts]
    paths = lists.per_prompt([[str(path) if isinstance(path, Path) else None for path in of_row] for of_row in sources])
    aliases: dict[str, Any] = {
        "completions_ids": contract["completion_ids"],
        "response_token_ids": contract["completion_ids"],
        "messages": lists.per_completion(_messages),
        "finish_reason": contract["finish_reasons"],
        "is_truncated": lists.per_completion(lambda _, completion: completion.is_truncated),
        "prompt_id": lists.per_prompt(names),
        "request_id": lists.in_form([[f"{name}/{g}" for g in range(lists.group_size)] for name in names]),
        "rollout_infos": lists.per_completion(lambda *_: {}),
        "image_path": [of_row or None for of_row in paths],
        "image_grid_thw": lists.per_prompt([_image_grid(group) for group in groups]),
        "problem": lists.per_prompt([_question(prompt) for prompt in prompts]),
    }
    of_conversations: dict[str, Callable[[Group, Completion], Any]] = {
        "turns": lambda _, completion: completion.turns,
        "environment_rewards": lambda _, completion: completion.environment_reward,
        "environment_metrics": lambda _, completion: (
            {} if completion.ending is None else dict(completion.ending.metrics)
        ),
        "environments": lambda _, completion: _environment(completion),
    }
    assert {"images", *aliases, *of_conversations} == set(ALIASES)
    has_turns = any(completion.turns is not None for group in groups for completion in group.completions)
    for name, read in of_conversations.items():
        # `environments` is passed only to rewards that name it, not through `**kwargs`. The objects must be unpickled
        # for the call, and pickled again for a worker, which takes time.
        if reward.names(name) or (has_turns and name != "environments"):
            aliases[name] = lists.per_completion(read)
    return aliases


def worker_call(reward: WeightedReward, group: Group, context: CallContext) -> tuple[dict[str, Any], int]:
    """Build the arguments and the seed of a call in a worker.

    The seed depends only on the reward's name and the completions, so that a resumed run gets the same random numbers.
    """
    seed = derived_seed("reward", reward.name, *(completion.text for completion in group.completions))
    return arguments(reward, [group], context), seed


def _environment(completion: Completion) -> Any:
    """The user's environment object at the end of a completion; None without an environment."""
    state = None if completion.ending is None else completion.ending.state
    environment = pickle.loads(state) if isinstance(state, bytes) else state  # noqa: S301 (our own)
    return getattr(environment, "for_rewards", environment)


def written_messages(completion: Completion) -> list[Message]:
    """The completion as one assistant message or, in a conversation, as the messages of all its turns.

    A last observation that the policy has not seen is left out.
    """
    if completion.turns is None:
        return [{"role": "assistant", "content": completion.text}]
    messages: list[dict[str, Any]] = []
    turns = list(completion.turns)
    while turns and not turns[-1].is_sampled and turns[-1].start == turns[-1].end:
        turns.pop()
    for turn in turns:
        is_continued = bool(messages) and messages[-1]["role"] == "assistant" and turn.role in ("assistant", "")
        if is_continued:
            messages[-1]["content"] += turn.text
        else:
            messages.append({"role": turn.role or "assistant", "content": turn.text})
            if turn.name or turn.role == "tool":
                messages[-1]["name"] = turn.name
    return messages  # type: ignore[return-value]


def _messages(group: Group, completion: Completion) -> list[Message]:
    """Append the completion to the chat, or extend the chat's last message if it is an assistant's."""
    content = group.prompt.content
    chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
    first, *others = written_messages(completion)
    if chat[-1]["role"] != "assistant":
        return [*chat, first, *others]
    text = first["content"]
    start = chat[-1]["content"] or ""
    merged = f"{start}{text}" if isinstance(start, str) else [*start, {"type": "text", "text": text}]
    return [*chat[:-1], {**chat[-1], "content": merged}, *others]


def _image_grid(group: Group) -> list[int] | None:
    """[t, h, w], the number of patches of the first image along time, height and width; None if unknown."""
    grids = None if group.vision is None else group.vision.images.get("image_grid_thw")
    return None if grids is None else grids[0].tolist()


def _question(prompt: Prompt) -> str:
    """The text of the last user message."""
    if isinstance(prompt.content, str):
        return prompt.content
    user_messages = [message for message in prompt.content if message["role"] == "user"]
    return message_text(user_messages[-1]) if user_messages else ""


def _in_form(reward: WeightedReward, group: Group, completion: Completion) -> Content:
    """Convert a completion to the form of its prompt, or of `completions_as`."""
    is_text = isinstance(group.prompt.content, str)
    as_prompt: Content = completion.text if is_text else written_messages(completion)
    if is_text and completion.turns is not None and reward.completions_as == "messages":
        as_prompt = written_messages(completion)
    return completion_in_form(as_prompt, reward.completions_as)


def _form_hint(reward: WeightedReward, group: Group, problem: str) -> str:
    """A hint if `problem` is the error of a reward that expects the other form of completions; else ""."""
    is_string = isinstance(_in_form(reward, group, group.completions[0]), str)
    if not (EXPECTS_MESSAGES if is_string else EXPECTS_TEXT).match(problem):
        return ""
    given, other = ("a string", "a list of messages") if is_string else ("a list of messages", "a string")
    form, given_by_prompt = prompt_form(group.prompt)
    if given == given_by_prompt:
        source, column = group.prompt.source or "the data", group.prompt.prompt_column
        fact = f"Reward functions get a completion as {given}, because the prompts of {source} are {form}"
        fact += f" (column {column!r})" * bool(column)
    else:
        fact = f"It gets a completion as {given}, because its completions_as is {reward.completions_as!r}"
    setting = "messages" if is_string else "text"
    remedy = f"To get {other} instead, set completions_as: {setting} in WeightedReward."
    return f" The cause can be the form of a completion. {fact}. {remedy}"


def applies(prompt: Prompt, reward: str) -> bool:
    """Whether a reward applies to a prompt."""
    return prompt.rewards is None or reward in prompt.rewards
