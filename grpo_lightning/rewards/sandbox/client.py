"""Run an untrusted program in the sandbox, by sending jobs to the launcher process (`sandbox/launcher.py`).

with Sandbox(program, Limits(memory_bytes=2**29), test_codes) as sandbox:
    ended = sandbox.run_main(b"3 4", seconds=5, max_output=1000)
    ended, value, why = sandbox.call("add", [3, 4], seconds=5, max_output=1000)
    ended, outcome, why = sandbox.judge(0, seconds=5)
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_lightning.rewards.sandbox import values

log = logging.getLogger(__name__)

START_SECONDS = 30.0
"""Time limit for the start of a launcher."""

GRACE_SECONDS = 5.0
"""Time after a job's time limit at which a silent launcher is killed."""

# Empty modules replace the parent packages, which would import torch.
START_LAUNCHER = """
import sys, types
sys.path[:] = [path for path in sys.path if path]
for name in ("grpo_lightning", "grpo_lightning.rewards", "grpo_lightning.rewards.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1]] if name.endswith("sandbox") else []
from grpo_lightning.rewards.sandbox.launcher import main
main(*map(int, sys.argv[2:]))
"""


class SandboxError(RuntimeError):
    """The sandbox itself does not work."""


@dataclass(frozen=True)
class Limits:
    """Limits and settings of a sandbox."""

    memory_bytes: int = 2**29
    """Address space that a program may reserve in addition to the interpreter's."""

    preamble: str = ""
    """Python code that runs before the code of every program."""

    allow_file_reads: bool = False
    """Run programs even if the kernel has no Landlock. Programs can then read files."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    how: str
    """"exit", "timeout", "output" (too long), "threads" (too many) or "lost" (its launcher was killed)."""

    status: int = 0
    """Exit status, or minus the number of the signal that ended the process."""

    output: bytes = b""
    """Standard output, the answer to a call, or the verdict of test code."""

    @property
    def problem(self) -> str:
        """Why the job failed; empty if it exited with status 0."""
        if self.how != "exit":
            return _PROBLEMS[self.how]
        if self.status < 0:
            return f"it was ended by signal {-self.status} (memory, CPU time or a crash)"
        return f"it ended with exit status {self.status}" if self.status else ""


_PROBLEMS = {
    "timeout": "it ran out of time",
    "output": "its output was too long",
    "threads": "it started too many threads",
    "lost": "its launcher was killed",
}


class Sandbox:
    """Runs one program any number of times, each time in new processes.

    The constructor starts a launcher process, which forks the processes of every run. A launcher that has ended or does
    not answer is replaced.

    Args:
        program: Python code, untrusted.
        limits: Limits of each run.
        tests: The test code for `judge`, as one dictionary per test with the fields of `code_rows.Code`. The process
            that runs the program never holds the test code.

    Raises:
        SandboxError: If the launcher does not start, or the kernel lacks what the sandbox needs.
    """

    def __init__(self, program: str, limits: Limits, tests: Sequence[dict[str, Any]] = ()) -> None:
        self._program, self._limits = program, limits
        encoded = [json.dumps(test).encode() for test in tests]
        self._places = [(sum(map(len, encoded[:index])), len(code)) for index, code in enumerate(encoded)]
        self._tests = b"".join(encoded)
        self._start()

    def _start(self) -> None:
        """Start the launcher. Raises: SandboxError if this fails."""
        ours, theirs = multiprocessing.Pipe()
        tests = os.memfd_create("tests") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDONLY)
        folder = tempfile.mkdtemp(prefix="grpo-lightning-")  # the launcher's working folder, which it removes at once
        try:
            if self._tests:
                os.write(tests, self._tests)
            self._process = subprocess.Popen(  # noqa: S603 (our own code and this interpreter)
                [
                    *(sys.executable, "-S", "-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0"),
                    *("-c", START_LAUNCHER),
                    *(str(Path(__file__).parent), str(theirs.fileno()), str(tests), str(os.getpid())),
                ],
                pass_fds=[theirs.fileno(), tests],
                cwd=folder,
                # The hash seed gives sets the same order in every run. On some clusters, the interpreter needs the
                # library path to start.
                env={"PYTHONHASHSEED": "0"}
                | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
            os.close(tests)
        self._control = ours
        try:
            setup = asdict(self._limits)
            ready, _ = self._ask(setup, self._program.encode("utf-8", "surrogatepass"), START_SECONDS)
            if "problem" in ready:
                raise SandboxError(f"programs cannot be sandboxed: {ready['problem']}.")
        except (EOFError, OSError):
            how = self._process.wait()
            raise SandboxError(f"the launcher of programs ended while it started (exit status {how}).") from None
        except SandboxError:
            self.close()
            raise
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self.landlock_abi = int(ready["landlock"])

    def run_main(self, stdin: bytes, *, seconds: float, max_output: int) -> Ended:
        """Run the program as a script.

        Args:
            stdin: The program's standard input.
            seconds: Time limit.
            max_output: Maximum size of the standard output, in bytes. A program with a larger output is stopped.

        Raises:
            SandboxError: If the sandbox failed.
        """
        return self._run({"kind": "main", "seconds": seconds, "max_output": max_output}, stdin)

    def call(
        self, function: str, arguments: Sequence[Any], *, seconds: float, max_output: int
    ) -> tuple[Ended, Any, str]:
        """Load the program, and call one of its functions or a method of its class `Solution`.

        Args:
            function: Name of the function or method.
            arguments: Positional arguments, of builtin types.
            seconds: Time limit for loading and calling together.
            max_output: Limit for the encoded value, in bytes.

        Returns:
            (how the job ended, the value, ""). If there is no value: (how the job ended, None, the reason).

        Raises:
            SandboxError: If the sandbox failed.
        """
        plain = values.refuse
        request = {"do": "call", "target": function, "keywords": values.encode({}, plain)}
        request["arguments"] = values.encode(list(arguments), plain)
        ended = self._run({"kind": "call", "seconds": seconds, "max_output": max_output}, values.pack_frame(request))
        if ended.problem:
            return ended, None, ended.problem
        try:
            answer = json.loads(ended.output[4:])
            if "error" in answer:
                return ended, None, f"{answer['error']}: {answer['text']}"
            return ended, values.decode(answer["value"], values.refuse), ""
        except values.PlainError:
            return ended, None, "the value is not plain data"
        except values.MALFORMED:
            return ended, None, "its answer is malformed"

    def judge(self, index: int, *, seconds: float) -> tuple[Ended, str, str]:
        """Run test code that calls the program's functions.

        Args:
            index: Index of the test in the constructor's `tests`.
            seconds: Time limit.

        Returns:
            (how the job ended, outcome, reason). The outcome is "passed", "failed" or "unsupported" (an argument cannot
            be copied).

        Raises:
            SandboxError: If the sandbox failed.
        """
        place, size = self._places[index]
        ended = self._run({"kind": "judge", "seconds": seconds, "max_output": 0, "place": place, "size": size}, b"")
        if ended.problem or not ended.output:
            return ended, "failed", ended.problem or "the test ended the process"
        verdict = json.loads(ended.output)
        return ended, str(verdict["outcome"]), str(verdict["text"])

    def close(self) -> None:
        """Kill the launcher."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, job: dict[str, Any], body: bytes) -> Ended:
        """Run a job. Raises: SandboxError if a child could not be started."""
        try:
            status, output = self._ask(job, body, job["seconds"] + GRACE_SECONDS)
        except (EOFError, OSError, SandboxError):
            log.warning("The launcher of a sandboxed program was lost; its test counts as failed.")
            self.close()
            self._start()
            return Ended("lost")
        if "problem" in status:
            raise SandboxError(f"a program could not be started: {status['problem']}.")
        return Ended(status["ended"], status["status"], output)

    def _ask(self, header: dict[str, Any], body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait. Raises: SandboxError after `seconds`; EOFError or OSError if the launcher ended."""
        self._control.send_bytes(json.dumps(header).encode() + b"\n" + body)
        if not self._control.poll(seconds):
            raise SandboxError(f"the launcher of programs did not answer within {seconds:g} s.")
        header_line, _, output = self._control.recv_bytes().partition(b"\n")
        return json.loads(header_line), output


PROBE = """
import os, socket, sys
attempts = {
    "read a file": lambda: open(sys.executable, "rb").read(1),
    "write a file": lambda: open("file", "w"),
    "open a socket": socket.socket,
    "start a process": os.fork,
}
for name, attempt in attempts.items():
    try:
        attempt()
        print(name)
    except OSError:
        pass
"""
"""A program that tries forbidden actions, and prints those that the sandbox does not prevent."""


def check_sandbox(limits: Limits) -> list[str]:
    """Start a sandbox and try to break out of it.

    Returns:
        The actions that the sandbox does not prevent: ["read a file"] if the kernel has no Landlock and
        `limits.allow_file_reads` is true, otherwise [].

    Raises:
        SandboxError: If the sandbox does not start, or cannot run `PROBE`.
        SandboxError: If `PROBE` can do a forbidden action. If `limits.allow_file_reads` is true, reading a file is not
            forbidden.
    """
    with Sandbox(PROBE, limits) as sandbox:
        ended = sandbox.run_main(b"", seconds=START_SECONDS, max_output=1000)
    possible = ended.output.decode().splitlines()
    allowed = ["read a file"] if limits.allow_file_reads else []
    if ended.problem or any(name not in allowed for name in possible):
        raise SandboxError(
            f"the sandbox does not work on this system: {ended.problem or 'a program can ' + ', '.join(possible)}."
        )
    return possible
