"""Vision-language model families, one record each. Other files read a model's record and never check its model type.

A record has only the properties that models do not declare themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from grpo_lightning.core.types import Coordinates
from grpo_lightning.policy.transformers_internals import base_model

log = logging.getLogger(__name__)

Resizing = Literal["pixels", "tiles", "fixed"]
"""How the number of tokens per image can be limited: by the image's number of `pixels`, by its number of `tiles`, or
not at all (`fixed`)."""


@dataclass(frozen=True)
class Family:
    """Properties of a model family that its config does not contain."""

    vision: tuple[str, ...]
    """Names of the modules that compute image features: the vision tower and its projector."""

    media_tokens: tuple[str, ...]
    """Placeholder and delimiter tokens of images and videos. They are never sampled, and are escaped in prompt texts.

    A sampled placeholder would have no image, and the next forward pass would fail."""

    coordinates: Coordinates
    """Coordinate system in which the model locates objects in an image."""

    resizing: Resizing

    pixel_count: int = 1
    """How many times the processor counts each pixel of an image towards the limits on the number of pixels."""

    attends_both_ways: bool = False
    """True if image tokens attend bidirectionally to the tokens of the same image."""

    unused: tuple[str, ...] = ()
    """Names of vision-tower modules whose outputs are unused."""

    has_vllm: bool = False
    """True if vLLM's log-probs of this family have been compared with the policy's, for prompts with images."""


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
GLM_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels", has_vllm=True),
    "qwen2_5_vl": Family(("visual",), QWEN_TOKENS, "resized", "pixels", has_vllm=True),
    "qwen3_vl": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels", has_vllm=True),
    "qwen3_vl_moe": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "qwen3_5": Family(("visual",), QWEN_TOKENS, "norm1000", "pixels"),
    "internvl": Family(
        ("vision_tower", "multi_modal_projector"),
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "norm1000",
        "tiles",
        has_vllm=True,
    ),
    "glm4v": Family(("visual",), GLM_TOKENS, "norm1000", "pixels", pixel_count=2),  # an image is two frames
    "glm4v_moe": Family(("visual",), GLM_TOKENS, "norm1000", "pixels", pixel_count=2),
    "gemma3": Family(
        ("vision_tower", "multi_modal_projector"),
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "norm1000",
        "fixed",
        attends_both_ways=True,
        unused=("head",),  # SigLIP's pooling, which exists unless `vision_use_head` is off
    ),
}
"""The record of every family, by the `config.model_type` of its models."""

REMOTE_CODE = {"internvl_chat": "internvl"}
"""Model types that exist only as remote code in a checkpoint, and the native types that replace them."""


def is_multimodal(config: Any) -> bool:
    """True for the config of a multimodal model."""
    return getattr(config, "vision_config", None) is not None


def family_of(config: Any) -> Family | None:
    """The record of a model's family; None for text-only models and unknown families."""
    return FAMILIES.get(config.model_type) if is_multimodal(config) else None


def native_checkpoints(name: str) -> str:
    """Native transformers checkpoints to use instead of an InternVL checkpoint that needs remote code.

    If `name` ends like `InternVL3-2B` or `InternVL3_5-4B`, the result names the native version of this checkpoint. For
    any other name, the result names two native checkpoints as examples.
    """
    size = re.search(r"InternVL(3|3_5)-(\d+B)$", name.rstrip("/"))
    if size is None:
        return "'OpenGVLab/InternVL3-2B-hf' or 'OpenGVLab/InternVL3_5-4B-HF'"
    return f"'OpenGVLab/InternVL{size[1]}-{size[2]}-{'hf' if size[1] == '3' else 'HF'}'"


def unknown_reason(config: Any) -> str | None:
    """Reason why a prompt's images cannot be encoded once and reused; None if they can be, or for a text-only model."""
    if not is_multimodal(config) or family_of(config) is not None:
        return None
    return (
        f"vision-language models of type {config.model_type} are not known (known types: "
        f"{', '.join(FAMILIES)}), so positions and images are left to the model"
    )


def refuse_remote_code(name: str, model_type: str | None) -> None:
    """Raise ValueError if this model type needs remote code."""
    if model_type in REMOTE_CODE:
        raise ValueError(
            f"model.policy {name!r} is a checkpoint with remote code (model type {model_type}), which cannot be "
            f"run prompt by prompt. Use a native checkpoint of type {REMOTE_CODE[model_type]}: "
            f"{native_checkpoints(name)}, or convert it: docs/vision.md#native-checkpoints."
        )


def vision_parts(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    """Iterate over the vision tower and its projector."""
    inner = inner_model(model)
    return (getattr(inner, name) for name in family.vision)


def inner_model(model: nn.Module) -> Any:
    """The model without its head."""
    return base_model(model).model


def is_tower_trained(model: nn.Module) -> bool:
    """True if the vision tower or its projector is trained, or if the model's family is unknown.

    In both cases, every pass has to encode images again.
    """
    family = family_of(base_model(model).config)
    if family is None:
        return True
    return any(parameter.requires_grad for part in vision_parts(model, family) for parameter in part.parameters())


def freeze_vision(model: nn.Module) -> None:
    """Freeze the vision tower and its projector.

    Raises:
        ValueError: If the model is text-only, or its family is not known.
    """
    family = known_family(base_model(model).config, "policy.freeze_vision_modules")
    for part in vision_parts(model, family):
        part.requires_grad_(False)


def freeze_unused(model: nn.Module) -> None:
    """Freeze the unused modules of the vision tower, because DDP would wait for their gradients."""
    for name, module in unused_parts(model).items():
        if any(weight.requires_grad for weight in module.parameters()):
            module.requires_grad_(False)
            log.info("Froze the vision tower's %s: its output is not used, so it gets no gradient.", name)


def unused_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The vision tower's modules whose outputs are not used: {name in the tower: module}."""
    family = family_of(base_model(model).config)
    if family is None:
        return {}
    return {
        name: module
        for part in vision_parts(model, family)
        for name, module in part.named_modules()
        if name.rpartition(".")[2] in family.unused
    }


def known_family(config: Any, setting: str) -> Family:
    """The record of a model's family, for a setting that needs it.

    Raises:
        ValueError: If the model is text-only, or its family is not known.
    """
    if not is_multimodal(config):
        raise ValueError(
            f"{setting} is set, but the policy (model type {config.model_type}) is text-only. Remove the setting."
        )
    family = family_of(config)
    if family is None:
        raise ValueError(
            f"{setting} is set, but vision-language models of type {config.model_type} are not known (known types: "
            f"{', '.join(FAMILIES)}). Remove the setting, or add a record to policy/families.py."
        )
    return family
