"""Calls in daemon threads, so that a call that hangs does not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Call a function in a separate daemon thread.

    A `ThreadPoolExecutor` is not used, because its threads are not daemons. The process would wait for them before it
    ends, even after Ctrl-C.

    Returns:
        The future of the call. If the call fails, the future's method `result` raises the error of the call, with the
        traceback.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future
