"""Run a model with the images of its prompts. Features of a frozen vision tower can be stored and used again.

The model's method `get_image_features` is replaced while a forward pass runs. The replacement returns stored features,
or runs the vision tower.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from grpo_lightning.core import ranks
from grpo_lightning.core.types import ImageFeatures, ObservedImages, PromptVision, VisionInputs
from grpo_lightning.policy.families import family_of, inner_model, is_tower_trained
from grpo_lightning.policy.transformers_internals import (
    PlacedPrompts,
    base_model,
    compute_device,
    evaluating,
    known_arguments,
    text_positions,
)


@contextlib.contextmanager
def showing_images(model: nn.Module, vision: VisionInputs, *, keeps: bool = False) -> Iterator[dict[str, Any]]:
    """Context for a forward pass with the images of prompts.

    Args:
        model: The policy.
        vision: Vision inputs of the prompts of the forward pass, in order. A prompt can occur several times.
        keeps: Store the image features in the `PromptVision` of each prompt.

    Yields:
        The image arguments of the model's forward.
    """
    with_images = [prompt for prompt in vision.prompts if prompt.images]
    if not with_images and vision.blank is None:
        yield {}
        return
    if family_of(base_model(model).config) is None:
        images = concatenate_images(with_images) if with_images else dict(vision.blank or {})
        yield known_arguments(model, **to_model(images, model))
        return
    distinct = list({id(prompt): prompt for prompt in with_images}.values())
    images = concatenate_images(distinct) if distinct else dict(vision.blank or {})
    inner = inner_model(model)
    encode: Callable[..., Any] = inner.get_image_features

    # `wraps`, because transformers' `generate` reads the names of the arguments.
    @functools.wraps(encode)
    def return_known(*args: Any, **options: Any) -> Any:
        known = [prompt.features for prompt in with_images if prompt.features is not None]
        return make_outputs(concatenate_features(known))

    @functools.wraps(encode)
    def encode_images(*args: Any, **options: Any) -> Any:
        features = read_features(encode(*args, **options))
        if not with_images:
            return make_outputs(features._replace(levels=[level[:0] for level in features.levels]))
        if keeps:
            store_features(distinct, features)
        if len(distinct) < len(with_images):
            of_prompt = dict(zip(map(id, distinct), split_features(distinct, features), strict=True))
            features = concatenate_features([of_prompt[id(prompt)] for prompt in with_images])
        return make_outputs(features)

    # With a blank image, other ranks may run the tower in this pass, so this rank has to run it, too. If a callback has
    # unfrozen the tower since the features were stored, they are not used: they have no gradient.
    is_known = bool(with_images) and vision.blank is None and all(prompt.features is not None for prompt in with_images)
    is_known = is_known and not is_tower_trained(model)
    if is_known:  # with empty tensors, the forward still calls get_image_features
        images = {name: tensor[:0] for name, tensor in images.items()}
    inner.get_image_features = return_known if is_known else encode_images
    try:
        yield known_arguments(model, **to_model(images, model))
    finally:
        del inner.get_image_features


def to_model(images: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Move tensors to the model's device and dtype."""
    device = compute_device(model)
    dtype = next(p.dtype for p in base_model(model).parameters() if p.is_floating_point())
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in images.items()}


def concatenate_images(prompts: Sequence[PromptVision]) -> dict[str, Tensor]:
    """Concatenate the image tensors of prompts, in order."""
    return {name: torch.cat(pad_to_largest([prompt.images[name] for prompt in prompts])) for name in prompts[0].images}


def pad_to_largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Right-pad tensors [images, ...] with zeros."""
    sizes = zip(*(tensor.shape[1:] for tensor in tensors), strict=True)
    most = [max(size) for size in sizes]

    def padding(tensor: Tensor) -> list[int]:
        pairs = zip(reversed(tensor.shape[1:]), reversed(most), strict=True)
        return [number for have, want in pairs for number in (0, want - have)]

    return [nn.functional.pad(tensor, padding(tensor)) if most else tensor for tensor in tensors]


def store_features(prompts: Sequence[PromptVision], features: ImageFeatures) -> None:
    """Store each prompt's part of the features with the prompt."""
    for prompt, own in zip(prompts, split_features(prompts, features), strict=True):
        prompt.features = own._replace(levels=[part.detach().clone() for part in own.levels])  # not a view of all


@torch.no_grad()
def encode_missing(model: nn.Module, prompts: Sequence[PromptVision | None]) -> None:
    """Compute and store image features that are not stored yet. The model's vision tower must be frozen.

    The tower runs on one prompt at a time, so that a resumed run computes the same features.
    """
    inner = inner_model(model)
    accepted = inspect.signature(inner.get_image_features).parameters
    for prompt in prompts:
        if prompt is not None and prompt.images and prompt.features is None:
            images = {name: image for name, image in to_model(prompt.images, model).items() if name in accepted}
            with evaluating(inner):  # like sampling, which runs without dropout
                store_features([prompt], read_features(inner.get_image_features(**images, return_dict=True)))


def split_features(prompts: Sequence[PromptVision], features: ImageFeatures) -> list[ImageFeatures]:
    """Split the features of several prompts."""
    counts = [prompt.num_image_tokens for prompt in prompts]
    parts = zip(*(level.split(counts) for level in features.levels), strict=True)
    return [features._replace(levels=list(own)) for own in parts]


def concatenate_features(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Concatenate the features of several prompts."""
    levels = zip(*(part.levels for part in features), strict=True)
    return features[0]._replace(levels=[torch.cat(parts) for parts in levels])


@dataclass
class Outputs(ModelOutput):
    """The output of `get_image_features`, with the fields that model forwards read and pass on."""

    pooler_output: Tensor | tuple[Tensor, ...] | None = None
    deepstack_features: list[Tensor | tuple[Tensor, ...]] | None = None


def make_outputs(features: ImageFeatures) -> Outputs:
    """Convert features to the output of `get_image_features`, as if all images were one image."""
    forms: dict[int, Callable[[Tensor], Any]] = {
        0: lambda level: (level,),
        2: lambda level: level,
        3: lambda level: level[None],
    }
    first, *deeper = (forms[d](level) for level, d in zip(features.levels, features.dimensions, strict=True))
    return Outputs(pooler_output=first, deepstack_features=deeper)


def read_features(outputs: Any) -> ImageFeatures:
    """Read the features from the output of `get_image_features`."""
    levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    dimensions = [level.ndim if isinstance(level, Tensor) else 0 for level in levels]
    return ImageFeatures([flatten(level) for level in levels], dimensions)


def flatten(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Flatten [images, tokens, H], or one tensor per image, to [image tokens, H]."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def needs_blank(model: nn.Module, prompts: Sequence[PromptVision | None], *, is_sharded: bool) -> bool:
    """True if the vision tower has to run on every rank. A rank without images then runs it on a blank image.

    The gradient of a trained tower is averaged over all ranks, and a sharded tower is gathered from all ranks.
    """
    if is_tower_trained(model):
        return True
    is_missing = any(prompt is not None and prompt.images and prompt.features is None for prompt in prompts)
    return is_sharded and ranks.any_over_ranks(is_missing)


# ---------------------------------------------------------------------------------------------------------- positions


def place_images(model: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, vision: VisionInputs) -> PlacedPrompts:
    """Compute the positions of all prompt tokens, including image tokens.

    Padding is not counted (see `text_positions`).

    For a model of an unknown family, no `position_ids` are returned, because the model computes its positions itself.

    Args:
        model: The policy.
        prompt_ids: [N, L] tokens, either of prompts (left-padded) or of conversations (padded on both sides).
        prompt_mask: [N, L] bool.
        vision: Vision inputs of the prompts.
    """
    lengths = prompt_mask.sum(-1).tolist()
    types = {
        # The tokens of prompts without types, for example of a dummy prompt, are text.
        name: at_tokens(
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
        return PlacedPrompts(types, first, 1)  # the model computes positions itself
    inner = inner_model(model)
    if not hasattr(inner, "rope_deltas"):
        return PlacedPrompts(types | {"position_ids": text_positions(prompt_mask)}, first, 1)
    rows = zip(prompt_ids, prompt_mask, vision.prompts, strict=True)
    placed = [position_of(inner, ids[mask], prompt) for ids, mask, prompt in rows]
    positions = at_tokens([positions for positions, _ in placed], prompt_mask).movedim(0, 1)
    first = torch.tensor([[following] for _, following in placed], device=prompt_mask.device)
    return PlacedPrompts(types | {"position_ids": positions}, first, 3)


def extend_vision(prompt: PromptVision, more_ids: Sequence[int], length: int) -> PromptVision:
    """Vision inputs of a prompt of `length` tokens, and of the text that follows it in a conversation."""
    if not more_ids:
        return prompt
    count = len(more_ids)
    types = {name: nn.functional.pad(t[:length], (0, count)) for name, t in prompt.token_types.items()}
    positions = prompt.positions
    if positions is not None:
        of_prompt, first = positions
        behind = torch.arange(first, first + count, dtype=of_prompt.dtype, device=of_prompt.device)
        positions = torch.cat([of_prompt, behind.expand(len(of_prompt), -1)], 1), first + count
    return replace(prompt, token_types=types, positions=positions, more_ids=list(more_ids))


def whole(
    prompt: PromptVision,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    observed: Sequence[ObservedImages],
) -> PromptVision:
    """The vision inputs of a conversation with images in its observations."""
    parts = [prompt, *(each.vision for each in observed)]
    length = len(prompt_ids) + len(completion_ids)
    token_types: dict[str, Tensor] = {}
    places = [(0, prompt), *((len(prompt_ids) + each.start, each.vision) for each in observed)]
    for start, part in places:
        for name, types in part.token_types.items():
            row = token_types.setdefault(name, types.new_zeros(length))
            row[start : start + len(types)] = types
    # A prompt without images has no rendered text; its tokens contain no placeholder to expand, and are used unchanged.
    unexpanded, end = ([] if prompt.sources else list(prompt_ids)), 0
    for each in observed:
        unexpanded += [*completion_ids[end : each.start], *each.unexpanded_ids]
        end = each.end
    return PromptVision(
        images=concatenate_images([part for part in parts if part.images]),
        token_types=token_types,
        num_image_tokens=sum(part.num_image_tokens for part in parts),
        sources=[source for part in parts for source in part.sources],
        text=prompt.text,
        more_ids=[*unexpanded, *completion_ids[end:]],
    )


def position_of(inner: Any, ids: Tensor, prompt: PromptVision) -> tuple[Tensor, int]:
    """[3, L] positions of a prompt's tokens, and the position of the first token after the prompt."""
    if prompt.positions is None:
        if prompt.images:
            names = inspect.signature(inner.get_rope_index).parameters
            inputs = {name: tensor[None] for name, tensor in prompt.token_types.items()} | dict(prompt.images)
            inputs = {name: tensor for name, tensor in inputs.items() if name in names}
            positions, delta = inner.get_rope_index(ids[None].cpu(), **inputs)
            prompt.positions = positions[:, 0], len(ids) + int(delta)
        else:
            prompt.positions = torch.arange(len(ids)).expand(3, -1), len(ids)
    return prompt.positions


def at_tokens(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Pad N tensors with zeros, and stack the padded tensors: [N, ..., L].

    Row n of the mask [N, L] is True in l columns. In row n of the result, tensor n [..., l] fills these columns. The
    other columns are 0.
    """
    spread = [row.new_zeros(*row.shape[:-1], mask.shape[1]) for row in rows]
    for each, row, tokens in zip(spread, rows, mask.to(rows[0].device), strict=True):
        each[..., tokens] = row
    return torch.stack(spread).to(mask.device)
