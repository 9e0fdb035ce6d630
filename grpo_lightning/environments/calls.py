"""A call of an environment, in the form in which workers take calls. Workers import this file, but no torch."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_lightning.environments.base import as_step, change_texts, kept_observation, messages_of, named_columns

Method = Literal["reset", "step", "on_failure"]


@dataclass
class EnvironmentCalls:
    """The calls of an environment, in the form in which workers take calls."""

    environment: Any
    """The environment that conversations begin with."""

    max_characters: int
    """Observations are cut to this number of characters, before they leave the worker."""

    @property
    def name(self) -> str:
        """The class name, for messages."""
        return type(self.environment).__name__

    @property
    def is_async(self) -> bool:
        """True if a method is a coroutine function."""
        return any(inspect.iscoroutinefunction(getattr(self.environment, name, None)) for name in ("reset", "step"))

    @property
    def in_process(self) -> bool:
        """True if the environment runs in the training process."""
        return bool(getattr(self.environment, "in_process", False)) or self.is_async

    def select(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Environments get no logging functions."""
        return {}

    def warm_up(self) -> None:
        """Nothing is to be prepared."""

    def __call__(self, method: Method, state: bytes | None, arguments: Any) -> tuple[bytes, Any]:
        """Call a method in a worker, where the environment arrives and leaves pickled. Args: as `call`."""
        after, value = self.call(method, None if state is None else pickle.loads(state), arguments)  # noqa: S301 (our own)
        return pickle.dumps(after), value

    def call(self, method: Method, environment: Any, arguments: Any) -> Any:
        """Call a method of an environment.

        Args:
            method: Name of the method.
            environment: The environment; None for a copy of the one that conversations begin with.
            arguments: The columns for `reset`, the text for `step`, (kind, problem) for `on_failure`.

        Returns:
            (The environment after the call, the value), or a coroutine that returns this.
        """
        environment = copy.deepcopy(self.environment) if environment is None else environment
        value: Any = None
        if method == "reset":
            reset = getattr(environment, "reset", None)
            value = None if reset is None else reset(**named_columns(reset, arguments))
        elif method == "step":
            value = environment.step(arguments)
        elif hasattr(environment, "on_failure"):
            value = environment.on_failure(*arguments)
        if inspect.isawaitable(value):
            return self._awaited(environment, method, value)
        return self._outcome(environment, method, value)

    async def _awaited(self, environment: Any, method: Method, value: Any) -> tuple[Any, Any]:
        return self._outcome(environment, method, await value)

    def _outcome(self, environment: Any, method: Method, value: Any) -> tuple[Any, Any]:
        """Check and cut the value."""
        if method == "reset":
            messages_of(value, "user")
            return environment, self._cut(value)
        if method == "on_failure" and value is None:
            return environment, None
        step = as_step(value)
        return environment, replace(step, observation=self._cut(step.observation))

    def _cut(self, observation: Any) -> Any:
        """Cut the texts of an observation, so that an answer of megabytes is not sent to the training process.

        Images are replaced by copies: the environment may change or overwrite them later.
        """
        if observation is None or isinstance(observation, str):
            return observation and observation[: self.max_characters]
        return [change_texts(m, lambda text: text[: self.max_characters]) for m in kept_observation(observation)]
