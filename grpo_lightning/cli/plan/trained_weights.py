"""Which weights are trained, and how wide the others are kept: LoRA, frozen layers and vision, 4 and 8 bits."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_lightning.cli.plan.shape import ModelShape, count_matrix_weights
from grpo_lightning.policy.families import freeze_unused, freeze_vision
from grpo_lightning.policy.lora import LoRA, adapter_config, adapter_layers
from grpo_lightning.policy.lora_targets import targets
from grpo_lightning.policy.trainable import freeze_first_layers

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
        model: On the meta device; its first layers and its vision tower are frozen, and a saved adapter is put beside
            its layers, in place.
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
        adapters, reads = adapter_sizes(model, lora)
        trained = TrainedWeights(
            own=0,
            own_matrices=0,
            adapters=adapters,
            quantized=quantized,
            quantized_bytes=QUANTIZED_BYTES.get(loader.quantization, 0.0),
            has_starting_adapter=lora.adapter is not None,
        )
        return trained, dataclasses.replace(shape, adapted_channels=reads // shape.num_layers)
    if loader.freeze_vision_modules:
        freeze_vision(model)
    if loader.freeze_layers:
        freeze_first_layers(model, loader.freeze_layers)
    freeze_unused(model)
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    if not frozen:
        return TrainedWeights.all_of(shape), shape
    own = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in frozen)
    matrices = count_matrix_weights(model, without=frozen)
    return TrainedWeights(own, matrices, shares_frozen=True), shape


def linear_layers(model: Any) -> list[Any]:
    """What is quantized: every linear layer but the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]


def adapter_sizes(model: Any, lora: LoRA) -> tuple[int, int]:
    """(weights of the adapters, numbers per token that their layers read).

    A saved adapter may have layers by a pattern, ranks of their own, the head or an embedding: peft builds it.
    """
    from transformers.pytorch_utils import Conv1D

    if lora.adapter is None:
        bases: list[Any] = list(targets(model, lora.target_modules).values())
        count = sum(lora.rank * sum(layer.weight.shape) for layer in bases)
    else:
        adapted = saved_adapter(model, lora.adapter)
        count = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        bases = [layer.get_base_layer() for layer in adapter_layers(adapted)]
    reads = sum(
        layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]
        for layer in bases
        if isinstance(layer, nn.Linear | Conv1D)
    )
    return count, reads


def saved_adapter(model: Any, adapter: str) -> Any:
    """A model on the meta device with the adapter of a folder or of the hub, whose weights are not read."""
    from peft import get_peft_model

    config = adapter_config(adapter)
    config.inference_mode = False
    config.init_lora_weights = True  # others are computed from the weights, which are not there
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run says it
        return get_peft_model(model, config)
