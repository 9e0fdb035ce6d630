"""Optimizers in the form a recipe names them.

    optimizer: {class_path: grpo_lightning.optimizers.AdamW, init_args: {lr: 1.0e-6}}

Any other optimizer class works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jsonargparse import class_from_function  # type: ignore[attr-defined]
from torch.nn import Parameter
from torch.optim import Optimizer

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


def bitsandbytes_class(name: str, summary: str) -> Any:
    """A class whose objects are bitsandbytes' of this name, with `AdamW`'s defaults; the package is imported then.

    Args:
        name: Of the class, there and here.
        summary: Its docstring.
    """

    def make(
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        try:
            import bitsandbytes
        except ImportError as error:
            raise ModuleNotFoundError(
                f"{name} needs bitsandbytes, which is not installed: pip install 'grpo-lightning[quantization]'. Or "
                "take AdamW."
            ) from error
        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        return optimizer

    make.__doc__ = f"{summary}\n\nRaises:\n    ModuleNotFoundError: If bitsandbytes is not installed."
    return class_from_function(make, Optimizer, name=name)


AdamW8bit = bitsandbytes_class(
    "AdamW8bit",
    "AdamW with 8-bit states, each block with its own scale (arXiv:2110.02861): 2 bytes a weight instead of 8.\n\n"
    "It runs on CUDA and CPUs. The weights keep their dtype.",
)
PagedAdamW8bit = bitsandbytes_class(
    "PagedAdamW8bit",
    "`AdamW8bit` with states that move to the CPU's memory by pages where the device's runs out.",
)
