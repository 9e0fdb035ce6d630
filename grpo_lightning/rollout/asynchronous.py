"""Asynchronous rollouts sample the groups of the next rollouts in the background while the policy trains.

A cycle is one rollout and all training on this rollout. S is `model.max_staleness`. At the start of cycle k, the groups
of cycle k are taken, and then the groups of cycle k + S are requested. The engine samples the groups of cycle
k + S with the weights that the policy has at the start of cycle k. At the start of a cycle, the policy's weights are
therefore at most S cycles newer than the weights that sampled the cycle's groups. Groups in flight have been requested,
but not taken yet. Checkpoints contain no groups in flight, so a resumed run samples these groups again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from grpo_lightning.core import ranks
from grpo_lightning.core.background import in_background
from grpo_lightning.core.types import Group, Prompt
from grpo_lightning.rollout.engine import Progress

log = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two checks of the decoding progress in the background."""


class Sampled(NamedTuple):
    """The groups of a request, and the seconds that sampling took."""

    groups: list[Group]
    seconds: float


class Request(NamedTuple):
    """A prompt in flight."""

    sampled: Future[Sampled]
    position: int
    """Position of the prompt among the prompts that were requested together."""

    rollout_index: int
    """Index of the rollout at whose beginning the prompt was requested."""


class InFlight:
    """Groups that are sampled in the background, by the keys of their prompts."""

    def __init__(self) -> None:
        self.requests: dict[int | str, deque[Request]] = {}
        """Requests by the key of their prompt, oldest first."""
        self.seconds = 0.0
        """Seconds that sampling took for the groups of the last `take`."""
        self.failure: Exception | None = None
        """The error that made the last call of `take` lose groups on this rank."""
        self.running: list[Future[Sampled]] = []
        """The rollouts that are being sampled, including those whose requests were forgotten."""
        self.latest: tuple[int, int] | None = None
        """The newest decoding progress."""

    def report(self, done: int, total: int) -> None:
        """Store the decoding progress. Engines call this in another thread, in which callbacks must not be called."""
        self.latest = (done, total)

    def request(self, prompts: Sequence[Prompt], sample: Callable[[], list[Group]], rollout_index: int) -> None:
        """Start sampling in the background."""
        future = in_background(lambda: time_sampling(sample))
        self.running.append(future)
        for position, prompt in enumerate(prompts):
            self.requests.setdefault(prompt.key, deque()).append(Request(future, position, rollout_index))

    def forget(self, oldest: int) -> None:
        """Forget requests that were made before rollout `oldest`. The data loader has skipped their prompts."""
        self._keep(lambda request: request.rollout_index >= oldest)

    def _keep(self, is_kept: Callable[[Request], bool]) -> None:
        """Forget the requests for which `is_kept` is False."""
        for key, requests in list(self.requests.items()):
            if kept := deque(request for request in requests if is_kept(request)):
                self.requests[key] = kept
            else:
                del self.requests[key]

    def lacking(self, prompts: Iterable[Prompt]) -> list[int]:
        """Positions of the prompts that are not in flight.

        If a prompt occurs twice in `prompts` but is in flight only once, the result has the position of the second
        occurrence.
        """
        seen: Counter[int | str] = Counter()
        positions = []
        for position, prompt in enumerate(prompts):
            seen[prompt.key] += 1
            if seen[prompt.key] > len(self.requests.get(prompt.key, ())):
                positions.append(position)
        return positions

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all sampling in the background has ended, and report progress for callbacks and the watchdog."""
        seen = None
        while self.running:
            done, _ = wait(self.running, timeout=POLL, return_when=FIRST_COMPLETED)
            self.running = [future for future in self.running if future not in done]
            if self.latest is not seen:
                seen = self.latest
                if seen is not None and progress is not None:
                    progress(*seen)

    def take(self, prompts: Sequence[Prompt], progress: Progress | None = None) -> list[Group | None]:
        """Wait until all sampling in the background has ended, and take the group of each of N prompts.

        Collective: every rank must call `take`. If sampling has failed for a prompt, `take` forgets every prompt that
        was requested in the same call of `request` as the failed prompt, and all ranks log a warning.

        Returns:
            N groups; None for each prompt that was not in flight, or for which sampling has failed.
        """
        self.wait(progress)
        self.failure, self.seconds = None, 0.0
        groups: list[Group | None] = []
        for prompt in prompts:
            requests = self.requests.get(prompt.key)
            group = None
            if requests:
                future, position, _ = requests.popleft()
                try:
                    sampled = future.result()
                    group = sampled.groups[position]
                    self.seconds += sampled.seconds / len(sampled.groups)
                except Exception as error:  # noqa: BLE001 - raised by `second_attempt`, if that fails too
                    self.failure = error
                    self._keep(lambda request, failed=future: request.sampled is not failed)  # type: ignore[misc]
            groups.append(group)
        described = None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        for rank, problem in enumerate(ranks.gather_objects(described)):
            if problem is not None:
                log.warning(
                    "A rollout that was sampled during training has been lost on rank %d: %s The prompts of this cycle "
                    "are sampled again before training continues. If that fails too, the run ends.",
                    rank,
                    problem if problem.endswith(".") else f"{problem}.",
                )
        return groups

    @contextlib.contextmanager
    def second_attempt(self) -> Iterator[None]:
        """Context in which lost groups are sampled again. If this fails too, both errors are shown."""
        failure, self.failure = self.failure, None
        try:
            yield
        except Exception as error:
            if failure is not None:
                show_first(failure, error)
            raise


def show_first(earlier: BaseException, error: BaseException) -> None:
    """Show the traceback of an earlier error above the tracebacks of `error` and its causes.

    Python itself does not show the earlier error if `error` has a cause of its own (`raise ... from`).
    """
    while error is not earlier:
        inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if inner is None:
            error.__context__, error.__suppress_context__ = earlier, False
            return
        error = inner


def time_sampling(sample: Callable[[], list[Group]]) -> Sampled:
    """Sample, and measure the seconds."""
    start = time.perf_counter()
    return Sampled(sample(), time.perf_counter() - start)
