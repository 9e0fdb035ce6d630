"""Work done by other processes or ahead by threads: same results in the same order for any number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

READ_AHEAD = 16
"""Items that each thread may be ahead of their use."""

_function: Callable[[Any], Any] | None = None


def in_processes(function: Callable[[T], R], items: Sequence[T], num_proc: int) -> list[R]:
    """`[function(item) for item in items]`, by `num_proc` processes; 1 is this process.

    Args:
        function: Picklable. It is sent once per process: it may be as large as a tokenizer.
        items: Picklable.
        num_proc: Processes.

    Raises:
        Exception: What `function` raises for the first item that it raises for, in the order of the items.
    """
    if num_proc == 1 or len(items) < 2:
        return [function(item) for item in items]
    num_proc = min(num_proc, len(items))
    chunk = max(1, min(1000, len(items) // (4 * num_proc)))
    with ProcessPoolExecutor(num_proc, initializer=_receive, initargs=(function,)) as pool:
        try:
            return list(pool.map(_call, items, chunksize=chunk))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _receive(function: Callable[[Any], Any]) -> None:
    """Keep the function in this process."""
    global _function  # noqa: PLW0603 - a worker process has no other place between its tasks
    _function = function


def _call(item: Any) -> Any:
    """Apply the function that this process was given."""
    assert _function is not None
    return _function(item)


def in_threads(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """`function(item)` for every item, read and computed ahead of use by `num_workers` threads; 0 does it when used.

    What reading an item or `function` raises comes up where its result would have.
    """
    if num_workers == 0:
        return (function(item) for item in items)
    return _Ahead(function, iter(items), num_workers).results()


class _Ahead:
    """Threads that take items in turn, at most `READ_AHEAD` per thread ahead of what was used."""

    def __init__(self, function: Callable[[Any], Any], items: Iterator[Any], num_workers: int) -> None:
        self.function, self.items, self.num_workers = function, items, num_workers
        self.reading = threading.Lock()  # one thread at a time takes an item, and with it its number
        self.changed = threading.Condition()
        self.done: dict[int, tuple[Any, BaseException | None]] = {}
        self.num_taken = self.num_used = 0
        self.is_over = False  # nothing more is to be taken

    def results(self) -> Iterator[Any]:
        """The results in the order of the items. The threads end with it, also when it is given up."""
        for _ in range(self.num_workers):
            threading.Thread(target=self.work, daemon=True).start()
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.num_used in self.done or self._is_used_up())
                    if self.num_used not in self.done:
                        return
                    result, error = self.done.pop(self.num_used)
                    self.num_used += 1
                    self.changed.notify_all()
                if error is not None:
                    raise error
                yield result
        finally:
            with self.changed:
                self.is_over = True
                self.changed.notify_all()

    def work(self) -> None:
        """Take an item, compute, repeat."""
        while True:
            with self.reading:
                with self.changed:
                    self.changed.wait_for(lambda: self.is_over or not self._is_far_ahead())
                    if self.is_over:
                        return
                item, error = self._take()
                with self.changed:
                    if item is _END and error is None:
                        self.is_over = True
                        self.changed.notify_all()
                        return
                    number = self.num_taken
                    self.num_taken += 1
                    self.is_over = self.is_over or error is not None
            result = None
            if error is None:
                try:
                    result = self.function(item)
                except Exception as raised:  # noqa: BLE001 - raised again where the result would have been used
                    error = raised
            with self.changed:
                self.done[number] = (result, error)
                self.changed.notify_all()

    def _take(self) -> tuple[Any, BaseException | None]:
        """The next item, `_END` after the last, or what reading it raised."""
        try:
            return next(self.items, _END), None
        except Exception as error:  # noqa: BLE001 - raised again where the result would have been used
            return _END, error

    def _is_far_ahead(self) -> bool:
        """True if enough was taken that is not used yet."""
        return self.num_taken - self.num_used >= READ_AHEAD * self.num_workers

    def _is_used_up(self) -> bool:
        """True if nothing more will come."""
        return self.is_over and self.num_used == self.num_taken


_END = object()
