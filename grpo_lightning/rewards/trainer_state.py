"""How far a run is, as rewards are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainerState:
    """Numbers of the Trainer, under its names; a value of its own, which also reaches rewards in other processes."""

    global_step: int
    """Optimizer steps done."""

    max_steps: int
    """-1 without a limit."""

    current_epoch: int
    max_epochs: int | None
    global_rank: int
    world_size: int

    @property
    def epoch(self) -> float:
        """As the Trainer of transformers calls `current_epoch`."""
        return float(self.current_epoch)

    @property
    def num_train_epochs(self) -> int | None:
        """As the Trainer of transformers calls `max_epochs`."""
        return self.max_epochs

    @property
    def is_world_process_zero(self) -> bool:
        """As the Trainer of transformers calls a `global_rank` of 0."""
        return self.global_rank == 0

    @classmethod
    def of(cls, trainer: Any) -> TrainerState:
        """That of a Lightning Trainer."""
        return cls(
            trainer.global_step,
            trainer.max_steps,
            trainer.current_epoch,
            trainer.max_epochs,
            trainer.global_rank,
            trainer.world_size,
        )
