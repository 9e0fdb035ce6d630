"""Rewards: what a completion is worth."""

from grpo_lightning.rewards.accuracy import Accuracy
from grpo_lightning.rewards.base import Reward, RewardLike, WeightedReward, completion_text
from grpo_lightning.rewards.by_method import ByMethod
from grpo_lightning.rewards.countdown import Countdown
from grpo_lightning.rewards.detection import DetectionMAP, OdLength, WeightedSum
from grpo_lightning.rewards.grounding import FormatRec, IoU
from grpo_lightning.rewards.judge import LLMJudge
from grpo_lightning.rewards.length import Cosine, Length, SoftOverlong
from grpo_lightning.rewards.methods import AllMatch, AnyAnswer, Counting, MultipleChoice, TextSimilarity, YesNo
from grpo_lightning.rewards.reasoning_gym import ReasoningGym
from grpo_lightning.rewards.registry import Plugin, available, reward
from grpo_lightning.rewards.repetition import BoxRepetition, Repetition
from grpo_lightning.rewards.reward_set import RewardSet, Scores
from grpo_lightning.rewards.text import ExactMatch, Format, ReactFormat

__all__ = [
    "Accuracy",
    "AllMatch",
    "AnyAnswer",
    "BoxRepetition",
    "ByMethod",
    "Cosine",
    "Countdown",
    "Counting",
    "DetectionMAP",
    "ExactMatch",
    "Format",
    "FormatRec",
    "IoU",
    "LLMJudge",
    "Length",
    "MultipleChoice",
    "OdLength",
    "Plugin",
    "ReactFormat",
    "ReasoningGym",
    "Repetition",
    "Reward",
    "RewardLike",
    "RewardSet",
    "Scores",
    "SoftOverlong",
    "TextSimilarity",
    "WeightedReward",
    "WeightedSum",
    "YesNo",
    "available",
    "completion_text",
    "reward",
]
