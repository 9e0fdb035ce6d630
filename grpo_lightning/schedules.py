"""Learning-rate schedules in the form a recipe names them.

    scheduler: {class_path: grpo_lightning.schedules.Cosine, init_args: {warmup_ratio: 0.1}}

The schedules are those of `transformers.get_scheduler`, as classes: jsonargparse cannot fill in the arguments of its
functions, and only the module knows the length of the run. Any torch scheduler class works as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Optimizer to a schedule, which is stepped after every optimizer step."""


class Schedule(LambdaLR):
    """A schedule of transformers: linear warm-up, then what the subclass names.

    Args:
        optimizer: Its learning rates are the highest of the run.
        warmup_ratio: Share of the run's optimizer steps to warm up for.
        warmup_steps: The same as a number of steps; give one of the two.

    Raises:
        ValueError: If both are given, or the ratio is not in [0, 1].
    """

    kind: ClassVar[str]
    """The schedule's name in `transformers.SchedulerType`."""

    def __init__(self, optimizer: Optimizer, warmup_ratio: float = 0.0, warmup_steps: int | None = None) -> None:
        if not 0 <= warmup_ratio <= 1:
            raise ValueError(
                f"warmup_ratio must be between 0 and 1, got {warmup_ratio}; warmup_steps takes a number of steps."
            )
        if warmup_steps is not None and warmup_ratio:
            raise ValueError(f"Give warmup_steps ({warmup_steps}) or warmup_ratio ({warmup_ratio}), not both.")
        self.warmup_ratio, self.warmup_steps = warmup_ratio, warmup_steps
        super().__init__(optimizer, lambda _: 1.0)

    def set_length(self, num_training_steps: float) -> None:
        """Fit the schedule to the length of the run, in optimizer steps; before the first of them.

        Raises:
            ValueError: If the run has no end.
        """
        from transformers import get_scheduler

        if math.isinf(num_training_steps) or num_training_steps < 0:
            raise ValueError(
                "The schedule needs to know how long the run is: set trainer.max_steps or trainer.max_epochs."
            )
        warmup = math.ceil(num_training_steps * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps
        num_steps = int(num_training_steps)
        # transformers gives the factor only bound to an optimizer; this one is thrown away.
        placeholder = torch.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
        factor = get_scheduler(self.kind, placeholder, warmup, num_steps, self.settings(num_steps)).lr_lambdas[0]
        self.lr_lambdas = [factor] * len(self.base_lrs)
        self._last_lr = [float(lr) * factor(self.last_epoch) for lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the place in the schedule; its shape and rates are those of this run."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]

    def settings(self, num_training_steps: int) -> dict[str, Any]:
        """The subclass's own arguments, as transformers names them."""
        return {}


class Constant(Schedule):
    """Linear warm-up, then the full learning rate."""

    kind = "constant_with_warmup"


class Linear(Schedule):
    """Linear warm-up, then linearly to 0."""

    kind = "linear"


class Cosine(Schedule):
    """Linear warm-up, then half a cosine down to `min_lr_ratio` times the learning rate."""

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

    def settings(self, num_training_steps: int) -> dict[str, Any]:
        """The lowest rate."""
        return {"min_lr_rate": self.min_lr_ratio}


class CosineWithRestarts(Schedule):
    """Linear warm-up, then `num_cycles` cosines from the full rate to 0."""

    kind = "cosine_with_restarts"

    def __init__(
        self, optimizer: Optimizer, warmup_ratio: float = 0.0, warmup_steps: int | None = None, num_cycles: int = 1
    ) -> None:
        self.num_cycles = num_cycles
        super().__init__(optimizer, warmup_ratio, warmup_steps)

    def settings(self, num_training_steps: int) -> dict[str, Any]:
        """The number of cosines."""
        return {"num_cycles": self.num_cycles}


class InverseSqrt(Schedule):
    """Linear warm-up, then with the inverse square root of the step."""

    kind = "inverse_sqrt"


class WarmupStableDecay(Schedule):
    """Linear warm-up, the full rate, then down to `min_lr_ratio` times it over the last `decay_ratio` of the run."""

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
        self.decay_ratio, self.min_lr_ratio = decay_ratio, min_lr_ratio
        super().__init__(optimizer, warmup_ratio, warmup_steps)

    def settings(self, num_training_steps: int) -> dict[str, Any]:
        """The decay's length and the lowest rate."""
        return {
            "num_decay_steps": math.ceil(num_training_steps * self.decay_ratio),
            "min_lr_ratio": self.min_lr_ratio,
        }
