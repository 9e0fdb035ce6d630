"""Rewards: functions and classes that score completions.

Names are imported on first use, so that a worker process that runs a text reward does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; the names are those of `_HOMES`
    from grpo_lightning.rewards.accuracy import Accuracy as Accuracy
    from grpo_lightning.rewards.base import Reward as Reward
    from grpo_lightning.rewards.base import RewardLike as RewardLike
    from grpo_lightning.rewards.base import WeightedReward as WeightedReward
    from grpo_lightning.rewards.base import completion_text as completion_text
    from grpo_lightning.rewards.boxes.rewards import BoxRepetition as BoxRepetition
    from grpo_lightning.rewards.boxes.rewards import DetectionMAP as DetectionMAP
    from grpo_lightning.rewards.boxes.rewards import FormatRec as FormatRec
    from grpo_lightning.rewards.boxes.rewards import IoU as IoU
    from grpo_lightning.rewards.boxes.rewards import OdLength as OdLength
    from grpo_lightning.rewards.boxes.rewards import WeightedSum as WeightedSum
    from grpo_lightning.rewards.code_tests import CodeTests as CodeTests
    from grpo_lightning.rewards.countdown import Countdown as Countdown
    from grpo_lightning.rewards.environment import EnvironmentReward as EnvironmentReward
    from grpo_lightning.rewards.environment import ToolUse as ToolUse
    from grpo_lightning.rewards.length import Cosine as Cosine
    from grpo_lightning.rewards.length import Length as Length
    from grpo_lightning.rewards.length import SoftOverlong as SoftOverlong
    from grpo_lightning.rewards.llm_judge import LLMJudge as LLMJudge
    from grpo_lightning.rewards.question_types import AllMatch as AllMatch
    from grpo_lightning.rewards.question_types import AnyAnswer as AnyAnswer
    from grpo_lightning.rewards.question_types import ByMethod as ByMethod
    from grpo_lightning.rewards.question_types import Counting as Counting
    from grpo_lightning.rewards.question_types import MultipleChoice as MultipleChoice
    from grpo_lightning.rewards.question_types import TextSimilarity as TextSimilarity
    from grpo_lightning.rewards.question_types import YesNo as YesNo
    from grpo_lightning.rewards.reasoning_gym import ReasoningGym as ReasoningGym
    from grpo_lightning.rewards.registry import Plugin as Plugin
    from grpo_lightning.rewards.registry import available as available
    from grpo_lightning.rewards.registry import reward as reward
    from grpo_lightning.rewards.reward_model import RewardModel as RewardModel
    from grpo_lightning.rewards.reward_set import RewardSet as RewardSet
    from grpo_lightning.rewards.scoring import Scores as Scores
    from grpo_lightning.rewards.text import ExactMatch as ExactMatch
    from grpo_lightning.rewards.text import Format as Format
    from grpo_lightning.rewards.text import ReactFormat as ReactFormat
    from grpo_lightning.rewards.text import Repetition as Repetition
    from grpo_lightning.rewards.workers import RewardWorkers as RewardWorkers

_HOMES = {
    name: module
    for module, names in {
        "accuracy": "Accuracy",
        "base": "Reward RewardLike WeightedReward completion_text",
        "boxes.rewards": "BoxRepetition DetectionMAP FormatRec IoU OdLength WeightedSum",
        "code_tests": "CodeTests",
        "countdown": "Countdown",
        "environment": "EnvironmentReward ToolUse",
        "length": "Cosine Length SoftOverlong",
        "llm_judge": "LLMJudge",
        "question_types": "AllMatch AnyAnswer ByMethod Counting MultipleChoice TextSimilarity YesNo",
        "reasoning_gym": "ReasoningGym",
        "registry": "Plugin available reward",
        "reward_model": "RewardModel",
        "reward_set": "RewardSet",
        "scoring": "Scores",
        "text": "ExactMatch Format ReactFormat Repetition",
        "workers": "RewardWorkers",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562). Raises: AttributeError if the name does not exist."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'grpo_lightning.rewards' has no attribute {name!r}; available: {', '.join(__all__)}."
        )
    value = getattr(import_module(f"grpo_lightning.rewards.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    """List the names for tab completion, including those not imported yet."""
    return sorted({*globals(), *__all__})
