"""Killable processes for rule rewards: a time limit, a memory limit, several calls at once, and who runs in them.

A reward that loops in C code cannot be interrupted by a signal, nor by a thread, which it keeps from running. A process
can be killed.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rewards.worker_process import ClosedError, receive, send, send_pickled

START_SECONDS = 120.0
"""How long the rewards may take to be imported."""


class OverdueError(RuntimeError):
    """A call took longer than its limit, and its worker was killed."""


class CrashError(RuntimeError):
    """The process that ran a call is gone."""


class RaisedError(RuntimeError):
    """A call raised in another process.

    Args:
        problem: The error and its place, in a line.
        shown: Its traceback there.
    """

    def __init__(self, problem: str, shown: str = "") -> None:
        super().__init__(problem)
        self.shown = shown

    def __str__(self) -> str:
        """Both: Python shows it as the cause of what is raised for it."""
        return f"{self.args[0]}\n{self.shown}".rstrip()


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
        """What is said of a call that took too long."""
        return f"it took longer than the {self.timeout_seconds:g} s of model.reward_workers.timeout_seconds"

    @property
    def step_limit(self) -> str:
        """Likewise where all calls did."""
        return (
            f"all calls for a rollout took longer than the {self.step_timeout_seconds:g} s of "
            "model.reward_workers.step_timeout_seconds"
        )


@dataclass
class Task:
    """A call on its way to a worker."""

    message: dict[str, Any]
    deadline: float
    """Of `time.monotonic`, for all calls of the step."""

    answer: concurrent.futures.Future[dict[str, Any]] = field(default_factory=concurrent.futures.Future)


class WorkerPool:
    """Workers that share the loaded rewards, each forked for its first call; gone with this object or this process.

    Args:
        rewards: Each pickled.
        settings: Number and limits.
        num_workers: Processes.
    """

    def __init__(self, rewards: Sequence[bytes], settings: RewardWorkers, num_workers: int) -> None:
        self.settings = settings
        self.parent = WorkerParent(rewards, int(settings.memory_gb * 1e9))
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        for number in range(num_workers):
            thread = WorkerThread(self.parent, settings)
            threading.Thread(target=thread.run, args=[self.tasks], name=f"reward-worker-{number}", daemon=True).start()
        self.close = weakref.finalize(self, _close, self.parent, self.tasks, num_workers)

    def problems(self) -> list[str | None]:
        """Why rewards could not be loaded; None for those that were. Raises: RuntimeError if it takes too long."""
        return self.parent.problems()

    def submit(self, message: dict[str, Any], deadline: float) -> concurrent.futures.Future[dict[str, Any]]:
        """Ask for a call.

        Args:
            message: What `worker_process.answered` takes, and the number of the reward.
            deadline: Of the step.

        Returns:
            Its answer; or OverdueError, CrashError.
        """
        task = Task(message, deadline)
        self.tasks.put(task)
        return task.answer


class WorkerParent:
    """The process that has loaded the rewards and forks the workers."""

    def __init__(self, rewards: Sequence[bytes], memory_bytes: int) -> None:
        self.rewards, self.memory_bytes = list(rewards), memory_bytes
        self.lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        """Start the process, and send it the rewards."""
        self.control, theirs = socket.socketpair()
        self.process = subprocess.Popen(  # noqa: S603 - our own script and this interpreter
            [sys.executable, str(Path(__file__).with_name("worker_process.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rewards print is no output of the run
            start_new_session=True,  # Ctrl-C is for the training process
        )
        theirs.close()
        path = [entry or os.getcwd() for entry in sys.path]
        send(self.control, {"path": path, "rewards": self.rewards, "memory_bytes": self.memory_bytes})
        self._problems: list[str | None] | None = None

    def problems(self) -> list[str | None]:
        """Why rewards could not be loaded. Raises: RuntimeError if the process does not start."""
        with self.lock:
            if self._problems is None:
                try:
                    self._problems = receive(self.control, time.monotonic() + START_SECONDS)
                except TimeoutError as error:
                    self.process.kill()
                    raise RuntimeError(
                        f"The rewards did not load in their own process within its {START_SECONDS:g} s: importing "
                        "their modules takes too long. Import what is slow inside the reward, or set "
                        "model.reward_workers.num_workers to 0."
                    ) from error
                except ClosedError as error:
                    raise RuntimeError(
                        f"The process that loads the rewards ended {_how(_status(self.process))}, when it imported "
                        "their modules; what it printed, if anything, is above. Correct that, or set "
                        "model.reward_workers.num_workers to 0."
                    ) from error
        assert self._problems is not None
        return self._problems

    def fork(self) -> tuple[socket.socket, int]:
        """A new worker. Returns: the connection to it, and its process id. Raises: CrashError if there is none."""
        with self.lock:
            if self.process.poll() is not None:  # somebody has killed it
                self.control.close()
                self._start()
        self.problems()
        ours, theirs = socket.socketpair()
        with self.lock:
            try:
                socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
                theirs.close()
                return ours, receive(ours, time.monotonic() + START_SECONDS)
            except (OSError, ClosedError) as error:
                ours.close()
                theirs.close()
                raise CrashError(self._not_started(error)) from error

    def _not_started(self, error: Exception) -> str:
        """Why there is no worker."""
        if isinstance(error, TimeoutError):
            return f"its worker was not ready within {START_SECONDS:g} s (getting the rewards ready takes too long)"
        if self.process.poll() is not None:
            return f"no worker could be started, as the process that starts them ended {_how(_status(self.process))}"
        return "its worker ended while it got the rewards ready; what it printed, if anything, is above"

    def end(self, worker: int, *, is_ending: bool) -> int | None:
        """Kill a worker; one that is ending by itself is given a moment.

        Returns:
            How it ended, as `os.waitpid` has it; None if nobody knows.
        """
        with self.lock:
            try:
                self.control.sendall(b"%s %d" % (b"reap" if is_ending else b"kill", worker))
                status: int = receive(self.control, time.monotonic() + START_SECONDS)
            except (OSError, ClosedError):
                return None
        return status


class WorkerThread:
    """Hands calls to a worker of its own, one after the other, and starts a new one where it is gone.

    Args:
        parent: Forks the workers.
        settings: The limits.
    """

    def __init__(self, parent: WorkerParent, settings: RewardWorkers) -> None:
        self.parent, self.settings = parent, settings
        self.connection: socket.socket | None = None
        self.worker = 0

    def run(self, tasks: queue.SimpleQueue[Task | None]) -> None:
        """Work until there is None."""
        while (task := tasks.get()) is not None:
            if not task.answer.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                task.answer.set_result(self.ask(task))
            except BaseException as error:  # noqa: BLE001 (whoever waits for the answer is told)
                task.answer.set_exception(error)
        if self.connection is not None:
            self.connection.close()

    def ask(self, task: Task) -> dict[str, Any]:
        """The answer to a call. Raises: OverdueError or CrashError."""
        if task.deadline <= time.monotonic():
            raise OverdueError(f"was not begun: {self.settings.step_limit}")
        try:
            data = pickle.dumps(task.message)
        except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
            return {"stays": f"what it is called with {_not_pickled(error)}"}
        if self.connection is None:
            self.connection, self.worker = self.parent.fork()
        seconds = max(0.001, min(self.settings.timeout_seconds, task.deadline - time.monotonic()))
        limit = time.monotonic() + seconds
        try:
            send_pickled(self.connection, data, seconds)
            answer: dict[str, Any] = receive(self.connection, limit)
        except TimeoutError:
            self.end(is_ending=False)
            why = self.settings.step_limit if task.deadline <= time.monotonic() else self.settings.call_limit
            raise OverdueError(f"was stopped: {why}") from None
        except (OSError, ClosedError):
            raise CrashError(f"its process ended {_how(self.end(is_ending=True))}") from None
        if answer.get("is_full"):  # of memory: it ends by itself
            self.end(is_ending=True)
        return answer

    def end(self, *, is_ending: bool) -> int | None:
        """Let go of the worker. Returns: as `WorkerParent.end`."""
        assert self.connection is not None
        self.connection.close()
        self.connection = None
        return self.parent.end(self.worker, is_ending=is_ending)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """How an ending process ended, as `os.waitpid` has it; None if it is still running after a moment."""
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return None
    return -code if code < 0 else code << 8


def _how(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "with the one that started it"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"by signal {number} ({signal.Signals(number).name})"
    return f"with exit status {os.waitstatus_to_exitcode(status)}"


def _close(parent: WorkerParent, tasks: queue.SimpleQueue[Task | None], num_workers: int) -> None:
    """End the threads and processes; those that are computing too."""
    for _ in range(num_workers):
        tasks.put(None)
    parent.control.close()
    try:
        parent.process.wait(5)
    except subprocess.TimeoutExpired:
        parent.process.kill()


def pickled(reward: Any) -> tuple[bytes | None, str]:
    """A reward as it is sent; or None, and why it cannot be."""
    if not hasattr(os, "fork"):
        return None, "this system cannot fork"
    try:
        return pickle.dumps(reward), ""
    except Exception as error:  # noqa: BLE001 (an object may raise anything when it is pickled)
        return None, f"it {_not_pickled(error)}"


def _not_pickled(error: Exception) -> str:
    """What is said of what cannot be sent."""
    return f"cannot be pickled ({type(error).__name__}: {error})"


def checked(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer. Raises: RaisedError if the call raised."""
    if "error" in answer:
        raise RaisedError(answer["error"], answer.get("traceback", ""))
    return answer


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
