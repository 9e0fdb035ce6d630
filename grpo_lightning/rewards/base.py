"""The reward contract: what a reward is called with, what it returns, and what happens when it fails.

A reward is a function or a callable object, sync or async. It is called by keyword with

    prompts, completions, completion_ids, trainer_state, log_extra, log_metric

and every data column; what its signature does not name is left out (`**kwargs` takes all). Each is a list with one
element per completion, the G completions of a prompt side by side. A chat prompt is a list of messages and its
completion `[{"role": "assistant", "content": text}]`; a text prompt and its completion are strings. It returns one
number per completion. None for a whole group: the reward does not apply there. None for some of a group: those
completions are not scorable. Reward functions written for TRL run unchanged.

With the attribute `per_group = True` a reward is called with whole groups: one prompt and one value of each column
per group, and lists of completions; it returns a list per group.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from grpo_lightning.types import Message

CONTRACT = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""The arguments every reward can take; data columns come on top."""

Content = str | Sequence[Message]
"""A prompt or completion as rewards receive it: text, or chat messages."""

OnError = Literal["raise", "none", "value"]


class Reward(ABC):
    """A reward that is a class: for settings, or for more than one function."""

    per_group: bool = False
    """True if it is called with whole groups."""

    required_columns: tuple[str, ...] = ()
    """Data columns it needs beyond those its signature names."""

    @property
    def name(self) -> str:
        """Its name in logs: the class name in snake case, unless a subclass says otherwise."""
        return _snake_case(type(self).__name__)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score completions; take by name what is needed. Returns: [B] numbers or None ([N] lists if `per_group`)."""


RewardLike = Reward | Callable[..., Any]
"""What users pass as a reward."""


class WeightedReward(Reward):
    """A reward with its weight in the total, a name, and what to do when it fails.

    Failing is: raising, returning the wrong number of values, or returning NaN, infinity or what is no number.

    Args:
        reward: The function or callable object.
        weight: Factor in the total; 0 runs and logs the reward only.
        name: Its name in logs; by default the function's, or the class name in snake case.
        on_error: "raise" stops the run; "none" makes the values None, "value" makes them `error_value`. A raise and a
            wrong length concern all completions of the call: with "none", only the other rewards count there.
        error_value: Only with `on_error="value"`.
    """

    def __init__(
        self,
        reward: RewardLike,
        weight: float = 1.0,
        name: str | None = None,
        on_error: OnError = "raise",
        error_value: float | None = None,
    ) -> None:
        """Raises: ValueError if an argument is out of range, or `reward` cannot be called by keyword."""
        if isinstance(reward, type) or not callable(reward):
            hint = f"an instance, {reward.__name__}(...)" if isinstance(reward, type) else "a function"
            raise ValueError(f"A reward must be a function or callable object, got {reward!r}: give {hint}.")
        if isinstance(reward, WeightedReward):
            raise ValueError(f"Reward {reward.name!r} is a WeightedReward already: put all settings into one.")
        if not math.isfinite(weight):
            raise ValueError(f"The weight of reward {name or _name(reward)!r} must be finite, got {weight}.")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {on_error!r}.")
        if (on_error == "value") != (error_value is not None and math.isfinite(error_value)):
            raise ValueError(
                f"error_value is the number that on_error='value' stands in with, and goes with nothing else; got "
                f"on_error={on_error!r}, error_value={error_value!r}."
            )
        self.reward = reward
        self.weight = float(weight)
        self.on_error: OnError = on_error
        self.error_value = error_value
        self.per_group = bool(getattr(_innermost(reward), "per_group", False))
        self._name = name or _name(reward)
        self._accepted, needed = _keywords(reward, self._name)
        columns = [*needed, *getattr(_innermost(reward), "required_columns", ())]
        self.required_columns = tuple(column for column in columns if column not in CONTRACT)

    @property
    def name(self) -> str:
        """The name given, or the reward's own."""
        return self._name

    def __call__(self, **available: Any) -> Any:
        """Call the reward with those of the arguments it takes."""
        if self._accepted is not None:
            available = {name: value for name, value in available.items() if name in self._accepted}
        return self.reward(**available)


def completion_text(completion: Content) -> str:
    """The text of a completion, whichever form it has: a string, or messages (the last one's text parts)."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part.get("type") == "text")


def _name(reward: RewardLike) -> str:
    """A reward's own name: a function's, a `Reward`'s, or the class name in snake case."""
    inner = _innermost(reward)
    name = getattr(inner, "name", None) or getattr(inner, "__name__", None)
    return name if isinstance(name, str) else _snake_case(type(inner).__name__)


def _snake_case(name: str) -> str:
    """ExactMatch -> exact_match, LLMJudge -> llm_judge."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _innermost(reward: RewardLike) -> RewardLike:
    """The function inside `functools.partial`s, which have neither its name nor its attributes."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def _keywords(reward: RewardLike, name: str) -> tuple[frozenset[str] | None, list[str]]:
    """The keywords a reward takes (None: any), and those it cannot do without.

    Raises:
        ValueError: If it cannot be called by keyword.
    """
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"Reward {name!r} does not tell its arguments: wrap it in a function with `def`.") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"Reward {name!r} takes {parameter.name!r} by position; rewards are called by keyword.")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = None if takes_all else frozenset(parameter.name for parameter in named)
    return accepted, [parameter.name for parameter in named if parameter.default is parameter.empty]
