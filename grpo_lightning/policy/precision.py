"""Modules that compute in another dtype than that of their weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn


def compute_like(module: nn.Module, original: nn.Module) -> None:
    """Have a module compute as if its weights had the dtype of another module's weights.

    The result is that of the module after `module.to(dtype)`, bit for bit, but the weights keep their own dtype, and
    gradients reach them: small updates of float32 weights are not lost to rounding.

    Args:
        module: Changed in place, with its submodules: the `forward` of each module that has weights is replaced.
        original: A module with the same submodules.
    """
    for part, other in zip(module.modules(), original.modules(), strict=True):
        if any(weight.is_floating_point() for weight in part.parameters(recurse=False)):
            part.forward = functools.partial(forward_like, part, other)


def forward_like(module: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with its weights converted to the dtype of the original's weights."""
    dtype = next(weight.dtype for weight in original.parameters(recurse=False) if weight.is_floating_point())
    return forward_in(dtype, module, *args, **kwargs)


def forward_in(dtype: torch.dtype, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module's class with the module's own weights converted to a dtype."""
    converted: Any = copy.copy(module)
    converted._parameters = {
        name: weight.to(dtype) if weight is not None and weight.is_floating_point() else weight
        for name, weight in module._parameters.items()
    }
    return type(module).forward(converted, *args, **kwargs)
