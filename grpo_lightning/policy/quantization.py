"""Frozen weights in 4 or 8 bits, as bitsandbytes stores them, under adapters that are trained."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

Quantization = Literal["none", "4bit", "8bit"]


def check_quantization(kind: Quantization) -> None:
    """Say what stands against it, before weights are loaded.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401 - is it there?
    except ImportError as error:
        raise ModuleNotFoundError(
            f"policy.quantization {kind!r} needs bitsandbytes, which is not installed: pip install "
            "'grpo-lightning[quantization]'."
        ) from error


def quantization_options(kind: Quantization, device_type: str) -> dict[str, Any]:
    """What `from_pretrained` is given: NF4 with quantised scales (arXiv:2305.14314), or int8; computed in bfloat16."""
    from transformers import BitsAndBytesConfig

    config = (
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        if kind == "4bit"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    # Quantised where it will run: bitsandbytes stores it on the device.
    device: int | str = torch.cuda.current_device() if device_type == "cuda" else device_type
    return {"quantization_config": config, "device_map": {"": device}}


def keep_differentiable(model: nn.Module) -> None:
    """Have 4-bit layers keep, on a CPU, the layout that gradients pass through.

    On a CPU with bf16 instructions, bitsandbytes repacks their weights in the first forward of eval mode. What
    multiplies the packed weights has no backward: after the first rollout, most adapters would get no gradient.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
