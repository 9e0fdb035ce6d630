"""Load the policy's tokenizer or multimodal processor, and set image limits."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lightning.policy.families import FAMILIES, is_multimodal, known_family
from grpo_lightning.policy.transformers_internals import naming, vocabulary_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from grpo_lightning.policy.settings import PolicySettings


log = logging.getLogger(__name__)

SETTINGS = {"max_pixels": "pixels", "min_pixels": "pixels", "max_anyres_num": "tiles"}
"""Settings that limit the tokens per image, with the `Resizing` of the families that support them."""


def load_tokenizer(
    loader: PolicySettings, processor: Any = None, config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer. If its pad token is missing or has no embedding, the eos token becomes the pad token.

    Raises:
        ValueError: If neither the tokenizer's pad token nor its eos token has an embedding.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = processor or loader.tokenizer or loader.name
    if isinstance(tokenizer, (str, Path)):
        with naming("model.policy.tokenizer" if loader.tokenizer else "model.policy", str(tokenizer)):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), **origin(loader))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    if getattr(processor, "chat_template", None):  # it takes precedence, as in the processor's own methods
        tokenizer.chat_template = processor.chat_template
    size = (0 if config is None else vocabulary_size(config)) or math.inf
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or pad >= size:
        if eos is None or eos >= size:
            raise ValueError(
                f"The tokenizer has neither a pad nor an eos token that the policy has an embedding for (ids {pad} and "
                f"{eos} of {size}). Set `tokenizer.pad_token` to any token of the policy, or `pad_token` in the "
                "policy's tokenizer_config.json."
            )
        if pad is not None:
            log.warning(
                "The tokenizer's pad token %r (id %d) is beyond the policy's %d embeddings: padding with %r instead.",
                *(tokenizer.pad_token, pad, size, tokenizer.eos_token),
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def load_processor(loader: PolicySettings, config: PretrainedConfig) -> Any:
    """Load a multimodal policy's processor, with the image limits that `loader` sets; None for a text-only policy.

    Raises:
        FileNotFoundError: If the processor cannot be loaded.
        ImportError: If a package that the processor needs is not installed.
        ValueError: If the policy's processor has no image processor, if the policy's family does not support the image
            limits, or if the limits contradict each other.
    """
    from transformers import AutoProcessor

    if not is_multimodal(config):
        return None
    processor: Any = loader.tokenizer or loader.name
    if isinstance(processor, (str, Path)):
        with naming("model.policy.tokenizer" if loader.tokenizer else "model.policy", str(processor)), naming_extra():
            processor = AutoProcessor.from_pretrained(str(processor), **origin(loader))
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"The policy (model type {config.model_type}) is multimodal, and {type(processor).__name__} has no image "
            "processor: pass its processor as the tokenizer, or a folder that has one (preprocessor_config.json)."
        )
    processor = copy.copy(processor)  # leaves the user's processor unchanged
    processor.image_processor = copy.deepcopy(processor.image_processor)
    limit_images(processor, loader, config)
    return processor


@contextlib.contextmanager
def naming_extra() -> Iterator[None]:
    """Context that catches an ImportError, and raises a new ImportError. The new message states which extra to install.

    Raises:
        ImportError: If a package is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"The policy's image processor needs a package that is not installed: pip install "
            f"'grpo-lightning[vision]'. Its error: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def origin(loader: PolicySettings) -> dict[str, Any]:
    """Arguments of `from_pretrained` other than the name.

    The setting `revision` does not apply to a separate `tokenizer`.
    """
    return {
        "revision": "main" if loader.tokenizer else loader.revision,
        "trust_remote_code": loader.trust_remote_code,
    }


def check_image_family(loader: PolicySettings, config: PretrainedConfig) -> None:
    """Raise ValueError for image limits that the policy's family does not support."""
    for name, resizing in SETTINGS.items():
        if getattr(loader, name) is None:
            continue
        family = known_family(config, f"policy.{name}")
        if family.resizing != resizing:
            fitting = sorted(kind for kind, record in FAMILIES.items() if record.resizing == resizing)
            raise ValueError(
                f"policy.{name} is {getattr(loader, name)}, but models of type {config.model_type} do not support it "
                f"(only {', '.join(fitting)} do). Remove the setting."
            )


def limit_images(processor: Any, loader: PolicySettings, config: PretrainedConfig) -> None:
    """Set a processor's limits of pixels or tiles per image. Raises: ValueError if the limits contradict each other."""
    images = processor.image_processor
    check_image_family(loader, config)
    if loader.max_pixels is not None or loader.min_pixels is not None:
        count = known_family(config, "policy.max_pixels").pixel_count
        least, most = images.size["shortest_edge"], images.size["longest_edge"]  # areas in pixels, despite their names
        least = least if loader.min_pixels is None else count * loader.min_pixels
        most = most if loader.max_pixels is None else count * loader.max_pixels
        if least > most:
            raise ValueError(
                f"Images would need at least {least} and at most {most} pixels: where policy.min_pixels or "
                "policy.max_pixels is null, the processor's own limit applies. Set both."
            )
        images.size = type(images.size)(**{"shortest_edge": least, "longest_edge": most})
    if loader.max_anyres_num is not None:
        images.crop_to_patches = True
        images.max_patches = loader.max_anyres_num
        images.min_patches = min(images.min_patches, loader.max_anyres_num)
