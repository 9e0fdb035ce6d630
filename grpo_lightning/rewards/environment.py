"""The environment's own reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.base import Content, Reward


class EnvironmentReward(Reward):
    """The sum of the rewards that the environment gave for the turns of a conversation (`environments.base.Step`).

    Args:
        default: The value for a conversation in which the environment gave no reward; null makes it not scorable.
    """

    says_solved = True

    def __init__(self, default: float | None = 0.0) -> None:
        self.default = default

    def __call__(
        self, completions: Sequence[Content], environment_rewards: Sequence[float | None], **columns: Any
    ) -> list[float | None]:
        """Read the rewards. Args: completions, environment_rewards: [B]. Returns: [B]."""
        return [self.default if reward is None else reward for reward in environment_rewards]


class ToolUse(Reward):
    """1 if a tool answered in the conversation, else 0. With weight 0, the fraction is only logged."""

    def __call__(self, completions: Sequence[Content], turns: Sequence[Any], **columns: Any) -> list[float]:
        """Look at the turns. Args: completions, turns: [B]. Returns: [B]."""
        return [float(any(turn.role == "tool" for turn in each or ())) for each in turns]
