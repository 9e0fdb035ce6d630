"""Find rewards by short name, built in or registered by installed packages.

A package registers a reward with an entry point of the group `grpo_lightning.rewards` in its `pyproject.toml`:

    [project.entry-points."grpo_lightning.rewards"]
    my_reward = "my_package.rewards:MyReward"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from grpo_lightning.core.log_messages import nearest
from grpo_lightning.rewards.accuracy import Accuracy
from grpo_lightning.rewards.base import CompletionsAs, OnError, RewardLike, WeightedReward
from grpo_lightning.rewards.boxes.rewards import BoxRepetition, DetectionMAP, FormatRec, IoU, OdLength, WeightedSum
from grpo_lightning.rewards.code_tests import CodeTests
from grpo_lightning.rewards.countdown import Countdown
from grpo_lightning.rewards.environment import EnvironmentReward, ToolUse
from grpo_lightning.rewards.length import Cosine, Length, SoftOverlong
from grpo_lightning.rewards.llm_judge import LLMJudge
from grpo_lightning.rewards.question_types import (
    AllMatch,
    AnyAnswer,
    ByMethod,
    Counting,
    MultipleChoice,
    TextSimilarity,
    YesNo,
)
from grpo_lightning.rewards.reasoning_gym import ReasoningGym
from grpo_lightning.rewards.reward_model import RewardModel
from grpo_lightning.rewards.text import ExactMatch, Format, ReactFormat, Repetition

GROUP = "grpo_lightning.rewards"
"""The entry point group in which packages register rewards."""

SHIPPED: dict[str, type] = {
    "accuracy": Accuracy,
    "all_match": AllMatch,
    "any_answer": AnyAnswer,
    "box_repetition": BoxRepetition,
    "by_method": ByMethod,
    "code_tests": CodeTests,
    "cosine": Cosine,
    "countdown": Countdown,
    "counting": Counting,
    "detection_map": DetectionMAP,
    "environment_reward": EnvironmentReward,
    "exact_match": ExactMatch,
    "format": Format,
    "format_rec": FormatRec,
    "iou": IoU,
    "length": Length,
    "llm_judge": LLMJudge,
    "multiple_choice": MultipleChoice,
    "od_length": OdLength,
    "reasoning_gym": ReasoningGym,
    "react_format": ReactFormat,
    "repetition": Repetition,
    "reward_model": RewardModel,
    "soft_overlong": SoftOverlong,
    "text_similarity": TextSimilarity,
    "tool_use": ToolUse,
    "weighted_sum": WeightedSum,
    "yes_no": YesNo,
}
"""The built-in rewards by name."""


class Plugin(WeightedReward):
    """A reward that is given by its short name.

    Args:
        name: The short name, one of `available()`.
        init_args: Arguments of the reward, if it is a class.
        weight: As in `WeightedReward`.
        log_name: The name in logs, by default the reward's own name.
        on_error: As in `WeightedReward`.
        error_value: As in `WeightedReward`.
        completions_as: As in `WeightedReward`.
    """

    def __init__(
        self,
        name: str,
        init_args: dict[str, Any] | None = None,
        weight: float = 1.0,
        log_name: str | None = None,
        on_error: OnError = "raise",
        error_value: float | None = None,
        completions_as: CompletionsAs = "auto",
    ) -> None:
        """Raises: ValueError, ImportError or TypeError if the function `reward` raises one."""
        super().__init__(reward(name, **(init_args or {})), weight, log_name, on_error, error_value, completions_as)


def available() -> dict[str, str]:
    """The short names of all rewards, each with its package.

    Raises:
        ValueError: If two packages register the same name.
    """
    return {
        **dict.fromkeys(SHIPPED, "grpo-lightning"),
        **{name: _package(p) for name, p in _installed_entry_points().items()},
    }


def reward(name: str, /, **init_args: Any) -> RewardLike:
    """Get a reward by its short name.

    Raises:
        ValueError: If the name is unknown, if two packages register the name, or if arguments are given for a function.
        ImportError: If the entry point of the reward fails to load.
        TypeError: If the reward does not take the arguments.
    """
    announced = _installed_entry_points()
    if name in SHIPPED:
        found: Any = SHIPPED[name]
    elif name in announced:
        found = _load(announced[name])
    else:
        raise ValueError(_unknown(name, [*SHIPPED, *announced]))
    if isinstance(found, type):
        made: RewardLike = found(**init_args)
        return made
    if init_args:
        raise ValueError(f"The reward {name!r} is a function and takes no init_args, got {init_args!r}.")
    function: RewardLike = found
    return function


def _installed_entry_points() -> Mapping[str, EntryPoint]:
    """The entry points of all installed packages by name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in SHIPPED or point.name in found:
            first = "grpo-lightning" if point.name in SHIPPED else _package(found[point.name])
            raise ValueError(
                f"Two packages register the reward {point.name!r}: {first} and {_package(point)}. Uninstall one of "
                f"them, or rename its entry point in the group {GROUP!r}."
            )
        found[point.name] = point
    return found


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise ImportError(
            f"The reward {point.name!r} of the package {_package(point)} failed to load (entry point {point.value!r} "
            f"in the group {GROUP!r}): {type(error).__name__}: {error}"
        ) from error


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed package"


def _unknown(name: str, names: list[str]) -> str:
    close = nearest(name.rpartition(".")[2].lower(), names, n=2)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"Unknown reward {name!r}; available: {', '.join(names)}.{hint} Name your own rewards by their import path, "
        f"'my_module.my_reward', or by an entry point in the group {GROUP!r} of an installed package."
    )
