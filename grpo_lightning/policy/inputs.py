"""What a forward call is given: positions counted over real tokens, and only the arguments a model knows."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def base_model(model: nn.Module) -> Any:
    """The model under a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def text_config(model: nn.Module) -> Any:
    """The config of the language model: of models with several parts, the decoder's."""
    return base_model(model).config.get_text_config(decoder=True)


def compute_device(policy: nn.Module) -> torch.device:
    """Where the policy computes: weights that are sharded may rest elsewhere (offloading)."""
    parameter = next(policy.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


def text_positions(mask: Tensor) -> Tensor:
    """[N, L] position of every token, counted over real tokens: left padding must not move a prompt.

    Completions continue at the real prompt length. With the padded length instead the gradient is off by 60 % and no
    loss curve shows it.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def accepts(model: nn.Module, argument: str) -> bool:
    """True if the model's forward names this argument (a **kwargs would swallow it silently)."""
    return argument in forward_arguments(type(base_model(model)))  # type: ignore[arg-type]


@functools.cache
def forward_arguments(model_class: type[nn.Module]) -> frozenset[str]:
    """The names in a model class's forward signature; cached, as every decoding step asks."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def known_arguments(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """The arguments among these that the model's forward names."""
    return {name: value for name, value in arguments.items() if accepts(model, name)}


def left_pad(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts to ([N, L] ids, [N, L] bool mask), padded in front."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (length - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(length) >= (length - lengths)[:, None]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
