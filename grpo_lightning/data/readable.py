"""What a prompt source reads: whatever was given as the data set, and what can be known of it without reading it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.images.cells import with_cells, without_decoding
from grpo_lightning.data.listed import LazyPrompts
from grpo_lightning.data.stream import PromptStream, stream_of


def known_prompts(data: Sequence[Prompt] | PromptStream) -> list[Prompt]:
    """The prompts that can be known without reading a data set: all of a list, the first of what is read when used."""
    return data.head() if isinstance(data, LazyPrompts | PromptStream) else list(data)


def source_names(data: Sequence[Prompt] | PromptStream) -> list[str]:
    """The names of the data's sources, sorted: all of a mixture, of other streams those of the first prompts."""
    if isinstance(data, PromptStream) and data.sources:
        return sorted(set(data.sources))
    return sorted({prompt.source for prompt in known_prompts(data)})


def readable(data: Any, convert: Any, **stream: int) -> Sequence[Prompt] | PromptStream:
    """The prompts of whatever was given as data set: lists are converted now, others as they are used."""
    if isinstance(data, DataLoader):
        raise TypeError("PromptSource makes batches itself: give it the data set, not a DataLoader (loader.dataset).")
    if isinstance(data, PromptStream):
        return data
    if isinstance(data, Mapping | str) or (not isinstance(data, Iterable) and not hasattr(data, "__getitem__")):
        raise TypeError(
            f"PromptSource needs a data set: a list of prompts, texts or rows, or a datasets.Dataset, got "
            f"{type(data).__name__} ({data!r:.80}). Put a single row into a list."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"PromptSource reads the data once per epoch, and a {type(data).__name__} can be read only once. Give a "
            "list, or a datasets.IterableDataset (datasets.IterableDataset.from_generator)."
        )
    if not hasattr(data, "__len__"):
        return stream_of(cast(Iterable[Any], without_decoding(data)), convert, **stream)
    if not len(data):
        raise ValueError("The prompt source has no prompts: the data set is empty.")
    if isinstance(data, list | tuple):
        # Prompts stay the objects they are, and the list the one the caller has.
        is_done = all(isinstance(prompt, Prompt) and prompt.index >= 0 for prompt in data)
        if is_done:
            return data
        prompts = [convert(row, number) for number, row in enumerate(data)]
        log_prompt_columns(prompts, set())
        return prompts
    return data if isinstance(data, LazyPrompts) else LazyPrompts(with_cells(data, "the data set"), convert)
