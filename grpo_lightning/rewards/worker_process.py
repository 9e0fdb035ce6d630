"""The processes in which rule rewards run: a parent that has loaded the rewards, and the workers that it forks.

The parent loads the rewards and the modules they come in once, and does nothing else: so a worker is there in a
millisecond, shares what was loaded, and one that stands in for a killed one runs the code the run began with, whatever
became of the files. A worker scores one call after the other, in its main thread, where signals work.

It runs as a script and loads nothing of this package but what the rewards themselves need.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!Q")
ENDING_SECONDS = 0.2
"""How long a process that is ending may take until it is gone."""

SHORT_PICKLE = 1 << 20
"""Bytes up to which all of a reward is compared with what it was, after every call; of larger ones, only their plain
attributes (numbers, texts)."""

CALLERS = frozenset(str(Path(__file__).with_name(name)) for name in ("worker_process.py", "call.py", "base.py"))
"""Files whose code is between a call and the reward."""

NOT_FOR_US = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a terminal or a scheduler sends to all processes of a run. They are for the training process, which ends
these."""


class ClosedError(EOFError):
    """The other side is gone."""


def send(connection: socket.socket, value: Any) -> None:
    """Send a value. Raises: what pickling does; OSError if the other side is gone."""
    send_pickled(connection, pickle.dumps(value))


def send_pickled(connection: socket.socket, data: bytes, seconds: float | None = None) -> None:
    """Send a pickled value. Raises: OSError if the other side is gone or does not take it in time (TimeoutError)."""
    connection.settimeout(seconds)
    connection.sendall(HEADER.pack(len(data)) + data)


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """The next value.

    Args:
        connection: From the other side.
        deadline: Of `time.monotonic`; None waits for ever.

    Raises:
        TimeoutError: If it is not all there by then.
        ClosedError: If the other side is gone.
    """
    (size,) = HEADER.unpack(_exactly(connection, HEADER.size, deadline))
    return pickle.loads(_exactly(connection, size, deadline))  # noqa: S301 (of our own process)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    """So many bytes. Raises: as `receive`."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        else:
            connection.settimeout(None)
        try:
            part = connection.recv(min(size - len(data), 1 << 20))
        except ConnectionError as error:
            raise ClosedError from error
        if not part:
            raise ClosedError
        data += part
    return bytes(data)


def main() -> None:
    """Load the rewards, then fork and kill workers as asked, until the process that asks is gone."""
    for name in NOT_FOR_US:
        signal.signal(getattr(signal, name), lambda *_: None)  # what a reward starts does not inherit a handler
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    sys.path[:] = setup["path"]
    logging.getLogger("grpo_lightning").setLevel(logging.INFO)
    # A reward of the training script must not be looked for in this one.
    sys.modules["__main__"] = types.ModuleType("__main__")
    rewards = [LoadedReward(data) for data in setup["rewards"]]
    with contextlib.suppress(OSError):  # the other side is gone already
        send(control, [reward.problem for reward in rewards])
    workers: set[int] = set()
    try:
        while True:
            asked, descriptors = _command(control)
            if asked == b"fork":
                connection = socket.socket(fileno=descriptors[0])
                connection.set_inheritable(False)  # or what a reward starts would keep it open
                if worker := _fork(control, connection, rewards, setup["memory_bytes"]):
                    workers.add(worker)
            else:
                kind, _, number = asked.partition(b" ")
                is_ours = int(number) in workers  # and not of a process that stood in this one's place
                workers.discard(int(number))
                send(control, _end(int(number), ENDING_SECONDS if kind == b"reap" else 0.0) if is_ours else None)
    except ClosedError:
        for worker in workers:
            _kill(worker)


class LoadedReward:
    """A reward that was sent here.

    Args:
        data: It, pickled.
    """

    def __init__(self, data: bytes) -> None:
        self.is_short = len(data) <= SHORT_PICKLE
        self.problem: str | None = None
        """Why it cannot be loaded."""
        try:
            self.reward = pickle.loads(data)  # noqa: S301 (of our own process)
        except BaseException as error:  # noqa: BLE001 (a module may do anything when it is imported, also exit)
            self.problem = f"{type(error).__name__}: {error}"

    def state(self) -> Any:
        """What it is: a call that leaves another state has changed it. None if it cannot be told."""
        inner = getattr(self.reward, "reward", self.reward)
        plain = {k: v for k, v in getattr(inner, "__dict__", {}).items() if isinstance(v, int | float | str | None)}
        try:
            return pickle.dumps(self.reward if self.is_short else plain)
        except Exception:  # noqa: BLE001 (an object may raise anything when it is pickled)
            return None


def _command(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next command and what descriptors came with it. Raises: ClosedError if the other side is gone."""
    control.settimeout(None)
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
    except ConnectionError as error:
        raise ClosedError from error
    if not data:
        raise ClosedError
    return data, list(descriptors)


def _fork(control: socket.socket, connection: socket.socket, rewards: Sequence[LoadedReward], memory_bytes: int) -> int:
    """Start a worker. Returns: its process id, which it also sends once it is ready; 0 if there is no room for one."""
    sys.stdout.flush()
    try:
        worker = os.fork()
    except OSError as error:
        connection.close()
        sys.stderr.write(f"No process for rewards could be started: {error}\n")
        return 0
    if worker:
        connection.close()
        return worker
    status = 1
    try:
        os.setsid()  # so that what a reward starts is killed with its worker
        end_with_parent()
        control.close()
        limit_memory(memory_bytes)
        for loaded in rewards:
            if loaded.problem is None:
                loaded.reward.warm_up()
        send(connection, os.getpid())
        serve(connection, rewards)
        status = 0
    except BaseException:  # noqa: BLE001 (it is said, and the process ends)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # nothing that the parent has registered is this process's to clean up


def _end(worker: int, patience: float) -> int:
    """Kill a worker and what it started, and reap it. Returns: its status as `waitpid` has it.

    One that is not reaped yet keeps its number: no other process is killed in its place. One that is ending by itself
    has closed its connection a moment before it is gone, and is given `patience` seconds, so that its own status is
    told.
    """
    until = time.monotonic() + patience
    while os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    _kill(worker)
    return os.waitpid(worker, 0)[1]


def _kill(worker: int) -> None:
    """Kill a worker and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent is gone, whatever it is computing."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def limit_memory(memory_bytes: int) -> None:
    """Let this process fail instead of the machine: it may allocate so much beyond what it shares with its parent."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(connection: socket.socket, rewards: Sequence[LoadedReward]) -> None:
    """Answer calls until the other side is gone, or the memory is used up: a new process has all of it again."""
    with contextlib.suppress(ClosedError):
        while True:
            try:
                call = receive(connection)
            except ClosedError:
                raise
            except BaseException as error:  # noqa: BLE001 (what a call is given may be of a class that is not here)
                problem = f"{type(error).__name__}: {error}"
                send(connection, {"stays": f"what it is called with cannot be loaded in another process ({problem})"})
                continue
            answer = answered(rewards[call["reward"]], call)
            try:
                send(connection, answer)
            except Exception as error:  # noqa: BLE001 (a value that cannot be pickled)
                send(connection, {"error": f"its values cannot be sent: {type(error).__name__}: {error}"})
            if answer.get("is_full"):
                return


def answered(loaded: LoadedReward, call: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward says.

    Returns:
        `result`, `extras`, `metrics` and `records` (of the log); or `error`; or why the reward `stays` in the training
        process.
    """
    seed_everything(call["seed"])
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    logs = {
        "log_extra": lambda column, values: extras.setdefault(column, []).extend(values),
        "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
    }
    before = loaded.state()
    with Records() as records:
        try:
            result = loaded.reward(
                **call["arguments"], **{name: log for name, log in logs.items() if name in call["logs"]}
            )
        except BaseException as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
            problem, shown = told(error)
            is_full = isinstance(error, MemoryError)
            if is_full:
                problem += ", with model.reward_workers.memory_gb as its limit"
            return {"error": problem, "traceback": shown, "is_full": is_full, "records": records.kept}
    if isinstance(result, Awaitable):
        if hasattr(result, "close"):
            result.close()
        return {"stays": "it is asynchronous"}
    if loaded.state() != before:
        return {"stays": "it changes itself when it is called, and every worker has its own"}
    if hasattr(result, "tolist"):
        result = result.tolist()
    return {"result": result, "extras": extras, "metrics": metrics, "records": records.kept}


def told(error: BaseException) -> tuple[str, str]:
    """What is said of an exception of a reward.

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


class Records(logging.Handler):
    """Keeps what a call logs: the training process has the run's log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record: its logger, level and message."""
        self.kept.append((record.name, record.levelno, record.getMessage()))

    def __enter__(self) -> Records:
        """Listen."""
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        logging.getLogger().removeHandler(self)


def seed_everything(seed: int) -> None:
    """Make what a call draws at random depend on the seed alone, not on which worker it came to or after what."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


if __name__ == "__main__":
    main()
