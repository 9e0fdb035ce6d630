"""Optimizers that recipes can name.

    optimizer: {class_path: grpo_lightning.optimizers.AdamW, init_args: {lr: 1.0e-6}}

Any other `torch.optim.Optimizer` class works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
"""Callable that builds an optimizer for the given parameters."""


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019). By default, the learning rate is 1e-6, and the weight decay is 0.

    Args:
        params: Parameters to train.
        lr: Learning rate before the schedule changes it.
        betas: Two decay factors. The first is for the running mean of the gradient. The second is for the running mean
            of the squared gradient.
        eps: Number to add to the square root of the running mean of the squared gradient.
        weight_decay: Each step subtracts `lr * weight_decay * weight` from every weight. Here, `lr` is the current
            learning rate. Biases and norms are decayed too. The Trainer of transformers does not decay biases and
            norms.
    """

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
    """AdamW with 8-bit states, quantized block by block (arXiv:2110.02861).

    The states take 2 bytes per parameter instead of 8. The weights keep their dtype. The optimizer runs on CUDA devices
    and CPUs.
    """

    def __new__(
        cls,
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Any:
        """Construct the optimizer of bitsandbytes that has the same name as this class.

        Args:
            params: Parameters to train.
            lr: Learning rate before the schedule changes it.
            betas: Decay factors per step of the running means of the gradient and of its square.
            eps: Added to the square root of the running mean of the squared gradient.
            weight_decay: Each step subtracts `lr * weight_decay * weight` from every weight. Biases and norms are
                decayed too, unlike in the Trainer of transformers.

        Raises:
            ModuleNotFoundError: If bitsandbytes is not installed.
        """
        return bitsandbytes_optimizer(cls.__name__)(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class PagedAdamW8bit(Optimizer):
    """`AdamW8bit` with states that are paged to CPU memory if the device runs out of memory."""

    # Defined again, because jsonargparse does not find the arguments of an inherited `__new__`.
    def __new__(
        cls,
        params: Iterable[Parameter],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Any:
        """Construct the optimizer of bitsandbytes that has the same name as this class.

        Args:
            params: Parameters to train.
            lr: Learning rate before the schedule changes it.
            betas: Decay factors per step of the running means of the gradient and of its square.
            eps: Added to the square root of the running mean of the squared gradient.
            weight_decay: Each step subtracts `lr * weight_decay * weight` from every weight. Biases and norms are
                decayed too, unlike in the Trainer of transformers.

        Raises:
            ModuleNotFoundError: If bitsandbytes is not installed.
        """
        return bitsandbytes_optimizer(cls.__name__)(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def bitsandbytes_optimizer(name: str) -> Any:
    """Import the bitsandbytes optimizer of this name.

    The import is inside the function, so that recipes can also be read where bitsandbytes is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{name} needs bitsandbytes, which is not installed: pip install 'grpo-lightning[quantization]'. Or use "
            "AdamW."
        ) from error
    return getattr(bitsandbytes.optim, name)
