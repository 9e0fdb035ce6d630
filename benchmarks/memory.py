"""How much memory a piece of work takes, as torch's profiler sees it."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None]) -> int:
    """The largest number of bytes on the CPU that were allocated at once, beyond those there before."""
    gc.collect()  # what is freed inside would be subtracted, though it was allocated before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def mib(num_bytes: float) -> int:
    """Bytes in MiB."""
    return round(num_bytes / 2**20)
