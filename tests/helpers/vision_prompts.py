"""Prompts with images, and micro-batches of them, for the tests of policies that see."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, MicroBatch, Prompt
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.tokenizer import load_tokenizer
from grpo_lightning.training.micro_batches import CompletionRow, collate, give_images
from tests.helpers.tiny_vlms import TinyVLM, picture

SCENARIOS: dict[str, list[list[Any]]] = {
    "one image": [[picture(0), "where?"], [picture(1, 84, 56), "find the big red box now"]],
    "several images": [
        [picture(0), "and", picture(1, 84, 56), "differ?"],
        [picture(2, 84, 84), picture(3), "which is brighter, first or second"],
    ],
    "no image": [["hello"], ["what is the answer to this question"]],
    "mixed": [
        ["no picture here at all, only words"],
        [picture(0), "where?"],
        ["compare", picture(1, 84, 56), "with", picture(2), "please"],
    ],
}
"""Prompts of different lengths: texts and images in their order."""


def prompt_of(*parts: str | Image.Image, **options: Any) -> Prompt:
    """A user turn of texts and images."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    images = [ImageRef(part) for part in parts if not isinstance(part, str)]
    return Prompt([{"role": "user", "content": content}], images=images, **options)


def encoder_of(vlm: TinyVLM) -> Encoder:
    """Return the encoder of prompts for a tiny model."""

    class Given:
        tokenizer = vlm.processor

    return Encoder(load_tokenizer(Given, vlm.processor), vlm.processor, vlm.model.config)  # type: ignore[arg-type]


def vision_batch(
    encoder: Encoder, prompts: list[list[Any]], *, generations: int = 3, width: int = 9, needs_blank: bool = False
) -> MicroBatch:
    """A micro-batch with ragged completions of byte tokens: the first the longest, the last one token."""
    encoded = [encoder(prompt_of(*parts)) for parts in prompts]
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, width + 1, (len(prompts) * generations,), generator=generator)
    sizes[0], sizes[-1] = width, 1
    rows = []
    for i, size in enumerate(sizes.tolist()):
        ids = torch.randint(2, 200, (size,), generator=generator).tolist()
        group = i // generations
        rows.append(CompletionRow(group, encoded[group].token_ids, Completion(ids, [0.0] * size, "stop"), 0.0))
    batch = collate(rows, 0)
    give_images([batch], encoder.vision_inputs([found.vision for found in encoded], needs_blank=needs_blank))
    return batch
