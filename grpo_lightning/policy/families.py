"""Facts about families of vision-language models, one record each: no other file names a model type.

What the models declare themselves is not repeated here: which tensors their forward takes, whether positions are
three-dimensional, how many tokens an image is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from grpo_lightning.core.types import Coordinates
from grpo_lightning.policy.hf import base_model

log = logging.getLogger(__name__)

Resizing = Literal["pixels", "tiles", "fixed"]
"""How an image's number of tokens is limited: by its `pixels`, by the number of `tiles` it is cut into, or not at all,
as every image is resized to the same size."""


@dataclass(frozen=True)
class Family:
    """The facts about a family that its config does not have."""

    vision: tuple[str, ...]
    """The parts that make features of images: the vision tower and what projects it, by their names in the model."""

    media_tokens: tuple[str, ...]
    """Tokens that stand for images and videos, or frame them: no answer has them, and no text of the data means them.

    One that was sampled would have no image behind it, and end the run at the next forward pass.
    """

    coordinates: Coordinates
    """How the model names places in an image."""

    resizing: Resizing

    pixel_count: int = 1
    """How often the processor counts every pixel of an image against its limits of pixels."""

    attends_both_ways: bool = False
    """True if the tokens of an image attend to those behind them too, which takes a mask."""

    unused: tuple[str, ...] = ()
    """Modules in the vision tower whose results nothing reads, by their own names: no loss gives them a gradient."""


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
GLM_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "qwen2_5_vl": Family(("visual",), QWEN_TOKENS, "resized", "pixels"),
    "qwen3_vl": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "qwen3_vl_moe": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "qwen3_5": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "internvl": Family(
        ("vision_tower", "multi_modal_projector"), ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "norm1000", "tiles"
    ),
    "glm4v": Family(("visual",), GLM_TOKENS, "norm1000", "pixels", pixel_count=2),  # an image is two frames
    "glm4v_moe": Family(("visual",), GLM_TOKENS, "norm1000", "pixels", pixel_count=2),
    "gemma3": Family(
        ("vision_tower", "multi_modal_projector"),
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "norm1000",
        "fixed",
        attends_both_ways=True,
        unused=("head",),  # SigLIP's pooling, where `vision_use_head` is not off
    ),
}
"""By `config.model_type`."""

REMOTE_CODE = {"internvl_chat": "internvl"}
"""Model types that only come as code next to a checkpoint, and the native ones that replace them."""


def sees_images(config: Any) -> bool:
    """True for the config of a model that takes images."""
    return getattr(config, "vision_config", None) is not None


def family_of(config: Any) -> Family | None:
    """The record of a model's family; None if it takes no images, or there is none."""
    return FAMILIES.get(config.model_type) if sees_images(config) else None


def native_checkpoints(name: str) -> str:
    """The checkpoints of the hub, in transformers' own form, that replace a remote-code InternVL.

    OpenGVLab publishes InternVL3 and InternVL3.5 in that form, and spells the two differently. There is none of
    InternVL2.5 and older, or of a checkpoint fine-tuned from them.
    """
    size = re.search(r"InternVL(3|3_5)-(\d+B)$", name.rstrip("/"))
    if size is None:
        return "'OpenGVLab/InternVL3-2B-hf' or 'OpenGVLab/InternVL3_5-4B-HF'"
    return f"'OpenGVLab/InternVL{size[1]}-{size[2]}-{'hf' if size[1] == '3' else 'HF'}'"


def unknown_reason(config: Any) -> str | None:
    """Why the images of a model cannot be run once per prompt; None if they can, or it takes none."""
    if not sees_images(config) or family_of(config) is not None:
        return None
    return (
        f"the package has no facts about vision-language models of type {config.model_type} (it knows "
        f"{', '.join(FAMILIES)}), and leaves positions and images to the model"
    )


def refuse_remote_code(name: str, model_type: str | None) -> None:
    """Raise ValueError if a checkpoint of this model type needs code of its own, naming its native form."""
    if model_type in REMOTE_CODE:
        raise ValueError(
            f"model.policy {name!r} is a checkpoint with code of its own (model type {model_type}), which cannot be "
            f"run prompt by prompt. Take a native checkpoint of type {REMOTE_CODE[model_type]}: "
            f"{native_checkpoints(name)}, or convert it: docs/vision.md#native-checkpoints."
        )


def vision_parts(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    """The vision tower and its projector."""
    inner = inner_model(model)
    return (getattr(inner, name) for name in family.vision)


def inner_model(model: nn.Module) -> Any:
    """The part of the model that turns images and tokens into hidden states: all but the head."""
    return base_model(model).model


def is_tower_trained(model: nn.Module) -> bool:
    """True if images have to be encoded anew in every pass, as what encodes them changes."""
    family = family_of(base_model(model).config)
    if family is None:
        return True
    return any(parameter.requires_grad for part in vision_parts(model, family) for parameter in part.parameters())


def freeze_vision(model: nn.Module) -> None:
    """Freeze the vision tower and its projector.

    Raises:
        ValueError: If the model has none, or its family is not known.
    """
    family = known_family(base_model(model).config, "policy.freeze_vision_modules")
    for part in vision_parts(model, family):
        part.requires_grad_(False)


def freeze_unused(model: nn.Module) -> None:
    """Freeze the parts of the vision tower that no loss reaches, and say so: DDP would wait for their gradients."""
    family = family_of(base_model(model).config)
    if family is None:
        return
    found = [
        (name, module)
        for part in vision_parts(model, family)
        for name, module in part.named_modules()
        if name.rpartition(".")[2] in family.unused and any(weight.requires_grad for weight in module.parameters())
    ]
    for name, module in found:
        module.requires_grad_(False)
        log.info("The vision tower's %s is frozen: nothing reads what it makes, so no loss can train it.", name)


def known_family(config: Any, setting: str) -> Family:
    """The record of a model's family, for a setting that needs it.

    Raises:
        ValueError: If the model takes no images, or there is no record.
    """
    if not sees_images(config):
        raise ValueError(
            f"{setting} is set, and the policy (model type {config.model_type}) takes no images: leave it out."
        )
    family = family_of(config)
    if family is None:
        raise ValueError(
            f"{setting} is set, and the package has no facts about models of type {config.model_type}; it knows "
            f"{', '.join(FAMILIES)}. Leave it out, or add a record to policy/families.py."
        )
    return family
