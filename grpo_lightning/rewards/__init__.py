"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.accuracy import Accuracy
from grpo_lightning.rewards.base import Reward, RewardLike, WeightedReward, completion_text
from grpo_lightning.rewards.by_method import ByMethod
from grpo_lightning.rewards.length import Cosine, Length, SoftOverlong
from grpo_lightning.rewards.methods import AllMatch, AnyAnswer, MultipleChoice, YesNo
from grpo_lightning.rewards.registry import Plugin, available, reward
from grpo_lightning.rewards.repetition import Repetition
from grpo_lightning.rewards.reward_set import RewardSet, Scores
from grpo_lightning.rewards.text import ExactMatch, Format, ReactFormat

__all__ = [
    "Accuracy",
    "AllMatch",
    "AnyAnswer",
    "ByMethod",
    "Cosine",
    "ExactMatch",
    "Format",
    "Length",
    "MultipleChoice",
    "Plugin",
    "ReactFormat",
    "Repetition",
    "Reward",
    "RewardLike",
    "RewardSet",
    "Scores",
    "SoftOverlong",
    "WeightedReward",
    "YesNo",
    "available",
    "completion_text",
    "reward",
]
