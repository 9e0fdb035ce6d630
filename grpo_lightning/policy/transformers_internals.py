"""Helpers for transformers models and configs. Start here when upgrading transformers.

Forward arguments, token positions and config fields differ between model families, and between releases of
transformers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def base_model(model: nn.Module) -> Any:
    """The model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def text_config(model: nn.Module) -> Any:
    """The config of the language model."""
    return base_model(model).config.get_text_config(decoder=True)


def attention_kernel(model: nn.Module) -> str:
    """The name of the decoder's attention kernel, or "" if there is none."""
    return getattr(text_config(model), "_attn_implementation", None) or ""


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights to a dtype, except those that `from_pretrained` with this dtype keeps in float32."""
    kept = [pattern.replace("*", ".*") for pattern in base_model(model)._get_dtype_plan(dtype)]
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and not any(re.search(pattern, name) for pattern in kept):
            weight.data = weight.data.to(dtype)


def compute_device(policy: nn.Module) -> torch.device:
    """The device that the policy computes on. Sharded weights can be stored on another device (offloading)."""
    parameter = next(policy.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


ROTARY = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys, in transformers' modeling modules."""


def rotary_layers(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Pairs (layer, forward of its class) of the attention layers whose forward calls the function `ROTARY`."""
    forwards = [(module, type(module).forward) for module in model.modules()]
    return [(module, forward) for module, forward in forwards if rotary_function(forward) is not None]


def rotary_function(forward: Any) -> FunctionType | None:
    """Find the function `ROTARY` that a forward calls, also in a decorated forward; None if there is none."""
    inner = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType) or not isinstance(inner, FunctionType):
        return None
    function = inner.__globals__.get(ROTARY) if ROTARY in inner.__code__.co_names else None
    return function if isinstance(function, FunctionType) else None


def norms(model: nn.Module) -> list[nn.Module]:
    """The RMS norms of a model, except torch's own norms, which already run as one kernel."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm") and not type(module).__module__.startswith("torch.")
    ]


def text_positions(mask: Tensor) -> Tensor:
    """[N, L] position of every token. Padding is not counted, because left padding must not shift a prompt.

    The positions of a completion continue at the unpadded length of its prompt.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


class PlacedPrompts(NamedTuple):
    """Positions of prompt tokens, and of the first token after each prompt."""

    arguments: dict[str, Tensor]
    """Arguments of the model's forward for the prompts: `position_ids` and the token types."""

    first: Tensor
    """[N, 1] position of the first token after each prompt."""

    dimensions: int
    """3 for models whose image tokens have time, row and column positions, else 1."""

    def along(self, positions: Tensor) -> Tensor:
        """Expand text positions [B, q] to the model's dimensions: [B, q] or [3, B, q]."""
        return positions if self.dimensions == 1 else positions.expand(self.dimensions, *positions.shape)


def accepts(model: nn.Module, argument: str) -> bool:
    """True if the model's forward has a parameter with the name `argument`. `**kwargs` does not count."""
    return argument in forward_arguments(type(base_model(model)))  # type: ignore[arg-type]


@functools.cache
def forward_arguments(model_class: type[nn.Module]) -> frozenset[str]:
    """Argument names of a model class's forward."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def known_arguments(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Keep the arguments that are in the signature of the model's forward.

    If the signature has `past_key_values` but not `cache`, the argument `cache` is renamed to `past_key_values`.
    """
    if "cache" in arguments and (name := cache_argument(model)):
        arguments[name] = arguments.pop("cache")
    return {name: value for name, value in arguments.items() if accepts(model, name)}


def cache_argument(model: nn.Module) -> str | None:
    """Name of the KV cache among the arguments of the model's forward; None if it takes no cache.

    transformers 5.24 has renamed `past_key_values` to `cache`.
    """
    return next((name for name in ("cache", "past_key_values") if accepts(model, name)), None)


def left_pad(rows: list[list[int]], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Left-pad prompts to ([N, L] ids, [N, L] bool mask), where L is a multiple of `multiple`."""
    length = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.tensor([[pad_id] * (length - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(length) >= (length - lengths)[:, None]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def naming(key: str, name: str) -> Iterator[None]:
    """Context for loading what a setting specifies. Raises: FileNotFoundError; its message states the setting."""
    if not may_be_on_hub(name) and not Path(name).is_dir():
        raise FileNotFoundError(
            f"{key} {name!r}: there is no folder {Path(name).resolve()}. The current folder is {Path.cwd()}."
        )
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a folder without a tokenizer
        source = (
            f"the folder {Path(name).resolve()}" if Path(name).is_dir() else "no such folder, nor a model on the hub"
        )
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{key} {name!r} cannot be loaded ({source}): {reason} Check the name; without a network only folders and "
            "models in the hub's cache can be loaded."
        ) from error


def may_be_on_hub(name: Any) -> bool:
    """True for a name that can only be loaded from the hub or from the hub's cache."""
    # Hub names are `name` or `owner/name`: anything else can only be a folder.
    return (
        isinstance(name, str) and name.count("/") <= 1 and not (name.startswith((".", "/", "~")) or Path(name).is_dir())
    )


def num_positions(config: PretrainedConfig) -> int | None:
    """Maximum number of positions of the language model; None if it has no limit.

    With dynamic NTK rope, the maximum is the number of positions in pretraining times the rope factor.
    """
    text = config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    factors = [entry.get("factor", 1.0) for entry in rope_entries(text) if "dynamic" in rope_type(entry)]
    return positions and int(positions * max(factors, default=1.0))


def vocabulary_size(config: PretrainedConfig) -> int:
    """Vocabulary size of the language model; 0 if the config does not contain it."""
    return getattr(config.get_text_config(decoder=True), "vocab_size", None) or 0


def rope_entries(config: Any) -> list[dict[str, Any]]:
    """The rope settings of a text config, one entry or one per layer type."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    is_per_layer_type = bool(rope) and all(isinstance(entry, dict) for entry in rope.values())
    entries = list(rope.values()) if is_per_layer_type else [rope]
    return [entry for entry in entries if isinstance(entry, dict)]


def rope_type(entry: dict[str, Any]) -> str:
    """The rope type of an entry; "default" if it has none."""
    return str(entry.get("rope_type", entry.get("type", "default")))


def is_adapted(model: Any) -> bool:
    """True for a model with adapters."""
    return hasattr(model, "peft_config")


def is_copied(module: nn.Module) -> bool:
    """True for peft's wrapper of a layer and its trained copies (`modules_to_save`)."""
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")


def running_module(module: Any) -> Any:
    """The layer that runs when `module` is called.

    For a copied layer, this is the original or the copy.
    """
    if not is_copied(module):
        return module
    active = module.active_adapters[:1]
    is_off = module._disable_adapters or not active or active[0] not in module.modules_to_save
    return module.original_module if is_off else module.modules_to_save[active[0]]
