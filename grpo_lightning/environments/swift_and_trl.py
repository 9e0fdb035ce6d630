"""Adapters for two kinds of user code: multi-turn functions for ms-swift, and environments for TRL."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_lightning.core.event_loop import wait_for
from grpo_lightning.core.types import FinishReason, Message
from grpo_lightning.environments.base import Environment, EnvironmentLike, Step, named_columns
from grpo_lightning.environments.tools import ToolFormat, Tools, name_of


class MultiTurnFunction(Environment):
    """An environment that calls a function written for ms-swift 3 as a `multi_turn_func`.

    The function gets a list with one dict. The dict contains the data columns, `messages` (the chat up to and including
    the policy's turn), `finish_reason` ("stop", or "length" for a truncated turn) and `index`, which is always 0. Keys
    that the function sets are kept for the next turns. The function sets `finished` in the dict to True or False, and
    returns the list. To continue the conversation, the function either appends messages, which become the observation,
    or changes the policy's last message. A changed message must be a beginning of the policy's message, followed by
    added text. The policy then continues after the added text. If `finished` is True, the function must not add text,
    and appended messages are only logged.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        self.function = function
        self.columns: dict[str, Any] = {}
        self.messages: list[Message] = []
        self.finish_reason: FinishReason = "stop"
        """Why the policy's turn ended."""

    def reset(self, prompt: Any, **columns: Any) -> None:
        """Store the prompt and the columns."""
        self.columns = {"index": 0, **columns}
        self.messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, completion: str) -> Step:
        """Call the function. Raises: ValueError if the function does not return what ms-swift expects."""
        is_continued = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        before = str(self.messages[-1]["content"]) if is_continued else ""
        kept = self.messages[:-1] if is_continued else self.messages
        messages = [*kept, {"role": "assistant", "content": before + completion}]
        given = {**self.columns, "finish_reason": self.finish_reason, "messages": copy.deepcopy(messages)}
        returned = self.function([given])
        if not isinstance(returned, Sequence) or len(returned) != 1 or not isinstance(returned[0], Mapping):
            raise ValueError(f"A multi-turn function must return the list of dicts that it got, got {returned!r:.120}.")
        if "finished" not in returned[0]:
            raise ValueError("A multi-turn function must set 'finished' to True or False in each dict that it returns.")
        self.columns |= {name: value for name, value in returned[0].items() if name != "messages"}
        self.messages, is_finished = list(returned[0]["messages"]), bool(returned[0]["finished"])
        after = self.messages
        if after[: len(messages)] == messages and len(after) > len(messages):
            return Step([dict(message) for message in after[len(messages) :]], done=is_finished)
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
        if is_finished:
            if mine[keep:]:
                raise ValueError(
                    "A multi-turn function has added text to the policy's message, and has set 'finished' to True: it "
                    "may then only cut the policy's message off, or append messages."
                )
            return Step(done=True) if keep == len(completion) else Step("", done=True, keep=keep)
        if not mine[keep:]:
            raise ValueError(
                "A multi-turn function has set 'finished' to False, but has added nothing from which the policy can "
                "continue."
            )
        return Step(mine[keep:], keep=keep)


_SHARED = ("factory", "object")
"""Attributes of a `ToolObject` that `__deepcopy__` handles separately. Copies share the factory, but not the object."""


class ToolObject(Tools):
    """An environment written for TRL (`environment_factory`): an object with public methods, which are the tools.

    A method `reset` gets the data columns that its signature names, and can return the first observation. A method
    `get_reward` gives the reward at the end of every conversation. All methods can be async.

    `reset` is called once per prompt, and the G conversations of the prompt begin with copies of the object. An object
    that cannot be pickled runs in the training process. If the object cannot be copied either, the factory makes one
    object per conversation, and `reset` is called on each.

    Args:
        factory: Class, or function without arguments, that makes the object.
        format: See `Tools`.
        max_calls: See `Tools`.
    """

    def __init__(self, factory: Callable[[], Any], format: ToolFormat = "auto", max_calls: int = 8) -> None:
        """Raises: ValueError if the object from `factory` has no public methods, or is an `Environment`."""
        self.factory = factory
        self.object: Any = factory()
        kind = type(self.object).__name__
        if isinstance(self.object, Environment):
            raise ValueError(f"The factory made a {kind}, which is an environment itself: pass this object instead.")
        methods = self._methods()
        if not methods:
            raise ValueError(f"The factory made a {kind}, which has no public methods that the policy could call.")
        self.in_process = bool(getattr(self.object, "in_process", False))
        self.is_new = True
        """True until `reset` or `step` is called."""
        self.columns: dict[str, Any] | None = None
        """The arguments of `reset`; None before `reset` is called and after unpickling."""
        self.first: Any = None
        """The observation that `reset` returned."""
        super().__init__(methods, format, max_calls)

    def _methods(self) -> list[Callable[..., Any]]:
        """The public methods, apart from `reset` and `get_reward`. Properties are not read."""
        found = [name for name, _ in inspect.getmembers(type(self.object), inspect.isfunction)]
        chosen = [name for name in found if not name.startswith("_") and name not in ("reset", "get_reward")]
        return [getattr(self.object, name) for name in chosen]

    @property
    def for_rewards(self) -> Any:
        """The object from the factory, which rewards get in the argument `environments`."""
        return self.object

    def reset(self, **columns: Any) -> Any:
        """Reset the object."""
        reset = getattr(self.object, "reset", None)
        self.is_new, self.columns = False, columns
        self.first = None if reset is None else wait_for(reset(**named_columns(reset, columns)))
        return self.first

    def step(self, completion: str) -> Step:
        """Run the calls of a turn. At the end of the conversation, also get the reward."""
        self.is_new = False
        step = super().step(completion)
        return replace(step, reward=self.end()) if step.done else step

    def end(self) -> float | None:
        """Get the reward from the object."""
        get_reward = getattr(self.object, "get_reward", None)
        value = None if get_reward is None else wait_for(get_reward())
        return None if value is None else float(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ToolObject:
        """Copy the environment; if its object cannot be copied, make a new object with the factory.

        Raises:
            RuntimeError: If the object cannot be copied, and `reset` of the new object returns another observation.
        """
        new = copy.copy(self)  # shallow, because the factory may hold something that cannot be copied
        vars(new).update(
            {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items() if name not in _SHARED}
        )
        try:
            new._bind(copy.deepcopy(self.object, memo))
            return new
        except Exception as error:
            if self.columns is None and not self.is_new:
                raise
            new._bind(self.factory())
            if self.columns is not None and new.reset(**self.columns) != self.first:
                raise RuntimeError(
                    f"a {type(self.object).__name__} cannot be copied ({type(error).__name__}: {error}), and another "
                    "one cannot take its place, because its `reset` answers differently to the same columns: make "
                    "`reset` deterministic, or give the class a method __deepcopy__"
                ) from error
            return new

    def _bind(self, value: Any) -> None:
        """Set the object, and use its methods as the tools."""
        self.object = value
        self.functions = {name_of(method): method for method in self._methods()}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the bound methods."""
        return {name: value for name, value in vars(self).items() if name not in ("functions", "columns", "first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.columns = self.first = None
        self._bind(self.object)


def as_environment(value: EnvironmentLike) -> Any:
    """Make an environment from the value of `model.environment`.

    Args:
        value: One of four:

            - an object with a method `step`;
            - a list of functions, which become `Tools`;
            - a function written for ms-swift, which takes the list of conversations (`MultiTurnFunction`);
            - a class or function like TRL's `environment_factory`, which makes an object with tools (`ToolObject`).

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
        return _of_function(value)
    if isinstance(value, Mapping):
        raise ValueError(
            f"model.environment got a dict of factories: {', '.join(map(repr, value))}. All rows of a run have one "
            "environment: write a class whose `reset` chooses by a data column, and pass this class."
        )
    raise ValueError(
        f"model.environment must be an object with a method `step`, a list of functions (tools), a multi-turn function "
        f"or a class whose methods are tools; got {value!r:.80}."
    )


def _of_function(function: Callable[..., Any]) -> Environment:
    """Wrap a function with one required argument (ms-swift) or none (TRL's factory)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it has no signature
        parameters = [inspect.Parameter("unknown", inspect.Parameter.VAR_POSITIONAL)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) == 1 and needed[0].kind is not needed[0].KEYWORD_ONLY:
        return MultiTurnFunction(function)
    if not needed and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ToolObject(function)
    raise ValueError(
        f"model.environment got the function {function!r:.80}, and its arguments do not show its kind: write "
        "MultiTurnFunction(function) if it takes the list of conversations (ms-swift), or ToolObject(factory) if it "
        "takes no arguments and makes an object with tools (TRL)."
    )
