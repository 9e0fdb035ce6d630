"""Runs the environments of a rollout: concurrently, in worker processes, within limits.

The workers are those of the rewards (`rewards/workers.py`), with the limits of `model.reward_workers`. A call gets the
pickled environment, and returns it with what it answered. A worker keeps nothing between calls, so that every call can
be killed, and an environment whose call has failed is as it was before the call.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from grpo_lightning.core.types import Prompt
from grpo_lightning.environments.base import InvalidStepError
from grpo_lightning.environments.calls import EnvironmentCalls, Method
from grpo_lightning.rewards.scoring import event_loop
from grpo_lightning.rewards.workers import Answer, RewardWorkers, WorkerPool

log = logging.getLogger(__name__)

FAILURES = ("exception", "timeout", "crash", "invalid_value")
"""Kinds of failures of a call: it raised an error; it timed out; its worker process died; its value is not allowed."""

OnError = Literal["raise", "none", "value"]


class Result(NamedTuple):
    """The outcome of a call."""

    state: Any
    """The environment after the call, pickled if it runs in workers. After a failed call in a worker, it is the
    environment before the call."""

    value: Any
    """An observation (`reset`) or a `Step` (`step`); None if the call failed."""

    failure: str = ""
    """One of `FAILURES`; empty on success."""

    problem: str = ""
    """Description of the failure; in messages, it follows the name of the environment."""

    cause: BaseException | None = None
    """The exception."""


class EnvironmentRunner:
    """Runs the environments of all conversations.

    Args:
        environment: The environment that conversations begin with.
        limits: Settings of the workers. `num_workers` 0 runs environments in the training process, without limits.
        max_characters: Longest observation.
    """

    def __init__(self, environment: Any, limits: RewardWorkers, max_characters: int) -> None:
        self.calls, self.limits = EnvironmentCalls(environment, max_characters), limits
        self.pool = WorkerPool([self.calls], limits, "Environment")  # type: ignore[list-item]

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
        """Start the workers; returns immediately."""
        self.pool.start(num_local_ranks)

    def reset(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Result]:
        """Begin conversations: one call per prompt. Args: seeds: of the random numbers of each call."""
        columns = [{"prompt": prompt.content, **prompt.columns} for prompt in prompts]
        waiting = [self._call("reset", None, each, seed) for each, seed in zip(columns, seeds, strict=True)]
        return [self._result(future, None) for future in waiting]

    def copy(self, state: Any) -> Any:
        """An environment of its own for each conversation of a prompt. Raises: RuntimeError if it cannot be copied."""
        if isinstance(state, bytes):
            return state
        try:
            return copy.deepcopy(state)
        except Exception as error:
            raise RuntimeError(
                f"Environment {self.name!r} cannot be copied ({type(error).__name__}: {error}), but each conversation "
                "of a prompt needs its own: give the class a method __deepcopy__, which shares what cannot be copied."
            ) from error

    def step(self, state: Any, text: str, seed: int) -> Future[Answer]:
        """Start a call of `step`. Args: state: the environment; text: the policy's turn."""
        return self._call("step", state, text, seed)

    def wait(self, future: Future[Answer], state: Any) -> Result:
        """Wait for a call of `step`; a failed one is answered by the environment's `on_failure`.

        Args:
            future: What `step` returned.
            state: The environment before the call.
        """
        result = self._result(future, state)
        if not result.failure:
            return result
        answer = self._result(self._call("on_failure", state, (result.failure, result.problem), 0), state)
        return result if answer.failure or answer.value is None else answer

    def _call(self, method: Method, state: Any, arguments: Any, seed: int) -> Future[Answer]:
        self.pool.wait()
        if self.pool.has(self.calls):  # type: ignore[arg-type]
            given = {"method": method, "state": state, "arguments": arguments}
            return self.pool.submit(self.calls, given, seed)  # type: ignore[arg-type]
        future: Future[Answer] = Future()
        try:
            outcome = self.calls.call(method, state, arguments)
        except Exception as error:  # noqa: BLE001 (an environment may raise anything; `on_error` decides)
            future.set_result(Answer().fail_by(error))
            return future
        if inspect.isawaitable(outcome):
            return asyncio.run_coroutine_threadsafe(self._finish(outcome), event_loop())
        future.set_result(Answer(outcome))
        return future

    async def _finish(self, outcome: Any) -> Answer:
        """Wait for an async environment, as long as a call may take."""
        try:
            return Answer(await asyncio.wait_for(outcome, self.limits.timeout_seconds))
        except (asyncio.TimeoutError, TimeoutError):
            return Answer().fail("timeout", f"was stopped: {self.limits.call_limit}")
        except Exception as error:  # noqa: BLE001 (an environment may raise anything; `on_error` decides)
            return Answer().fail_by(error)

    def _result(self, future: Future[Answer], state: Any) -> Result:
        """Wait for a call. Args: state: the environment before the call."""
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
