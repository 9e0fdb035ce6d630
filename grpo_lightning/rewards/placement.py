"""Which rewards run in workers, and which stay in the training process, and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.workers import RewardWorkers, WorkerPool, pickled

log = logging.getLogger(__name__)

REMEDY = (
    "To run it in a worker, define it in a module that can be imported, with no lambda, file or connection in it, and "
    "keep no state between calls. To keep it here and silence this warning, set in_process = True on it: it is then "
    "called once per batch."
)
"""What to do about a reward that is not called in a worker."""


class Placement:
    """The workers of a set of rewards, started when they are first asked for.

    Picklable; a copy starts workers of its own.

    Args:
        rewards: All of the run.
        settings: Of the workers; None, or none of them: all rewards stay in the training process.
    """

    def __init__(self, rewards: Sequence[WeightedReward], settings: RewardWorkers | None) -> None:
        self.rewards = rewards
        self.settings = settings
        self._pool: WorkerPool | None = None
        self._numbers: dict[str, int] | None = None
        self._is_checked = False
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        """Without processes."""
        return vars(self) | {"_pool": None, "_numbers": None, "_is_checked": False}

    @property
    def limits(self) -> RewardWorkers | None:
        """What calls may take; None without limits."""
        return self.settings if self.settings is not None and self.settings.num_workers != 0 else None

    def start(self, num_local_ranks: int = 1) -> None:
        """Have the rewards loaded, if any can go to workers; returns at once.

        Args:
            num_local_ranks: That share the machine.
        """
        if self._numbers is not None and self._process == os.getpid():
            return
        self._numbers, self._pool, self._is_checked = {}, None, False
        self._process = os.getpid()  # a fork of it has none of its threads
        if self.limits is None:
            return
        sent: list[bytes] = []
        for reward in self.rewards:
            if reward.in_process:  # by its own word
                continue
            data, why = pickled(reward)
            if data is None:
                self._say(reward.name, why)
                continue
            self._numbers[reward.name] = len(sent)
            sent.append(data)
        if sent:
            self._pool = WorkerPool(sent, self.limits, self.limits.number(num_local_ranks))

    def place(self, reward: WeightedReward) -> tuple[WorkerPool, int] | None:
        """The workers, and the reward's number there; None if it stays in the training process.

        Raises:
            RuntimeError: If the workers do not start.
        """
        self.start()
        assert self._numbers is not None
        if self._pool is not None and not self._is_checked:
            self._is_checked = True
            names = {number: name for name, number in self._numbers.items()}
            for number, problem in enumerate(self._pool.problems()):
                if problem is not None:
                    self.keep(names[number], f"it cannot be loaded in another process ({problem})")
        place = self._numbers.get(reward.name)
        return None if self._pool is None or place is None else (self._pool, place)

    def keep(self, name: str, why: str) -> None:
        """Keep a reward in the training process from now on, and say why."""
        assert self._numbers is not None
        if self._numbers.pop(name, None) is not None:
            self._say(name, why)

    def _say(self, name: str, why: str) -> None:
        """Warn once: no limit holds in the training process."""
        log.warning(
            "Reward %r runs in the training process without time or memory limits: %s.%s",
            name,
            why,
            f" {REMEDY}" if hasattr(os, "fork") else "",
        )
