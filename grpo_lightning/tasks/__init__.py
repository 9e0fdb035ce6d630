"""Tasks of other packages: their questions as rows of data, their verifiers for the rewards."""

from grpo_lightning.tasks.prepare import ReasoningGymTasks

__all__ = ["ReasoningGymTasks"]
