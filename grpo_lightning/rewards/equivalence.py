"""Whether two mathematical expressions are equal, decided in a process of its own, within a time limit.

Sympy may compute for ever, and not even a signal interrupts a large power; signals also work in the main thread only.
A process can be killed, from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

START_SECONDS = 120.0
"""How long the process may take to import what it needs; minutes only on a machine that is very busy."""


class UndecidedError(RuntimeError):
    """The comparison failed or took too long."""


class Equivalence:
    """The process that compares, started with the first question and again after it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process now. Raises: RuntimeError if it does not start."""
        with self._lock:
            self._running()

    def decide(self, gold: str, answer: str, *, announced_in: str = "", timeout_seconds: float) -> bool | None:
        """Compare an answer with the right one.

        Args:
            gold: The right answer.
            answer: An answer.
            announced_in: A text; the formula that it announces as the answer, if there is one, is taken instead.
            timeout_seconds: After which the process is killed, also if this one is gone.

        Returns:
            Whether they are equal (False too if the answer cannot be read); None if `gold` cannot be read.

        Raises:
            UndecidedError: If the comparison failed or took too long.
            RuntimeError: If the process does not start.
        """
        question = json.dumps(
            {"gold": gold, "answer": answer, "announced_in": announced_in, "timeout_seconds": timeout_seconds}
        )
        with self._lock:
            process = self._running()
            line, is_late = _exchange(process, question, timeout_seconds)
            if is_late or not line:
                self._process = None
                _end(process)
            if not line:
                raise UndecidedError(
                    f"took longer than {timeout_seconds:g} s" if is_late else "the comparing process died"
                )
        found = json.loads(line)
        if "error" in found:
            raise UndecidedError(found["error"])
        value: bool | None = found["value"]
        return value

    def _running(self) -> subprocess.Popen[str]:
        """The process, ready. Raises: RuntimeError if it does not start."""
        if self._process is None or self._process.poll() is not None:
            process = subprocess.Popen(  # noqa: S603 - our own script and this interpreter
                [sys.executable, str(Path(__file__).with_name("equivalence_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                # It finds packages where this process does, whatever put them on the path.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            line, is_late = _exchange(process, None, START_SECONDS)
            if is_late:
                _end(process)
                raise RuntimeError(
                    f"The process that compares mathematical answers was not ready within {START_SECONDS:g} s: "
                    "importing math-verify takes too long. The machine may be too busy, or a network file system slow."
                )
            if line.strip() != "ready":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)  # it may be ending by itself, and its own status says why
                _end(process)
                raise RuntimeError(
                    f"The process that compares mathematical answers did not start (exit status {process.poll()}); "
                    "what it printed, if anything, is above."
                )
            self._process = process
        return self._process


def check_installed(needed_by: str) -> None:
    """Raises: ImportError if math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"{needed_by} needs math-verify: pip install 'grpo-lightning[math]'.")


def equivalence() -> Equivalence:
    """The process of this process: a fork must not read the answers meant for its parent."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(process_id: int) -> Equivalence:
    """One per process id."""
    return Equivalence()


def _exchange(process: subprocess.Popen[str], question: str | None, timeout_seconds: float) -> tuple[str, bool]:
    """Ask and wait. Returns: the line that came back, empty if the process ended; and whether it was killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(timeout_seconds, stop)
    timer.daemon = True
    timer.start()
    line = ""
    try:
        if question is not None:
            process.stdin.write(question + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:  # it died before or while it was asked
        line = ""
    finally:
        timer.cancel()
        timer.join()  # or it could kill the process that the next question goes to
    return line if line.endswith("\n") else "", is_late.is_set()


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent yet has nobody to go to
                pipe.close()
