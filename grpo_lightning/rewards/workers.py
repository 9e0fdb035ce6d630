"""Rewards in processes that can be killed: a time limit, a memory limit, and several calls at once.

A reward that loops in C code cannot be interrupted by a signal, nor by a thread, which it keeps from running. So the
training process starts a supervisor. It loads the rewards once, forks the workers, hands them the calls, and kills the
workers whose calls take too long:

    training process  -- calls -->  supervisor  -- one call at a time -->  workers
                      <- answers -              <------- answer ---------

A forked worker is ready in a millisecond, shares what the supervisor has loaded, and runs the code that the run began
with, whatever became of the files. It scores in its main thread, where signals work.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import logging.handlers
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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lightning.rewards.base import WeightedReward

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long the rewards may take to be imported, and how long a worker may take to warm them up."""

ENDING_SECONDS = 0.2
"""How long a worker that has closed its connection may take to end, so that its exit status is its own."""

LONGEST_WAIT = 3600.0
"""Seconds; a limit may be longer than what the system can wait for at once."""

MOST_RECORDS = 10_000
"""Messages that a call may log."""

CALLERS = frozenset(str(Path(__file__).with_name(name)) for name in ("workers.py", "scoring.py", "base.py"))
"""Files whose code is between a call and the reward."""

NOT_FOR_US = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a terminal or a scheduler sends to all processes of a run. They are for the training process, which ends
the supervisor."""

START_SUPERVISOR = (
    "import sys; sys.path[:] = sys.argv[2:]; from grpo_lightning.rewards.workers import supervise; "
    "supervise(int(sys.argv[1]))"
)

REMEDY = (
    "To run it in a worker, define it in a module that can be imported, with no lambda, file or connection in it, and "
    "keep no state between calls. To keep it here and silence this warning, set in_process = True on it: it is then "
    "called once per batch."
)
"""Advice for a reward that is not called in a worker."""


@dataclass
class RewardWorkers:
    """The processes in which rewards run that are plain functions or objects (those that can be pickled)."""

    num_workers: int | None = None
    """Processes of each rank; null is one for each CPU core it has, from 2 to 8. 0 runs all rewards in the training
    process, without limits."""

    timeout_seconds: float = 30.0
    """How long a call, of one reward on the completions of one prompt, may take."""

    step_timeout_seconds: float = 600.0
    """How long all calls for a rollout may take together, those of asynchronous rewards as well."""

    memory_gb: float = 4.0
    """GB of addresses that a process may reserve beyond what it shares with the others; what it starts has as many."""

    def __post_init__(self) -> None:
        """Check every range. Raises: ValueError naming the field, the value got and what is allowed."""
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
        """`num_workers` with its default filled in, where so many ranks share the cores."""
        if self.num_workers is not None:
            return self.num_workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(8, max(2, cores // num_local_ranks))

    @property
    def call_limit(self) -> str:
        """Why a call was stopped that took too long."""
        return f"it took longer than the {self.timeout_seconds:g} s of model.reward_workers.timeout_seconds"

    @property
    def step_limit(self) -> str:
        """Likewise where all calls together took too long."""
        return (
            f"all calls for a rollout took longer than the {self.step_timeout_seconds:g} s of "
            "model.reward_workers.step_timeout_seconds"
        )


# ------------------------------------------------------------------------------------------------- a call, anywhere


class RaisedError(RuntimeError):
    """A call raised in a worker.

    Args:
        problem: The error and its place, in a line.
        shown: Its traceback there.
    """

    def __init__(self, problem: str, shown: str) -> None:
        super().__init__(problem, shown)
        self.shown = shown

    def __str__(self) -> str:
        """Both: Python shows it as the cause of what is raised for it."""
        return f"{self.args[0]}\n{self.shown}".rstrip()


@dataclass
class Answer:
    """The outcome of a call: its values and what it logged, or how it failed."""

    result: Any = None
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """From `log_extra`: one value per completion."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    """From `log_metric`."""

    records: list[tuple[str, int, str]] = field(default_factory=list)
    """From `logging` in a worker: logger, level, message."""

    failure: str = ""
    """One of `scoring.FAILURES`, or "stays" if the reward must run in the training process; empty if it returned."""

    problem: str = ""
    """The failure in words that follow the name of the reward."""

    cause: BaseException | None = None
    """The exception."""

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Add a column next to the completions in the logs: one value per completion."""
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; the mean of those given in a step is shown."""
        self.metrics.setdefault(name, []).append(float(value))

    def fail(self, failure: str, problem: str, cause: BaseException | None = None) -> Answer:
        """Make it the answer of a call that failed; nothing that the call gave or logged counts."""
        self.result, self.extras, self.metrics = None, {}, {}
        self.failure, self.problem, self.cause = failure, problem, cause
        return self

    def fail_by(self, error: BaseException) -> Answer:
        """Make it the answer of a call that raised."""
        return self.fail("exception", f"raised {describe_error(error)[0]}", error)


def call_reward(reward: WeightedReward, arguments: Mapping[str, Any], catch: type[BaseException] = Exception) -> Answer:
    """Call a reward, in whichever process. Returns: its answer, in which `result` may be awaitable."""
    answer = Answer()
    logs = reward.select({"log_extra": answer.log_extra, "log_metric": answer.log_metric})
    try:
        answer.result = reward(**arguments, **logs)
    except catch as error:  # a user's function may raise anything; `on_error` decides
        answer.fail_by(error)
    return answer


def describe_error(error: BaseException) -> tuple[str, str]:
    """An exception of a reward in words.

    Returns:
        Its class, text and place, "KeyError: 'gold', at my_rewards.py:3"; and its traceback. Both begin at the reward's
        own code.
    """
    frames = frame = error.__traceback__
    while frame is not None:  # what is between: futures have frames of their own
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
    """A call on its way to a worker."""

    number: int
    data: bytes
    """Number of the reward, arguments and seed, pickled: the supervisor does not look at them."""

    seconds: float
    """How long it may take in its worker."""

    deadline: float
    """By `time.monotonic`, for all calls of the step."""


class WorkerPool:
    """The workers of some rewards, which share what is loaded; they are gone with this object or this process.

    They start when they are first asked for, and again where somebody has killed the supervisor. Picklable; a copy
    starts workers of its own.

    Args:
        rewards: All of the run. Those that cannot go to workers stay in the training process.
        limits: None, or none of them: all stay.
    """

    def __init__(self, rewards: Sequence[WeightedReward], limits: RewardWorkers | None) -> None:
        self.rewards = rewards
        self.limits = limits if limits is not None and limits.num_workers != 0 else None
        """The limits of calls; None without any."""
        self._places: dict[str, int] = {}
        """In the pool, of the rewards that workers call, by name."""
        self._started_by: int | None = None
        """A process id: a fork has none of the threads."""
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Without processes."""
        return WorkerPool, (self.rewards, self.limits)

    def start(self, num_local_ranks: int = 1) -> None:
        """Have the rewards loaded, if any can go to workers; returns at once.

        Args:
            num_local_ranks: That share the machine.
        """
        with self._lock:
            if self._started_by == os.getpid():
                return
            self._started_by, self._places = os.getpid(), {}
            sent: list[bytes] = []
            for reward in self.rewards if self.limits is not None else ():
                if reward.in_process:  # by its own word
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
                self._setup = (sent, self.limits, self.limits.number(num_local_ranks))
                self._start_supervisor()

    def _start_supervisor(self) -> None:
        """Start the process that loads the rewards, and send it the rewards."""
        self._control, theirs = multiprocessing.Pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        self._process = subprocess.Popen(  # noqa: S603 - our own code and this interpreter
            [sys.executable, "-c", START_SUPERVISOR, str(theirs.fileno()), *path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rewards print is no output of the run
            start_new_session=True,  # Ctrl-C is for the training process
        )
        theirs.close()
        with contextlib.suppress(OSError):  # it has ended already, which `wait` reports
            self._control.send((*self._setup, START_SECONDS))
        self._loaded: Future[list[str | None]] = Future()
        self._pending: dict[int, Future[Answer]] = {}
        self._numbers = itertools.count()
        shared = (self._control, self._process, self._loaded, self._pending)
        threading.Thread(target=_listen, args=shared, daemon=True).start()
        self._close = weakref.finalize(self, _close, self._control, self._process, os.getpid())

    def wait(self) -> None:
        """Wait until the rewards are loaded; those that cannot be loaded stay in the training process.

        Raises:
            RuntimeError: If it takes too long, or the supervisor ends meanwhile.
        """
        self.start()
        if not self._places:
            return
        try:
            problems = self._loaded.result(START_SECONDS)
        except concurrent.futures.TimeoutError:
            self._process.kill()
            raise RuntimeError(
                f"The rewards did not load in their own process within its {START_SECONDS:g} s: importing their "
                "modules takes too long. Import what is slow inside the reward, or set "
                "model.reward_workers.num_workers to 0."
            ) from None
        for name, place in list(self._places.items()):
            if (problem := problems[place]) is not None:
                self.keep(name, f"it cannot be loaded in another process ({problem})")

    def has(self, reward: WeightedReward) -> bool:
        """Whether workers call a reward; else it stays in the training process."""
        return reward.name in self._places

    def keep(self, name: str, why: str) -> None:
        """Keep a reward in the training process from now on, and say why."""
        if self._places.pop(name, None) is not None:
            self._warn(name, why)

    def _warn(self, name: str, why: str) -> None:
        """Warn once: no limit holds in the training process."""
        remedy = f" {REMEDY}" if hasattr(os, "fork") else ""
        log.warning("Reward %r runs in the training process without time or memory limits: %s.%s", name, why, remedy)

    def stop(self) -> None:
        """End the workers and all that they are called for; the next call starts them again."""
        if self._places:
            self._close()

    def submit(
        self,
        reward: WeightedReward,
        arguments: Mapping[str, Any],
        seed: int = 0,
        *,
        seconds: float = math.inf,
        deadline: float = math.inf,
    ) -> Future[Answer]:
        """Ask for a call.

        Args:
            reward: One that workers have.
            arguments: All that it takes, but for what it logs with.
            seed: Of the random numbers of the call.
            seconds: A limit for this call, besides that of the settings.
            deadline: By `time.monotonic`, for all calls of the step.
        """
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # nobody cancels it, or `_listen` would fail
        try:
            data = pickle.dumps((self._places[reward.name], arguments, seed))
        except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
            answer.set_result(Answer().fail("stays", f"what it is called with {_not_pickled(error)}"))
            return answer
        assert self.limits is not None
        with self._lock:
            if self._process.poll() is not None:
                self._start_supervisor()
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._control.send(Call(number, data, min(seconds, self.limits.timeout_seconds), deadline))
            except OSError:  # killed a moment ago
                self._pending.pop(number, answer).set_result(_lost())
        return answer


def _listen(
    control: Connection, process: subprocess.Popen[bytes], loaded: Future[Any], pending: dict[int, Future[Answer]]
) -> None:
    """Hand on what the supervisor sends, until it ends."""
    with contextlib.suppress(EOFError, OSError):
        loaded.set_result(control.recv())
        while True:
            number, data = control.recv()
            answer = pending.pop(number)
            try:
                answer.set_result(pickle.loads(data))  # noqa: S301 (of our own process)
            except Exception as error:  # noqa: BLE001 (a value may be of a class that is not here)
                answer.set_exception(error)
    how = _describe_end(process.wait())
    if not loaded.done():
        loaded.set_exception(
            RuntimeError(
                f"The process that loads the rewards ended {how}, when it imported their modules; what it printed, if "
                "anything, is above. Correct that, or set model.reward_workers.num_workers to 0."
            )
        )
    while pending:
        pending.popitem()[1].set_result(_lost())


def _lost() -> Answer:
    """The answer to a call whose supervisor was killed."""
    return Answer().fail("crash", "did not return: its process ended with the one that started it")


def _close(control: Connection, process: subprocess.Popen[bytes], started_by: int) -> None:
    """End the supervisor and its workers, those that are computing too; a fork of the training process does not."""
    if os.getpid() != started_by:
        return
    with contextlib.suppress(OSError):
        control.send(None)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def _describe_end(status: int) -> str:
    """How a process ended, by its exit status as `subprocess` and `multiprocessing` have it."""
    return f"with exit status {status}" if status >= 0 else f"by signal {-status} ({signal.Signals(-status).name})"


def _not_pickled(error: Exception) -> str:
    """Why something cannot be sent."""
    return f"cannot be pickled ({type(error).__name__}: {error})"


# --------------------------------------------------------------------------------------------------- the supervisor


def supervise(descriptor: int) -> None:
    """Load the rewards and have workers call them, until the training process closes the pool or is gone.

    Args:
        descriptor: Of the connection to the training process.
    """
    for name in NOT_FOR_US:
        signal.signal(getattr(signal, name), lambda *_: None)  # what a reward starts does not inherit a handler
    sys.modules["__main__"] = types.ModuleType("__main__")  # a reward of the training script is not here
    logging.getLogger("grpo_lightning").setLevel(logging.INFO)
    control = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the training process is gone
        pickled, *settings = control.recv()
        rewards, problems = zip(*map(_load_reward, pickled), strict=True)
        gc.freeze()  # or every worker would copy what they share
        control.send(list(problems))
        Supervisor(control, rewards, *settings).run()


def _load_reward(data: bytes) -> tuple[WeightedReward | None, str | None]:
    """A reward that was sent here, or why it cannot be loaded."""
    try:
        return pickle.loads(data), None  # noqa: S301 (of our own process)
    except BaseException as error:  # noqa: BLE001 (a module may do anything when it is imported, also exit)
        return None, f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class Worker:
    """A worker, as the supervisor sees it."""

    process: Any
    connection: Connection
    call: Call | None = None
    """The one it has."""

    limit: float = math.inf
    """By `time.monotonic`, for getting ready, and then for that call."""

    is_ready: bool = False

    def send(self) -> None:
        """Send it its call, whose time begins."""
        assert self.call is not None
        self.limit = min(time.monotonic() + self.call.seconds, self.call.deadline)
        with contextlib.suppress(OSError):  # it has died, which its connection tells next
            self.connection.send_bytes(self.call.data)


@dataclass
class Supervisor:
    """Hands calls to workers, and kills those that take too long."""

    control: Connection
    """To the training process."""

    rewards: Sequence[Any]
    """Loaded; None for one that cannot be."""

    settings: RewardWorkers
    num_workers: int
    """Each is forked for its first call."""

    start_seconds: float
    """How long a worker may take to get ready."""

    queue: deque[Call] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)

    def run(self) -> None:
        """Work until the training process closes the pool. Raises: EOFError, ConnectionError if it is gone."""
        try:
            while True:
                while self.queue and self._hand_out():
                    pass
                limits = [worker.limit for worker in self.workers if worker.call is not None]
                seconds = max(0.0, min(LONGEST_WAIT, min(limits) - time.monotonic())) if limits else None
                ready = wait([self.control, *(worker.connection for worker in self.workers)], seconds)
                for worker in list(self.workers):
                    if worker.connection in ready:
                        self._hear(worker)
                    elif worker.call is not None and worker.limit <= time.monotonic():
                        self._stop(worker, worker.call)
                if self.control in ready:
                    if (call := self.control.recv()) is None:
                        return
                    self.queue.append(call)
        finally:
            while self.workers:
                self._end(self.workers[0])

    def _hand_out(self) -> bool:
        """Take care of the next call. Returns: False if all workers are busy."""
        worker = next((worker for worker in self.workers if worker.call is None), None)
        if worker is None and len(self.workers) == self.num_workers:
            return False
        call = self.queue.popleft()
        if call.deadline <= time.monotonic():
            self._fail(call, "timeout", f"was not begun: {self.settings.step_limit}")
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
        """Start a worker, which gets a call once it is ready. Raises: OSError if there is no room for it."""
        ours, theirs = multiprocessing.Pipe()
        others = [self.control, ours, *(worker.connection for worker in self.workers)]
        arguments = (theirs, others, self.rewards, int(self.settings.memory_gb * 1e9))
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return Worker(process, ours, call, time.monotonic() + self.start_seconds)

    def _hear(self, worker: Worker) -> None:
        """Take what a worker sends: that it is ready, an answer, or its end."""
        call = worker.call
        try:
            data, is_last = worker.connection.recv()
        except (EOFError, OSError):
            how = self._end(worker, ENDING_SECONDS)
            if call is not None:
                early = "its worker ended while it got the rewards ready; what it printed, if anything, is above"
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
        """Kill a worker that has taken too long."""
        is_step = call.deadline <= time.monotonic()
        self._end(worker)
        if not worker.is_ready:
            why = f"not ready within {self.start_seconds:g} s (getting the rewards ready takes too long)"
            self._fail(call, "crash", f"did not return: its worker was {why}")
        else:
            why = self.settings.step_limit if is_step else self.settings.call_limit
            self._fail(call, "timeout", f"was stopped: {why}")

    def _end(self, worker: Worker, patience: float = 0.0) -> str:
        """Kill a worker and what it started; one that ends by itself is given a moment. Returns: how it ended."""
        self.workers.remove(worker)
        worker.connection.close()
        wait([worker.process.sentinel], patience)
        worker.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # it is not reaped yet: its number is no other's
        worker.process.join()
        return _describe_end(worker.process.exitcode)

    def _fail(self, call: Call, failure: str, problem: str) -> None:
        """Answer a call that failed."""
        self.control.send((call.number, pickle.dumps(Answer().fail(failure, problem))))


# ------------------------------------------------------------------------------------------------------- the workers


def _work(connection: Connection, others: Sequence[Connection], rewards: Sequence[Any], memory_bytes: int) -> None:
    """Answer calls until the supervisor is gone, or the memory is used up: a new process has all of it again."""
    status = 1
    try:
        os.setsid()  # so that what a reward starts is killed with its worker
        _end_with_parent()
        for other in others:  # the supervisor's ends
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
                asked = connection.recv_bytes()
            except (EOFError, OSError):
                break
            answer = _answer(asked, rewards, called)
            is_last = isinstance(answer.cause, MemoryError)
            connection.send((_pickle_answer(answer), is_last))
        status = 0
    except BaseException:  # noqa: BLE001 (it is printed, and the process ends)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # nothing that the supervisor has registered is this process's to clean up


def _answer(asked: bytes, rewards: Sequence[Any], called: set[int]) -> Answer:
    """Answer a call.

    Args:
        asked: Number of the reward, arguments and seed, pickled.
        rewards: The loaded rewards.
        called: Those that this worker has called.
    """
    try:
        number, arguments, seed = pickle.loads(asked)  # noqa: S301 (of our own process)
    except BaseException as error:  # noqa: BLE001 (an argument may be of a class that is not here)
        problem = f"{type(error).__name__}: {error}"
        return Answer().fail("stays", f"what it is called with cannot be loaded in another process ({problem})")
    reward = rewards[number]
    is_first = number not in called
    called.add(number)
    before = _pickle_state(reward) if is_first else None
    _seed_random(seed)
    records = logging.handlers.BufferingHandler(MOST_RECORDS)  # the training process has the run's log
    records.setLevel(logging.INFO)
    logging.getLogger().addHandler(records)
    answer = call_reward(reward, arguments, BaseException)  # SystemExit is a failure like others here
    logging.getLogger().removeHandler(records)
    answer.records = [(record.name, record.levelno, record.getMessage()) for record in records.buffer]
    if isinstance(answer.cause, MemoryError):
        answer.problem += ", with model.reward_workers.memory_gb as its limit"
    elif isinstance(answer.result, Awaitable):
        getattr(answer.result, "close", lambda: None)()
        return answer.fail("stays", "it is asynchronous")
    elif not answer.failure and is_first and _pickle_state(reward) != before:
        return answer.fail("stays", "it changes itself when it is called, and every worker has its own")
    if hasattr(answer.result, "tolist"):
        answer.result = answer.result.tolist()
    return answer


def _pickle_answer(answer: Answer) -> bytes:
    """An answer as it is sent, with its exception in words."""
    if answer.cause is not None:
        answer.cause = RaisedError(answer.problem, describe_error(answer.cause)[1])
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
        problem = f"raised its values cannot be sent: {type(error).__name__}: {error}"
        return pickle.dumps(Answer(records=answer.records).fail("exception", problem))


def _pickle_state(reward: WeightedReward) -> bytes | None:
    """The state of a reward, to see whether a call changes it. None if it cannot be pickled."""
    try:
        return pickle.dumps(reward)
    except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled)
        return None


def _end_with_parent() -> None:
    """Let Linux kill this process when its parent is gone, whatever it is computing."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit_memory(memory_bytes: int) -> None:
    """Let this process fail instead of the machine: it may allocate so much beyond what it shares with its parent."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _seed_random(seed: int) -> None:
    """Make the random numbers of a call depend on the seed alone, not on its worker or the calls before."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
