"""Parallel map, in worker processes or threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

READ_AHEAD = 16
"""Maximum number of results per thread that are computed before they are used."""

_function: Callable[[Any], Any] | None = None


def in_processes(function: Callable[[T], R], items: Sequence[T], num_proc: int) -> list[R]:
    """Compute `[function(item) for item in items]` in `num_proc` worker processes.

    If `num_proc` is 1, the calling process computes the list. Each worker process receives `function` only once, so
    `function` can hold a large object such as a tokenizer.

    Raises:
        Exception: The error of the first item on which `function` fails.
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
    """Store the function in the worker process."""
    global _function  # noqa: PLW0603 - state of a worker process between its tasks
    _function = function


def _call(item: Any) -> Any:
    """Apply the function stored in the worker process."""
    assert _function is not None
    return _function(item)


def in_threads(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """Yield `function(item)` for every item, computed in advance by `num_workers` threads.

    With 0 threads, each result is computed when it is used. Otherwise, one additional thread reads the items, and at
    most `READ_AHEAD` results per thread are computed in advance. If `items` or `function` raises an error, the iterator
    raises this error in place of the result.
    """
    if num_workers == 0:
        return (function(item) for item in items)
    return _read_ahead(function, iter(items), num_workers)


def _read_ahead(function: Callable[[T], R], items: Iterator[T], num_workers: int) -> Iterator[R]:
    """Implement `in_threads` for at least one worker."""
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
