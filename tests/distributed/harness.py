"""Several processes on this CPU, started as torchrun starts them.

    run_ranks("tests.distributed.steps", "zero3", folder)

A process group costs seconds, so a file of tests starts one per strategy and runs all of its cases in it. Every rank
runs the module's `main(*arguments)`; what they find out they write to files, which the tests read.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets, and one thread each."""
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    # The tests' own process may have run a Trainer, which leaves traces that would be taken for this run's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST_", "NODE_"))}
    return inherited | own


def start_ranks(
    module: str, *arguments: object, world_size: int = 2, extra: Mapping[str, str] | None = None, folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Start `python -m module arguments` on every rank, each in a session of its own, writing to `rank<r>.txt`."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        with (folder / f"rank{rank}.txt").open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, arguments)],
                    env=environment(rank, world_size, port) | dict(extra or {}),
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return ranks


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a rank and everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_ranks(
    module: str,
    *arguments: object,
    world_size: int = 2,
    timeout: float = 300,
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


def tails(folder: Path, size: int = 6000) -> str:
    """The end of what every rank printed."""
    texts = {path.stem: path.read_text(errors="replace")[-size:] for path in sorted(folder.glob("rank*.txt"))}
    return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())
