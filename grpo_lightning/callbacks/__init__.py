"""Callbacks for recipes: progress, logs, pictures, checkpoints and exports of a run."""

from grpo_lightning.callbacks.before_after import BeforeAfter
from grpo_lightning.callbacks.completion_log import CompletionLog
from grpo_lightning.callbacks.draw_boxes import DrawBoxes
from grpo_lightning.callbacks.export_policy import ExportPolicy
from grpo_lightning.callbacks.learning_curves import LearningCurves
from grpo_lightning.callbacks.newest_checkpoints import NewestCheckpoints
from grpo_lightning.callbacks.progress import ProgressBar
from grpo_lightning.callbacks.run_record import RunRecord
from grpo_lightning.callbacks.run_report import RunReport
from grpo_lightning.callbacks.run_summary import RunSummary
from grpo_lightning.callbacks.watchdog import Watchdog
from grpo_lightning.callbacks.write_predictions import WritePredictions

__all__ = [
    "BeforeAfter",
    "CompletionLog",
    "DrawBoxes",
    "ExportPolicy",
    "LearningCurves",
    "NewestCheckpoints",
    "ProgressBar",
    "RunRecord",
    "RunReport",
    "RunSummary",
    "Watchdog",
    "WritePredictions",
]
