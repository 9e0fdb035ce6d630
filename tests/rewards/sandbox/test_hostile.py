"""Programs that attack: each gets its honest score, touches nothing outside, and leaves no process behind."""

from __future__ import annotations

import os
import socket
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.rewards import CodeTests
from grpo_lightning.rewards.sandbox.client import Limits, Sandbox
from tests.marks import NEEDS_LANDLOCK, SLOW, few, only

pytestmark = NEEDS_LANDLOCK

SECONDS = 1.0
"""Time limit of a test."""

GRACE = 3.0
"""Seconds that the start and end of a launcher may add on a busy machine."""

ANSWER = 918273645
"""The expected answer, which no program computes by accident."""


def bomb() -> str:
    """A gigabyte in some thousand bytes: a thousand times the same compressed megabyte, compressed again."""
    stream = zlib.compressobj(9, wbits=-15)
    megabyte = stream.compress(bytes(10**6)) + stream.flush(zlib.Z_FULL_FLUSH)
    return b64encode(zlib.compress(megabyte * 1000 + stream.flush(), 9)).decode()


# Scripts that print the right answer if their attack succeeds, and otherwise raise. `answer` is in their input.
ATTACKS = {
    "fork": "os.fork()",
    "double fork": "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)",
    "subprocess": "import subprocess; subprocess.run(['true'], check=True)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], dict())",
    "exec": "os.execv('/bin/echo', ['echo', answer])",
    "system": "if os.system('true'): raise OSError",
    "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
    "vfork": "if libc.syscall(58) < 0: raise OSError",
    "10 GB": "b'x' * 10**10",
    "10 GB in pieces": "pieces = [bytes(10**6) for _ in range(10**4)]",
    "10 GB of shared memory": "import mmap; mmap.mmap(-1, 10**10)",
    "zip bomb": f"import zlib, base64; zlib.decompress(zlib.decompress(base64.b64decode('{bomb()}')), -15)",
    "huge file": "open('big', 'wb').write(bytes(10**6))",
    "memory file": "os.memfd_create('big')",
    "delete": "os.remove({canary!r})",
    "delete a folder": "import shutil; shutil.rmtree({folder!r})",
    "delete the parent of the current folder": "import shutil; shutil.rmtree('..')",
    "rename": "os.rename({canary!r}, {canary!r} + '2')",
    "chmod": "os.chmod({canary!r}, 0)",
    "utime": "os.utime({canary!r}, (0, 0))",
    "truncate": "os.truncate({canary!r}, 0)",
    "truncate by reading": "os.open({canary!r}, os.O_RDONLY | os.O_TRUNC)",
    "append": "open({canary!r}, 'a').write('x')",
    "read a file": "open({canary!r}).read()",
    "read the tests": "open({tests!r}).read()",
    "list a folder": "os.listdir({folder!r})",
    "read a password file": "open('/etc/passwd').read()",
    "memory of the parent": "open('/proc/{pid}/mem', 'rb')",
    "environment of the parent": "open('/proc/{pid}/environ', 'rb').read()",
    "own environment in /proc": "open('/proc/self/environ', 'rb').read()",
    "own memory": "open('/proc/self/mem', 'r+b')",
    "own memory map": "open('/proc/self/maps').read()",
    "file of a folder's descriptor": "os.open('canary', 0, dir_fd=os.open({folder!r}, os.O_PATH | os.O_DIRECTORY))",
    "file of its own descriptor": "open(f'/proc/self/fd/{{os.open({canary!r}, os.O_PATH)}}').read()",
    "unnamed file": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "extended attribute": "os.setxattr({canary!r}, 'user.a', b'1')",
    "pseudo terminal": "os.openpty()",
    "message queue": "if libc.mq_open(b'/{token}', 0o102, 0o600, None) < 0: raise OSError",
    "key ring": "if libc.syscall(248, b'user', b'a', b'b', 1, -2) < 0: raise OSError",
    "own session": "os.setsid()",
    "list processes": "os.listdir('/proc')",
    "memory of the launcher": "open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "ptrace": "if libc.ptrace(16, {pid}, 0, 0): raise OSError",
    "ptrace of the launcher": "if libc.ptrace(16, os.getppid(), 0, 0): raise OSError",
    "process_vm_readv": "if libc.process_vm_readv({pid}, None, 0, None, 0, 0) < 0: raise OSError",
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "listen": "import socket; socket.create_server(('127.0.0.1', 0))",
    "DNS": "import socket; socket.getaddrinfo('localhost', 80)",
    "datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "datagram of a socket pair": "import socket; socket.socketpair(type=2)[0].sendto(b'x', '/dev/log')",
    "netlink": "import socket; socket.socket(16, 3, 0)",
    "io_uring": "if libc.syscall(425, 1, ctypes.create_string_buffer(120)) < 0: raise OSError",
    "kill all": "os.kill(-1, 9)",
    "kill the group": "os.kill(0, 9)",
    "kill the parent": "os.kill({pid}, 9)",
    "kill the launcher": "os.kill(os.getppid(), 9)",
    "stop the launcher": "os.kill(os.getppid(), 19)",
    "signal by a pidfd": "import signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "signal by owner of a pipe": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {pid})",
    "limits of the parent": "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "priority": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "symlink": "os.symlink({folder!r}, 'link'); open('link/canary').read()",
    "hard link": "os.link({canary!r}, 'link')",
    "folder": "os.mkdir('folder')",
    "fifo": "os.mkfifo('fifo')",
    "/dev/shm": "open('/dev/shm/{token}', 'w')",
    "shared memory": "from multiprocessing import shared_memory; shared_memory.SharedMemory(create=True, size=100)",
    "System V shared memory": "if libc.shmget(0, 4096, 0o1777) < 0: raise OSError",
    "/tmp": "open('/tmp/{token}', 'w')",
    "temporary file": "import tempfile; tempfile.NamedTemporaryFile()",
    "many files": "files = [open('/dev/null') for _ in range(10**6)]",
    "namespaces": "if libc.unshare(0x10000000): raise OSError",
    "mount": "if libc.mount(b'none', b'/', None, 0, None): raise OSError",
    "chroot": "os.chroot('.')",
    "change user": "os.setuid(12345)",
    "capabilities": "if libc.prctl(47, 2, 21, 0, 0): raise OSError",
    "environment": "os.environ['HF_TOKEN']",
    "C environment": "if not [v for v in iter_environ() if b'HF_TOKEN' in v]: raise OSError",
    "import the package": "import grpo_lightning",
    "import installed packages": "import numpy",
    "find installed packages": "sys.path += {path!r}; import torch",
    "modules of the launcher": "import grpo_lightning.rewards.sandbox.launcher",
    "segmentation fault": "ctypes.string_at(0)",
    "stack overflow": "sys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)",
    "stack overflow in C": "x = []\nfor _ in range(10**6): x = [x]\nsys.setrecursionlimit(10**9)\nrepr(x)",
    "abort": "os.abort()",
    "threads": "import threading, time\nfor _ in range(5000): threading.Thread(target=time.sleep, args=[99]).start()",
    "small threads": (
        "import threading, time; threading.stack_size(32768)\n"
        "for _ in range(5000): threading.Thread(target=time.sleep, args=[99]).start()"
    ),
    "stop itself": "os.kill(os.getpid(), 19)",
    "exit handler": "import atexit; atexit.register(os._exit, 3)",
    "surrogates in the output": "print(chr(0xD800))",
    "bytes in the output": "os.write(1, b'\\xff\\xfe\\0' + bytes(range(256)))",
    "NUL in the output": "print(end='\\0')",
    "answer to another descriptor": (
        "for n in range(64):\n try: os.write(n, answer.encode())\n except OSError: pass\nos.close(1)"
    ),
}

# Scripts that never end, or write for ever.
ENDLESS = {
    "fork bomb": "while True:\n try: os.fork()\n except OSError: pass",
    "output": "while True: print(answer * 1000)",
    "error output": "while True: print('x' * 1000, file=sys.stderr)",
    "loop in C": "sum(iter(int, 1))",
    "big number": "10 ** 10 ** 9",
    "sleep": "import time; time.sleep(1000)",
    "ignored signals": (
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)"
    ),
    "closed output": "import time; os.close(1); time.sleep(1000)",
    "closed descriptors": "import time; os.closerange(0, 100); time.sleep(1000)",
    "exit handler": "import atexit, time; print(answer); atexit.register(time.sleep, 1000)",
    "thread": "import threading, time; print(answer); threading.Thread(target=time.sleep, args=[1000]).start()",
    "regular expression": "import re; re.match('(a*)*b', 'a' * 100)",
    "output without an end of line": "while True: os.write(1, b'7')",
    "busy threads": (
        "import hashlib, threading\ndef work():\n while True: hashlib.sha256(bytes(10**6))\n"
        "for _ in range(8): threading.Thread(target=work).start()"
    ),
    "power": "pow(3, 10**7, 10**10**6)",
    "digits": "str(1 << 10**8)",
    "waits for input": "while True: sys.stdin.read(1)",
}

START = """
import ctypes, os, sys
answer = sys.stdin.read().strip()
libc = ctypes.CDLL(None, use_errno=True)
def iter_environ():
    place = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    n = 0
    while place and place[n]:
        yield place[n]
        n += 1
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Create the targets of attacks; afterwards they are unchanged, and no launcher is left."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    canary = tmp_path / "canary"
    canary.write_text(f"{ANSWER}")
    before = canary.stat()
    token = f"grpo-lightning-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield {
            **{"canary": str(canary), "folder": str(tmp_path), "tests": __file__, "token": token, "pid": os.getpid()},
            **{"port": server.getsockname()[1], "path": [str(Path(pytest.__file__).parents[1])]},
        }
        with pytest.raises(BlockingIOError):
            server.accept()
    assert list(tmp_path.iterdir()) == [canary]
    assert canary.read_text() == f"{ANSWER}"
    assert (canary.stat().st_mode, canary.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert not Path("/tmp", token).exists()
    assert not Path("/dev/shm", token).exists()
    assert launchers() == []


def launchers() -> list[int]:
    """Processes of launchers that this process has started, and all their descendants: they share the command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
        except OSError:
            continue
        if any(b"sandbox.launcher" in argument for argument in arguments) and str(os.getpid()).encode() in arguments:
            found.append(int(folder.name))
    return found


def value(program: str, tests: Any, seconds: float = SECONDS, **settings: Any) -> float | None:
    """The reward of one program; it takes no longer than its time limits."""
    reward = CodeTests(["tests"], timeout_seconds=seconds, call_seconds=seconds, memory_mb=256, **settings)
    start = time.monotonic()
    (found,) = reward(completions=[f"```python\n{program}\n```"], tests=[tests])
    assert time.monotonic() - start < seconds + GRACE
    return found


def test_an_honest_program_passes(outside):
    program = f"{START}\nprint(answer)"
    assert value(program, {"inputs": [f"{ANSWER}\n"], "outputs": [f"{ANSWER}"]}) == 1
    assert value(program, {"inputs": [f"{ANSWER}\n"], "outputs": [f"{ANSWER + 1}"]}) == 0


FAST_ATTACKS = (
    *(
        "fork",
        "double fork",
        "exec",
        "10 GB",
        "zip bomb",
        "huge file",
        "delete",
        "truncate by reading",
        "read the tests",
    ),
    *("read the tests", "memory of the parent", "ptrace", "connect", "listen", "DNS", "kill all"),
    *("kill the launcher", "limits of the parent", "symlink", "/dev/shm", "/tmp", "many files", "environment"),
    *("C environment", "import the package", "find installed packages", "segmentation fault", "small threads"),
    *("surrogates in the output", "NUL in the output"),
)
FAST_ENDLESS = ("fork bomb", "output", "loop in C", "ignored signals", "closed output", "exit handler")

BROKEN = ("NameError", "SyntaxError", "TypeError", "AttributeError", "IndexError", "UnboundLocalError")
"""Errors of an attack that is wrong itself."""


@pytest.mark.parametrize("name", only(FAST_ATTACKS, ATTACKS))
def test_an_attack_fails(outside, name):
    attack = ATTACKS[name].format(**outside) if "{" in ATTACKS[name] else ATTACKS[name]
    indented = attack.replace("\n", "\n ")
    program = (
        f"{START}\ntry:\n {indented}\nexcept Exception as error:\n print(type(error).__name__)\n raise\nprint(answer)"
    )
    assert value(program, {"inputs": [f"{ANSWER}\n"], "outputs": [f"{ANSWER}"]}) == 0
    with Sandbox(program, Limits(2**28)) as sandbox:
        ended = sandbox.run_main(f"{ANSWER}\n".encode(), seconds=SECONDS, max_output=10**6)
    assert f"{ANSWER}\n".encode() != ended.output or ended.problem
    assert not set(BROKEN) & set(ended.output.decode(errors="replace").split())


@few(2)
@pytest.mark.parametrize("name", only(FAST_ENDLESS, ENDLESS))
def test_a_program_without_an_end_is_stopped(outside, name):
    program = f"{START}\n{ENDLESS[name]}\nprint(answer)"
    assert value(program, {"inputs": [f"{ANSWER}\n"], "outputs": [f"{ANSWER}"]}, seconds=0.7) == 0


# ------------------------------------------------------------------------------------------------------- test code

_WRITTEN = "import os, struct\ntext = b'{\"value\": %s}'\nos.write(4, struct.pack('!i', len(text)) + text)\nos._exit(0)"
"""Writes an answer past the functions that encode values."""

# Programs for the tests below, which pass none of them: they know neither the tests nor the expected values.
FORGERIES = {
    "exit": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit handler": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): return 0",
    "always equal": (
        "class A:\n def __eq__(self, other): return True\n def __bool__(self): return True\ndef f(x): return A()"
    ),
    "always equal number": "class A(int):\n def __eq__(self, other): return True\ndef f(x): return A(1)",
    "always equal text": "class A(str):\n def __eq__(self, other): return True\ndef f(x): return A('1')",
    "always equal list": "class A(list):\n def __eq__(self, other): return True\ndef f(x): return A([1])",
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *a: True\n"
        "builtins.compile = builtins.exec = lambda *a, **k: None\ndef f(x): return 0"
    ),
    "patched json": 'import json; json.dumps = lambda *a, **k: \'{"outcome": "passed"}\'\ndef f(x): return 0',
    "patched frames": (
        "import sys\nfor m in list(sys.modules.values()):\n for n in list(vars(m)):\n"
        "  if n in ('run_test', 'encode', '_perform'): setattr(m, n, lambda *a: ('passed', ''))\ndef f(x): return 0"
    ),
    "written verdict": (
        'import os, struct\ntext = b\'{"outcome": "passed", "text": ""}\'\nfor n in range(64):\n'
        " for data in (text, struct.pack('!i', len(text)) + text):\n"
        "  try: os.write(n, data)\n  except OSError: pass\ndef f(x): return 0"
    ),
    "exception of another name": "def f(x): raise type('not scorable', (Exception,), {})('unsupported')",
    "end of an iteration": "def f(x): raise StopIteration",
    "exception with a long name": "def f(x): raise type('a' * 60000, (Exception,), {})()",
    "exception with surrogates": "def f(x): raise ValueError(chr(0xD800) + chr(0))",
    "huge key": "def f(x): return {1 << 17000: 1}",
    "huge key in a key": "def f(x): return {frozenset([1 << 17000]): 1}",
    "huge number": "def f(x): return 1 << 100000",
    "written float": _WRITTEN % '["f", "0x1p99999999"]',
    "written complex number": _WRITTEN % '["c", "0x1p99999999", "0x0p+0"]',
    "written error": _WRITTEN.replace('"value": %s', '"error": [1], "text": {"a": 1}'),
    "equal hashes": "def f(x): return {n * (2**61 - 1) for n in range(1, 2000)}",
    "exception that passes": "def f(x): raise type('PlainError', (Exception,), {})()",
    "deep list": "def f(x):\n a = []\n for _ in range(10**5): a = [a]\n return a",
    "list of itself": "def f(x):\n a = []\n a.append(a)\n return a",
    "large value": "def f(x): return 'x' * 10**8",
    "endless iterator": "import itertools\ndef f(x): return itertools.count()",
    "sleep": "import time\ndef f(x): time.sleep(100)",
    "sleep in the module": "import time; time.sleep(100)",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "no function": "def g(x): return 2 * x + 1",
    "NUL": "def f(x): return 2 * x + 1\n\0",
    "surrogate": "def f(x): return 2 * x + 1\nA = '\ud800'",
    "no Python": "def f(x) return 2 * x + 1",
    "look for the tests": (
        "import gc, sys\ndef f(x):\n found = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))]\n"
        " frame = sys._getframe()\n while frame: found.append(dict(frame.f_locals)); frame = frame.f_back\n"
        " for o in found:\n  for t in (o.values() if isinstance(o, dict) else o):\n"
        "   if isinstance(t, (str, bytes)) and ('as' + 'sert') in str(t):\n"
        "    return int(str(t).split('==')[-1].split(\"'\")[0])\n"
        " raise OSError"
    ),
    "read the tests": (
        "import os\ndef f(x):\n for n in range(64):\n  try: text = os.pread(n, 10**6, 0)\n  except OSError: continue\n"
        "  if b'assert' in text: return int(text.split(b'==')[-1].split(b'\"')[0])\n raise OSError"
    ),
}
FAST_FORGERIES = (
    *("exit", "exit at once", "exit in the call", "always equal", "always equal number", "patched builtins"),
    *(
        "patched frames",
        "written verdict",
        "exception of another name",
        "list of itself",
        "NUL",
    ),
    *("end of an iteration", "huge key", "written float"),
    *("surrogate", "look for the tests", "read the tests"),
)


def test_an_honest_function_passes(outside):
    program = "def f(x): return 2 * x + 1"
    assert value(program, ["assert f(3) == 7", "assert f(20) == 41"]) == 1
    assert value(program, {"inputs": [[3], [20]], "outputs": [7, 41], "fn_name": "f"}) == 1


@few(5)
@pytest.mark.parametrize("name", only(FAST_FORGERIES, FORGERIES))
def test_a_forged_value_fails(outside, name):
    assert value(FORGERIES[name], ["assert f(3) == 7", "assert f(20) == 41"]) == 0
    assert value(FORGERIES[name], {"inputs": [[3], [20], [5]], "outputs": [7, 41, {"1": [7]}], "fn_name": "f"}) == 0


def test_the_end_of_an_iteration_does_not_end_the_loop_of_a_test(outside):
    test = "assert all(map(lambda case: f(case[0]) == case[1], [(3, 7), (20, 41)]))"
    assert value("def f(x): return 2 * x + 1", [test]) == 1
    assert value(FORGERIES["end of an iteration"], [test]) == 0


@SLOW
def test_values_with_equal_hashes_do_not_slow_down_the_reward(outside):
    """A set of n numbers that all have the hash 0 takes n * n / 2 comparisons, after the program's time is over."""
    program = (
        "import os, struct\nnumbers = ','.join('[\"i\",\"%x\"]' % (n * (2**61 - 1)) for n in range(1, 30000))\n"
        "text = ('{\"value\": [\"s\", [' + numbers + ']]}').encode()\ntext = struct.pack('!i', len(text)) + text\n"
        "while text: text = text[os.write(4, text):]\nos._exit(0)"
    )
    expected = {str(number): number for number in range(50_000)}
    assert value(program, {"inputs": [[3]], "outputs": [expected], "fn_name": "f"}, seconds=2.0) == 0


def test_expected_text_without_computing_passes_only_its_test(outside):
    assert value("print(7)", {"inputs": ["3", "20"], "outputs": ["7", "41"]}) == 0.5
    assert value("def f(x): return 7", ["assert f(3) == 7", "assert f(20) == 41"]) == 0.5
    assert value("def f(x): return 7", ["assert f(3) == 7", "assert f(20) == 41"], score="all") == 0
