"""The processes of a `WorkerPool`: the supervisor, and the workers that call the rewards.

`rewards/workers.py` describes the processes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.workers import (
    Answer,
    Call,
    Deadline,
    DescribedValue,
    RaisedError,
    RewardWorkers,
    call_reward,
    describe_end,
    describe_error,
    describe_value,
    seed_random,
)

log = logging.getLogger(__name__)

ENDING_SECONDS = 0.2
"""Time to exit for a worker that has closed its connection, so that its exit status is reported."""

LONGEST_WAIT = 3600.0
"""Longest wait of the supervisor, in seconds. The system may not support longer waits."""

MOST_RECORDS = 10_000
"""Maximum number of log records per call."""

IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a terminal or scheduler sends to all processes of a run. The training process handles them and stops the
supervisor."""


class _Output(io.FileIO):
    """Output of rewards. It is dropped if nothing can receive it, for example because the terminal was closed."""

    def write(self, data: Any) -> int:
        """Write, or drop the data."""
        try:
            written = super().write(data)  # None if a descriptor that does not block is full
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def stream_to(descriptor: int) -> io.TextIOWrapper:
    """Make a text stream like `sys.stderr` whose writes never fail."""
    raw = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def supervise(descriptor: int) -> None:
    """The supervisor's main function: load the rewards, and run workers until the pool is closed."""
    for name in IGNORED_SIGNALS:
        # A handler instead of SIG_IGN, because subprocesses of rewards inherit SIG_IGN, but no handlers.
        signal.signal(getattr(signal, name), lambda *_: None)
    sys.modules["__main__"] = types.ModuleType("__main__")  # rewards of the training script cannot be loaded here
    sys.stdout.flush()
    sys.stdout, sys.stderr = (stream_to(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    logging.getLogger("grpo_lightning").setLevel(logging.INFO)
    control = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the training process has ended
        pickled, *settings = control.recv()
        rewards, problems = zip(*map(_load_reward, pickled), strict=True)
        gc.freeze()  # otherwise garbage collection would copy shared memory in every worker
        control.send(list(problems))
        Supervisor(control, rewards, *settings).run()


def _load_reward(data: bytes) -> tuple[WeightedReward | None, str | None]:
    """Unpickle a reward. Returns: (reward, None), or (None, why it runs in the training process)."""
    try:
        return pickle.loads(data), None  # noqa: S301 (from our own process)
    except BaseException as error:  # noqa: BLE001 (importing a module may do anything, even exit)
        if isinstance(error, AttributeError) and "module '__main__'" in str(error):  # here, another program is __main__
            return None, "it is defined in the training script or notebook"
        return None, f"it cannot be loaded in another process ({type(error).__name__}: {error})"


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
        """Run until the training process closes the pool."""
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
        """Send or fail the next call. Returns: False if all workers are busy."""
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
        """Fork a worker."""
        ours, theirs = multiprocessing.Pipe()
        others = [self.control, ours, *(worker.connection for worker in self.workers)]
        arguments = (theirs, others, self.rewards, int(self.settings.memory_gb * 1e9))
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return Worker(process, ours, call, time.monotonic() + self.start_seconds)

    def _receive(self, worker: Worker) -> None:
        """Handle a message of a worker."""
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
        """Kill a worker and its subprocesses after `patience` seconds. Returns: its exit status."""
        self.workers.remove(worker)
        worker.connection.close()
        wait([worker.process.sentinel], patience)
        worker.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # it is not reaped yet, so its pid cannot be reused
        worker.process.join()
        return describe_end(worker.process.exitcode)

    def _fail(self, call: Call, failure: str, problem: str) -> None:
        """Answer a call that failed."""
        self.control.send((call.number, pickle.dumps(Answer().fail(failure, problem))))


# ------------------------------------------------------------------------------------------------------- the workers


def _work(connection: Connection, others: Sequence[Connection], rewards: Sequence[Any], memory_bytes: int) -> None:
    """Main function of a worker: answer calls until the supervisor ends, or a call runs out of memory."""
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers that the supervisor has registered


class FirstRecords(logging.Handler):
    """Keeps the first `MOST_RECORDS` log records of a call."""

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
    """Run the pickled call `request`, add the index of its reward to `called`, and return the answer."""
    try:
        number, arguments, seed = pickle.loads(request)  # noqa: S301 (from our own process)
    except BaseException as error:  # noqa: BLE001 (an argument's class may be missing in this process)
        problem = f"{type(error).__name__}: {error}"
        return Answer().fail("stays", f"its arguments cannot be loaded in another process ({problem})")
    reward = rewards[number]
    is_first = number not in called
    called.add(number)
    before = _pickle_state(reward) if is_first else None
    seed_random(seed)
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
    """Pickle a reward, to detect changes; None if it cannot be pickled."""
    try:
        return pickle.dumps(reward)
    except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled)
        return None


def _end_with_parent() -> None:
    """Have Linux kill this process when its parent ends."""
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
