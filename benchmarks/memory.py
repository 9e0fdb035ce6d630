"""Peak memory of a function, as measured by torch's profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None]) -> int:
    """The largest number of bytes that `work` has allocated on the CPU at once, beyond those allocated before."""
    gc.collect()  # garbage that is freed during `work` would be subtracted, although it was allocated before
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
