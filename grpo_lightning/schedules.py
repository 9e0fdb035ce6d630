"""Optimizers and learning-rate schedules in the form a recipe names them.

    optimizer: {class_path: grpo_lightning.schedules.adamw, init_args: {lr: 1.0e-6}}
    scheduler: {class_path: grpo_lightning.schedules.cosine, init_args: {warmup_ratio: 0.1}}

The schedules are those of transformers, with return types (without which jsonargparse refuses them) and with the run's
length filled in. Any other optimizer class, and any torch scheduler class, works as well.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
"""Parameters to an optimizer."""

SchedulerFactory = Callable[..., LRScheduler]
"""(optimizer), or (optimizer, num_training_steps), to a scheduler that is stepped after every optimizer step."""


def adamw(
    params: Iterable[Parameter],
    lr: float = 1e-6,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019) with GRPO's defaults: a small learning rate and no weight decay."""
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def constant(
    optimizer: Optimizer, num_training_steps: int, warmup_ratio: float = 0.0, warmup_steps: int | None = None
) -> LambdaLR:
    """Linear warm-up, then the full learning rate."""
    from transformers import get_constant_schedule_with_warmup

    return get_constant_schedule_with_warmup(optimizer, warmup(num_training_steps, warmup_ratio, warmup_steps))


def linear(
    optimizer: Optimizer, num_training_steps: int, warmup_ratio: float = 0.0, warmup_steps: int | None = None
) -> LambdaLR:
    """Linear warm-up, then linearly to 0."""
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(
        optimizer, warmup(num_training_steps, warmup_ratio, warmup_steps), num_training_steps
    )


def cosine(
    optimizer: Optimizer,
    num_training_steps: int,
    warmup_ratio: float = 0.0,
    warmup_steps: int | None = None,
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """Linear warm-up, then half a cosine down to `min_lr_ratio` times the learning rate."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer,
        warmup(num_training_steps, warmup_ratio, warmup_steps),
        num_training_steps,
        min_lr_rate=min_lr_ratio,
    )


def warmup(num_training_steps: int, warmup_ratio: float, warmup_steps: int | None) -> int:
    """Warm-up steps: as given, or a share of the run, rounded up.

    Raises:
        ValueError: If both are given, or the ratio is not in [0, 1].
    """
    if not 0 <= warmup_ratio <= 1:
        raise ValueError(f"warmup_ratio must be between 0 and 1, got {warmup_ratio}. Use warmup_steps for a number of steps.")
    if warmup_steps is not None and warmup_ratio:
        raise ValueError(f"Give warmup_steps ({warmup_steps}) or warmup_ratio ({warmup_ratio}), not both.")
    return math.ceil(num_training_steps * warmup_ratio) if warmup_steps is None else warmup_steps


def build_scheduler(factory: SchedulerFactory, optimizer: Optimizer, num_training_steps: float) -> LRScheduler:
    """Call a factory with the run's length if it asks for it.

    Raises:
        ValueError: If it asks for it and the run has no end.
    """
    if "num_training_steps" not in callable_parameters(factory):
        return factory(optimizer)
    if math.isinf(num_training_steps):
        raise ValueError("This schedule needs to know how long the run is: set trainer.max_steps or trainer.max_epochs.")
    return factory(optimizer, num_training_steps=int(num_training_steps))


def callable_parameters(factory: Callable[..., Any]) -> set[str]:
    """The parameter names of a factory; of what it wraps, if it is a partial."""
    return set(inspect.signature(factory).parameters)
