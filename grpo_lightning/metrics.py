"""Metrics of an optimizer step: sums and counts, so that micro-batches and ranks of different size average right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor


class StepMetrics:
    """Collects metrics over the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self.sums: dict[str, float | Tensor] = {}
        self.counts: dict[str, float | Tensor] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add to a mean: `total` is a sum over `count` items."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to a quantity that is reported as its sum over the step."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = 1.0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_sum(f"time/{name}", time.perf_counter() - start)

    def pop(self) -> dict[str, float]:
        """The metrics collected since the last call. A mean over nothing is left out: it has no value."""
        values = {name: float(total) / float(self.counts[name]) for name, total in self.sums.items() if self.counts[name] > 0}
        self.sums, self.counts = {}, {}
        return values
