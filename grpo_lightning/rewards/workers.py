"""Worker processes for rewards, with time and memory limits.

A reward that loops in C code does not release the interpreter, so neither a signal handler nor another thread can
interrupt it. Therefore the training process starts a supervisor process. The supervisor loads the rewards once, forks
the workers, sends calls to the workers, and kills workers whose calls time out:

    training process  -- calls -->  supervisor  -- one call at a time -->  workers
                      <- answers -              <------- answer ---------

`rewards/worker_processes.py` has the code of the supervisor and the workers.

A worker runs the code as it was at the start of the run, even if the source files have changed since then. A worker
calls rewards in its main thread, so a reward may use signal handlers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lightning.core.log_messages import WarnOnce
from grpo_lightning.rewards.base import WeightedReward

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Time limit for importing the rewards in the supervisor. The start of each worker has the same limit."""

CALLERS = frozenset(
    str(Path(__file__).parents[1] / name)
    for name in (
        "rewards/workers.py",
        "rewards/worker_processes.py",
        "rewards/scoring.py",
        "rewards/base.py",
        "environments/workers.py",
        "environments/method_calls.py",
    )
)
"""Files whose stack frames are left out of the tracebacks of rewards."""

START_SUPERVISOR = (
    "import sys; sys.path[:] = sys.argv[2:]; from grpo_lightning.rewards.worker_processes import supervise; "
    "supervise(int(sys.argv[1]))"
)

REMEDIES = {
    "Reward": (
        "To run it in a worker, define it in an importable module, without lambdas, open files or connections, and "
        "keep no state between calls. To keep it here and silence this warning, set in_process = True on it: it is "
        "then called once per batch."
    ),
    "Environment": (
        "To run it in a worker, define it in an importable module, without lambdas, open files or connections. To keep "
        "it here and silence this warning, set in_process = True on its class."
    ),
}
"""Advice for what does not run in a worker, by kind."""


@dataclass
class RewardWorkers:
    """Settings of the worker processes in which picklable sync rewards run."""

    num_workers: int | None = None
    """Worker processes per rank. Null means (available CPU cores / ranks of the machine), at least 2 and at most 8.
    With 0, all rewards run in the training process, without time and memory limits."""

    timeout_seconds: float = 30.0
    """Time limit of one call: one reward on the completions of one prompt."""

    step_timeout_seconds: float = 600.0
    """Time limit of all calls of a rank for a rollout together, including async rewards, from the end of sampling."""

    memory_gb: float = 4.0
    """Address space in GB that a worker may reserve in addition to the memory that it shares with the supervisor. Each
    subprocess has the same limit."""

    def __post_init__(self) -> None:
        """Check the ranges. Raises: ValueError naming the field, its value and the allowed range."""
        limits = [
            ("num_workers", self.num_workers is None or self.num_workers >= 0, "at least 0, or null"),
            ("timeout_seconds", self.timeout_seconds > 0, "above 0"),
            ("step_timeout_seconds", self.step_timeout_seconds >= self.timeout_seconds, "at least timeout_seconds"),
            ("memory_gb", self.memory_gb > 0, "above 0"),
        ]
        for name, is_valid, allowed in limits:
            if not is_valid:
                raise ValueError(f"reward_workers.{name} must be {allowed}, got {getattr(self, name)!r}.")

    def number(self, num_local_ranks: int = 1) -> int:
        """The number of workers per rank, if `num_local_ranks` ranks share the CPU cores."""
        if self.num_workers is not None:
            return self.num_workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(8, max(2, cores // num_local_ranks))

    @property
    def call_limit(self) -> str:
        """The reason for a timeout of one call, for messages."""
        return f"it took longer than the {self.timeout_seconds:g} s of model.reward_workers.timeout_seconds"

    @property
    def step_limit(self) -> str:
        """The reason for a timeout of all calls together, for messages."""
        return (
            f"all calls for a rollout took longer than the {self.step_timeout_seconds:g} s of "
            "model.reward_workers.step_timeout_seconds"
        )


# ------------------------------------------------------------------------------------------------- a call, anywhere


class RaisedError(RuntimeError):
    """An exception that a reward raised in a worker."""

    def __init__(self, problem: str, shown: str) -> None:
        super().__init__(problem, shown)
        self.shown = shown

    def __str__(self) -> str:
        """The error and its traceback."""
        return f"{self.args[0]}\n{self.shown}".rstrip()


@dataclass
class Answer:
    """The outcome of a call: its values and logs, or its failure."""

    result: Any = None
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns logged by `log_extra`: one value per completion."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Values logged by `log_metric`."""

    records: list[tuple[str, int, str]] = field(default_factory=list)
    """Log records of the call in a worker: (logger, level, message)."""

    failure: str = ""
    """One of `scoring.FAILURES`, or "stays" if the reward must run in the training process; empty on success."""

    problem: str = ""
    """Description of the failure, to follow the name of the reward."""

    cause: BaseException | None = None
    """The exception that caused the failure; None if there was none."""

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a column with one value per completion, next to the completions."""
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric. Values of the same step are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def fail(self, failure: str, problem: str, cause: BaseException | None = None) -> Answer:
        """Turn this into the answer of a failed call, without values, columns and metrics."""
        self.result, self.extras, self.metrics = None, {}, {}
        self.failure, self.problem, self.cause = failure, problem, cause
        return self

    def fail_by(self, error: BaseException) -> Answer:
        """Turn this into the answer of a call that raised an exception."""
        return self.fail("exception", f"raised {describe_error(error)[0]}", error)


def call_reward(reward: WeightedReward, arguments: Mapping[str, Any], catch: type[BaseException] = Exception) -> Answer:
    """Call a reward in the current process. The `result` of the returned `Answer` may be awaitable."""
    answer = Answer()
    logs = reward.select({"log_extra": answer.log_extra, "log_metric": answer.log_metric})
    try:
        answer.result = reward(**arguments, **logs)
    except catch as error:  # a user's function may raise anything; `on_error` decides
        answer.fail_by(error)
    return answer


@dataclass
class DescribedValue:
    """Stands for a returned value that cannot be pickled, such as a generator."""

    text: str
    """The result of `describe_value`."""


def describe_value(value: Any) -> str:
    """Format a returned value for an error message."""
    if isinstance(value, DescribedValue):
        return value.text
    size = f" of {len(value)}" if hasattr(value, "__len__") and not hasattr(value, "tolist") else ""
    text = f"a {type(value).__name__}{size}: {value!r:.80}"
    if isinstance(value, Generator | AsyncGenerator):
        text += "; collect the values in a list and return the list, instead of yielding them"
    return text


def describe_error(error: BaseException) -> tuple[str, str]:
    """Format an exception of a reward.

    Returns:
        The class, text and location of the exception ("KeyError: 'gold', at my_rewards.py:3"), and its traceback. The
        location is that of the first frame in the reward's own code, and the traceback starts at this frame.
    """
    frames = frame = error.__traceback__
    while frame is not None:  # skip all frames up to the last one of this package: futures add some in between
        if frame.tb_frame.f_code.co_filename in CALLERS:
            frames = frame.tb_next
        frame = frame.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    problem = f"{type(error).__name__}: {error}"
    if frames is not None:
        problem += f", at {Path(frames.tb_frame.f_code.co_filename).name}:{frames.tb_lineno}"
    return problem, shown


@contextlib.contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed the random number generators as in a worker, and restore them afterwards."""
    python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_torch = None if torch is None else torch.default_generator.get_state()
    seed_random(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None:
            torch.default_generator.set_state(of_torch)


def seed_random(seed: int) -> None:
    """Seed all global random number generators."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


# ----------------------------------------------------------------------------------------- in the training process


class Call(NamedTuple):
    """A call to be sent to a worker."""

    number: int
    data: bytes
    """The pickled tuple (index of the reward, arguments, seed)."""

    seconds: float
    """Time limit in the worker."""

    deadline: float
    """Deadline of all calls of the step, in `time.monotonic` seconds."""


class Deadline(NamedTuple):
    """A new deadline for calls that were sent earlier."""

    numbers: frozenset[int]
    """Numbers of the calls."""

    deadline: float
    """In `time.monotonic` seconds."""


class SentCall(NamedTuple):
    """A call that was sent to the supervisor, and its answer."""

    number: int
    answer: Future[Answer]
    reward: str = ""
    """Name of the reward, for a call of `WorkerPool.submit_early`."""

    @property
    def is_lost(self) -> bool:
        """True if the supervisor was killed before it answered."""
        return self.answer.done() and self.answer.result().problem == _lost_answer().problem


class WorkerPool:
    """Pool of worker processes that run rewards, under one supervisor process.

    The first call starts the supervisor, and a later call starts it again if it was killed or closed. The supervisor
    ends with this object or this process.

    Args:
        rewards: All rewards of the run.
        limits: Settings of the workers. If `limits` is None or `num_workers` is 0, all rewards run in the training
            process.
        kind: The first word of warnings: "Reward" or "Environment".
    """

    def __init__(self, rewards: Sequence[WeightedReward], limits: RewardWorkers | None, kind: str = "Reward") -> None:
        self.rewards, self.kind = rewards, kind
        self.warn_once = WarnOnce()
        self.limits = limits if limits is not None and limits.num_workers != 0 else None
        """The limits of calls; None without workers."""
        self._places: dict[str, int] = {}
        """The rewards that run in workers, with the index of each in the pool."""
        self._started_by: int | None = None
        """Id of the process that has started the workers. A fork lacks its threads, and therefore starts new
        workers."""
        self._num_local_ranks = 1
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        """Numbers of calls; a new supervisor does not start again at 0."""
        self._early: dict[bytes, list[SentCall]] = {}
        """Unused calls of `submit_early`, by digest."""

    def __reduce__(self) -> Any:
        """Pickle without the processes."""
        return WorkerPool, (self.rewards, self.limits, self.kind)

    def start(self, num_local_ranks: int | None = None) -> None:
        """Start loading the rewards, and return immediately.

        If `num_local_ranks` is None, the number of the previous call stays (at first 1).
        """
        with self._lock:
            self._num_local_ranks = num_local_ranks or self._num_local_ranks
            if self._started_by == os.getpid():
                return
            self._started_by, self._places, self._early = os.getpid(), {}, {}
            sent: list[bytes] = []
            for reward in self.rewards if self.limits is not None else ():
                if reward.in_process:
                    continue
                if not hasattr(os, "fork"):
                    self._warn(reward.name, "this system cannot fork")
                    continue
                try:
                    sent.append(pickle.dumps(reward))
                    self._places[reward.name] = len(sent) - 1
                except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
                    self._warn(reward.name, f"it {_not_pickled(error)}")
            if sent and self.limits is not None:
                self._setup = (sent, self.limits, self.limits.number(self._num_local_ranks))
                self._start_supervisor()

    def _start_supervisor(self) -> None:
        """Start the supervisor and send it the rewards."""
        self._control, theirs = multiprocessing.Pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        self._process = subprocess.Popen(  # noqa: S603 - our own code and this interpreter
            [sys.executable, "-c", START_SUPERVISOR, str(theirs.fileno()), *path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the output of rewards goes to stderr
            start_new_session=True,  # Ctrl-C is for the training process
        )
        theirs.close()
        with contextlib.suppress(OSError):  # it has already ended, which `wait` reports
            self._control.send((*self._setup, START_SECONDS))
        self._loaded: Future[list[str | None]] = Future()
        self._pending: dict[int, Future[Answer]] = {}
        shared = (self._control, self._process, self._loaded, self._pending)
        threading.Thread(target=_listen, args=shared, daemon=True).start()
        self._close = weakref.finalize(self, _close, self._control, self._process, os.getpid())

    def wait(self) -> None:
        """Wait until the supervisor has loaded the rewards.

        If the supervisor cannot load a reward, the training process runs the reward.

        Raises:
            RuntimeError: If the supervisor does not load the rewards within `START_SECONDS`.
            RuntimeError: If the supervisor ends before it has loaded the rewards.
        """
        self.start()
        if not self._places:
            return
        try:
            problems = self._loaded.result(START_SECONDS)
        except concurrent.futures.TimeoutError:
            self._process.kill()
            raise RuntimeError(
                f"The rewards did not load in their own process within {START_SECONDS:g} s: importing their modules "
                "takes too long. Move slow imports into the reward, or set model.reward_workers.num_workers to 0."
            ) from None
        for name, place in list(self._places.items()):
            if (problem := problems[place]) is not None:
                self.keep(name, problem)

    @property
    def is_loaded(self) -> bool:
        """True once the supervisor has loaded the rewards."""
        return bool(self._places) and self._loaded.done() and self._loaded.exception() is None

    def has(self, reward: WeightedReward) -> bool:
        """Whether a reward runs in workers."""
        return reward.name in self._places

    def keep(self, name: str, why: str) -> None:
        """Run a reward in the training process from now on, with a warning."""
        if self._places.pop(name, None) is not None:
            self._warn(name, why)

    def _warn(self, name: str, why: str) -> None:
        """Warn about a reward that runs without limits."""
        remedy = f" {REMEDIES[self.kind]}" if hasattr(os, "fork") else ""
        text = "%s %r runs in the training process without time or memory limits: %s.%s"
        self.warn_once(log, name, text, self.kind, name, why, remedy)

    def stop(self) -> None:
        """Stop the workers and their calls. The next call starts the workers again."""
        if self._places:
            self._close()

    def close(self) -> None:
        """Stop the workers, and forget which rewards they have loaded."""
        with self._lock:
            self.stop()
            self._started_by, self._places, self._early = None, {}, {}

    def submit(
        self,
        reward: WeightedReward,
        arguments: Mapping[str, Any],
        seed: int = 0,
        *,
        seconds: float = math.inf,
        deadline: float = math.inf,
    ) -> Future[Answer]:
        """Submit a call, or take over a call from `submit_early` with the same reward, arguments and seed.

        `seconds` limits this call, in addition to `timeout_seconds` of the settings. `deadline` is in `time.monotonic`
        seconds.
        """
        try:
            data = pickle.dumps((self._places[reward.name], arguments, seed))
        except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
            answer: Future[Answer] = Future()
            answer.set_result(Answer().fail("stays", f"its arguments {_not_pickled(error)}"))
            return answer
        if early := self._early.get(_digest(data)):
            call = early.pop()
            if not call.is_lost:
                self._set_deadline([call], deadline)
                return call.answer
        return self._send(data, seconds, deadline).answer

    def submit_early(self, reward: WeightedReward, arguments: Mapping[str, Any], seed: int) -> None:
        """Send a call to the workers ahead of its `submit`.

        The call has no deadline until `submit` takes it over.
        """
        try:
            data = pickle.dumps((self._places[reward.name], arguments, seed))
        except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled; `submit` reports it)
            return
        call = self._send(data)._replace(reward=reward.name)
        self._early.setdefault(_digest(data), []).append(call)

    def cancel_early(self) -> int:
        """Cancel the calls that `submit` has not taken over. Returns: their number."""
        calls = [call for same in self._early.values() for call in same]
        self._early = {}
        self._set_deadline(calls, -math.inf)
        for call in calls:
            # A worker checks only in its first call of a reward whether the call changes the reward's state. Later
            # calls in this worker do not repeat the report, so the report of an unused call is read here.
            if call.answer.done() and (answer := call.answer.result()).failure == "stays":
                self.keep(call.reward, answer.problem)
        return len(calls)

    def set_deadline(self, answers: Iterable[Future[Answer]], deadline: float) -> None:
        """Set the deadline, in `time.monotonic` seconds, of calls that were submitted without one."""
        chosen = set(answers)
        self._set_deadline([SentCall(*sent) for sent in list(self._pending.items()) if sent[1] in chosen], deadline)

    def _send(self, data: bytes, seconds: float = math.inf, deadline: float = math.inf) -> SentCall:
        """Send a pickled call to the supervisor."""
        assert self.limits is not None
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # makes it non-cancellable, otherwise `_listen` could fail
        with self._lock:
            if self._process.poll() is not None:
                self._start_supervisor()
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._control.send(Call(number, data, min(seconds, self.limits.timeout_seconds), deadline))
            except OSError:  # the supervisor was just killed
                self._pending.pop(number, answer).set_result(_lost_answer())
        return SentCall(number, answer)

    def _set_deadline(self, calls: Sequence[SentCall], deadline: float) -> None:
        """Set the deadline of calls that have not been answered."""
        numbers = frozenset(call.number for call in calls if not call.answer.done())
        with self._lock, contextlib.suppress(OSError):  # the supervisor was just killed, which `_listen` reports
            if numbers and self._process.poll() is None:
                self._control.send(Deadline(numbers, deadline))


def _listen(
    control: Connection, process: subprocess.Popen[bytes], loaded: Future[Any], pending: dict[int, Future[Answer]]
) -> None:
    """Receive the answers of the supervisor until the supervisor ends."""
    with contextlib.suppress(EOFError, OSError):
        loaded.set_result(control.recv())
        while True:
            number, data = control.recv()
            answer = pending.pop(number)
            try:
                answer.set_result(pickle.loads(data))  # noqa: S301 (from our own process)
            except Exception as error:  # noqa: BLE001 (unpickling runs the code of the values' classes)
                problem = f"returned values that the training process cannot load: {type(error).__name__}: {error}"
                answer.set_result(Answer().fail("exception", problem, error))
    how = describe_end(process.wait())
    if not loaded.done():
        loaded.set_exception(
            RuntimeError(
                f"The process that loads the rewards ended {how} while importing their modules; its output, if any, "
                "is above. Fix the cause, or set model.reward_workers.num_workers to 0."
            )
        )
    while pending:
        pending.popitem()[1].set_result(_lost_answer())


def _digest(data: bytes) -> bytes:
    """Digest of a pickled call."""
    return hashlib.sha256(data).digest()


def _lost_answer() -> Answer:
    """The answer to a call whose supervisor was killed."""
    return Answer().fail("crash", "did not return: its supervisor process was killed")


def _close(control: Connection, process: subprocess.Popen[bytes], started_by: int) -> None:
    """Stop the supervisor and its workers, including busy ones, except in a fork of the training process."""
    if os.getpid() != started_by:
        return
    with contextlib.suppress(OSError):
        control.send(None)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def describe_end(status: int) -> str:
    """Format the exit status of a process, as `subprocess` and `multiprocessing` define it."""
    return f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.Signals(-status).name})"


def _not_pickled(error: Exception) -> str:
    """Format a pickling error."""
    return f"cannot be pickled ({type(error).__name__}: {error})"
