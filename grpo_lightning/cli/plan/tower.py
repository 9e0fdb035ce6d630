"""What encodes images: the vision tower and what projects it, their sizes read from config and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_lightning.policy.families import family_of


@dataclass(frozen=True)
class Tower:
    """A vision tower and its projector: all of a model that is neither decoder nor head."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    has_gated_mlp: bool
    has_fused_norms: bool
    """LayerNorms in one kernel, not RMS norms."""

    patches_per_token: int
    """Patches of an image that become one of its tokens: rows the tower runs on, for each."""

    patch_numbers: int
    """Numbers of one patch as the processor cuts it: channels x frames x pixels."""

    num_levels: int
    """Features per token: one, and those that deeper layers of the decoder are given (deepstack)."""

    num_weights: int
    num_matrix_weights: int
    """In matrices and convolutions: what every patch is multiplied by."""


def tower_of(model: Any) -> Tower:
    """The tower of a vision-language model from transformers, on any device.

    Raises:
        ValueError: If its config does not name its sizes as transformers does.
    """
    vision = model.config.vision_config
    depth = number(vision, "depth", "num_hidden_layers")
    # Qwen2-VL calls the width `embed_dim`: its `hidden_size` is the decoder's.
    hidden = number(vision, "embed_dim", "hidden_size")
    parts = vision_modules(model)
    lists = (part for part in parts if isinstance(part, nn.ModuleList) and len(part) == depth)
    layers = next(lists, None)
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of {depth} vision layers, as its config says.")
    patch = number(vision, "patch_size")
    weights = vision_weights(model)
    looked_up = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    return Tower(
        num_layers=depth,
        hidden_size=hidden,
        # Not all configs say the width that their layers have.
        intermediate_size=max(part.in_features for part in layers.modules() if isinstance(part, nn.Linear)),
        num_heads=number(vision, "num_heads", "num_attention_heads"),
        has_gated_mlp=any("gate" in name for name, _ in layers.named_modules()),
        has_fused_norms=any(isinstance(part, nn.LayerNorm) for part in layers.modules()),
        patches_per_token=patches_per_token(model.config, patch),
        patch_numbers=3 * getattr(vision, "temporal_patch_size", 1) * patch**2,
        num_levels=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        num_weights=sum(weight.numel() for weight in weights),
        num_matrix_weights=sum(w.numel() for w in weights if w.ndim >= 2 and id(w) not in looked_up),
    )


def vision_modules(model: Any) -> list[nn.Module]:
    """Every module of the tower and its projector, at any depth."""
    head = model.get_output_embeddings()
    others = {id(module) for module in (*model.get_decoder().modules(), head)}
    return [module for module in model.modules() if id(module) not in others]


def vision_weights(model: Any) -> list[nn.Parameter]:
    """The parameters of the tower and its projector."""
    others = {id(weight) for weight in model.get_decoder().parameters()}
    others |= {id(weight) for weight in model.get_output_embeddings().parameters()}
    return [weight for weight in model.parameters() if id(weight) not in others]


def patches_per_token(config: Any, patch: int) -> int:
    """Patches that the projector makes one token of, as the families say it."""
    vision = config.vision_config
    if merged := getattr(vision, "spatial_merge_size", None):
        return int(merged) ** 2
    if ratio := getattr(config, "downsample_ratio", None):
        return round(1 / float(ratio) ** 2)
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return int((number(vision, "image_size") // patch) ** 2 // tokens)
    return 1


def number(config: Any, *names: str) -> int:
    """A size by the first of these names that the config has; of a side by side pair, one.

    Raises:
        ValueError: If it has none of them.
    """
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    raise ValueError(f"{type(config).__name__} does not name its sizes as other models do: it has no {names[-1]}.")


def most_tokens(config: Any, processor: Any) -> int | None:
    """Tokens of the largest image that the processor makes; None if it sets no limit that is known.

    By pixels: longest_edge / (patch x merge)^2, half of it where an image is two frames.
    By tiles: (tiles + thumbnail) x tokens of one. Else: of one image.

    Args:
        config: The model's.
        processor: Its own, with the limits of the run.
    """
    images, vision = processor.image_processor, config.vision_config
    patch = number(vision, "patch_size")
    area = getattr(images.size, "longest_edge", None)
    if area is not None and hasattr(vision, "spatial_merge_size"):
        family = family_of(config)
        area //= 1 if family is None else family.pixel_count
        return int(area // (patch * vision.spatial_merge_size) ** 2)
    if getattr(images, "crop_to_patches", False) and getattr(processor, "image_seq_length", None):
        tiles = int(images.max_patches)
        return (tiles + (tiles > 1)) * int(processor.image_seq_length)
    per_image = getattr(config, "mm_tokens_per_image", None) or getattr(processor, "image_seq_length", None)
    return None if per_image is None else int(per_image)
