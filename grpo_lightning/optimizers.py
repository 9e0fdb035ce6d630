"""Optimizers that recipes can name.

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
"""Callable that builds an optimizer for the given parameters."""


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
    """Wrap an optimizer class of bitsandbytes with `AdamW`'s defaults; bitsandbytes is imported on first use.

    Args:
        name: Class name in `bitsandbytes.optim`, also used here.
        summary: Docstring of the class.
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
                f"{name} needs bitsandbytes, which is not installed: pip install 'grpo-lightning[quantization]', or "
                "use AdamW."
            ) from error
        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        return optimizer

    make.__doc__ = f"{summary}\n\nRaises:\n    ModuleNotFoundError: If bitsandbytes is not installed."
    return class_from_function(make, Optimizer, name=name)


AdamW8bit = bitsandbytes_class(
    "AdamW8bit",
    "AdamW with block-wise quantized 8-bit states (arXiv:2110.02861): 2 bytes per parameter instead of 8.\n\n"
    "It runs on CUDA and CPUs. The weights keep their dtype.",
)
PagedAdamW8bit = bitsandbytes_class(
    "PagedAdamW8bit",
    "`AdamW8bit` with paged states, which move to CPU memory when the device runs out of memory.",
)
