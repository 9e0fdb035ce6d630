"""Prompts with images for vLLM, which processes the images itself.

vLLM gets the images, and the token ids of the prompt with one placeholder per image. From these inputs, vLLM must
compute the same token ids as the policy's processor (`check_prompt_ids`).
"""

from __future__ import annotations

import base64
import functools
import io
import json
import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt, PromptVision, VisionInputs

if TYPE_CHECKING:
    from PIL.Image import Image


class KnownImage:
    """An image that is decoded once, and encoded at most once.

    Raises:
        ImageError: If `ImageRef.read` raises one.
    """

    def __init__(self, source: ImageRef) -> None:
        self.source, self.image = source, source.read()
        self._lock = threading.Lock()

    @property
    def content_part(self) -> dict[str, str]:
        """The image as a PNG file in a URL, for a server."""
        with self._lock:
            return self._content_part

    @functools.cached_property
    def _content_part(self) -> dict[str, str]:
        url = self.source.data_url() if self.source.is_copy else data_url(self.image)
        return {"type": "image_url", "url": url}


KnownImages: TypeAlias = dict[Hashable, KnownImage]
"""Images by key. Holding an image keeps its source alive, so its key remains unique."""


class PromptImages:
    """The images of a prompt. `unexpanded_ids` are its tokens with one placeholder per image."""

    def __init__(self, known: Sequence[KnownImage], unexpanded_ids: list[int]) -> None:
        self.known, self.unexpanded_ids = known, unexpanded_ids

    @property
    def images(self) -> list[Image]:
        """The images, upright and in RGB."""
        return [each.image for each in self.known]

    @property
    def content_parts(self) -> list[dict[str, str]]:
        """The images as PNG files in URLs, for a server."""
        return [each.content_part for each in self.known]

    @property
    def sizes(self) -> str:
        """The sizes of the images, for messages."""
        return ", ".join(f"{image.width}x{image.height}" for image in self.images)


def images_of(vision: PromptVision, tokenizer: PreTrainedTokenizerBase, known: KnownImages) -> PromptImages | None:
    """The images of a prompt; None if the prompt has no images.

    The function reads each image that is not in `known`, and adds this image to `known`.

    Raises:
        ImageError: If `ImageRef.read` raises one.
    """
    if not vision.sources:
        return None
    for source in vision.sources:
        if source.key not in known:
            known[source.key] = KnownImage(source)
    ids: Any = tokenizer(vision.text, add_special_tokens=False)["input_ids"]
    return PromptImages([known[source.key] for source in vision.sources], [*ids, *vision.more_ids])


def data_url(image: Image) -> str:
    """An image as a PNG file in a URL, because PNG keeps all pixels."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def probe_prompt() -> Prompt:
    """Make a prompt with an image in which no two rows, no two columns and no two color channels are equal."""
    import PIL.Image

    waves = PIL.Image.radial_gradient("L")
    colors = PIL.Image.merge(
        "RGB", (waves, PIL.Image.linear_gradient("L"), waves.crop((0, 0, 90, 200)).resize(waves.size))
    )
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    return Prompt(
        [{"role": "user", "content": content}], images=[ImageRef(colors.resize((168, 112)))], where="the probe"
    )


def check_counts(vision: VisionInputs, limit: int | None) -> None:
    """Check that no prompt has more than `limit` images.

    Raises:
        ValueError: If a prompt has more than `limit` images.
    """
    most = max((len(prompt.sources) for prompt in vision.prompts), default=0)
    if limit is not None and most > limit:
        raise ValueError(
            f"A prompt has {most} images, and engine.limit_mm_per_prompt allows {limit}: set it to {{image: {most}}} "
            "or remove it."
        )


def check_prompt_ids(images: PromptImages, prompt_ids: Sequence[int], got: Sequence[int] | None, remedy: str) -> None:
    """Check that vLLM and the policy's processor have computed the same token ids for a prompt with images.

    Raises:
        RuntimeError: If the tokens differ, or vLLM has not reported them.
    """
    if got is None:
        raise RuntimeError("vLLM did not report the token ids of a prompt with images (prompt_token_ids).")
    if list(got) == list(prompt_ids):
        return
    if len(got) != len(prompt_ids):
        raise RuntimeError(
            f"A prompt with {len(images.images)} image(s) ({images.sizes} pixels) has {len(prompt_ids)} tokens for the "
            f"policy and {len(got)} tokens for vLLM: their processors resize images to different sizes, or cut them "
            f"into different numbers of tiles. {remedy}"
        )
    first = next(i for i, (own, other) in enumerate(zip(prompt_ids, got, strict=True)) if own != other)
    raise RuntimeError(
        f"A prompt with {len(images.images)} image(s) has {len(prompt_ids)} tokens for the policy and for vLLM, but "
        f"token {first} is {prompt_ids[first]} for the policy and {got[first]} for vLLM: their tokenizers differ. Save "
        "the policy's tokenizer in a form that AutoTokenizer loads unchanged (a server gets its folder by `vllm serve "
        "--tokenizer`), or use LocalEngine."
    )


def image_limits(processor: Any) -> dict[str, Any]:
    """Settings of a processor that determine the number of tokens of an image."""
    images = processor.image_processor
    if getattr(images, "crop_to_patches", False):
        return {name: getattr(images, name) for name in ("crop_to_patches", "min_patches", "max_patches")}
    size = images.size
    return {"size": {key: value for key, value in dict(size).items() if value is not None}}


def processor_flag(processor: Any) -> str:
    """The flag of `vllm serve` that gives the server's processor the limits of the policy's processor."""
    return f"--mm-processor-kwargs '{json.dumps(image_limits(processor), sort_keys=True)}'"
