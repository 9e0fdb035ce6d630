"""Rewards: what a completion is worth.

The names load on first use: a process that runs a reward loads what that reward needs, and not torch for one of text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lightning.rewards.accuracy import Accuracy
    from grpo_lightning.rewards.base import Reward, RewardLike, WeightedReward, completion_text
    from grpo_lightning.rewards.boxes.detection import DetectionMAP, OdLength, WeightedSum
    from grpo_lightning.rewards.boxes.iou import FormatRec, IoU
    from grpo_lightning.rewards.by_method import ByMethod
    from grpo_lightning.rewards.countdown import Countdown
    from grpo_lightning.rewards.length import Cosine, Length, SoftOverlong
    from grpo_lightning.rewards.llm_judge import LLMJudge
    from grpo_lightning.rewards.methods import AllMatch, AnyAnswer, Counting, MultipleChoice, TextSimilarity, YesNo
    from grpo_lightning.rewards.reasoning_gym import ReasoningGym
    from grpo_lightning.rewards.registry import Plugin, available, reward
    from grpo_lightning.rewards.repetition import BoxRepetition, Repetition
    from grpo_lightning.rewards.reward_model import RewardModel
    from grpo_lightning.rewards.reward_set import RewardSet
    from grpo_lightning.rewards.scoring import Scores
    from grpo_lightning.rewards.text import ExactMatch, Format, ReactFormat
    from grpo_lightning.rewards.workers import RewardWorkers

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
    "RewardModel",
    "RewardSet",
    "RewardWorkers",
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

_HOMES = {
    "Accuracy": "accuracy",
    "AllMatch": "methods",
    "AnyAnswer": "methods",
    "BoxRepetition": "repetition",
    "ByMethod": "by_method",
    "Cosine": "length",
    "Countdown": "countdown",
    "Counting": "methods",
    "DetectionMAP": "boxes.detection",
    "ExactMatch": "text",
    "Format": "text",
    "FormatRec": "boxes.iou",
    "IoU": "boxes.iou",
    "LLMJudge": "llm_judge",
    "Length": "length",
    "MultipleChoice": "methods",
    "OdLength": "boxes.detection",
    "Plugin": "registry",
    "ReactFormat": "text",
    "ReasoningGym": "reasoning_gym",
    "Repetition": "repetition",
    "Reward": "base",
    "RewardLike": "base",
    "RewardModel": "reward_model",
    "RewardSet": "reward_set",
    "RewardWorkers": "workers",
    "Scores": "scoring",
    "SoftOverlong": "length",
    "TextSimilarity": "methods",
    "WeightedReward": "base",
    "WeightedSum": "boxes.detection",
    "YesNo": "methods",
    "available": "registry",
    "completion_text": "base",
    "reward": "registry",
}


def __getattr__(name: str) -> Any:
    """Load a name where it is defined (PEP 562). Raises: AttributeError if there is none of that name."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'grpo_lightning.rewards' has no attribute {name!r}; there are: {', '.join(__all__)}."
        )
    value = getattr(import_module(f"grpo_lightning.rewards.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    """Names to complete, those not loaded yet included."""
    return sorted({*globals(), *__all__})
