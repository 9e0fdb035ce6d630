"""The processes in which rule rewards run: a parent that has loaded the rewards, and the workers that it forks.

The parent loads the rewards and the modules they come in once, and does nothing else: so a worker is there in a
millisecond, shares what was loaded, and one that stands in for a killed one runs the code the run began with, whatever
became of the files. A worker scores one call after the other, in its main thread, where signals work.

It runs as a script and loads nothing of this package but what the rewards themselves need.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!Q")
ENDING_SECONDS = 0.2
"""How long a process that is ending may take until it is gone."""

SHORT_PICKLE = 1 << 20
"""Bytes up to which a reward is compared with what it was, after every call."""


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
    # They are for the training process, which ends this one. Workers too go on when SLURM warns all processes of a job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    sys.path[:] = setup["path"]
    rewards: list[Any] = []
    problems: list[str | None] = []
    for data in setup["rewards"]:
        reward, problem = loaded(data)
        rewards.append(reward)
        problems.append(problem)
    send(control, problems)
    workers: set[int] = set()
    try:
        while True:
            asked, descriptors = _command(control)
            if asked == b"fork":
                workers.add(_fork(control, socket.socket(fileno=descriptors[0]), rewards, setup["memory_bytes"]))
            else:
                worker = int(asked)
                workers.discard(worker)
                send(control, _end(worker))
    except ClosedError:
        for worker in workers:
            _kill(worker)


def loaded(data: bytes) -> tuple[Any, str | None]:
    """A reward, or why it cannot be loaded here."""
    try:
        return pickle.loads(data), None  # noqa: S301 (of our own process)
    except BaseException as error:  # noqa: BLE001 (a module may do anything when it is imported, also exit)
        return None, f"{type(error).__name__}: {error}"


def _command(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next command and what descriptors came with it. Raises: ClosedError if the other side is gone."""
    control.settimeout(None)
    data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
    if not data:
        raise ClosedError
    return data, list(descriptors)


def _fork(control: socket.socket, connection: socket.socket, rewards: Sequence[Any], memory_bytes: int) -> int:
    """Start a worker. Returns: its process id, which it also sends."""
    sys.stdout.flush()
    worker = os.fork()
    if worker:
        connection.close()
        return worker
    status = 1
    try:
        os.setsid()  # so that what a reward starts is killed with its worker
        end_with_parent()
        control.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        limit_memory(memory_bytes)
        send(connection, os.getpid())
        serve(connection, rewards)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)  # nothing that the parent has registered is this process's to clean up


def _end(worker: int) -> int:
    """Kill a worker and what it started, and reap it. Returns: its status as `waitpid` has it.

    One that is not reaped yet keeps its number: no other process is killed in its place. One that is ending by itself
    has closed its connection a moment before it is gone, and is given that moment, so that its own status is told.
    """
    patience = time.monotonic() + ENDING_SECONDS
    while os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > patience:
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


def serve(connection: socket.socket, rewards: Sequence[Any]) -> None:
    """Answer calls until the other side is gone."""
    with contextlib.suppress(ClosedError):
        while True:
            call = receive(connection)
            answer = answered(rewards[call["reward"]], call)
            try:
                send(connection, answer)
            except Exception as error:  # noqa: BLE001 (a value that cannot be pickled)
                send(connection, {"error": f"its values cannot be sent: {type(error).__name__}: {error}"})


def answered(reward: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward says.

    Returns:
        `result`, `extras` and `metrics`; or `error`; or why the reward `stays` in the training process.
    """
    seed_everything(call["seed"])
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    logs = {
        "log_extra": lambda column, values: extras.setdefault(column, []).extend(values),
        "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
    }
    before = pickle.dumps(reward)
    try:
        result = reward(**call["arguments"], **{name: log for name, log in logs.items() if name in call["logs"]})
    except BaseException as error:  # noqa: BLE001 (a user's function may raise anything; `on_error` decides)
        shown = "".join(traceback.format_exception(error))
        return {"error": f"{type(error).__name__}: {error}", "traceback": shown}
    if isinstance(result, Awaitable):
        if hasattr(result, "close"):
            result.close()
        return {"stays": "it is asynchronous"}
    if len(before) < SHORT_PICKLE and pickle.dumps(reward) != before:
        return {"stays": "it changes itself when it is called, and every worker has its own"}
    if hasattr(result, "tolist"):
        result = result.tolist()
    return {"result": result, "extras": extras, "metrics": metrics}


def seed_everything(seed: int) -> None:
    """Make what a call draws at random depend on the seed alone, not on which worker it came to or after what."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


if __name__ == "__main__":
    main()
