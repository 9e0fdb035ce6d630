"""Rewards for conversations: the sum of the environment's own rewards, and a reward for the use of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lightning.rewards.base import Content, Reward


class EnvironmentReward(Reward):
    """The sum of the rewards that the environment gave for the turns of a conversation (`environments.base.Step`).

    Args:
        default: The value for a conversation in which the environment gave no reward. Null makes the completion not
            scorable.
    """

    says_solved = True

    def __init__(self, default: float | None = 0.0) -> None:
        self.default = default

    def __call__(
        self, completions: Sequence[Content], environment_rewards: Sequence[float | None], **columns: Any
    ) -> list[float | None]:
        """Score conversations. Returns: [B] sums of the environment's rewards, `default` where there is none."""
        return [self.default if reward is None else reward for reward in environment_rewards]


class ToolUse(Reward):
    """1 if a tool ran in the conversation, else 0.

    The reward is 1 even if the tool raised an error, took too long or crashed. A call runs no tool in four cases:

    - The call is malformed.
    - The call names an unknown tool.
    - The call has wrong arguments.
    - The call exceeds the maximum number of calls per turn.

    Some environments log neither the metric `calls` nor the metric `used_tools`. For these environments, the reward is
    1 if the conversation has a message of the role "tool".
    """

    def __call__(
        self,
        completions: Sequence[Content],
        turns: Sequence[Any],
        environment_metrics: Sequence[Mapping[str, float]],
        **columns: Any,
    ) -> list[float]:
        """Score conversations. Returns: [B] 0 or 1."""
        return [float(_has_run(*each)) for each in zip(turns, environment_metrics, strict=True)]


RUN = ("ok", "exception", "timeout", "crash")
"""The outcomes of calls that ran (see `environments.tools.OUTCOMES`)."""


def _has_run(turns: Sequence[Any] | None, metrics: Mapping[str, float]) -> bool:
    if "calls" in metrics or "used_tools" in metrics:
        return any(metrics.get(f"calls/{outcome}", 0) > 0 for outcome in RUN)
    return any(turn.role == "tool" for turn in turns or ())
