"""What the memory of a run depends on, beside the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.image_parts import Images
from grpo_lightning.cli.plan.reward_parts import RewardModelSize
from grpo_lightning.cli.plan.states import Division
from grpo_lightning.cli.plan.trained_weights import TrainedWeights

Offloaded = Literal["reference", "optimizer"]


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a run depends on, beside the model."""

    batch: ScoredBatch
    """The largest micro-batch, at its longest."""

    sampling_rows: int
    """Completions decoded at the same time; 0 if the policy does not sample itself."""

    sampling_prompts: int
    precision: Precision
    optimizer_bytes: float
    """Of optimizer state per trained weight."""

    division: Division = field(default_factory=Division)
    trained: TrainedWeights | None = None
    """None: every weight, in its own width."""

    checkpointing: Literal["none", "layers", "chunks"] = "none"
    is_eager: bool = False
    has_reference: bool = True
    accumulates: bool = False
    """True with several micro-batches per step: gradients of the first are there while the next ones run."""

    gathers_for_sampling: bool = False
    """True if sharded weights are whole on every device while completions are drawn."""

    offloaded: frozenset[Offloaded] = frozenset()
    """What is on the CPU while completions are drawn."""

    images: Images | None = None
    """Of the prompts; None where there are none."""

    reward_models: tuple[RewardModelSize, ...] = ()
    """Among the rewards."""

    @property
    def holds_gradients(self) -> bool:
        """True if gradients are there while activations are: those of the micro-batch or the chunk before."""
        return self.accumulates or (self.checkpointing == "chunks" and len(self.batch.chunks) > 1)

    @property
    def widths(self) -> Precision:
        """The precision as the strategy runs it: DeepSpeed converts the model and keeps masters in the optimizer."""
        width = self.precision.compute
        return Precision(width, width) if self.division.has_masters else self.precision
