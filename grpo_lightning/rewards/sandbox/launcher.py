"""Launcher of sandboxed programs: a process that forks one or two children per test.

`sandbox/client.py` starts the launcher in a new interpreter without site packages. Therefore the launcher's memory
holds neither the data nor the environment variables of the training run. Only the children execute the program, after
`Isolation.enter`:

    reward worker  -- program, input -->  launcher  -- fork -->  program
                  <- status, output -              -- fork -->  tests (only for tests that are Python code)

A job has one of three kinds:

- "main" runs the program as `__main__` with a standard input, and returns its standard output.
- "call" loads the program, and calls one function (`sandbox/values.py`).
- "judge" loads the program in one child, and runs test code in a second child. The test code calls the program through
  pipes. Only the second child ever reads the test code.

This module imports only the standard library and its siblings.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import fcntl
import gc
import importlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from grpo_lightning.rewards.sandbox import values
from grpo_lightning.rewards.sandbox.isolation import MAX_THREADS, Isolation, IsolationError

PRELOADED = (
    *("array", "ast", "bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "math", "operator"),
    *("re", "string", "threading", "typing"),
)
"""Modules that the launcher imports once for all children."""

PROGRAM, TESTS = 0, 1
"""Roles of a child."""

TICK_SECONDS = 0.01
"""Interval at which a program's threads are counted."""

VERDICT_BYTES = 65536
"""Maximum size of the tests' verdict, in bytes."""


class Child(BaseException):
    """Raised in a forked child to leave the launcher's loop."""

    def __init__(self, task: Callable[[], None]) -> None:
        self.task = task


def main(control: int, tests: int, parent: int) -> None:
    """Serve jobs until the reward worker closes the connection."""
    try:
        task = _serve_jobs(control, tests, parent)
    except Child as child:
        task = child.task
    task()


def _serve_jobs(control: int, tests: int, parent: int) -> Callable[[], None]:
    """Serve jobs. Returns: in the launcher, a task that does nothing. Raises: Child, in a forked process."""
    os.rmdir(os.getcwd())
    os.environ.clear()
    try:
        setup, source = _receive(control)
        isolation = Isolation(allow_file_reads=setup["allow_file_reads"])
        isolation.end_with(parent)
        for name in PRELOADED:
            importlib.import_module(name)
        for name in ("exit", "quit"):  # `site` defines them, but is not imported here
            setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
    except Exception as error:  # noqa: BLE001 (reported to the reward, which raises it)
        kind = "" if isinstance(error, IsolationError) else f"{type(error).__name__}: "
        _send(control, {"problem": f"{kind}{error}"})
        return _nothing
    gc.freeze()  # otherwise garbage collection would copy shared memory in every child
    _send(control, {"landlock": isolation.landlock_abi})
    launcher = Launcher(isolation, setup, source.decode("utf-8", "surrogatepass"), tests)
    while True:
        try:
            job, body = _receive(control)
        except EOFError:
            return _nothing
        try:
            status, output = launcher.run(job, body)
        except OSError as error:
            status, output = {"problem": f"{type(error).__name__}: {error}"}, b""
        _send(control, status, output)


def _nothing() -> None:
    """Do nothing."""


def _open_input(body: bytes) -> tuple[int, int]:
    """Open a program's standard input. Returns: the end to read, and the end to write (-1 for a file in memory).

    The input is a file in memory if possible, because programs of contests read the size of their input. Otherwise, the
    input is a pipe, which has no size.
    """
    if not hasattr(os, "memfd_create"):
        return os.pipe()
    try:
        return _input_file(body), -1
    except OSError:  # for example if the setting vm.memfd_noexec of the kernel is 2
        return os.pipe()


def _input_file(body: bytes) -> int:
    """Make a file in memory that cannot be changed. Raises: OSError if the system does not allow this."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(body)
        while left:
            left = left[os.write(file, left) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        os.lseek(file, 0, os.SEEK_SET)
    except OSError:
        os.close(file)
        raise
    return file


def _send(control: int, header: dict[str, Any], body: bytes = b"") -> None:
    """Send a message in the framing of `multiprocessing.connection`: length, JSON line, body."""
    data = json.dumps(header).encode() + b"\n" + body
    left = memoryview(struct.pack("!i", len(data)) + data)
    while left:
        left = left[os.write(control, left) :]


def _receive(control: int) -> tuple[dict[str, Any], bytes]:
    """Receive a message. Raises: EOFError if the other end is closed."""
    (size,) = struct.unpack("!i", values.read_exactly(control, 4))
    header, _, body = values.read_exactly(control, size).partition(b"\n")
    return json.loads(header), body


class Launcher:
    """Runs jobs in sandboxed children. `setup` has the fields of `client.Limits`."""

    def __init__(self, isolation: Isolation, setup: dict[str, Any], source: str, tests: int) -> None:
        self.isolation, self.setup, self.source, self.tests = isolation, setup, source, tests
        self.process = os.getpid()
        self.entered = mmap.mmap(-1, 2)
        """Bytes shared with the children. A child sets its byte (PROGRAM or TESTS) to 1 once it is in the sandbox."""

    def run(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Run a job.

        Args:
            job: A dictionary with `kind`, `seconds` (the time limit) and `max_output` (in bytes). A "judge" job also
                has `place` and `size`, the offset and length of its test code in the file `tests`.
            body: The standard input of a "main" job, or the request of a "call" job.

        Returns:
            How the program (in a "judge" job, the tests) ended, and the output. In the dictionary, `ended` is "exit",
            "timeout", "output" (too long) or "threads" (too many). `status` is the exit status, or minus the number of
            the signal.

        Raises:
            OSError: If a child could not be started.
            Child: Only in a forked process, which then leaves the launcher's loop.
        """
        seconds = job["seconds"]
        if job["kind"] == "judge":
            return self._judge(job, seconds)
        is_main = job["kind"] == "main"
        feed, give = _open_input(body) if is_main else os.pipe()
        take, collect = os.pipe()
        if is_main:
            pid = self._fork(PROGRAM, [feed, collect, None], seconds, self._run_main)
        else:
            pid = self._fork(PROGRAM, [None, None, None, feed, collect], seconds, self._serve)
        os.close(feed)
        os.close(collect)
        return self._watch(pid, Exchange(take, job["max_output"], give, body), pid, seconds)

    def _judge(self, job: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """Run test code, which calls the program."""
        program_in, tests_out = os.pipe()
        tests_in, program_out = os.pipe()
        program = self._fork(PROGRAM, [None, None, None, program_in, program_out], seconds, self._serve)
        os.close(program_in)
        os.close(program_out)
        take, collect = os.pipe()
        place, size = job["place"], job["size"]
        try:
            judge = self._fork(
                TESTS,
                [None, None, None, tests_in, tests_out, self.tests, collect],
                seconds,
                lambda: _judge_program(place, size),
            )
        except OSError:
            _end(program)
            raise
        for descriptor in (tests_in, tests_out, collect):
            os.close(descriptor)
        try:
            found = self._watch(judge, Exchange(take, VERDICT_BYTES), program, seconds)
            if os.waitpid(program, os.WNOHANG)[0]:
                self._check_entered(PROGRAM)
        finally:
            _end(program)
        return found

    def _fork(self, role: int, wanted: list[int | None], seconds: float, task: Callable[[], None]) -> int:
        """Fork a child that enters the sandbox. The file descriptors `wanted` become its descriptors 0, 1, ...

        None stands for `/dev/null`. Returns: the child's process id, in the launcher. Raises: Child, in the child.
        """
        self.entered[role] = 0
        pid = os.fork()
        if pid:
            return pid
        try:
            self.isolation.end_with(self.process)
            null = os.open("/dev/null", os.O_RDWR)
            ruleset = self.isolation.ruleset
            targets = [null if one is None else one for one in wanted] + ([] if ruleset is None else [ruleset])
            copies = [fcntl.fcntl(one, fcntl.F_DUPFD, 100) for one in targets]
            for number, one in enumerate(copies):
                os.dup2(one, number)
            os.closerange(len(copies), os.sysconf("SC_OPEN_MAX"))
            self.isolation.ruleset = None if ruleset is None else len(wanted)
            os.setsid()
            self.isolation.enter(self.setup["memory_bytes"], int(seconds) + 1)
            self.entered[role] = 1
            self.entered.close()
        except BaseException:  # noqa: BLE001 (nothing may run outside of the sandbox)
            os._exit(127)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        raise Child(task)

    def _run_main(self) -> None:
        """Run the program as a script.

        The child ends as any Python script does (threads, exit handlers, open files).
        """
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        sys.argv = ["program.py"]
        self._execute(module)

    def _serve(self) -> None:
        """Load the program, and serve requests."""
        module = types.ModuleType("program")
        sys.modules["program"] = module
        problem: BaseException | None = None
        try:
            self._execute(module)
        except BaseException as error:  # noqa: BLE001 (the answer to every request)
            problem = error
        values.serve(module.__dict__, problem, 3, 4)
        os._exit(0)

    def _execute(self, module: types.ModuleType) -> None:
        """Execute the preamble and the program. Raises: any exception that one of them raises."""
        _hide_package()
        exec(compile(self.setup["preamble"], "preamble.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        exec(compile(self.source, "program.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102

    def _watch(self, pid: int, exchange: Exchange, program: int, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Wait until the child `pid` ends; kill it at the time, output or thread limit. Returns: as `run`.

        The thread limit applies to `program`, the child that runs the program. In a "judge" job, `pid` is another
        child.

        Raises:
            OSError: If the child `pid` did not enter the sandbox.
        """
        stop = time.monotonic() + seconds
        with exchange:
            while True:
                left = stop - time.monotonic()
                if left <= 0:
                    ended = "timeout"
                elif exchange.is_open:
                    ended = exchange.step(min(TICK_SECONDS, left))
                else:
                    done, status = _poll_exit(pid, min(TICK_SECONDS, left))
                    if done:
                        self._check_entered(PROGRAM if pid == program else TESTS)
                        return {"ended": "exit", "status": os.waitstatus_to_exitcode(status)}, bytes(exchange.output)
                    ended = ""
                if not ended and count_threads(program) > MAX_THREADS:
                    ended = "threads"
                if ended:
                    _end(pid)
                    return {"ended": ended, "status": -signal.SIGKILL}, bytes(exchange.output)

    def _check_entered(self, role: int) -> None:
        """Raises: OSError if a child has ended without entering the sandbox."""
        if not self.entered[role]:
            raise OSError("a child could not enter the sandbox")


class Exchange:
    """Context that feeds a child its input, collects its output, and closes both pipes at the end.

    `take` is the file descriptor of the output, which may have at most `limit` bytes. `give` is the file descriptor of
    the input; -1 if there is no input.
    """

    def __init__(self, take: int, limit: int, give: int = -1, body: bytes = b"") -> None:
        self.take, self.limit, self.give, self.left = take, limit, give, memoryview(body)
        self.output = bytearray()
        self.is_open = True
        """False once the child has closed its output."""
        self._poller = select.poll()
        self._poller.register(take, select.POLLIN)
        if give >= 0:
            os.set_blocking(give, False)
            self._poller.register(give, select.POLLOUT)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        os.close(self.take)
        self._close_input()

    def step(self, seconds: float) -> str:
        """Wait, and read or write once. Returns: "output" if the output is too long, otherwise ""."""
        for descriptor, _ in self._poller.poll(seconds * 1000):
            if descriptor == self.give:
                self._feed()
                continue
            piece = os.read(self.take, 65536)
            self.output += piece
            self.is_open = bool(piece)
            if len(self.output) > self.limit:
                return "output"
        return ""

    def _feed(self) -> None:
        """Write as much of the input as the pipe takes now."""
        try:
            self.left = self.left[os.write(self.give, self.left[:65536]) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed its input
            self.left = self.left[:0]
        if not self.left:
            self._poller.unregister(self.give)
            self._close_input()

    def _close_input(self) -> None:
        """Close the input once."""
        if self.give >= 0:
            os.close(self.give)
            self.give = -1


def _poll_exit(pid: int, seconds: float) -> tuple[bool, int]:
    """Wait until a child ends. Returns: whether it has ended, and its status."""
    stop = time.monotonic() + seconds
    pause = 0.0002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done or time.monotonic() >= stop:
            return bool(done), status
        time.sleep(pause)
        pause *= 2


def _end(pid: int) -> None:
    """Kill a child, and wait for its end."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):  # it has ended, and was waited for
        return


def count_threads(pid: int) -> int:
    """Number of threads of a process; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[17])
    except OSError:
        return 0


def _hide_package() -> None:
    """Forget the launcher's modules, so that `import grpo_lightning` fails in a program."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "grpo_lightning"]:
        del sys.modules[name]


# ----------------------------------------------------------------------------------------------------------- the tests


def _judge_program(place: int, size: int) -> NoReturn:
    """Run one test, and write the verdict. File descriptors 3 and 4 lead to the program."""
    test = json.loads(os.pread(5, size, place))
    os.close(5)
    outcome, text = run_test(test, values.ask_through(4, 3))
    data = json.dumps({"outcome": outcome, "text": text[:500]}).encode()
    os.write(6, data)
    os._exit(0)


def run_test(test: dict[str, Any], call_program: Callable[[dict[str, Any]], Any]) -> tuple[str, str]:
    """Run test code.

    `test` has the fields of `code_rows.Code`.

    Returns:
        ("passed", ""), ("failed", why) or ("unsupported", why).
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        namespace |= {name: importlib.import_module(name) for name in test["modules"]}
        namespace |= {name: values.Remote(call_program, name, "function") for name in test["names"]}
        for part in ("setup", "code"):
            exec(compile(test[part], f"{part}.py", "exec", dont_inherit=True), namespace)  # noqa: S102
    except values.PlainError as error:
        return "unsupported", f"the test passes arguments that are not plain data: {error}"
    except AssertionError as error:
        return "failed", f"AssertionError {error!s:.200}".strip()
    except BaseException as error:  # noqa: BLE001 (the test failed, whatever it raised)
        return "failed", f"{type(error).__name__}: {error!s:.200}"
    return "passed", ""
