"""Work done by other processes or ahead by threads: same results in the same order for any number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
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
    """`function(item)` for every item, computed ahead of use by `num_workers` threads; 0 computes it when used.

    One more thread reads the items. At most `READ_AHEAD` items per thread are ahead of their use. An error of `items`
    or `function` is raised where its result would have been. The threads end with the iterator.
    """
    if num_workers == 0:
        return (function(item) for item in items)
    return _read_ahead(function, iter(items), num_workers)


def _read_ahead(function: Callable[[T], R], items: Iterator[T], num_workers: int) -> Iterator[R]:
    """`in_threads` with threads."""
    reader, workers = ThreadPoolExecutor(1), ThreadPoolExecutor(num_workers)

    def compute(item: Future[Any]) -> Any:
        return _END if item.result() is _END else function(item.result())

    def submit() -> Future[Any]:
        return workers.submit(compute, reader.submit(next, items, _END))

    try:
        waiting = deque(submit() for _ in range(READ_AHEAD * num_workers))
        while (result := waiting.popleft().result()) is not _END:
            waiting.append(submit())
            yield result
    finally:
        for pool in (reader, workers):
            pool.shutdown(wait=False, cancel_futures=True)


_END = object()
