"""Order of the prompts in an epoch, shuffled or not, for datasets in memory, datasets read lazily, and streams.

A stream has an unknown length, can be larger than memory, and is shuffled within a buffer.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.images.preflight import ImageCounts
from grpo_lightning.data.images.references import with_cells, without_decoding
from grpo_lightning.data.lengths import LengthCount, LengthLimit, Measured
from grpo_lightning.data.parallel import in_threads

T = TypeVar("T")

Part: TypeAlias = Callable[[], Iterable[tuple[Any, Callable[[Any, int], Measured]]]]
"""A function that opens one dataset and yields its rows. Each row comes with a function that converts the row:
(row, index) -> prompt with its length. `operator.length_hint` of the rows is their number, if it is known."""


class LazyPrompts:
    """Prompts of a `datasets.Dataset` or of another dataset with a length. Each prompt is read when it is used."""

    def __init__(self, rows: Any, convert: Callable[[Any, int], Prompt]) -> None:
        self.rows = rows
        self.convert = convert
        self.logged_lines: set[str] = set()
        self._heads: dict[int, list[Prompt]] = {}

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        """Read a prompt. Raises: IndexError past the end, which makes the class iterable."""
        number = range(len(self))[index]
        return self.convert(self.rows[number], number)

    def head(self, size: int = 64) -> list[Prompt]:
        """Return the first `size` prompts as a preview of the data."""
        if size not in self._heads:
            self._heads[size] = [self[number] for number in range(min(size, len(self)))]
            log_prompt_columns(self._heads[size], self.logged_lines)
        return list(self._heads[size])


class ListedOrder:
    """One pass over a known number of prompts, in blocks. A block is a list of positions of prompts in `prompts`."""

    def __init__(self, prompts: Sequence[Prompt] | LazyPrompts, seed: int | None) -> None:
        self.prompts = prompts
        self.numbers: Sequence[int] = range(len(prompts))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.numbers = torch.randperm(len(prompts), generator=generator).tolist()

    def take(self, start: int, size: int) -> tuple[Sequence[int], int]:
        """Get the block of up to `size` prompts at position `start` of the order.

        Returns:
            The positions of these prompts in `prompts`, and the position after this block.
        """
        return self.numbers[start : start + size], min(start + size, len(self.numbers))

    def share(self, block: Sequence[int]) -> list[Prompt]:
        """Read the prompts of a part of a block."""
        return [self.prompts[number] for number in block]


class PromptStream:
    """A stream of prompts. Every pass reads the datasets again, row by row.

    A pass that is not shuffled reads one dataset after the other. A shuffled pass mixes the datasets (`mix_parts`).
    The stream does not apply `limit`. The `parts` apply it, and the stream reports how many prompts exceed it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        shuffle_buffer: int = 1000,
        num_workers: int = 0,
        limit: LengthLimit | None = None,
        sources: Sequence[str] = (),
        check_head: Callable[[Sequence[Prompt]], object] | None = None,
    ) -> None:
        if shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer must be at least 1, got {shuffle_buffer}.")
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}.")
        self.parts = parts
        self.shuffle_buffer = shuffle_buffer
        self.num_workers = num_workers
        self.limit = limit
        self.sources = tuple(sources)
        self.check_head = check_head
        self.images = ImageCounts()
        self.logged_lines: set[str] = set()
        """Lines already logged about the prompt columns of sources."""

        self._heads: dict[int, list[Prompt]] = {}
        self._num_rows: dict[int, int | None] = {}

    @property
    def num_rows(self) -> list[int | None]:
        """Number of rows of each dataset; None if it is not known."""
        for place in range(len(self.parts)):
            if place not in self._num_rows:
                self._open(place)
        return [self._num_rows[place] for place in range(len(self.parts))]

    def _open(self, place: int) -> Iterable[tuple[Any, Callable[[Any, int], Measured]]]:
        """Open a dataset, and store its number of rows for `num_rows`."""
        rows = self.parts[place]()
        size = operator.length_hint(rows, -1)
        self._num_rows[place] = None if size < 0 else size
        return rows

    def order(self, seed: int | None) -> StreamOrder:
        """Start one pass over the data. The pass is shuffled by `seed`, or not shuffled if `seed` is None."""
        return StreamOrder(self, seed)

    def head(self, size: int = 64) -> list[Prompt]:
        """Return the prompts of the first `size` rows of every dataset. Dropped prompts are left out.

        Raises:
            ValueError: If a prompt is too long and `overlong_prompts` is "error".
        """
        if size not in self._heads:
            measured = [
                convert(row, number)
                for place in range(len(self.parts))
                for number, (row, convert) in zip(range(size), self._open(place), strict=False)
            ]
            if self.limit is not None and self.limit.overlong_prompts == "error":
                self.limit.check(measured, of=f"the first {len(measured)} of the stream")
            prompts = [m.prompt for m in measured if m.prompt is not None]
            if self.check_head is not None:
                self.check_head(prompts)
            self._heads[size] = prompts
        return list(self._heads[size])

    def read(self, seed: int | None, start: int) -> Iterator[tuple[int, Measured]]:
        """Yield (position in the order, prompt with its length), starting at position `start`.

        `seed` determines the order; None keeps the order of the data. Positions count all rows, including rows that are
        dropped. Rows before `start` are read, but not parsed.
        """
        rows: Iterator[Any]
        if seed is None:
            rows = enumerate(itertools.chain.from_iterable(map(self._open, range(len(self.parts)))))
        else:
            mixed = mix_parts([self._open(place) for place in range(len(self.parts))], derived_seed(seed, "parts"))
            rows = shuffle_rows(mixed, self.shuffle_buffer, seed)
        return in_threads(_convert, itertools.islice(enumerate(rows), start, None), self.num_workers)


def _convert(item: tuple[int, tuple[int, tuple[Any, Callable[[Any, int], Measured]]]]) -> tuple[int, Measured]:
    """Convert a row to a prompt. The prompt's index is the row's number, which does not depend on the seed."""
    position, (number, (row, convert)) = item
    return position, convert(row, number)


def mix_parts(parts: Sequence[Iterable[T]], seed: int) -> Iterator[tuple[int, T]]:
    """Mix the rows of several parts. For each row, a part is sampled at random, and the part's next row is yielded.

    If the number of rows of every part is known, a part is sampled in proportion to the number of its rows that are
    left. Otherwise, all parts that have rows left are sampled with the same probability.

    Yields:
        A number that identifies the row, and the row. The number does not depend on `seed`.
    """
    # Python guarantees only for random() that its numbers are the same in every version.
    draw = random.Random(seed).random
    sizes = [operator.length_hint(part, -1) for part in parts]
    are_known = min(sizes, default=-1) >= 0
    weights = dict(enumerate(sizes if are_known else [1] * len(parts)))
    readers = [enumerate(part) for part in parts]
    while weights:
        place = _sample(weights, draw())
        try:
            position, row = next(readers[place])
        except StopIteration:
            del weights[place]
            continue
        if are_known:
            weights[place] -= 1
        yield position * len(parts) + place, row


def _sample(weights: dict[int, int], uniform: float) -> int:
    """Sample a key in proportion to its weight, by a random number in [0, 1). If all weights are 0, take the last."""
    threshold = uniform * sum(weights.values())
    for key, weight in weights.items():
        threshold -= weight
        if threshold < 0:
            return key
    return next(reversed(weights))


def shuffle_rows(rows: Iterable[T], buffer_size: int, seed: int) -> Iterator[T]:
    """Shuffle rows within a buffer. Each row is sampled from the next `buffer_size` rows that are not sampled yet."""
    # Python guarantees only for random() that its numbers are the same in every version.
    draw = random.Random(seed).random
    rows = iter(rows)
    buffer = list(itertools.islice(rows, buffer_size))
    for row in rows:
        place = int(draw() * len(buffer))
        yield buffer[place]
        buffer[place] = row
    while buffer:
        place = int(draw() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


class StreamOrder:
    """One pass over a stream, in blocks of prompts. Only prompts that are still needed stay in memory."""

    def __init__(self, stream: PromptStream, seed: int | None) -> None:
        self.stream = stream
        self.seed = seed
        self.reading: Iterator[tuple[int, Measured]] | None = None
        self.start = 0
        self.window: deque[tuple[int, Prompt]] = deque()
        self.lengths = LengthCount()
        self.logged_lengths = LengthCount()

    def take(self, start: int, size: int) -> tuple[list[Prompt], int]:
        """Get up to `size` prompts, starting at position `start`. Returns: the prompts, and the position after them."""
        if self.reading is None or start < self.start:
            self.reading = self.stream.read(self.seed, start)
            self.window.clear()
            self.lengths = LengthCount()  # rows that are read again must not be counted twice
        self.start = start
        while self.window and self.window[0][0] < start:
            self.window.popleft()
        while len(self.window) < size and self._read_one():
            pass
        block = list(itertools.islice(self.window, size))
        return [prompt for _, prompt in block], block[-1][0] + 1 if block else start

    def share(self, block: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of a part of a block."""
        return list(block)

    def _read_one(self) -> bool:
        """Read a row, and append its prompt to `window` unless the row is dropped or before `start`.

        Returns:
            False at the end of the data, otherwise True.
        """
        assert self.reading is not None
        try:
            position, measured = next(self.reading)
        except StopIteration:
            self._log_lengths("the stream")
            return False
        except BaseException:
            self.reading = None  # a generator is exhausted once it has raised, but the data has not ended
            raise
        limit, prompt = self.stream.limit, measured.prompt
        if limit is not None:
            if prompt is None and limit.overlong_prompts == "error":
                limit.check([measured], of="the stream")
            self.lengths = self.lengths.with_one(measured.num_tokens, limit.max_prompt_length)
            # The number of prompts that are too long is logged at the end of the data, which a run with max_steps may
            # never reach. Therefore this number is also logged at the first such prompt, and whenever it has doubled.
            if self.lengths.num_too_long >= max(1, 2 * self.logged_lengths.num_too_long):
                self._log_lengths("the stream so far")
        if prompt is not None:
            self.stream.images.add(prompt)
            self.stream.images.warn(so_far=True)
            log_prompt_columns([prompt], self.stream.logged_lines)
            if position >= self.start:
                self.window.append((position, prompt))
        return True

    def _log_lengths(self, of: str) -> None:
        """Log how many prompts were dropped or truncated, unless the counts are unchanged since the last log."""
        if self.stream.limit is not None and self.lengths.num_too_long and self.lengths != self.logged_lengths:
            self.stream.limit.warn(self.lengths, of=of)
            self.logged_lengths = self.lengths


Prompts: TypeAlias = Sequence[Prompt] | LazyPrompts | PromptStream
"""The prompts of a dataset: a list, or an object that reads prompts when they are used."""


def known_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts that are known before training.

    Every prompt of a list is known. For other data, only the first prompts are known.
    """
    return prompts.head() if isinstance(prompts, LazyPrompts | PromptStream) else list(prompts)


def source_names(prompts: Prompts) -> list[str]:
    """Sorted names of the sources.

    If `prompts` is a stream with `sources`, the function returns all names in `sources`. Otherwise, the function
    returns the sources of the prompts in `known_prompts(prompts)`.
    """
    if isinstance(prompts, PromptStream) and prompts.sources:
        return sorted(set(prompts.sources))
    return sorted({prompt.source for prompt in known_prompts(prompts)})


def as_prompts(data: Any, convert: Callable[[Any, int], Prompt], **stream: int) -> Prompts:
    """Convert a dataset to prompts. A list is converted immediately, and other datasets are converted lazily.

    Each prompt gets a unique index. Prompts of a list keep their indices if these are unique. `stream` has keyword
    arguments of `PromptStream`, for data without a length.

    Raises:
        TypeError: If `data` is not a dataset, or can be read only once.
        ValueError: If `data` is empty.
    """
    if isinstance(data, DataLoader):
        raise TypeError("PromptSource makes batches itself: give it the dataset, not a DataLoader (loader.dataset).")
    if isinstance(data, PromptStream):
        return data
    if isinstance(data, Mapping | str) or (not isinstance(data, Iterable) and not hasattr(data, "__getitem__")):
        raise TypeError(
            f"PromptSource needs a dataset: a list of prompts, texts or rows, or a datasets.Dataset, got "
            f"{type(data).__name__} ({data!r:.80}). Put a single row into a list."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"PromptSource reads the data once per epoch, and a {type(data).__name__} can be read only once. Give a "
            "list, or a datasets.IterableDataset (datasets.IterableDataset.from_generator)."
        )
    convert_at = functools.partial(_convert_at, convert)
    if not hasattr(data, "__len__"):
        return stream_rows(cast(Iterable[Any], without_decoding(data)), convert_at, **stream)
    if not len(data):
        raise ValueError("The prompt source has no prompts: the dataset is empty.")
    if isinstance(data, list | tuple):
        # Not copied: the source shares the list and its prompts with the caller.
        prompts: Sequence[Prompt] = data
        if not all(isinstance(prompt, Prompt) and prompt.index >= 0 for prompt in data):
            prompts = [convert(row, number) for number, row in enumerate(data)]
            log_prompt_columns(prompts, set())
        if len({prompt.index for prompt in prompts}) < len(prompts):  # for example two mixtures in one list
            prompts = [replace(prompt, index=number) for number, prompt in enumerate(prompts)]
        return prompts
    return data if isinstance(data, LazyPrompts) else LazyPrompts(with_cells(data, "the dataset"), convert_at)


def _convert_at(convert: Callable[[Any, int], Prompt], row: Any, number: int) -> Prompt:
    """Convert a row to a prompt whose index is the row's position."""
    prompt = convert(row, number)
    return prompt if prompt.index == number else replace(prompt, index=number)


def stream_rows(rows: Iterable[T], convert: Callable[[T, int], Prompt], **options: Any) -> PromptStream:
    """Create a stream over anything that can be iterated repeatedly."""
    return PromptStream([functools.partial(_open, rows, functools.partial(_measure, convert))], **options)


def _open(rows: Iterable[T], convert: Callable[[T, int], Measured]) -> Iterator[tuple[T, Callable[[T, int], Measured]]]:
    """Pair every row with the function that converts it."""
    return ((row, convert) for row in rows)


def _measure(convert: Callable[[T, int], Prompt], row: T, number: int) -> Measured:
    """Convert a row to a prompt, without measuring its length."""
    return Measured(convert(row, number))
