"""Several processes on this CPU, with the environment that torchrun gives them.

    run_ranks("tests.distributed.steps", "zero3", folder)

A process group costs seconds, so a file of tests starts one per strategy and runs all of its cases in it. Every rank
runs the module's `main(*arguments)`; what they find out they write to files, which the tests read. Ranks are forks of
one process that has imported everything (`fork_server.py`); `test_command.py` also has ranks that start from nothing.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port

T = TypeVar("T")
FOR_ALL = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}
"""Variables that packages read when they are imported."""


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets, with one thread each."""
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    # The tests' own process may have run a Trainer, which leaves traces that would be taken for this run's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST_", "NODE_"))}
    return inherited | FOR_ALL | own


class Rank:
    """A rank's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.code is None:
            self.code = ask_server({"poll": self.pid})
        return self.code

    def wait(self, timeout: float = 60) -> int:
        """Its exit code, once it has ended.

        Raises:
            TimeoutError: If it runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} runs after {timeout} seconds")
            time.sleep(0.1)
        return code


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process that ranks are forks of; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.fork_server"],
        env=os.environ | FOR_ALL,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask_server(request: dict[str, Any]) -> Any:
    """Its answer."""
    requests, answers = server().stdin, server().stdout
    assert requests
    assert answers
    requests.write(f"{json.dumps(request)}\n")
    requests.flush()
    answer = answers.readline()
    assert answer, "the process that ranks are forks of has ended; what it printed says why"
    return json.loads(answer)


def start_ranks(
    module: str, *arguments: object, world_size: int = 2, extra: Mapping[str, str] | None = None, folder: Path
) -> list[Rank]:
    """Start `python -m module arguments` on every rank, each in a session of its own, writing to `rank<r>.txt`."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        start = {
            "module": module,
            "arguments": [str(argument) for argument in arguments],
            "environment": environment(rank, world_size, port) | dict(extra or {}),
            "folder": str(ROOT),
            "output": str(folder / f"rank{rank}.txt"),
        }
        ranks.append(Rank(ask_server({"start": start})))
    return ranks


def kill(rank: Rank) -> None:
    """SIGKILL to a rank and everything that it started."""
    if rank.poll() is None:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def run_ranks(
    module: str,
    *arguments: object,
    world_size: int = 2,
    timeout: float = 900,
    extra: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `python -m module arguments` on every rank to its end.

    Returns:
        What each rank printed.

    Raises:
        AssertionError: If a rank fails, or they are not done in time (a hang), with the end of what they printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ranks = start_ranks(module, *arguments, world_size=world_size, extra=extra, folder=folder)
        deadline = time.monotonic() + timeout
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                assert time.monotonic() < deadline, f"not done after {timeout} seconds: a hang?\n{tails(folder)}"
                time.sleep(0.1)
            assert not any(rank.poll() for rank in ranks), f"a rank failed\n{tails(folder)}"
        finally:
            for rank in ranks:
                kill(rank)
        return [(folder / f"rank{rank}.txt").read_text(errors="replace") for rank in range(world_size)]


def once(work: Callable[..., T]) -> Callable[..., T]:
    """The work, done once for the same arguments; if it fails, every call for them raises its error.

    For ranks that run all cases of some tests: unlike those of a fixture with parameters, the tests need not be the
    product of the parameters.
    """
    done: dict[Any, Future[T]] = {}

    def ask(*arguments: Any) -> T:
        if arguments not in done:
            done[arguments] = Future()
            try:
                done[arguments].set_result(work(*arguments))
            except Exception as error:  # noqa: BLE001 - raised by `result`
                done[arguments].set_exception(error)
        return done[arguments].result()

    return ask


def tails(folder: Path, size: int = 6000) -> str:
    """The end of what every rank printed."""
    texts = {path.stem: path.read_text(errors="replace")[-size:] for path in sorted(folder.glob("rank*.txt"))}
    return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())
