"""Calls of an environment's methods. Worker processes import this file, so it does not import torch."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_lightning.core.types import change_texts
from grpo_lightning.environments.base import (
    as_reward,
    as_step,
    kept_observation,
    messages_of,
    named_columns,
)
from grpo_lightning.environments.swift_and_trl import MultiTurnFunction

Method = Literal["reset", "step", "end", "on_failure"]


METHODS = ("reset", "step", "end")
"""The methods that may be async."""


def class_name(environment: Any) -> str:
    """The class name of an environment, or of the user's object that it wraps."""
    return type(getattr(environment, "for_rewards", environment)).__name__


def copy_environment(environment: Any) -> Any:
    """Copy an environment. Raises: RuntimeError if it cannot be copied."""
    try:
        return copy.deepcopy(environment)
    except Exception as error:
        raise RuntimeError(
            f"Environment {class_name(environment)!r} cannot be copied ({type(error).__name__}: {error}), but each "
            "conversation of a prompt needs its own: give the class a method __deepcopy__, which shares what cannot be "
            "copied."
        ) from error


def pickling_problem(environment: Any) -> str | None:
    """The reason why an environment cannot be pickled; None if it can be."""
    if isinstance(environment, bytes):
        return None
    try:
        pickle.dumps(environment)
    except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
        return f"{type(error).__name__}: {error}"
    return None


@dataclass
class EnvironmentCalls:
    """Calls the methods of an environment.

    This class has the interface of a reward (`WeightedReward`), so that reward workers can make the calls.
    """

    environment: Any
    """The environment that conversations begin with."""

    max_characters: int
    """Each text of an observation is cut to this number of characters in the worker."""

    @property
    def name(self) -> str:
        """The class name, for messages."""
        return class_name(self.environment)

    @property
    def is_async(self) -> bool:
        """True if at least one of the methods in `METHODS` is a coroutine function."""
        return any(inspect.iscoroutinefunction(getattr(self.environment, name, None)) for name in METHODS)

    @property
    def in_process(self) -> bool:
        """True if the environment runs in the training process."""
        return bool(getattr(self.environment, "in_process", False)) or self.is_async

    def select(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return no logging functions."""
        return {}

    def warm_up(self) -> None:
        """Do nothing."""

    def __call__(self, method: Method, state: bytes | None, arguments: Any) -> tuple[bytes, Any]:
        """Make a `call` in a worker; the environment is passed and returned in pickled form."""
        after, value = self.call(method, None if state is None else pickle.loads(state), arguments)  # noqa: S301 (our own)
        try:
            return pickle.dumps(after), value
        except Exception as error:
            raise RuntimeError(
                f"Environment {self.name!r} cannot be pickled after `{method}` ({type(error).__name__}: {error}), but "
                "between two calls in workers it is pickled: remove what cannot be pickled from the object, or set "
                "in_process = True on its class"
            ) from error

    def call(self, method: Method, environment: Any, arguments: Any) -> Any:
        """Call a method of an environment.

        Args:
            method: Name of the method.
            environment: The environment; None uses a copy of `self.environment`.
            arguments: The columns for `reset`, (text, finish reason) for `step`, None for `end`, (kind, problem) for
                `on_failure`.

        Returns:
            (environment after the call, value), or a coroutine that returns this pair.
        """
        environment = copy_environment(self.environment) if environment is None else environment
        value: Any = None
        if method == "reset":
            reset = getattr(environment, "reset", None)
            value = None if reset is None else reset(**named_columns(reset, arguments))
        elif method == "step":
            text, finish_reason = arguments
            if isinstance(environment, MultiTurnFunction):
                environment.finish_reason = finish_reason
            value = environment.step(text)
        elif method == "end":
            value = environment.end() if hasattr(environment, "end") else None
        elif hasattr(environment, "on_failure"):
            value = environment.on_failure(*arguments)
        if inspect.isawaitable(value):
            return self._await_value(environment, method, value)
        return self._outcome(environment, method, value)

    async def _await_value(self, environment: Any, method: Method, value: Any) -> tuple[Any, Any]:
        return self._outcome(environment, method, await value)

    def _outcome(self, environment: Any, method: Method, value: Any) -> tuple[Any, Any]:
        if method == "reset":
            messages_of(value, "user")
            return environment, self._cut(value)
        if method == "end":
            return environment, as_reward(value, "end")
        if method == "on_failure" and value is None:
            return environment, None
        step = as_step(value)
        return environment, replace(step, observation=self._cut(step.observation))

    def _cut(self, observation: Any) -> Any:
        """Cut each text of an observation to `max_characters`, and copy the images."""
        if observation is None or isinstance(observation, str):
            return observation and observation[: self.max_characters]
        return [change_texts(m, lambda text: text[: self.max_characters]) for m in kept_observation(observation)]
