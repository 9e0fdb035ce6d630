"""The model in one line: Lightning's table adds modes and FLOPs, which say nothing about a policy that samples."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count

log = logging.getLogger(__name__)


class ParameterSummary(ModelSummary):
    """Says the class and number of parameters of policy and reference, and how many are trained."""

    def _summary(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        """Lightning's counts without its warning about the megabytes of a precision, which are not shown."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
            return super()._summary(trainer, pl_module)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: Any,
    ) -> None:
        """Log the line."""
        columns = dict(summary_data)
        parts = zip(columns["Name"], columns["Type"], columns["Params"], strict=True)
        counts = [get_human_readable_count(count) for count in (trainable_parameters, total_parameters)]
        log.info(
            "Model: %s; %s of %s parameters are trained.",
            ", ".join(f"{name} {kind} ({' '.join(count.split())})" for name, kind, count in parts),
            *(" ".join(count.split()) for count in counts),
        )
