"""Optimizers in the form a recipe names them.

    optimizer: {class_path: grpo_lightning.optimizers.AdamW, init_args: {lr: 1.0e-6}}

Any other optimizer class works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from grpo_lightning.schedules import Schedule

if TYPE_CHECKING:
    import lightning as L

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
"""Parameters to an optimizer."""


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) with GRPO's defaults: a small learning rate and no weight decay."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class AdamW8bit(Optimizer):
    """AdamW with 8-bit states, each block of them with its own scale (arXiv:2110.02861): 2 bytes a weight instead of 8.

    The object is one of bitsandbytes' class of the same name, which runs on CUDA and CPUs. The weights keep their
    dtype.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        become_bitsandbytes(self, "AdamW8bit", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class PagedAdamW8bit(Optimizer):
    """The same with states that move to the CPU's memory by pages where the device's runs out.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        become_bitsandbytes(self, "PagedAdamW8bit", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def become_bitsandbytes(optimizer: Optimizer, name: str, params: Iterable[Parameter], **settings: Any) -> None:
    """Make the optimizer one of bitsandbytes: a class cannot derive from a package that is imported when it is used."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{name} needs bitsandbytes, which is not installed: pip install 'grpo-lightning[quantization]'. Or take "
            "AdamW."
        ) from error
    optimizer.__class__ = getattr(bitsandbytes.optim, name)
    optimizer.__init__(params, **settings)  # type: ignore[misc]


def restore_settings(trainer: L.Trainer, settings: Sequence[dict[str, Any]], schedule: Any) -> None:
    """Let the settings of this run's optimizer beat those that came with the optimizer's state from a checkpoint.

    A schedule other than ours has its rate in the checkpoint alone: there the rate stays.

    Args:
        trainer: Of a run that may be resumed.
        settings: This run's, of every parameter group.
        schedule: This run's, or None.
    """
    if trainer.ckpt_path is None:
        return
    kept = {"lr"} if schedule and not isinstance(schedule, Schedule) else set()
    for group, own in zip(trainer.optimizers[0].param_groups, settings, strict=False):
        group.update({name: value for name, value in own.items() if name not in kept})
