"""The policy's tokenizer, and the processor of one that sees images: how they are loaded and limited."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lightning.policy.families import FAMILIES, known_family, sees_images
from grpo_lightning.policy.hf import naming, vocabulary_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from grpo_lightning.policy.settings import PolicySettings


log = logging.getLogger(__name__)

SETTINGS = {"max_pixels": "pixels", "min_pixels": "pixels", "max_anyres_num": "tiles"}
"""The settings that limit the tokens of an image, and the kind of families that each is for."""


def load_tokenizer(
    loader: PolicySettings, processor: Any = None, config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token that the policy has an embedding for: padding is masked, so any such id serves.

    Args:
        loader: Where it comes from.
        processor: What has it, for a policy that sees images.
        config: The policy's; None has an embedding for every token.

    Raises:
        ValueError: If neither its pad nor its eos token has one.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = processor or loader.tokenizer or loader.name
    if isinstance(tokenizer, (str, Path)):
        with naming("model.policy.tokenizer" if loader.tokenizer else "model.policy", str(tokenizer)):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), **origin(loader))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    if getattr(processor, "chat_template", None):  # it goes first, as in the processor's own methods
        tokenizer.chat_template = processor.chat_template
    size = (0 if config is None else vocabulary_size(config)) or math.inf
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or pad >= size:
        if eos is None or eos >= size:
            raise ValueError(
                f"The tokenizer has neither a pad nor an eos token that the policy has an embedding for (ids {pad} and "
                f"{eos} of {size}). Set `tokenizer.pad_token` to any token of the policy's, or `pad_token` in the "
                "policy's tokenizer_config.json."
            )
        if pad is not None:
            log.warning(
                "The tokenizer's pad token %r (id %d) is beyond the policy's %d embeddings: %r pads instead.",
                *(tokenizer.pad_token, pad, size, tokenizer.eos_token),
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def load_processor(loader: PolicySettings, config: PretrainedConfig) -> Any:
    """The processor of a policy that sees images, limited as the loader says; None for one that takes text only.

    Raises:
        FileNotFoundError: If there is none.
        ImportError: If what it needs is not installed.
        ValueError: If what is given is no processor.
    """
    from transformers import AutoProcessor

    if not sees_images(config):
        return None
    processor: Any = loader.tokenizer or loader.name
    if isinstance(processor, (str, Path)):
        with naming("model.policy.tokenizer" if loader.tokenizer else "model.policy", str(processor)), naming_extra():
            processor = AutoProcessor.from_pretrained(str(processor), **origin(loader))
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"The policy (model type {config.model_type}) takes images, and {type(processor).__name__} has no image "
            "processor: give its processor as the tokenizer, or a folder that has one (preprocessor_config.json)."
        )
    processor = copy.copy(processor)  # the user's stays as it is
    processor.image_processor = copy.deepcopy(processor.image_processor)
    limit_images(processor, loader, config)
    return processor


@contextlib.contextmanager
def naming_extra() -> Iterator[None]:
    """Name the extra to install where a processor misses a package. Raises: ImportError."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"The policy takes images, and its processor needs a package: pip install 'grpo-lightning[vision]'. "
            f"It says: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def origin(loader: PolicySettings) -> dict[str, Any]:
    """The arguments of `from_pretrained` next to the name; the revision is that of the policy."""
    return {
        "revision": "main" if loader.tokenizer else loader.revision,
        "trust_remote_code": loader.trust_remote_code,
    }


def check_image_family(loader: PolicySettings, config: PretrainedConfig) -> None:
    """Raise ValueError for limits of images that the policy's family does not know."""
    for name, resizing in SETTINGS.items():
        if getattr(loader, name) is None:
            continue
        family = known_family(config, f"policy.{name}")
        if family.resizing != resizing:
            fitting = sorted(kind for kind, record in FAMILIES.items() if record.resizing == resizing)
            raise ValueError(
                f"policy.{name} is {getattr(loader, name)}, and has no meaning for a policy of type "
                f"{config.model_type}: it is for {', '.join(fitting)}. Leave it out."
            )


def limit_images(processor: Any, loader: PolicySettings, config: PretrainedConfig) -> None:
    """Tell a processor how many tokens an image may become at most, and at least."""
    images = processor.image_processor
    check_image_family(loader, config)
    if loader.max_pixels is not None or loader.min_pixels is not None:
        count = known_family(config, "policy.max_pixels").pixel_count
        least, most = images.size["shortest_edge"], images.size["longest_edge"]  # of areas, whatever they are called
        least = least if loader.min_pixels is None else count * loader.min_pixels
        most = most if loader.max_pixels is None else count * loader.max_pixels
        if least > most:
            raise ValueError(
                f"An image would have at least {least} pixels and at most {most}: the processor's own limits hold "
                "where policy.min_pixels or policy.max_pixels is null. Set both."
            )
        images.size = type(images.size)(**{"shortest_edge": least, "longest_edge": most})
    if loader.max_anyres_num is not None:
        images.crop_to_patches = True
        images.max_patches = loader.max_anyres_num
        images.min_patches = min(images.min_patches, loader.max_anyres_num)
