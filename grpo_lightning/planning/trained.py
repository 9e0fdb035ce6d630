"""Which weights are trained, and how wide the others are kept: LoRA, frozen layers, 4 and 8 bits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from grpo_lightning.planning.shape import ModelShape, count_matrix_weights
from grpo_lightning.policy.freezing import freeze_first_layers
from grpo_lightning.policy.lora import LoRA, adapter_config, targets

if TYPE_CHECKING:
    from grpo_lightning.policy.loading import PolicyLoader

QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
"""Per weight. 4 bits: nf4 in blocks of 64, whose scales are 8 bits and have 32-bit scales per 256 (QLoRA,
arXiv:2305.14314, section 3). 8 bits: and a scale per row, left out."""

ADAPTER_BYTES = 4
"""Adapters are float32, whatever the model is; DeepSpeed runs them in the model's width and keeps 32-bit masters."""


@dataclass(frozen=True)
class TrainedWeights:
    """How many weights there are of each kind.

    Args:
        own: Of the model's own weights, those that are trained.
        own_matrices: Among them, those in matrices.
        adapters: LoRA's, on top of the model's own; all of them are trained.
        quantized: Of the model's own weights, those kept in fewer bits.
        quantized_bytes: Of each of them.
        has_starting_adapter: True if the reference is the adapter the run began with, a copy of it.
        shares_frozen: True if the reference's frozen weights are the policy's own.
    """

    own: int
    own_matrices: int
    adapters: int = 0
    quantized: int = 0
    quantized_bytes: float = 0.0
    has_starting_adapter: bool = False
    shares_frozen: bool = False

    @classmethod
    def all_of(cls, shape: ModelShape) -> TrainedWeights:
        """Every weight."""
        return cls(shape.num_weights, shape.num_matrix_weights)

    @property
    def count(self) -> int:
        """What the optimizer steps."""
        return self.own + self.adapters

    def model_bytes(self, shape: ModelShape, width: int) -> float:
        """Bytes of the model's own weights, without adapters, at a width."""
        return (shape.num_weights - self.quantized) * width + self.quantized * self.quantized_bytes

    def reference_bytes(self, shape: ModelShape, width: int) -> float:
        """Bytes the reference takes beside the policy: with adapters it is the policy without them."""
        if self.adapters:
            return self.adapters * ADAPTER_BYTES * self.has_starting_adapter
        return (self.own if self.shares_frozen else shape.num_weights) * width


def trained_weights(model: Any, shape: ModelShape, loader: PolicyLoader) -> tuple[TrainedWeights, ModelShape]:
    """(what a policy trains, its shape with the adapters), by the rules the run goes by.

    Args:
        model: On the meta device; its first layers are frozen in place.
        shape: Its shape.
        loader: The policy's settings.

    Raises:
        FileNotFoundError: If the adapter to start from is not there.
        ValueError: If layers to freeze or to adapt are not there.
    """
    lora = loader.lora
    quantized = 0
    if loader.quantization != "none":
        quantized = sum(layer.weight.numel() for layer in linear_layers(model))
    if lora is not None:
        layers, rank = adapted_layers(model, lora)
        widths = [sorted(layer.weight.shape) for layer in layers]
        reads = sum(layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0] for layer in layers)
        trained = TrainedWeights(
            own=0,
            own_matrices=0,
            adapters=sum(rank * (narrow + wide) for narrow, wide in widths),
            quantized=quantized,
            quantized_bytes=QUANTIZED_BYTES.get(loader.quantization, 0.0),
            has_starting_adapter=lora.adapter is not None,
        )
        return trained, dataclasses.replace(shape, adapted_channels=reads // shape.num_layers)
    if not loader.freeze_layers:
        return TrainedWeights.all_of(shape), shape
    freeze_first_layers(model, loader.freeze_layers)
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    own = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in frozen)
    matrices = count_matrix_weights(model, without=frozen)
    return TrainedWeights(own, matrices, shares_frozen=True), shape


def linear_layers(model: Any) -> list[Any]:
    """What is quantized: every linear layer but the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]


def adapted_layers(model: Any, lora: LoRA) -> tuple[list[Any], int]:
    """(the layers that get adapters, the adapters' rank); of an adapter that was saved, its own."""
    if lora.adapter is None:
        return list(targets(model, lora.target_modules).values()), lora.rank
    saved = adapter_config(lora.adapter)
    ends = saved.target_modules
    names = [ends] if isinstance(ends, str) else sorted(ends or [])
    is_all = names == ["all-linear"]
    return list(targets(model, None if is_all else names).values()), saved.r
