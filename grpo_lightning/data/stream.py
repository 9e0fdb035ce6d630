"""A data set that is read as it is used: of unknown length, larger than memory, shuffled within a buffer."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.formats import log_prompt_columns
from grpo_lightning.data.images.counts import ImageCounts
from grpo_lightning.data.lengths import LengthCount, LengthLimit, Measured
from grpo_lightning.data.parallel import in_threads

T = TypeVar("T")

Part = Callable[[], Iterable[tuple[Any, Callable[[Any, int], Measured]]]]
"""Opens one data set: its rows, each with what makes row and number a prompt."""


class PromptStream:
    """Prompts that are read when they are used, part after part, as often as they are asked for.

    Args:
        parts: The data sets.
        shuffle_buffer: Rows kept to draw the next one from; 1 keeps the order.
        num_workers: Threads that read ahead.
        limit: The limit the parts measure by, to say how many prompts it concerned.
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
        self.said_empty: dict[str, int] = {}
        """Rows by source that were said to be asked without an image."""

        self.said_unread: set[str] = set()
        """Sources of which it was said that a column of images is not read."""

        self.logged_columns: set[str] = set()
        """Sources whose prompt column was logged."""

        self._heads: dict[int, list[Prompt]] = {}

    def order(self, seed: int | None) -> StreamOrder:
        """One pass over the data: shuffled by `seed`, or as it is for None."""
        return StreamOrder(self, seed)

    def head(self, size: int = 64) -> list[Prompt]:
        """The first prompts of every part, unshuffled: what can be known of the data before training. Read once."""
        if size not in self._heads:
            self._heads[size] = self._read_head(size)
        return list(self._heads[size])

    def _read_head(self, size: int) -> list[Prompt]:
        """Read the first prompts of every part. Raises: ValueError if one is too long, where that is an error."""
        measured = [
            convert(row, number)
            for part in self.parts
            for number, (row, convert) in zip(range(size), part(), strict=False)
        ]
        if self.limit is not None and self.limit.overlong_prompts == "error":
            self.limit.check(measured, of=f"the first {len(measured)} of the stream")
        return [m.prompt for m in measured if m.prompt is not None]

    def read(self, seed: int | None, start: int) -> Iterator[tuple[int, Measured]]:
        """The positions and prompts of the order of `seed` from position `start` on.

        A position counts rows, also those that are left out: what lies before `start` is read, but not parsed.
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
        self.said = LengthCount()
        """The counts that the log has."""

        self.images = ImageCounts()
        self.said_left_out = 0

    def take(self, start: int, size: int) -> tuple[list[Prompt], int]:
        """Up to `size` prompts from position `start` on, fewer at the end, and the position after them."""
        if self.reading is None or start < self.start:
            self.reading = self.stream.read(self.seed, start)
            self.window.clear()
            self.lengths, self.images = LengthCount(), ImageCounts()  # rows that are read again must not count twice
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
            self._report("the stream")
            self._report_images()
            return False
        except BaseException:
            self.reading = None  # a reader that has raised is over, which must not pass for the end of the data
            raise
        self.images.add(measured)
        for source in self.images.mixed.keys() - self.stream.said_empty.keys():
            self._say_empty(source, so_far=True)
        for source in self.images.unread.keys() - self.stream.said_unread:
            self.images.warn_unread(source, so_far=True)
            self.stream.said_unread.add(source)
        if self.stream.limit is not None:
            if measured.prompt is None and self.stream.limit.overlong_prompts == "error":
                self.stream.limit.check([measured], of="the stream")
            self.lengths = self.lengths.with_one(measured.num_tokens, self.stream.limit.max_prompt_length)
            # A run that ends by max_steps never comes to the end of the data: said at the first and at doubling counts.
            if self.lengths.num_too_long >= max(1, 2 * self.said.num_too_long):
                self._report("the stream so far")
        if measured.prompt is not None:
            log_prompt_columns([measured.prompt], self.stream.logged_columns)
        if measured.prompt is not None and position >= self.start:
            self.window.append((position, measured.prompt))
        return True

    def _report(self, of: str) -> None:
        """Say how many prompts were left out or cut, unless the log has just these counts."""
        if self.stream.limit is not None and self.lengths.num_too_long and self.lengths != self.said:
            self.stream.limit.warn(self.lengths, of=of)
            self.said = self.lengths

    def _report_images(self) -> None:
        """At the end of a pass, say how many rows were left out for their images, or asked without one."""
        left_out = self.images.left_out.total()
        if left_out and left_out != self.said_left_out:
            self.images.warn_left_out("the stream")
            self.said_left_out = left_out
        for source, count in self.images.mixed.items():
            if count > self.stream.said_empty[source]:
                self._say_empty(source)

    def _say_empty(self, source: str, *, so_far: bool = False) -> None:
        """Say that rows of a source are asked without an image: at the first, and when all are counted."""
        self.images.warn_empty(source, so_far=so_far)
        self.stream.said_empty[source] = self.images.empty[source]


def stream_of(rows: Iterable[T], convert: Callable[[T, int], Prompt], **options: Any) -> PromptStream:
    """A stream over anything that can be iterated again and again."""
    return PromptStream([functools.partial(_open, rows, functools.partial(_measure, convert))], **options)


def _open(rows: Iterable[T], convert: Callable[[T, int], Measured]) -> Iterator[tuple[T, Callable[[T, int], Measured]]]:
    """Every row with what converts it."""
    return ((row, convert) for row in rows)


def _measure(convert: Callable[[T, int], Prompt], row: T, number: int) -> Measured:
    """A row as a prompt of any length."""
    return Measured(convert(row, number))
