"""What a run computes in, and whether the trained weights are wide enough to move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from grpo_lightning.policy.settings import PolicySettings

NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance of neighbours, as a share of the weight: a smaller step is rounded away."""


def check_masters(settings: PolicySettings, precision: str | int | None, *, has_masters: bool) -> None:
    """Refuse a run whose steps are lost in rounding, before weights are loaded.

    AdamW moves a weight by about the learning rate in a step. A weight of 0.02 in bfloat16 moves by 8e-5 or not at all.

    Args:
        settings: What is trained, and how wide its weights are.
        precision: `trainer.precision`.
        has_masters: The strategy keeps 32-bit copies of the trained weights, which take the steps (DeepSpeed does).

    Raises:
        ValueError: If trained weights have 16 bits and no copy of 32.
    """
    if has_masters:
        return
    name = str(precision)
    adapters = " It makes float32 adapters narrow as well." if settings.lora is not None else ""
    if name in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision {name!r} gives the trained weights 16 bits, in which steps of usual learning rates are "
            f"rounded away, and this strategy keeps no copy of 32 bits.{adapters} Set it to "
            f"{'bf16-mixed' if name == 'bf16-true' else '16-mixed'!r}, or take DeepSpeed (trainer.strategy: zero2)."
        )
    dtype = dtype_name(settings)
    if dtype in NARROW and settings.lora is None:
        raise ValueError(
            f"The trained weights are {dtype} (policy.dtype, or as the model was given): a step below "
            f"{NARROW[dtype]:.1g} of a weight is rounded away, which at usual learning rates is all of them, and this "
            "strategy keeps no copy of 32 bits. Set policy.dtype to float32 with trainer.precision 'bf16-mixed', train "
            "adapters (policy.lora), or take DeepSpeed (trainer.strategy: zero2)."
        )


def compute_dtype(
    settings: PolicySettings, precision: str | int | None, deepspeed: Mapping[str, Any] | None = None
) -> str:
    """The dtype of a run's matrix products: mixed precision computes in fewer bits than the weights have.

    Args:
        settings: How wide the weights are.
        precision: `trainer.precision`.
        deepspeed: DeepSpeed's configuration, which may say so as well; None without it.
    """
    for dtype, name, key in (("bfloat16", "bf16", "bf16"), ("float16", "16", "fp16")):
        if str(precision).startswith(name) or (deepspeed or {}).get(key, {}).get("enabled") is True:
            return dtype
    return dtype_name(settings)


def dtype_name(settings: PolicySettings) -> str:
    """The dtype of the policy's weights: a loaded model's own, else the one it will have."""
    own = getattr(settings.model, "dtype", None) if hasattr(settings.model, "parameters") else None
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else settings.dtype
