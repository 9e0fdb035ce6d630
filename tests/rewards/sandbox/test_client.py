"""Jobs of a sandbox: input, output, limits."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lightning.rewards.sandbox.client import Ended, Limits, Sandbox
from tests.marks import NEEDS_LANDLOCK, few

pytestmark = NEEDS_LANDLOCK


def run(program: str, stdin: bytes = b"", seconds: float = 10.0, max_output: int = 10**8, **limits: Any) -> Ended:
    with Sandbox(program, Limits(**{"memory_bytes": 2**28, **limits})) as sandbox:
        return sandbox.run_main(stdin, seconds=seconds, max_output=max_output)


def test_large_inputs_and_outputs_arrive_whole():
    data = bytes(range(256)) * 20_000
    assert run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])", data).output == data[::-1]
    program = "import sys\nfor _ in range(50): sys.stdout.buffer.write(bytes(10**5))\nprint(len(sys.stdin.read()))"
    assert run(program, b"x" * 10**6).output == bytes(5 * 10**6) + b"1000000\n"  # writes before it reads


@pytest.mark.parametrize(
    "reads",
    [
        "import io, os\nread = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline",
        "import mmap\nread = mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline",
        "import sys\nsys.stdin.read()\nsys.stdin.seek(0)\nread = sys.stdin.readline",
        "read = open('/dev/stdin').readline",
    ],
    ids=["size", "mmap", "seek", "path"],
)
def test_the_input_is_a_file_as_contests_redirect_it(reads: str):
    assert run(f"{reads}\nprint(len(read()), len(read()))", b"x" * 10**6 + b"\n12\n").output == b"1000001 3\n"


def test_an_empty_input_is_a_file():
    assert run("import os; print(os.fstat(0).st_size, os.read(0, 1))").output == b"0 b''\n"


def test_the_input_cannot_be_changed():
    """Not even through a mapping, to which the limit on the size of files does not apply."""
    program = "import mmap\ntry: mmap.mmap(0, 0)[0] = 121\nexcept PermissionError: print('refused')"
    assert run(program, b"xx") == Ended("exit", 0, b"refused\n")


def test_an_input_that_is_not_read_is_no_problem():
    for program in ("print(1)", "import os; os.close(0); print(1)", "import sys; sys.stdin.close(); print(1)"):
        assert run(program, b"x" * 10**6) == Ended("exit", 0, b"1\n")


def test_the_system_files_that_programs_can_use():
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        program = f"open({path!r}, 'rb').read(1); print(1, flush=True); open({path!r}, 'wb').write(b'x'); print(2)"
        assert run(program).output == (b"1\n2\n" if path == "/dev/null" else b"1\n")


def test_how_programs_end():
    assert run("print(1)") == Ended("exit", 0, b"1\n")
    assert run("print(1); raise SystemExit") == Ended("exit", 0, b"1\n")
    assert run("print(1); raise SystemExit(3)") == Ended("exit", 3, b"1\n")
    assert run("print(1); raise SystemExit('text')") == Ended("exit", 1, b"1\n")
    assert run("print(1); 1 / 0") == Ended("exit", 1, b"1\n")
    assert run("print(1") == Ended("exit", 1)
    assert run("import os; os.kill(os.getpid(), 9)") == Ended("exit", -9)
    assert run("while True: pass", seconds=0.2).how == "timeout"
    assert "ended by signal 9" in run("import os; os.kill(os.getpid(), 9)").problem


@few(3)
@pytest.mark.parametrize(
    "program",
    [
        "open(1, 'w').write('3')",
        "import os\nf = os.fdopen(1, 'w')\nf.write('3')",
        "import sys\nsys.__stdout__.write('3')",
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nprint(3)\nold.write('3')",
        "import os, sys\nsys.stdout = None\nos.write(1, b'3')",
        "import sys\nsys.stdout.write('3')\nsys.stdout.close()",
        "class A:\n def __init__(self): self.f = open(1, 'w'); self.f.write('3')\na = A()\na.me = a",
        "import os, sys\ndata = os.read(0, os.fstat(0).st_size or 9)\nos.write(1, data)",
        "import atexit, io, sys\nout = io.BytesIO()\natexit.register(lambda: sys.stdout.buffer.write(b'3'))",
        "print(3, end='')\nexit()\nprint(4)",
        "def main():\n print(3, end='')\n quit(0)\nmain()\nprint(4)",
    ],
)
def test_everything_that_is_printed_arrives(program):
    assert run(program, b"3") == Ended("exit", 0, b"3")


def test_the_limit_of_the_output():
    assert run("print('x' * 99)", max_output=100) == Ended("exit", 0, b"x" * 99 + b"\n")
    assert run("print('x' * 100)", max_output=100).how == "output"
    endless = run("while True: print('x' * 10**6)", max_output=10**6)
    assert endless.how == "output"
    assert len(endless.output) <= 10**6 + 65536


def test_the_limit_of_memory():
    program = "try: print(len(bytes({})))\nexcept MemoryError: print('none')"
    for size, found in ((10**7, b"10000000\n"), (2 * 10**8, b"200000000\n"), (3 * 10**8, b"none\n")):
        assert run(program.format(size)).output == found
    assert run(program.format(2 * 10**8), memory_bytes=10**8).output == b"none\n"


def test_integers_of_any_length():
    assert run("n = int(input())\nprint(n * n)", b"1" * 3000).output == b"%s\n" % square(3000)
    assert run("print(len(str(2 ** 20000)), int('7' * 6000) % 7)").output == b"6021 0\n"


def square(digits: int) -> bytes:
    """The square of 11...1 in decimal digits, by long multiplication."""
    found, carry = bytearray(), 0
    for place in range(2 * digits - 1):
        carry += digits - abs(digits - 1 - place)
        found.append(48 + carry % 10)
        carry //= 10
    return bytes(reversed(found)) if not carry else str(carry).encode() + bytes(reversed(found))


def test_the_limit_of_threads():
    start = "import threading, time\nthreading.stack_size(65536)\n"
    few = f"{start}for _ in range(50): threading.Thread(target=time.sleep, args=[0.2]).start()\nprint(1)"
    assert run(few) == Ended("exit", 0, b"1\n")
    assert run(few.replace("50", "500").replace("0.2", "100")).how == "threads"


def test_the_limit_of_cpu_time():
    """The kernel's, if the launcher is too slow: of all threads together."""
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
    assert run(program, seconds=2.5).output == b"(3, 3)\n"


def test_limits_are_hard():
    program = (
        "import resource as r\nfor n in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE, r.RLIMIT_CORE):\n"
        " soft, hard = r.getrlimit(n)\n print(soft == hard != -1)"
    )
    assert run(program).output == b"True\n" * 5


@pytest.mark.parametrize("preamble", ["", "from typing import *", "x = 1"])
def test_a_program_has_its_own_line_numbers_and_future(preamble):
    program = "from __future__ import annotations\nimport sys\nprint(sys._getframe().f_lineno, __name__)"
    assert run(program, preamble=preamble).output == b"3 __main__\n"


def test_calls_are_separate():
    with Sandbox("n = 0\ndef f():\n    global n\n    n += 1\n    return n", Limits(2**28)) as sandbox:
        found = [sandbox.call("f", [], seconds=5, max_output=1000)[1] for _ in range(2)]
    assert found == [1, 1]
