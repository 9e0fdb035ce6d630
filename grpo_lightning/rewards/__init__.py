"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.base import Reward, RewardLike, WeightedReward, completion_text
from grpo_lightning.rewards.reward_set import RewardSet, Scores
from grpo_lightning.rewards.text import ExactMatch, Format, Length

__all__ = [
    "ExactMatch",
    "Format",
    "Length",
    "Reward",
    "RewardLike",
    "RewardSet",
    "Scores",
    "WeightedReward",
    "completion_text",
]
