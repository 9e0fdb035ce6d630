"""Runs the environments of a rollout at the same time, in worker processes with time and memory limits.

A call gets and returns the pickled environment, so a worker can be killed during any call. All calls of a round (one
turn of each conversation) have the same deadline, which is `step_timeout_seconds` after the end of sampling.

The random generators of `random`, numpy and torch (on the CPU) are seeded for each call, with two exceptions:

- Calls of async methods are not seeded, because several of these calls run at the same time.
- During asynchronous rollouts, calls in the training process are not seeded, because these calls do not run in the main
  thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from grpo_lightning.core.event_loop import event_loop
from grpo_lightning.core.types import FinishReason, Prompt
from grpo_lightning.environments.base import Environment, InvalidStepError
from grpo_lightning.environments.method_calls import EnvironmentCalls, Method, copy_environment
from grpo_lightning.rewards.workers import Answer, RewardWorkers, WorkerPool, seeded_random

log = logging.getLogger(__name__)

FAILURES = ("exception", "timeout", "crash", "invalid_value")
"""Kinds of failed calls."""

OnError = Literal["raise", "none", "value"]


class Result(NamedTuple):
    """The outcome of a call."""

    state: Any
    """The environment after the call, pickled if it runs in workers. After a failed call in a worker, this is the
    environment before the call. After a failed call in the training process, changes made by the call remain."""

    value: Any
    """The checked result of the method. If the call failed and `on_failure` has not answered, this is None."""

    failure: str = ""
    """One of `FAILURES`, also if `on_failure` has answered; empty on success."""

    problem: str = ""
    """Description of the failure, to follow the environment's name."""

    cause: BaseException | None = None
    """The exception that caused the failure."""


class EnvironmentRunner:
    """Runs the environments of all conversations.

    Args:
        environment: The environment that conversations begin with.
        limits: Settings of the workers. With `num_workers` 0, environments run in the training process. Memory then has
            no limit, and only async methods have a time limit.
        max_characters: Maximum number of characters of each text of an observation.
    """

    def __init__(self, environment: Any, limits: RewardWorkers, max_characters: int) -> None:
        self.calls, self.limits = EnvironmentCalls(environment, max_characters), limits
        self.pool = WorkerPool([self.calls], limits, "Environment")  # type: ignore[list-item]
        self._is_closed = False
        self._begin_round()

    @property
    def name(self) -> str:
        """The environment's name in messages."""
        return self.calls.name

    @property
    def observation_role(self) -> str:
        """The role of observations that are text."""
        return getattr(self.calls.environment, "observation_role", "user")

    @property
    def tools(self) -> Sequence[Any]:
        """Functions that the chat template describes to the policy."""
        return tuple(getattr(self.calls.environment, "tools", ()))

    def start(self, num_local_ranks: int = 1) -> None:
        """Start the workers, and return immediately."""
        self._is_closed = False
        self.pool.start(num_local_ranks)

    def close(self) -> None:
        """Stop the workers at the end of a run. The next call of `reset` starts them again.

        A rollout in the background then raises an error at its next call.
        """
        self._is_closed = True
        self.pool.close()

    def reset(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Result]:
        """Begin conversations, with one call and one seed per prompt."""
        self._is_closed = False
        columns = [{"prompt": prompt.content, **prompt.columns} for prompt in prompts]
        return self._all("reset", [None] * len(prompts), columns, seeds)

    def end(self, states: Sequence[Any], seeds: Sequence[int]) -> list[Result]:
        """Call `Environment.end` for conversations that a limit has ended."""
        method = getattr(type(self.calls.environment), "end", None)
        if method is None or method is Environment.end:  # no call, because it would pickle the environment
            return [Result(state, None) for state in states]
        return self._all("end", states, [None] * len(states), seeds)

    def _all(
        self, method: Method, states: Sequence[Any], arguments: Sequence[Any], seeds: Sequence[int]
    ) -> list[Result]:
        """Make calls at the same time, and wait for all of them."""
        self._begin_round()
        waiting = [
            self._call(method, state, each, seed) for state, each, seed in zip(states, arguments, seeds, strict=True)
        ]
        self._end_round()
        return [self._result(future, state) for future, state in zip(waiting, states, strict=True)]

    def copy(self, state: Any) -> Any:
        """Copy a prompt's environment for one conversation. Raises: RuntimeError if it cannot be copied."""
        return state if isinstance(state, bytes) else copy_environment(state)

    def step(self, state: Any, text: str, seed: int, finish_reason: FinishReason = "stop") -> Future[Answer]:
        """Start a call of the environment's method `step`, on the policy's turn `text`."""
        if not math.isinf(self._deadline):
            self._begin_round()
        return self._call("step", state, (text, finish_reason), seed)

    def wait(self, future: Future[Answer], state: Any) -> Result:
        """Wait until a call of the environment's method `step` ends, and return its result.

        If the call fails, the environment's method `on_failure` is called. If `on_failure` returns a valid value other
        than None, the result has this value and the kind of the failure. Otherwise, the result describes the failure of
        `step`.
        """
        if math.isinf(self._deadline):
            self._end_round()
        result = self._result(future, state)
        if not result.failure:
            return result
        late = self._deadline + self.limits.timeout_seconds  # `on_failure` may run after the deadline
        answer = self._result(self._call("on_failure", state, (result.failure, result.problem), 0, late), state)
        return result if answer.failure or answer.value is None else answer._replace(failure=result.failure)

    def _begin_round(self) -> None:
        """Begin a round of calls, without a deadline while turns are still being sampled."""
        self._round: list[Future[Answer]] = []
        self._deadline = math.inf

    def _end_round(self) -> None:
        """Set the deadline of a round, once all its calls have been made."""
        self._deadline = time.monotonic() + self.limits.step_timeout_seconds
        if self.pool.has(self.calls):  # type: ignore[arg-type]
            self.pool.set_deadline(self._round, self._deadline)

    def _call(
        self, method: Method, state: Any, arguments: Any, seed: int, deadline: float = math.inf
    ) -> Future[Answer]:
        if self._is_closed:
            raise RuntimeError(
                f"The run has ended, so the environment {self.name!r} is not called for the rollout that is being "
                "sampled in the background."
            )
        self.pool.wait()
        if self.pool.has(self.calls):  # type: ignore[arg-type]
            given = {"method": method, "state": state, "arguments": arguments}
            future = self.pool.submit(self.calls, given, seed, deadline=deadline)  # type: ignore[arg-type]
            self._round.append(future)
            return future
        future = Future()
        try:
            # Outside of the main thread, restoring the generators would make training repeat random numbers.
            is_alone = threading.current_thread() is threading.main_thread()
            with seeded_random(seed) if is_alone else contextlib.nullcontext():
                outcome = self.calls.call(method, state, arguments)
        except Exception as error:  # noqa: BLE001 (an environment may raise anything; `on_error` decides)
            future.set_result(Answer().fail_by(error))
            return future
        if inspect.isawaitable(outcome):
            return asyncio.run_coroutine_threadsafe(self._finish(outcome), event_loop())
        future.set_result(Answer(outcome))
        return future

    async def _finish(self, outcome: Any) -> Answer:
        """Wait for an async method, at most for the time limit of a call."""
        try:
            return Answer(await asyncio.wait_for(outcome, self.limits.timeout_seconds))
        except (asyncio.TimeoutError, TimeoutError):
            return Answer().fail("timeout", f"was stopped: {self.limits.call_limit}")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - `on_error` decides
            return Answer().fail_by(error)

    def _result(self, future: Future[Answer], state: Any) -> Result:
        """Wait until a call ends, and return its result."""
        answer = future.result()
        for name, level, message in answer.records:
            logging.getLogger(name).log(level, "Environment %r: %s", self.name, message)
        if answer.failure == "stays":
            self.pool.keep(self.calls.name, answer.problem)
            raise RuntimeError(
                f"Environment {self.name!r} cannot run in worker processes: {answer.problem}. Set in_process = True on "
                "its class, or make it picklable."
            )
        if answer.failure:
            is_value = answer.problem.startswith(f"raised {InvalidStepError.__name__}:")
            kind = "invalid_value" if is_value else answer.failure
            return Result(state, None, kind, answer.problem, answer.cause)
        after, value = answer.result
        return Result(after, value)
