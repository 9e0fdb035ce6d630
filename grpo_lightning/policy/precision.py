"""Modules that compute in a dtype other than that of their weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.transformers_internals import base_model

NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of 16-bit dtypes: the largest update, as a fraction of the weight, that can be lost to rounding."""


def compute_like(module: nn.Module, original: nn.Module) -> None:
    """Change a module so that it computes in the dtype of another module's weights.

    The module's own weights keep their dtype, and the gradients are computed for these weights. Small updates of
    float32 weights are therefore not lost to rounding.
    """
    for part, other in zip(module.modules(), original.modules(), strict=True):
        if any(weight.is_floating_point() for weight in part.parameters(recurse=False)):
            part.forward = functools.partial(forward_like, part, other)


def forward_like(module: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of `module` with converted weights.

    For this call, the weights of `module` are converted to the dtype of another module's weights. The other module is
    `original`.
    """
    dtype = next(weight.dtype for weight in original.parameters(recurse=False) if weight.is_floating_point())
    return forward_in(dtype, module, *args, **kwargs)


def use_float32_head(model: nn.Module) -> None:
    """Change the output head so that it computes the logits in float32, without autocast.

    The weights stay in 16 bits, because they may be tied or sharded. Each call makes a temporary float32 copy.
    According to MiniMax-M1 (arXiv:2506.13585, section 3.2), a 16-bit head is the main reason why log-probs differ
    between sampling and training.

    Raises:
        ValueError: If the model does not declare its head, or the head is quantized.
    """
    head = base_model(model).get_output_embeddings()
    if head is None:
        raise ValueError(
            f"policy.head_dtype is 'float32', but {type(base_model(model)).__name__} does not declare its output head "
            "(get_output_embeddings). Set it to 'auto'."
        )
    if any(not weight.is_floating_point() for weight in head.parameters()):
        raise ValueError("policy.head_dtype is 'float32', but the head's weights are quantized. Set it to 'auto'.")
    for part in head.modules():
        if next(part.parameters(recurse=False), None) is not None:
            part.forward = functools.partial(forward_in_float32, part)


def restore_head(model: nn.Module) -> None:
    """Undo `use_float32_head`, for a model in memory that an earlier run used."""
    head = base_model(model).get_output_embeddings()
    for part in () if head is None else head.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, functools.partial) and forward.func is forward_in_float32:
            del part.forward


def forward_in_float32(module: nn.Module, hidden: Tensor, **kwargs: Any) -> Tensor:
    """Run a layer's forward in float32, from [..., H] to [..., V]."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits: Tensor = forward_in(torch.float32, module, hidden.to(torch.float32), **kwargs)
    return logits


def linear_copies(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy the float32 weights of linear layers, and convert the copies to `dtype`.

    The keys of the result are the names of the weights. A layer whose `forward` was replaced gets no copy. In a model
    with DoRA, no layer gets a copy, because DoRA computes norms of the float32 weights.
    """
    if any("lora_magnitude_vector" in name for name, _ in model.named_parameters()):
        return {}
    return {
        f"{name}.{kind}": weight.detach().to(dtype)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "forward" not in vars(module)
        for kind, weight in module.named_parameters(recurse=False)
        if weight.dtype == torch.float32
    }


def forward_in(dtype: torch.dtype, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module's class with the module's own weights converted to a dtype."""
    converted: Any = copy.copy(module)
    converted._parameters = {
        name: weight.to(dtype) if weight is not None and weight.is_floating_point() else weight
        for name, weight in module._parameters.items()
    }
    return type(module).forward(converted, *args, **kwargs)
