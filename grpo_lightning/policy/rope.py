"""Rotary frequencies that depend on the longest row of a batch (longrope, dynamic NTK), fixed for the whole run.

transformers recomputes these frequencies in every forward pass from the largest position in it. One row that crosses
the original length then changes the log-probs of all rows next to it, and of its own tokens that are cached already:
sampled, batched and single log-probs would differ by nats. Here every pass gets the frequencies of the longest row that
the run can have, as a batch that holds such a row would: sampling, scoring and the reference agree, alone or batched.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.hf import base_model, rope_entries, rope_type, text_config

log = logging.getLogger(__name__)


def is_length_dependent(kind: str) -> bool:
    """True if transformers recomputes frequencies of this kind from the length of the batch."""
    return "dynamic" in kind or kind == "longrope"


def original_length(config: Any) -> int | None:
    """The row length beyond which a text config's frequencies depend on the length; None if they never do."""
    lengths = [
        entry.get("original_max_position_embeddings", config.max_position_embeddings)
        if rope_type(entry) == "longrope"
        else config.max_position_embeddings
        for entry in rope_entries(config)
        if is_length_dependent(rope_type(entry))
    ]
    return min(lengths, default=None)


def fix_frequencies(model: nn.Module, longest: int) -> None:
    """Give every forward pass of a model the frequencies of a row of `longest` tokens, whatever it is given.

    Args:
        model: Changed in place; one with frequencies that do not depend on the length stays as it is.
        longest: Tokens of the longest row of the run, completion included.

    Raises:
        ValueError: If rows cross the original length, and the model's code does not follow transformers' conventions.
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
            f"this run may have {longest}: its own code cannot be told to keep one set of frequencies. Use "
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
        log.info("Rotary frequencies (%s): those of rows up to %d tokens, for the whole run.", kinds, original)
    else:
        log.warning(
            "Rotary frequencies (%s): those of rows of %d tokens, the longest of this run (longest prompt + "
            "max_completion_length), for rows of every length. Elsewhere, rows up to %d tokens may get the short ones: "
            "if no row needs to be longer, lower data.max_prompt_length or sampling.max_completion_length.",
            kinds,
            longest,
            original,
        )


def fixed_length(model: nn.Module) -> int | None:
    """The row length that a model's frequencies were fixed for; None if they do not depend on it."""
    return next((module.fixed_length for module in model.modules() if hasattr(module, "fixed_length")), None)  # type: ignore[return-value]


def module_types(module: nn.Module) -> list[str]:
    """The rope types of a rotary embedding of transformers; none of other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):  # one per layer type
        return list(kinds.values())
    return [kinds] if isinstance(kinds, str) else []


def append_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Forward pre-hook: the positions with that of the longest row's last token behind them.

    Raises:
        ValueError: If a row is longer than that, and would change the frequencies.
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
    """Forward hook: the embeddings without those of the appended position."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
