"""Counts the calls of rewards that are sent to workers."""

from typing import Any

import pytest

from grpo_lightning.rewards.workers import WorkerPool


class Calls:
    """Counts the calls that are sent to workers, and those that are sent early and not used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_sent = self.num_early = self.num_unused = 0
        send, submit_early, cancel_early = WorkerPool._send, WorkerPool.submit_early, WorkerPool.cancel_early

        def counted_send(pool: WorkerPool, *args: Any) -> Any:
            self.num_sent += 1
            return send(pool, *args)

        def counted_early(pool: WorkerPool, *args: Any) -> None:
            self.num_early += 1
            submit_early(pool, *args)

        def counted_cancel(pool: WorkerPool) -> int:
            count = cancel_early(pool)
            self.num_unused += count
            return count

        monkeypatch.setattr(WorkerPool, "_send", counted_send)
        monkeypatch.setattr(WorkerPool, "submit_early", counted_early)
        monkeypatch.setattr(WorkerPool, "cancel_early", counted_cancel)
