"""Worker processes for rewards: time limits, memory limits, and several calls at once.

A reward that loops in C code does not release the interpreter, so neither a signal handler nor another thread can
interrupt it. Therefore the training process starts a supervisor process. The supervisor loads the rewards once, forks
the workers, sends calls to the workers, and kills workers whose calls time out:

    training process  -- calls -->  supervisor  -- one call at a time -->  workers
                      <- answers -              <------- answer ---------

A forked worker is ready in a millisecond and shares the modules that the supervisor has loaded. It runs the code as it
was at the start of the run, even if the source files have changed since then. It calls rewards in its main thread, so a
reward may use signal handlers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
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
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lightning.rewards.base import WeightedReward

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Time limit for importing the rewards in the supervisor. The start of each worker, which warms up the rewards, has a
separate limit of the same length."""

ENDING_SECONDS = 0.2
"""Time that a worker gets to exit after it has closed its connection, so that its exit status is reported."""

LONGEST_WAIT = 3600.0
"""Maximum duration of one wait of the supervisor, in seconds. Without this maximum, a large time limit could exceed the
longest wait that the system supports."""

MOST_RECORDS = 10_000
"""Maximum number of log records per call."""

CALLERS = frozenset(
    str(Path(__file__).parents[1] / name)
    for name in (
        "rewards/workers.py",
        "rewards/scoring.py",
        "rewards/base.py",
        "environments/workers.py",
        "environments/method_calls.py",
    )
)
"""Files whose stack frames are left out of the tracebacks of rewards."""

IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a terminal or scheduler sends to all processes of a run. The supervisor ignores these signals, because
the training process handles them and stops the supervisor."""

START_SUPERVISOR = (
    "import sys; sys.path[:] = sys.argv[2:]; from grpo_lightning.rewards.workers import supervise; "
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
"""Advice about an object that does not run in a worker, by the kind of object."""


@dataclass
class RewardWorkers:
    """Settings of the worker processes in which picklable sync rewards run."""

    num_workers: int | None = None
    """Worker processes per rank. null divides the available CPU cores among the ranks of the machine and starts one
    process per core, but at least 2 and at most 8 per rank. With 0, all rewards run in the training process, without
    time and memory limits."""

    timeout_seconds: float = 30.0
    """Time limit of one call: one reward on the completions of one prompt."""

    step_timeout_seconds: float = 600.0
    """Time limit of all calls for a rollout together, including async rewards. It starts when sampling ends."""

    memory_gb: float = 4.0
    """Address space in GB that a worker may reserve in addition to the memory that it shares with the supervisor. Each
    subprocess of a worker has the same limit."""

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
    """An exception that a reward raised in a worker.

    Args:
        problem: The exception and its location, in one line.
        shown: The formatted traceback of the exception in the worker.
    """

    def __init__(self, problem: str, shown: str) -> None:
        super().__init__(problem, shown)
        self.shown = shown

    def __str__(self) -> str:
        """The error and its traceback. Python shows both as the cause of the error raised in the training process."""
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
    """Description of the failure; in messages, it follows the name of the reward."""

    cause: BaseException | None = None
    """The exception that caused the failure; None if there was none."""

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a column next to the completions: one value per completion."""
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric; values of the same step are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def fail(self, failure: str, problem: str, cause: BaseException | None = None) -> Answer:
        """Turn this into the answer of a failed call, and discard its values, columns and metrics."""
        self.result, self.extras, self.metrics = None, {}, {}
        self.failure, self.problem, self.cause = failure, problem, cause
        return self

    def fail_by(self, error: BaseException) -> Answer:
        """Turn this into the answer of a call that raised an exception."""
        return self.fail("exception", f"raised {describe_error(error)[0]}", error)


def call_reward(reward: WeightedReward, arguments: Mapping[str, Any], catch: type[BaseException] = Exception) -> Answer:
    """Call a reward in the current process. Returns: its answer, in which `result` may be awaitable."""
    answer = Answer()
    logs = reward.select({"log_extra": answer.log_extra, "log_metric": answer.log_metric})
    try:
        answer.result = reward(**arguments, **logs)
    except catch as error:  # a user's function may raise anything; `on_error` decides
        answer.fail_by(error)
    return answer


@dataclass
class DescribedValue:
    """Stands for a returned value that cannot be sent to the training process, such as a generator."""

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


# ----------------------------------------------------------------------------------------- in the training process


class Call(NamedTuple):
    """A call to be sent to a worker."""

    number: int
    data: bytes
    """The pickled tuple (index of the reward, arguments, seed). The supervisor does not unpickle it."""

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

    The supervisor starts on first use, and starts again on the next use if it was killed or stopped by `close`. The
    supervisor and the workers end when `close` is called, when this object is deleted, or when this process ends. The
    pool is picklable; an unpickled copy starts its own supervisor.

    Args:
        rewards: All rewards of the run. Rewards that cannot run in workers run in the training process.
        limits: Settings of the workers; None, or `num_workers` 0, runs all rewards in the training process.
        kind: The kind of object that runs here, for messages: "Reward", or "Environment" (`environments/workers.py`).
    """

    def __init__(self, rewards: Sequence[WeightedReward], limits: RewardWorkers | None, kind: str = "Reward") -> None:
        self.rewards, self.kind = rewards, kind
        self.limits = limits if limits is not None and limits.num_workers != 0 else None
        """The limits of calls; None without workers."""
        self._places: dict[str, int] = {}
        """The rewards that run in workers: the index of each in the pool, by the reward's name."""
        self._started_by: int | None = None
        """Id of the process that has started the workers. A fork of this process lacks the process's threads, and
        therefore starts new workers."""
        self._num_local_ranks = 1
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        """Numbers of calls; a new supervisor does not start again at 0."""
        self._early: dict[bytes, list[SentCall]] = {}
        """Calls of `submit_early` that `submit` has not taken over, by the digest of the call."""

    def __reduce__(self) -> Any:
        """Pickle without the processes."""
        return WorkerPool, (self.rewards, self.limits, self.kind)

    def start(self, num_local_ranks: int | None = None) -> None:
        """Start loading the rewards that can run in workers; returns immediately.

        Args:
            num_local_ranks: Ranks that share the machine. None keeps the number of the previous call; in the first
                call, None means 1.
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
        """Wait until the supervisor has loaded the rewards; a reward that it cannot load will run in this process.

        Raises:
            RuntimeError: If loading times out, or the supervisor ends while it loads the rewards.
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
                self.keep(name, f"it cannot be loaded in another process ({problem})")

    @property
    def is_loaded(self) -> bool:
        """True once the supervisor has loaded the rewards, so that `wait` returns immediately and without an error."""
        return bool(self._places) and self._loaded.done() and self._loaded.exception() is None

    def has(self, reward: WeightedReward) -> bool:
        """Whether a reward runs in workers; otherwise it runs in the training process."""
        return reward.name in self._places

    def keep(self, name: str, why: str) -> None:
        """Run a reward in the training process from now on, and log a warning with the reason."""
        if self._places.pop(name, None) is not None:
            self._warn(name, why)

    def _warn(self, name: str, why: str) -> None:
        """Warn about a reward that runs without limits."""
        remedy = f" {REMEDIES[self.kind]}" if hasattr(os, "fork") else ""
        log.warning(
            "%s %r runs in the training process without time or memory limits: %s.%s", self.kind, name, why, remedy
        )

    def stop(self) -> None:
        """Stop the workers and their calls; the next call starts the workers again."""
        if self._places:
            self._close()

    def close(self) -> None:
        """Stop the workers, and forget which rewards they have loaded; `start` and `wait` start new workers."""
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

        Args:
            reward: A reward that runs in workers.
            arguments: The keyword arguments of the reward, except the logging functions.
            seed: Seed of the random numbers of the call.
            seconds: Time limit of this call; `timeout_seconds` of the settings applies too.
            deadline: Deadline of all calls of the step, in `time.monotonic` seconds.
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

        The call has no deadline at first. A later `submit` with the same reward, arguments and seed takes over the
        call, and sets its deadline.

        Args:
            reward: As in `submit`.
            arguments: As in `submit`.
            seed: As in `submit`.
        """
        try:
            data = pickle.dumps((self._places[reward.name], arguments, seed))
        except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled; `submit` reports it)
            return
        call = self._send(data)._replace(reward=reward.name)
        self._early.setdefault(_digest(data), []).append(call)

    def cancel_early(self) -> int:
        """Cancel the calls of `submit_early` that `submit` has not taken over. Returns: their number."""
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
        """Set the deadline of calls that were submitted without one.

        Args:
            answers: The results of `submit` for the calls.
            deadline: In `time.monotonic` seconds.
        """
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
    how = _describe_end(process.wait())
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
    """Digest of a pickled call, which may be large (tests of programs)."""
    return hashlib.sha256(data).digest()


def _lost_answer() -> Answer:
    """The answer to a call whose supervisor was killed."""
    return Answer().fail("crash", "did not return: its supervisor process was killed")


def _close(control: Connection, process: subprocess.Popen[bytes], started_by: int) -> None:
    """Stop the supervisor and its workers, including busy ones; does nothing in a fork of the training process."""
    if os.getpid() != started_by:
        return
    with contextlib.suppress(OSError):
        control.send(None)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def _describe_end(status: int) -> str:
    """Format the exit status of a process, as `subprocess` and `multiprocessing` define it."""
    return f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.Signals(-status).name})"


def _not_pickled(error: Exception) -> str:
    """Format a pickling error."""
    return f"cannot be pickled ({type(error).__name__}: {error})"


# --------------------------------------------------------------------------------------------------- the supervisor


def supervise(descriptor: int) -> None:
    """Main function of the supervisor: load the rewards and run workers until the training process closes the pool.

    Args:
        descriptor: File descriptor of the connection to the training process.
    """
    for name in IGNORED_SIGNALS:
        # A handler instead of SIG_IGN, because subprocesses of rewards inherit SIG_IGN, but no handlers.
        signal.signal(getattr(signal, name), lambda *_: None)
    sys.modules["__main__"] = types.ModuleType("__main__")  # rewards of the training script cannot be loaded here
    logging.getLogger("grpo_lightning").setLevel(logging.INFO)
    control = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the training process has ended
        pickled, *settings = control.recv()
        rewards, problems = zip(*map(_load_reward, pickled), strict=True)
        gc.freeze()  # otherwise garbage collection would copy shared memory in every worker
        control.send(list(problems))
        Supervisor(control, rewards, *settings).run()


def _load_reward(data: bytes) -> tuple[WeightedReward | None, str | None]:
    """Unpickle a reward. Returns: (reward, None), or (None, why it cannot be loaded)."""
    try:
        return pickle.loads(data), None  # noqa: S301 (from our own process)
    except BaseException as error:  # noqa: BLE001 (importing a module may do anything, even exit)
        return None, f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class Worker:
    """The supervisor's handle of a worker process."""

    process: Any
    connection: Connection
    call: Call | None = None
    """The current call."""

    limit: float = math.inf
    """Deadline of the worker's start, and later of the current call, in `time.monotonic` seconds."""

    is_ready: bool = False

    def send(self) -> None:
        """Send the current call to the worker, and start the call's time limit."""
        assert self.call is not None
        self.limit = min(time.monotonic() + self.call.seconds, self.call.deadline)
        with contextlib.suppress(OSError):  # it has died, which its connection reports next
            self.connection.send_bytes(self.call.data)


@dataclass
class Supervisor:
    """Dispatches calls to workers, and kills workers that time out."""

    control: Connection
    """Connection to the training process."""

    rewards: Sequence[Any]
    """The loaded rewards; None for a reward that cannot be loaded."""

    settings: RewardWorkers
    num_workers: int
    """Maximum number of workers; each is forked for its first call."""

    start_seconds: float
    """Time limit for the start of a worker."""

    queue: deque[Call] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)

    def run(self) -> None:
        """Run until the training process closes the pool. Raises: EOFError, ConnectionError if that process ended."""
        try:
            while True:
                while self.queue and self._dispatch():
                    pass
                limits = [worker.limit for worker in self.workers if worker.call is not None]
                seconds = max(0.0, min(LONGEST_WAIT, min(limits) - time.monotonic())) if limits else None
                ready = wait([self.control, *(worker.connection for worker in self.workers)], seconds)
                for worker in list(self.workers):
                    if worker.connection in ready:
                        self._receive(worker)
                    elif worker.call is not None and worker.limit <= time.monotonic():
                        self._stop(worker, worker.call)
                if self.control in ready:
                    if (message := self.control.recv()) is None:
                        return
                    if isinstance(message, Deadline):
                        self._set_deadline(message)
                    else:
                        self.queue.append(message)
        finally:
            while self.workers:
                self._end(self.workers[0])

    def _set_deadline(self, new: Deadline) -> None:
        """Change the deadline of waiting and running calls."""
        for place, call in enumerate(self.queue):
            if call.number in new.numbers:
                self.queue[place] = call._replace(deadline=new.deadline)
        for worker in self.workers:
            if worker.call is not None and worker.call.number in new.numbers:
                worker.call = worker.call._replace(deadline=new.deadline)
                if worker.is_ready:  # otherwise `limit` is the deadline of its start
                    worker.limit = min(worker.limit, new.deadline)

    def _dispatch(self) -> bool:
        """Send the next call to a worker, or answer that the call failed. Returns: False if all workers are busy."""
        worker = next((worker for worker in self.workers if worker.call is None), None)
        if worker is None and len(self.workers) == self.num_workers:
            return False
        call = self.queue.popleft()
        if call.deadline <= time.monotonic():
            self._fail(call, "timeout", f"was not started: {self.settings.step_limit}")
        elif worker is not None:
            worker.call = call
            worker.send()
        else:
            try:
                self.workers.append(self._fork(call))
            except OSError as error:
                self._fail(call, "crash", f"did not return: no worker could be started ({error})")
        return True

    def _fork(self, call: Call) -> Worker:
        """Fork a worker, which gets the call once it is ready. Raises: OSError if the fork fails."""
        ours, theirs = multiprocessing.Pipe()
        others = [self.control, ours, *(worker.connection for worker in self.workers)]
        arguments = (theirs, others, self.rewards, int(self.settings.memory_gb * 1e9))
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return Worker(process, ours, call, time.monotonic() + self.start_seconds)

    def _receive(self, worker: Worker) -> None:
        """Handle a message of a worker: ready, an answer, or end of file."""
        call = worker.call
        try:
            data, is_last = worker.connection.recv()
        except (EOFError, OSError):
            how = self._end(worker, ENDING_SECONDS)
            if call is not None:
                early = "its worker ended while warming up the rewards; its output, if any, is above"
                why = f"its process ended {how}" if worker.is_ready else early
                self._fail(call, "crash", f"did not return: {why}")
            return
        if not worker.is_ready:
            worker.is_ready = True
            worker.send()
            return
        assert call is not None
        self.control.send((call.number, data))
        worker.call = None
        if is_last:
            self._end(worker, ENDING_SECONDS)

    def _stop(self, worker: Worker, call: Call) -> None:
        """Kill a worker that timed out."""
        is_step = call.deadline <= time.monotonic()
        self._end(worker)
        if not worker.is_ready:
            why = f"not ready within {self.start_seconds:g} s (warming up the rewards takes too long)"
            self._fail(call, "crash", f"did not return: its worker was {why}")
        else:
            why = self.settings.step_limit if is_step else self.settings.call_limit
            self._fail(call, "timeout", f"was stopped: {why}")

    def _end(self, worker: Worker, patience: float = 0.0) -> str:
        """Kill a worker and its subprocesses after a grace period of `patience` seconds. Returns: its exit status."""
        self.workers.remove(worker)
        worker.connection.close()
        wait([worker.process.sentinel], patience)
        worker.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # it is not reaped yet, so its pid cannot be reused
        worker.process.join()
        return _describe_end(worker.process.exitcode)

    def _fail(self, call: Call, failure: str, problem: str) -> None:
        """Answer a call that failed."""
        self.control.send((call.number, pickle.dumps(Answer().fail(failure, problem))))


# ------------------------------------------------------------------------------------------------------- the workers


def _work(connection: Connection, others: Sequence[Connection], rewards: Sequence[Any], memory_bytes: int) -> None:
    """Main function of a worker: answer calls until the supervisor ends, or until a call runs out of memory."""
    status = 1
    try:
        os.setsid()  # so that subprocesses of rewards are killed with their worker
        _end_with_parent()
        for other in others:  # the supervisor's ends of its connections, inherited by the fork
            other.close()
        _limit_memory(memory_bytes)
        for reward in rewards:
            if reward is not None:
                reward.warm_up()
        connection.send((None, False))
        called: set[int] = set()
        is_last = False
        while not is_last:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                break
            answer = _answer(request, rewards, called)
            is_last = isinstance(answer.cause, MemoryError)
            connection.send((_pickle_answer(answer), is_last))
        status = 0
    except BaseException:  # noqa: BLE001 (it is printed, and the process ends)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers that the supervisor has registered


class FirstRecords(logging.Handler):
    """Keeps the first `MOST_RECORDS` log records of a call, which the training process writes to the run's log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[tuple[str, int, str]] = []
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Format and keep a record, or count it as dropped."""
        if len(self.records) == MOST_RECORDS:
            self.num_dropped += 1
            return
        try:
            message = record.getMessage()
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 (the message may not fit its arguments)
            self.handleError(record)
        else:
            self.records.append((record.name, record.levelno, message))

    def all_records(self) -> list[tuple[str, int, str]]:
        """The kept records (logger, level, message), and a warning if records were dropped."""
        if not self.num_dropped:
            return self.records
        dropped = (
            f"{self.num_dropped:,} more log messages of this call were dropped; the limit is {MOST_RECORDS:,} per call."
        )
        return [*self.records, (log.name, logging.WARNING, dropped)]


def _answer(request: bytes, rewards: Sequence[Any], called: set[int]) -> Answer:
    """Run a call and return its answer.

    Args:
        request: The pickled tuple (index of the reward, arguments, seed).
        rewards: The loaded rewards.
        called: Indices of the rewards that this worker has called; updated in place.
    """
    try:
        number, arguments, seed = pickle.loads(request)  # noqa: S301 (from our own process)
    except BaseException as error:  # noqa: BLE001 (an argument's class may be missing in this process)
        problem = f"{type(error).__name__}: {error}"
        return Answer().fail("stays", f"its arguments cannot be loaded in another process ({problem})")
    reward = rewards[number]
    is_first = number not in called
    called.add(number)
    before = _pickle_state(reward) if is_first else None
    _seed_random(seed)
    recorder = FirstRecords()
    logging.getLogger().addHandler(recorder)
    answer = call_reward(reward, arguments, BaseException)  # SystemExit is a failure like any other
    logging.getLogger().removeHandler(recorder)
    answer.records = recorder.all_records()
    if isinstance(answer.cause, MemoryError):
        answer.problem += "; the limit is model.reward_workers.memory_gb"
    elif isinstance(answer.result, Awaitable):
        getattr(answer.result, "close", lambda: None)()
        return answer.fail("stays", "it is asynchronous")
    elif not answer.failure and is_first and _pickle_state(reward) != before:
        return answer.fail("stays", "its state changes when it is called, and every worker would have its own copy")
    if hasattr(answer.result, "tolist"):
        answer.result = answer.result.tolist()
    if isinstance(answer.result, Iterator | AsyncIterator):  # cannot be pickled
        answer.result = DescribedValue(describe_value(answer.result))
    return answer


def _pickle_answer(answer: Answer) -> bytes:
    """Pickle an answer, with its exception replaced by a `RaisedError`."""
    if answer.cause is not None:
        answer.cause = RaisedError(answer.problem, describe_error(answer.cause)[1])
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
        problem = f"returned values that cannot be pickled: {type(error).__name__}: {error}"
        return pickle.dumps(Answer(records=answer.records).fail("exception", problem))


def _pickle_state(reward: WeightedReward) -> bytes | None:
    """Pickle a reward, to detect whether a call changes its state. None if it cannot be pickled."""
    try:
        return pickle.dumps(reward)
    except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled)
        return None


def _end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even while it is busy."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit_memory(memory_bytes: int) -> None:
    """Limit the address space of this process to `memory_bytes` beyond what it shares with its parent."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed the random number generators as for a call in a worker, and restore them afterwards."""
    python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_torch = None if torch is None else torch.default_generator.get_state()
    _seed_random(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None:
            torch.default_generator.set_state(of_torch)


def _seed_random(seed: int) -> None:
    """Seed all global random number generators, so that a call depends neither on its worker nor on earlier calls."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
