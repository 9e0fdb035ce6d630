"""Callbacks any recipe can use: what a run looks like while it goes on and when it is over."""

from grpo_lightning.callbacks.before_after import BeforeAfter
from grpo_lightning.callbacks.completions import CompletionLog
from grpo_lightning.callbacks.curves import LearningCurves
from grpo_lightning.callbacks.draw_boxes import DrawBoxes
from grpo_lightning.callbacks.export import ExportPolicy
from grpo_lightning.callbacks.newest_checkpoints import NewestCheckpoints
from grpo_lightning.callbacks.predictions import WritePredictions
from grpo_lightning.callbacks.progress import ProgressBar

__all__ = [
    "BeforeAfter",
    "CompletionLog",
    "DrawBoxes",
    "ExportPolicy",
    "LearningCurves",
    "NewestCheckpoints",
    "ProgressBar",
    "WritePredictions",
]
