"""Running a model with images: each one is encoded once for its prompt, and the features of a frozen tower are kept.

Every vision-language model of transformers asks its `get_image_features` for what the images become, inside its
forward. That method is replaced while a forward pass runs: by what hands over features that are known already, by what
keeps those that are made, or by what makes the tower run on a blank image for nobody.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.core.types import ImageFeatures, PromptVision, VisionInputs
from grpo_lightning.policy.families import family_of, inner_model, is_tower_trained
from grpo_lightning.policy.hf import base_model, compute_device, known_arguments, text_positions


@contextlib.contextmanager
def seeing(model: nn.Module, vision: VisionInputs | None, *, keeps: bool = False) -> Iterator[dict[str, Any]]:
    """Inside, the model's forward takes the images of some prompts.

    Args:
        model: The policy.
        vision: Of the prompts of the pass, in their order; None if the model sees no images.
        keeps: Keep the features with the prompts.

    Yields:
        The arguments that make its forward ask for them.
    """
    with_images = [] if vision is None else [prompt for prompt in vision.prompts if prompt.images]
    if vision is None or (not with_images and vision.blank is None):
        yield {}
        return
    images = merged(with_images) if with_images else dict(vision.blank or {})
    if family_of(base_model(model).config) is None:
        yield known_arguments(model, **moved(images, model))
        return
    inner = inner_model(model)
    encode: Callable[..., Any] = inner.get_image_features

    def known(*args: Any, **options: Any) -> Any:
        return as_outputs(joined([prompt.features for prompt in with_images if prompt.features is not None]))

    def made(*args: Any, **options: Any) -> Any:
        features = features_in(encode(*args, **options))
        if not with_images:
            features = features._replace(levels=[level[:0] for level in features.levels])
        elif keeps:
            keep(with_images, features)
        return as_outputs(features)

    is_known = bool(with_images) and all(prompt.features is not None for prompt in with_images)
    if is_known:  # the forward only has to ask for them
        images = {name: tensor[:0] for name, tensor in images.items()}
    inner.get_image_features = known if is_known else made
    try:
        yield known_arguments(model, **moved(images, model))
    finally:
        del inner.get_image_features


def moved(images: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors where the model computes, and in its precision: not every model sees to that."""
    device = compute_device(model)
    dtype = next(p.dtype for p in base_model(model).parameters() if p.is_floating_point())
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in images.items()}


def merged(prompts: Sequence[PromptVision]) -> dict[str, Tensor]:
    """The tensors of all images of some prompts, in their order."""
    return {name: torch.cat(same_size([prompt.images[name] for prompt in prompts])) for name in prompts[0].images}


def same_size(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors [images, ...] with zeros behind, as processors fill up images of a batch that differ in tiles or size."""
    sizes = zip(*(tensor.shape[1:] for tensor in tensors), strict=True)
    most = [max(size) for size in sizes]

    def padding(tensor: Tensor) -> list[int]:
        pairs = zip(reversed(tensor.shape[1:]), reversed(most), strict=True)
        return [number for have, want in pairs for number in (0, want - have)]

    return [nn.functional.pad(tensor, padding(tensor)) if most else tensor for tensor in tensors]


def keep(prompts: Sequence[PromptVision], features: ImageFeatures) -> None:
    """Give every prompt its part of the features."""
    counts = [prompt.num_image_tokens for prompt in prompts]
    parts = [level.detach().split(counts) for level in features.levels]
    for prompt, own in zip(prompts, zip(*parts, strict=True), strict=True):
        prompt.features = features._replace(levels=[part.clone() for part in own])  # no view of what all of them are


def joined(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """The features of several prompts together."""
    levels = zip(*(part.levels for part in features), strict=True)
    return features[0]._replace(levels=[torch.cat(parts) for parts in levels])


class Outputs(SimpleNamespace):
    """The output of `get_image_features`: the fields that forwards read."""

    pooler_output: Tensor | tuple[Tensor, ...]
    deepstack_features: list[Tensor | tuple[Tensor, ...]]


def as_outputs(features: ImageFeatures) -> Outputs:
    """Features as forwards take them: all images as one."""
    forms: dict[int, Callable[[Tensor], Any]] = {
        0: lambda level: (level,),
        2: lambda level: level,
        3: lambda level: level[None],
    }
    first, *deeper = (forms[d](level) for level, d in zip(features.levels, features.dimensions, strict=True))
    return Outputs(pooler_output=first, deepstack_features=deeper)


def features_in(outputs: Any) -> ImageFeatures:
    """The features in what `get_image_features` gives."""
    found = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    dimensions = [level.ndim if isinstance(level, Tensor) else 0 for level in found]
    return ImageFeatures([flat(level) for level in found], dimensions)


def flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[image tokens, H] of what is [images, tokens, H], or a tensor for every image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def needs_blank(model: nn.Module, prompts: Sequence[PromptVision | None], *, is_sharded: bool) -> bool:
    """Whether the vision tower runs in the passes over some prompts of all ranks, and so has to run on every rank.

    A tower that is trained gets its gradient from all ranks; of one that is sharded, every rank has a part. Features
    that are known already need no tower.
    """
    if is_tower_trained(model):
        return True
    is_missing = any(prompt is not None and prompt.images and prompt.features is None for prompt in prompts)
    return is_sharded and ranks.is_any(is_missing)


# ---------------------------------------------------------------------------------------------------------- positions


class PlacedPrompts(NamedTuple):
    """Where the tokens of some prompts are, and where the next ones continue."""

    arguments: dict[str, Tensor]
    """Arguments of the model's forward over the prompts: `position_ids`, and the kind of each token."""

    first: Tensor
    """[N, 1] position of the first token after each prompt."""

    dimensions: int
    """3 for models that place image tokens by time, row and column, else 1."""

    def along(self, positions: Tensor) -> Tensor:
        """[B, q] or [3, B, q]: positions of text, in as many dimensions as the model has."""
        return positions if self.dimensions == 1 else positions.expand(self.dimensions, *positions.shape)


def place(model: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, vision: VisionInputs | None) -> PlacedPrompts:
    """Positions counted over real tokens, as `text_positions`; those of image tokens as the model counts them.

    Args:
        model: The policy.
        prompt_ids: [N, L] left padded.
        prompt_mask: [N, L] bool.
        vision: Of the prompts.
    """
    if vision is None:
        return PlacedPrompts({"position_ids": text_positions(prompt_mask)}, prompt_mask.sum(-1, keepdim=True), 1)
    lengths = prompt_mask.sum(-1).tolist()
    types = {
        # What has no types, a stand-in for no prompt for example, is text.
        name: left_padded(
            [
                prompt.token_types.get(name, torch.zeros(length, dtype=torch.long))
                for prompt, length in zip(vision.prompts, lengths, strict=True)
            ],
            prompt_mask,
        )
        for name in {name: None for prompt in vision.prompts for name in prompt.token_types}
    }
    first = prompt_mask.sum(-1, keepdim=True)
    if family_of(base_model(model).config) is None:
        return PlacedPrompts(types, first, 1)  # counted by the model itself, as it sees fit
    inner = inner_model(model)
    if not hasattr(inner, "rope_deltas"):
        return PlacedPrompts(types | {"position_ids": text_positions(prompt_mask)}, first, 1)
    rows = zip(prompt_ids, prompt_mask, vision.prompts, strict=True)
    placed = [position_of(inner, ids[mask], prompt) for ids, mask, prompt in rows]
    positions = left_padded([positions for positions, _ in placed], prompt_mask).movedim(0, 1)
    first = torch.tensor([[following] for _, following in placed], device=prompt_mask.device)
    return PlacedPrompts(types | {"position_ids": positions}, first, 3)


def position_of(inner: Any, ids: Tensor, prompt: PromptVision) -> tuple[Tensor, int]:
    """[3, L] positions of one prompt's tokens, and that of the first token after it."""
    if prompt.positions is None:
        if prompt.images:
            wanted = inspect.signature(inner.get_rope_index).parameters
            known = {name: tensor[None] for name, tensor in prompt.token_types.items()} | dict(prompt.images)
            given = {name: tensor for name, tensor in known.items() if name in wanted}
            positions, delta = inner.get_rope_index(ids[None].cpu(), **given)
            prompt.positions = positions[:, 0], len(ids) + int(delta)
        else:
            prompt.positions = torch.arange(len(ids)).expand(3, -1), len(ids)
    return prompt.positions


def left_padded(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """[N, ..., L] of N tensors [..., l], zeros in front, where the mask [N, L] is."""
    length = mask.shape[1]
    return torch.stack([nn.functional.pad(row, (length - row.shape[-1], 0)) for row in rows]).to(mask.device)
