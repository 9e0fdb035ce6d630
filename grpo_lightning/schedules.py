"""Learning-rate schedules that recipes can name.

    scheduler: {class_path: grpo_lightning.schedules.Cosine, init_args: {warmup_ratio: 0.1}}

These are the schedules of `transformers.get_scheduler`, as classes. Recipes cannot name transformers' own functions,
because only the training module knows the length of the run. Any class of `torch.optim.lr_scheduler` works as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

log = logging.getLogger(__name__)

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Builds a schedule for an optimizer. The schedule is stepped after every optimizer step."""


class Schedule(LambdaLR):
    """Base class of the schedules, with a linear warm-up that is followed by the shape of the subclass.

    Args:
        optimizer: Its learning rates become the peak rates.
        warmup_ratio: Length of the warm-up, as a fraction of the run's optimizer steps.
        warmup_steps: Length of the warm-up in optimizer steps; cannot be combined with `warmup_ratio`.

    Raises:
        ValueError: If both `warmup_ratio` and `warmup_steps` are given, or `warmup_ratio` is not in [0, 1].

    The training module calls `set_length` of the run's schedule. A `Schedule` cannot be a part of another schedule,
    such as `SequentialLR`. The training module does not call `set_length` of such a part, so the part raises
    ValueError.
    """

    kind: ClassVar[str]
    """Name in `transformers.SchedulerType`."""

    def __init__(self, optimizer: Optimizer, warmup_ratio: float = 0.0, warmup_steps: int | None = None) -> None:
        if not 0 <= warmup_ratio <= 1:
            raise ValueError(
                f"warmup_ratio must be between 0 and 1, got {warmup_ratio}; warmup_steps takes a number of steps."
            )
        if warmup_steps is not None and warmup_ratio:
            raise ValueError(f"Give warmup_steps ({warmup_steps}) or warmup_ratio ({warmup_ratio}), not both.")
        self.warmup_ratio, self.warmup_steps = warmup_ratio, warmup_steps
        super().__init__(optimizer, self.without_length)

    def without_length(self, step: int) -> float:
        """The factor 1, until `set_length` is called. Raises: ValueError after step 0."""
        if step:
            raise ValueError(
                f"The schedule {type(self).__name__} does not know the length of the run: the training module sets it "
                "only if the schedule is the run's only one, not a part of another one such as SequentialLR. Use one "
                "schedule of this package (with warmup_steps or warmup_ratio), or only schedules of torch."
            )
        return 1.0

    def set_length(self, num_training_steps: float) -> None:
        """Set the length of the run in optimizer steps. Call this method before the first optimizer step.

        Raises:
            ValueError: If the run has no end.
        """
        from transformers import get_scheduler

        if math.isinf(num_training_steps) or num_training_steps < 0:
            raise ValueError("The schedule needs the length of the run: set trainer.max_steps or trainer.max_epochs.")
        warmup = math.ceil(num_training_steps * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps
        num_steps = int(num_training_steps)
        if warmup > num_steps:
            log.warning(
                "The learning rate never reaches its peak: the warm-up takes %d steps, and the run has %d.",
                warmup,
                num_steps,
            )
        # `get_scheduler` needs an optimizer, so it gets a placeholder.
        placeholder = torch.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
        settings = self.settings(num_steps, warmup)
        factor = get_scheduler(self.kind, placeholder, warmup, num_steps, settings).lr_lambdas[0]
        self.lr_lambdas = [factor] * len(self.base_lrs)
        self._last_lr = [float(lr) * factor(self.last_epoch) for lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore only the position. Shape and rates come from this run's settings."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]

    def settings(self, num_training_steps: int, num_warmup_steps: int) -> dict[str, Any]:
        """Extra arguments that the subclass passes to `transformers.get_scheduler`."""
        return {}


class Constant(Schedule):
    """Linear warm-up, then the peak learning rate."""

    kind = "constant_with_warmup"


class Linear(Schedule):
    """Linear warm-up, then linear decay to 0."""

    kind = "linear"


class Cosine(Schedule):
    """Linear warm-up, then cosine decay to `min_lr_ratio` times the peak learning rate.

    Args:
        optimizer: Its learning rates become the peak rates.
        warmup_ratio: Length of the warm-up, as a fraction of the run's optimizer steps.
        warmup_steps: Length of the warm-up in optimizer steps; cannot be combined with `warmup_ratio`.
        min_lr_ratio: Learning rate at the end of the run, as a fraction of the peak learning rate.
    """

    kind = "cosine_with_min_lr"

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_ratio: float = 0.0,
        warmup_steps: int | None = None,
        min_lr_ratio: float = 0.0,
    ) -> None:
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer, warmup_ratio, warmup_steps)

    def settings(self, num_training_steps: int, num_warmup_steps: int) -> dict[str, Any]:
        """The minimum rate."""
        return {"min_lr_rate": self.min_lr_ratio}


class CosineWithRestarts(Schedule):
    """Linear warm-up, then `num_cycles` cosine decays, each from the peak learning rate to 0.

    Args:
        optimizer: Its learning rates become the peak rates.
        warmup_ratio: Length of the warm-up, as a fraction of the run's optimizer steps.
        warmup_steps: Length of the warm-up in optimizer steps; cannot be combined with `warmup_ratio`.
        num_cycles: Number of decays.
    """

    kind = "cosine_with_restarts"

    def __init__(
        self, optimizer: Optimizer, warmup_ratio: float = 0.0, warmup_steps: int | None = None, num_cycles: int = 1
    ) -> None:
        self.num_cycles = num_cycles
        super().__init__(optimizer, warmup_ratio, warmup_steps)

    def settings(self, num_training_steps: int, num_warmup_steps: int) -> dict[str, Any]:
        """The number of cycles."""
        return {"num_cycles": self.num_cycles}


class InverseSqrt(Schedule):
    """Linear warm-up, then decay with the inverse square root of the step."""

    kind = "inverse_sqrt"


class WarmupStableDecay(Schedule):
    """Linear warm-up, then the peak learning rate, then decay to `min_lr_ratio` times the peak learning rate.

    Args:
        optimizer: Its learning rates become the peak rates.
        warmup_ratio: Length of the warm-up, as a fraction of the run's optimizer steps.
        warmup_steps: Length of the warm-up in optimizer steps; cannot be combined with `warmup_ratio`.
        decay_ratio: Length of the decay, as a fraction of the run's optimizer steps. The decay ends with the run.
        min_lr_ratio: Learning rate at the end of the run, as a fraction of the peak learning rate.
    """

    kind = "warmup_stable_decay"

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_ratio: float = 0.0,
        warmup_steps: int | None = None,
        decay_ratio: float = 0.2,
        min_lr_ratio: float = 0.0,
    ) -> None:
        if not 0 < decay_ratio <= 1:
            raise ValueError(f"decay_ratio must be above 0 and at most 1, got {decay_ratio}.")
        if warmup_ratio + decay_ratio > 1:
            raise ValueError(
                f"warmup_ratio and decay_ratio must add up to at most 1, got {warmup_ratio} and {decay_ratio}: the "
                "decay would begin before the end of the warm-up."
            )
        self.decay_ratio, self.min_lr_ratio = decay_ratio, min_lr_ratio
        super().__init__(optimizer, warmup_ratio, warmup_steps)

    def settings(self, num_training_steps: int, num_warmup_steps: int) -> dict[str, Any]:
        """The arguments `min_lr_ratio` and `num_decay_steps`. The decay never begins before the end of the warm-up."""
        longest = max(0, num_training_steps - num_warmup_steps)
        return {
            "num_decay_steps": min(math.ceil(num_training_steps * self.decay_ratio), longest),
            "min_lr_ratio": self.min_lr_ratio,
        }
