"""What a function or callable object says of itself: its name, its arguments, whether it is asynchronous."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any


def check_callable(reward: Any) -> None:
    """Raises: ValueError if it is no function or callable object."""
    if isinstance(reward, str):
        raise ValueError(
            f"A reward must be a function or callable object, got the text {reward!r}: give the function itself, or "
            f"grpo_lightning.rewards.reward({reward!r}) for a shipped or installed reward of that name."
        )
    if isinstance(reward, type) or not callable(reward):
        hint = f"an instance, {reward.__name__}(...)" if isinstance(reward, type) else "a function"
        raise ValueError(f"A reward must be a function or callable object, got {reward!r}: give {hint}.")


def snake_case(name: str) -> str:
    """ExactMatch -> exact_match, LLMJudge -> llm_judge."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def innermost(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `functools.partial`s, which have neither its name nor its attributes."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def keywords(reward: Callable[..., Any], name: str) -> tuple[frozenset[str] | None, list[str]]:
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


def is_async(reward: Callable[..., Any]) -> bool:
    """True for a coroutine function, or an object whose `__call__` is one."""
    inner = innermost(reward)
    return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)
