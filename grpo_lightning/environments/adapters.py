"""Multi-turn functions of ms-swift and environments of TRL, unchanged, as environments."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_lightning.core.types import Message
from grpo_lightning.environments.base import Environment, EnvironmentLike, Step
from grpo_lightning.environments.tools import ToolFormat, Tools


class MultiTurnFunction(Environment):
    """A `multi_turn_func` of ms-swift (version 3): a function from conversations to conversations.

    The function gets a list with one dict: the data columns, and `messages`, the chat up to the policy's turn. It
    returns the list with `finished` set in each dict. If the conversation is not finished, the function has either
    appended messages, which become the observation, or changed the policy's last message: then the policy goes on
    behind the part of its message that is unchanged and behind the text that the function has added.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        self.function = function
        self.columns: dict[str, Any] = {}
        self.messages: list[Message] = []

    def reset(self, prompt: Any, **columns: Any) -> None:
        """Keep the prompt and the columns."""
        self.columns = dict(columns)
        self.messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, completion: str) -> Step:
        """Call the function. Raises: ValueError if it does not return what ms-swift expects."""
        is_continued = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        before = str(self.messages[-1]["content"]) if is_continued else ""
        kept = self.messages[:-1] if is_continued else self.messages
        messages = [*kept, {"role": "assistant", "content": before + completion}]
        returned = self.function([{**self.columns, "messages": copy.deepcopy(messages)}])
        if not isinstance(returned, Sequence) or len(returned) != 1 or not isinstance(returned[0], Mapping):
            raise ValueError(f"A multi-turn function must return the list of dicts that it got, got {returned!r:.120}.")
        if "finished" not in returned[0]:
            raise ValueError("A multi-turn function must set 'finished' to True or False in each dict that it returns.")
        after = list(returned[0]["messages"])
        if returned[0]["finished"]:
            return Step(done=True)
        self.messages = after
        if after[: len(messages)] == messages and len(after) > len(messages):
            return Step([dict(message) for message in after[len(messages) :]])
        changed = str(after[-1]["content"]) if len(after) == len(messages) else ""
        if len(after) != len(messages) or after[:-1] != messages[:-1] or not changed.startswith(before):
            raise ValueError(
                "A multi-turn function may append messages, or change the last message of the assistant; this one has "
                "changed other messages."
            )
        mine = changed[len(before) :]
        keep = next(
            (i for i, (a, b) in enumerate(zip(mine, completion, strict=False)) if a != b),
            min(len(mine), len(completion)),
        )
        if not mine[keep:]:
            raise ValueError(
                "A multi-turn function has set 'finished' to False, but has added nothing for the policy to go on from."
            )
        return Step(mine[keep:], keep=keep)


class ToolObject(Tools):
    """An environment of TRL (`environment_factory`): an object whose public methods are tools.

    Its method `reset`, if it has one, gets the data columns, and may return the first observation. Its method
    `get_reward`, if it has one, gives the reward at the end of the conversation.

    Args:
        factory: Class, or function without arguments, that makes the object.
        format: See `Tools`.
        max_calls: See `Tools`.
    """

    def __init__(self, factory: Callable[[], Any], format: ToolFormat = "auto", max_calls: int = 8) -> None:
        self.factory = factory
        self.object: Any = factory()
        super().__init__(self._methods(), format, max_calls)

    def _methods(self) -> list[Callable[..., Any]]:
        """The public methods, apart from `reset` and `get_reward`."""
        found = inspect.getmembers(self.object, inspect.ismethod)
        return [method for name, method in found if not name.startswith("_") and name not in ("reset", "get_reward")]

    def reset(self, **columns: Any) -> Any:
        """Reset the object."""
        reset = getattr(self.object, "reset", None)
        return None if reset is None else reset(**columns)

    def step(self, completion: str) -> Step:
        """Run the calls of a turn; at the end of the conversation, ask for the reward."""
        step = super().step(completion)
        if step.done and hasattr(self.object, "get_reward"):
            return Step(step.observation, done=True, reward=float(self.object.get_reward()), metrics=step.metrics)
        return step

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the bound methods, which `__setstate__` binds again."""
        return {name: value for name, value in vars(self).items() if name != "functions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.functions = {method.__name__: method for method in self._methods()}


def as_environment(value: EnvironmentLike) -> Any:
    """Make an environment of what `model.environment` was given.

    Args:
        value: An object with a method `step`; a list of functions, which become `Tools`; a function in ms-swift's style
            (`MultiTurnFunction`); or a class or function that makes an object with tools, as TRL's
            `environment_factory` (`ToolObject`).

    Raises:
        ValueError: If the value is none of these.
    """
    if isinstance(value, type) and hasattr(value, "step"):
        raise ValueError(f"model.environment must be an object: write {value.__name__}(...), not the class.")
    if hasattr(value, "step"):
        return value
    if isinstance(value, list | tuple) and value and all(map(callable, value)):
        return Tools(list(value))
    if isinstance(value, type):
        return ToolObject(value)
    if callable(value):
        return MultiTurnFunction(value)
    raise ValueError(
        f"model.environment must be an object with a method `step`, a list of functions (tools), a multi-turn function "
        f"or a class whose methods are tools; got {value!r:.80}."
    )
