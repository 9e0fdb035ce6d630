"""Use one set of length-dependent rotary frequencies (longrope, dynamic NTK) for the whole run.

transformers recomputes these frequencies in every forward pass, from the largest position in the batch. If one row
exceeds the model's original context length, the log-probs of all rows in the batch change.

Therefore this module makes every forward pass use the frequencies of the longest possible row of the run.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.transformers_internals import base_model, rope_entries, rope_type, text_config

log = logging.getLogger(__name__)


def is_length_dependent(kind: str) -> bool:
    """True if transformers recomputes frequencies of this rope type from the length of the batch."""
    return "dynamic" in kind or kind == "longrope"


def original_length(config: Any) -> int | None:
    """Row length above which the frequencies depend on the length; None if they never depend on it."""
    lengths = [
        entry.get("original_max_position_embeddings", config.max_position_embeddings)
        if rope_type(entry) == "longrope"
        else config.max_position_embeddings
        for entry in rope_entries(config)
        if is_length_dependent(rope_type(entry))
    ]
    return min(lengths, default=None)


def fix_frequencies(model: nn.Module, longest: int) -> None:
    """Change a model so that every forward pass uses the same rotary frequencies.

    The frequencies are those of the longest row. `longest` is the number of tokens in this row. If the model's
    frequencies never depend on the row length, the model is not changed.

    Raises:
        ValueError: If rows may exceed the original length, and the model's code does not follow transformers'
            conventions.
    """
    config = text_config(model)
    original = original_length(config)
    if original is None:
        return
    kinds = ", ".join(sorted({rope_type(entry) for entry in rope_entries(config)} - {"default"}))
    modules = [module for module in model.modules() if any(map(is_length_dependent, module_types(module)))]
    if not modules and longest > original:
        raise ValueError(
            f"{type(base_model(model)).__name__} has {kinds} rope, which changes at {original} tokens, and rows of "
            f"this run may have {longest}: its remote code cannot use one fixed set of frequencies. Use "
            "transformers' implementation (policy.trust_remote_code: false), or keep prompt and completion within "
            f"{original} tokens (data.max_prompt_length, sampling.max_completion_length)."
        )
    for module in modules:
        if not hasattr(module, "fixed_length"):
            module.register_forward_pre_hook(append_last_position, with_kwargs=True)
            module.register_forward_hook(drop_last_position)
        module.fixed_length = longest  # type: ignore[assignment]
        is_same_beyond = longest > original and all(kind in ("default", "longrope") for kind in module_types(module))
        module.largest_length = math.inf if is_same_beyond else max(longest, original)  # type: ignore[assignment]
    if longest <= original:
        log.info("Rotary frequencies (%s): fixed to those of rows up to %d tokens.", kinds, original)
    else:
        log.warning(
            "Rotary frequencies (%s): fixed to those of rows of %d tokens, the longest of this run (longest prompt + "
            "max_completion_length), for rows of every length. Other software may use the short frequencies for rows "
            "up to %d tokens: if no row needs to be longer, lower data.max_prompt_length or "
            "sampling.max_completion_length.",
            kinds,
            longest,
            original,
        )


def fixed_length(model: nn.Module) -> int | None:
    """The row length that a model's frequencies are fixed to; None if they do not depend on the length."""
    return next((module.fixed_length for module in model.modules() if hasattr(module, "fixed_length")), None)  # type: ignore[return-value]


def module_types(module: nn.Module) -> list[str]:
    """The rope types of a transformers rotary embedding; an empty list for any other module."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):  # one per layer type
        return list(kinds.values())
    return [kinds] if isinstance(kinds, str) else []


def append_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Append one position to the position ids (forward pre-hook).

    The appended position is that of the last token in a row of `module.fixed_length` tokens.

    Raises:
        ValueError: If a row is so long that transformers would compute other frequencies.
    """
    positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if module.largest_length < math.inf and (length := int(positions.max()) + 1) > module.largest_length:
        raise ValueError(
            f"A row of {length} tokens would change the policy's rotary frequencies, which are fixed for rows up to "
            f"{module.largest_length} tokens for the whole run. Set data.max_prompt_length, so that the longest row is "
            "known from the start."
        )
    positions = torch.cat([positions, torch.full_like(positions[..., :1], module.fixed_length - 1)], -1)
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def drop_last_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Drop the embeddings of the appended position (forward hook)."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
