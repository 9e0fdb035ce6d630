"""The event loop of async rewards, environments and tools. It runs in a separate thread."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable
from typing import Any


def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process."""
    return _event_loop(os.getpid())


@functools.cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Start an event loop. It runs in its own thread, because notebooks run a loop in the main thread.

    A forked process needs a loop of its own, so `process_id` is the cache key.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"async-{process_id}", daemon=True).start()
    return loop


def wait_for(value: Any) -> Any:
    """Wait for an awaitable in sync code, and return its result. A value that is not awaitable is returned unchanged.

    Raises:
        RuntimeError: If the thread of the event loop calls `wait_for` with an awaitable.
        RuntimeError: If the awaitable raises SystemExit.
    """
    if not isinstance(value, Awaitable):
        return value

    async def finish() -> Any:
        try:
            return await value
        except SystemExit as error:  # it would end the thread of the loop
            raise RuntimeError(f"SystemExit: {error}") from error

    if _is_in_loop():
        getattr(value, "close", lambda: None)()
        raise RuntimeError(
            "An async function is called by a sync method within an async method: await it in the async method instead."
        )
    return asyncio.run_coroutine_threadsafe(finish(), event_loop()).result()


def _is_in_loop() -> bool:
    """True in the thread of the event loop."""
    try:
        return asyncio.get_running_loop() is event_loop()
    except RuntimeError:
        return False
