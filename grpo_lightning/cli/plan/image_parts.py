"""What images need: features of a frozen tower, kept for a rollout, or the activations of one that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_lightning.cli.plan.activations import Pass, layer_bytes
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.parts import ALWAYS, Part
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.tower import Tower

PIXEL_BYTES = 4
"""Processors give float32."""


@dataclass(frozen=True)
class Images:
    """The images of a run, at their largest."""

    tokens: int
    """Of all images of one prompt."""

    prompts_per_rollout: int
    """Of one rank."""

    is_tower_trained: bool


def tower_shape(tower: Tower) -> ModelShape:
    """The tower as a decoder that keeps no keys and values: its layers are counted alike."""
    return ModelShape(
        num_layers=tower.num_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        vocab_size=0,
        num_heads=tower.num_heads,
        num_kv_heads=tower.num_heads,
        head_dim=tower.hidden_size // tower.num_heads,
        windows=(),
        has_gated_mlp=tower.has_gated_mlp,
        has_fused_norms=tower.has_fused_norms,
    )


def tower_bytes(
    tower: Tower, tokens: int, precision: Precision, *, checkpointing: Literal["none", "layers", "chunks"] = "none"
) -> int:
    """Bytes that a trained tower keeps of some images for the backward pass.

        patches  = tokens x patches per token
        kept     = pixels + layers x what a decoder layer keeps of a token without a mask, and the projector's
                   3 products, as wide as the patches of a token are together
        layers checkpointed: each layer's input, and one layer whole

    Args:
        tower: The tower.
        tokens: Of the images, all together.
        precision: The widths.
        checkpointing: `policy.activation_checkpointing`; "chunks" are of completions, and leave the images as they are.
    """
    shape, patches = tower_shape(tower), tokens * tower.patches_per_token
    layer = layer_bytes(shape, Pass(patches, 1, 1), precision)
    row = patches * tower.hidden_size
    layers = tower.num_layers * layer
    if checkpointing == "layers":
        layers = tower.num_layers * row * precision.residual + layer
    return patches * tower.patch_numbers * PIXEL_BYTES + layers + row * (precision.residual + 3 * precision.compute)


def feature_bytes(shape: ModelShape, images: Images, precision: Precision) -> int:
    """Bytes of the features of a rollout's images."""
    if shape.tower is None:
        return 0
    numbers = images.prompts_per_rollout * images.tokens * shape.hidden_size * shape.tower.num_levels
    return numbers * precision.compute


def image_parts(
    shape: ModelShape,
    images: Images | None,
    precision: Precision,
    *,
    prompts: int,
    checkpointing: Literal["none", "layers", "chunks"],
) -> list[Part]:
    """What images need beside what their tokens do; nothing where there are none.

    Args:
        shape: The model.
        images: Of the run.
        precision: The widths.
        prompts: Whose images a micro-batch runs, those of a repeated prompt as often as it is repeated.
        checkpointing: `policy.activation_checkpointing`.
    """
    if images is None or shape.tower is None:
        return []
    if images.is_tower_trained:
        kept = tower_bytes(shape.tower, prompts * images.tokens, precision, checkpointing=checkpointing)
        how = f"{prompts} x {images.tokens * shape.tower.patches_per_token:,} patches, for the tower's backward pass"
        return [Part("image activations", kept, frozenset({"update"}), False, how)]
    features = feature_bytes(shape, images, precision)
    how = f"{images.prompts_per_rollout} x {images.tokens:,} tokens of a frozen tower, kept for the rollout"
    return [Part("image features", features, ALWAYS, False, how)]
