"""Asynchronous rollouts: groups of the next cycles are sampled in the background while the policy trains.

At the start of cycle k, the groups of this cycle, which were requested S cycles earlier (`model.max_staleness`), are
taken, and those of cycle k + S are requested, from the weights that cycle k starts with. So completions are trained on
with weights that are at most S cycles newer than those that sampled them. Groups in flight are not part of
checkpoints: a resumed run samples them again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from grpo_lightning.core import ranks
from grpo_lightning.core.types import Group, Prompt


class Sampled(NamedTuple):
    """The groups of a request, and the seconds that sampling took."""

    groups: list[Group]
    seconds: float


class Request(NamedTuple):
    """A prompt in flight."""

    sampled: Future[Sampled]
    position: int
    """Position of the prompt among those that were requested together."""

    rollout_index: int
    """Index of the rollout that was being trained on when the prompt was requested."""


class InFlight:
    """Groups that are sampled in the background, by the keys of their prompts."""

    def __init__(self) -> None:
        self.requests: dict[int | str, deque[Request]] = {}
        """By the key of a prompt: its requests, oldest first. Several epochs may have requested it."""
        self.seconds = 0.0
        """Seconds that it took to sample the groups which `take` has returned last."""

    def request(self, prompts: Sequence[Prompt], sample: Callable[[], list[Group]], rollout_index: int) -> None:
        """Start sampling in the background.

        Args:
            prompts: N prompts.
            sample: Samples their N groups. It is called in another thread.
            rollout_index: Index of the present rollout.
        """
        future = in_background(lambda: timed(sample))
        for position, prompt in enumerate(prompts):
            self.requests.setdefault(prompt.key, deque()).append(Request(future, position, rollout_index))

    def forget(self, oldest: int) -> None:
        """Forget requests from before rollout `oldest`.

        The data loader has skipped their prompts, for example because `limit_train_batches` ended the epoch.
        """
        for key, requests in list(self.requests.items()):
            if kept := deque(request for request in requests if request.rollout_index >= oldest):
                self.requests[key] = kept
            else:
                del self.requests[key]

    def lacking(self, prompts: Iterable[Prompt]) -> list[int]:
        """Positions of the prompts that are not in flight; a prompt that occurs twice has to be in flight twice."""
        seen: Counter[int | str] = Counter()
        positions = []
        for position, prompt in enumerate(prompts):
            seen[prompt.key] += 1
            if seen[prompt.key] > len(self.requests.get(prompt.key, ())):
                positions.append(position)
        return positions

    def take(self, prompts: Sequence[Prompt]) -> list[Group | None]:
        """Wait for the groups of N prompts; None for prompts that are not in flight. Collective.

        Raises:
            Exception: The error of this rank's background thread, with its traceback.
            RuntimeError: On the other ranks.
        """
        failure: Exception | None = None
        groups: list[Group | None] = []
        used: dict[int, Sampled] = {}
        try:
            for prompt in prompts:
                requests = self.requests.get(prompt.key)
                if not requests:
                    groups.append(None)
                    continue
                sampled, position, _ = requests.popleft()
                used[id(sampled)] = sampled.result()
                groups.append(used[id(sampled)].groups[position])
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            failure = error
        described = None if failure is None else f"{type(failure).__name__}: {failure}"
        for rank, problem in enumerate(ranks.gather_objects(described)):
            if problem is not None:
                raise failure or RuntimeError(f"Sampling in the background failed on rank {rank}: {problem}")
        self.seconds = sum(sampled.seconds for sampled in used.values())
        return groups


def timed(sample: Callable[[], list[Group]]) -> Sampled:
    """Sample, and measure the seconds."""
    start = time.perf_counter()
    return Sampled(sample(), time.perf_counter() - start)


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own, which nothing waits for: not even the end of the process does."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future
