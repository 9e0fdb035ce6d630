"""The prompts of a data set in the order of an epoch: in memory, read lazily, or streamed.

A stream has an unknown length, may be larger than memory, and is shuffled within a buffer.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.images.preflight import ImageCounts
from grpo_lightning.data.images.references import with_cells, without_decoding
from grpo_lightning.data.lengths import LengthCount, LengthLimit, Measured
from grpo_lightning.data.parallel import in_threads

T = TypeVar("T")

Part: TypeAlias = Callable[[], Iterable[tuple[Any, Callable[[Any, int], Measured]]]]
"""Opens one data set: its rows, each with the function that makes row and number a prompt."""


class LazyPrompts:
    """The prompts of a data set with a length (a `datasets.Dataset`, a torch `Dataset`), each read when it is used."""

    def __init__(self, rows: Any, convert: Callable[[Any, int], Prompt]) -> None:
        self.rows = rows
        self.convert = convert
        self.logged_columns: set[str] = set()
        self._heads: dict[int, list[Prompt]] = {}

    def __len__(self) -> int:
        """Prompts."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        """One prompt. Raises: IndexError behind the last, so that it can be iterated."""
        number = range(len(self))[index]
        return self.convert(self.rows[number], number)

    def head(self, size: int = 64) -> list[Prompt]:
        """The first prompts, read once: what is known of the data without reading all of it."""
        if size not in self._heads:
            self._heads[size] = [self[number] for number in range(min(size, len(self)))]
            log_prompt_columns(self._heads[size], self.logged_columns)
        return list(self._heads[size])


class ListedOrder:
    """One pass over prompts of known number: blocks of their numbers by position."""

    def __init__(self, prompts: Sequence[Prompt] | LazyPrompts, seed: int | None) -> None:
        self.prompts = prompts
        self.numbers: Sequence[int] = range(len(prompts))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.numbers = torch.randperm(len(prompts), generator=generator).tolist()

    def take(self, start: int, size: int) -> tuple[Sequence[int], int]:
        """Up to `size` numbers from position `start` on, fewer at the end, and the position after them."""
        return self.numbers[start : start + size], min(start + size, len(self.numbers))

    def share(self, block: Sequence[int]) -> list[Prompt]:
        """The prompts of a part of a block: only these are read."""
        return [self.prompts[number] for number in block]


class PromptStream:
    """Prompts that are read when they are used, part after part, in every pass anew.

    Args:
        parts: The data sets.
        shuffle_buffer: Rows kept to draw the next one from; 1 keeps the order.
        num_workers: Threads that read ahead.
        limit: The limit the parts measure by, to log how many prompts it concerned.
        sources: The names of the sources the prompts come from, if they are known without reading.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        shuffle_buffer: int = 1000,
        num_workers: int = 0,
        limit: LengthLimit | None = None,
        sources: Sequence[str] = (),
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
        self.images = ImageCounts()
        self.logged_columns: set[str] = set()
        """Sources whose prompt column was logged."""

        self._heads: dict[int, list[Prompt]] = {}

    def order(self, seed: int | None) -> StreamOrder:
        """One pass over the data: shuffled by `seed`, or as it is for None."""
        return StreamOrder(self, seed)

    def head(self, size: int = 64) -> list[Prompt]:
        """The first prompts of every part, unshuffled, read once: what is known of the data before training.

        Raises:
            ValueError: If one is too long, where that is an error.
        """
        if size not in self._heads:
            measured = [
                convert(row, number)
                for part in self.parts
                for number, (row, convert) in zip(range(size), part(), strict=False)
            ]
            if self.limit is not None and self.limit.overlong_prompts == "error":
                self.limit.check(measured, of=f"the first {len(measured)} of the stream")
            self._heads[size] = [m.prompt for m in measured if m.prompt is not None]
        return list(self._heads[size])

    def read(self, seed: int | None, start: int) -> Iterator[tuple[int, Measured]]:
        """The positions and prompts of the order of `seed` from position `start` on.

        A position counts rows, also those that are left out: rows before `start` are read, but not parsed.
        """
        rows: Iterator[Any] = enumerate(itertools.chain.from_iterable(part() for part in self.parts))
        if seed is not None:
            rows = shuffled(rows, self.shuffle_buffer, seed)
        return in_threads(_convert, itertools.islice(enumerate(rows), start, None), self.num_workers)


def _convert(item: tuple[int, tuple[int, tuple[Any, Callable[[Any, int], Measured]]]]) -> tuple[int, Measured]:
    """A row as a prompt that knows its place in the unshuffled data."""
    position, (number, (row, convert)) = item
    return position, convert(row, number)


def shuffled(rows: Iterable[T], buffer_size: int, seed: int) -> Iterator[T]:
    """The rows in an order that follows from `seed`: each is drawn from the next `buffer_size` ones not yet drawn."""
    # Only random() is promised to give the same numbers in every Python version.
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
    """One pass over a stream: blocks of prompts by position, of which only those still needed are kept."""

    def __init__(self, stream: PromptStream, seed: int | None) -> None:
        self.stream = stream
        self.seed = seed
        self.reading: Iterator[tuple[int, Measured]] | None = None
        self.start = 0
        self.window: deque[tuple[int, Prompt]] = deque()
        self.lengths = LengthCount()
        self.logged_lengths = LengthCount()

    def take(self, start: int, size: int) -> tuple[list[Prompt], int]:
        """Up to `size` prompts from position `start` on, fewer at the end, and the position after them."""
        if self.reading is None or start < self.start:
            self.reading = self.stream.read(self.seed, start)
            self.window.clear()
            self.lengths = LengthCount()  # rows that are read again must not count twice
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
        """Read a row into the window, unless it is left out or lies before it; False at the end of the data."""
        assert self.reading is not None
        try:
            position, measured = next(self.reading)
        except StopIteration:
            self._log_lengths("the stream")
            return False
        except BaseException:
            self.reading = None  # a reader that has raised is over, which must not pass for the end of the data
            raise
        limit, prompt = self.stream.limit, measured.prompt
        if limit is not None:
            if prompt is None and limit.overlong_prompts == "error":
                limit.check([measured], of="the stream")
            self.lengths = self.lengths.with_one(measured.num_tokens, limit.max_prompt_length)
            # A run that ends by max_steps never reaches the end of the data: log at the first and at doubling counts.
            if self.lengths.num_too_long >= max(1, 2 * self.logged_lengths.num_too_long):
                self._log_lengths("the stream so far")
        if prompt is not None:
            self.stream.images.add(prompt)
            self.stream.images.warn(so_far=True)
            log_prompt_columns([prompt], self.stream.logged_columns)
            if position >= self.start:
                self.window.append((position, prompt))
        return True

    def _log_lengths(self, of: str) -> None:
        """Log how many prompts were left out or cut, unless the log has just these counts."""
        if self.stream.limit is not None and self.lengths.num_too_long and self.lengths != self.logged_lengths:
            self.stream.limit.warn(self.lengths, of=of)
            self.logged_lengths = self.lengths


Prompts: TypeAlias = Sequence[Prompt] | LazyPrompts | PromptStream
"""The prompts of a data set: a list, or read when they are used."""


def known_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts known without reading a data set: all of a list, the first of what is read when used."""
    return prompts.head() if isinstance(prompts, LazyPrompts | PromptStream) else list(prompts)


def source_names(prompts: Prompts) -> list[str]:
    """The names of the data's sources, sorted: all of a mixture, of other streams those of the first prompts."""
    if isinstance(prompts, PromptStream) and prompts.sources:
        return sorted(set(prompts.sources))
    return sorted({prompt.source for prompt in known_prompts(prompts)})


def as_prompts(data: Any, convert: Callable[[Any, int], Prompt], **stream: int) -> Prompts:
    """The prompts of any data set: lists are converted now, others as they are used.

    Args:
        data: Prompts, rows or texts: a list, a data set with a length, or something that can be iterated repeatedly.
        convert: (row, number) -> prompt.
        stream: Settings of `PromptStream`.

    Raises:
        TypeError: If it is no data set, or can be read only once.
        ValueError: If it is empty.
    """
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
        return stream_rows(cast(Iterable[Any], without_decoding(data)), convert, **stream)
    if not len(data):
        raise ValueError("The prompt source has no prompts: the data set is empty.")
    if isinstance(data, list | tuple):
        # Prompts stay the objects they are, and the list the one the caller has.
        if all(isinstance(prompt, Prompt) and prompt.index >= 0 for prompt in data):
            return data
        prompts = [convert(row, number) for number, row in enumerate(data)]
        log_prompt_columns(prompts, set())
        return prompts
    return data if isinstance(data, LazyPrompts) else LazyPrompts(with_cells(data, "the data set"), convert)


def stream_rows(rows: Iterable[T], convert: Callable[[T, int], Prompt], **options: Any) -> PromptStream:
    """A stream over anything that can be iterated repeatedly."""
    return PromptStream([functools.partial(_open, rows, functools.partial(_measure, convert))], **options)


def _open(rows: Iterable[T], convert: Callable[[T, int], Measured]) -> Iterator[tuple[T, Callable[[T, int], Measured]]]:
    """Every row with the function that converts it."""
    return ((row, convert) for row in rows)


def _measure(convert: Callable[[T, int], Prompt], row: T, number: int) -> Measured:
    """A row as a prompt of any length."""
    return Measured(convert(row, number))
