"""The seccomp filter, executed here instruction by instruction, on both architectures; and what the sandbox refuses."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest

from grpo_lightning.rewards.sandbox import client, isolation
from grpo_lightning.rewards.sandbox.client import Limits, Sandbox, SandboxError, check_sandbox
from grpo_lightning.rewards.sandbox.isolation import Isolation, IsolationError, architecture, seccomp_filter
from tests.marks import NEEDS_LANDLOCK

pytestmark = NEEDS_LANDLOCK

PID = 4321
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(code: bytes, arch: int, number: int, *arguments: int) -> int:
    """Return the kernel's action for a system call, by a filter."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    place, register = 0, 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("<HBBI", code, 8 * place)
        place += 1
        if operation == 0x20:
            (register,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x54:
            register &= operand
        elif operation == 0x15:
            place += if_true if register == operand else if_false
        elif operation == 0x45:
            place += if_true if register & operand else if_false
        else:
            assert operation == 0x06
            return operand


@pytest.fixture(params=ARCHES)
def call(request: pytest.FixtureRequest) -> Any:
    """Decides on a system call given by its numbers on (x86_64, aarch64)."""
    arch: str = request.param

    def made(numbers: tuple[int, int | None], *arguments: int, has_landlock: bool = True) -> int:
        number = numbers[list(ARCHES).index(arch)]
        if number is None:
            pytest.skip("the architecture does not have it")
        return decide(seccomp_filter(arch, PID, has_landlock=has_landlock), ARCHES[arch], number, *arguments)

    return made


REFUSED = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "mkdirat": (258, 34),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "symlinkat": (266, 36),
    "fchmodat": (268, 53),
    "ftruncate": (77, 46),
    "utimensat": (280, 88),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "setuid": (105, 146),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "setsid": (112, 157),
    "setpgid": (109, 154),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(call, name):
    assert call(REFUSED[name]) == EPERM


def test_only_what_is_listed_is_allowed(call):
    """The test covers the numbers of all system calls, and some beyond."""
    allowed = {number for number in range(1024) if call((number, number)) == ALLOW}
    special = {56, 220, 72, 25, 302, 261, 2, 257, 29, 16, 62, 129, 53, 199, 44, 206, 234, 131}
    assert allowed - special <= {
        number for numbers in isolation._HARMLESS.values() for number in numbers if number is not None
    }
    assert len(allowed) < 120
    assert call((0x40000000 + 59, 1 << 30)) == EPERM  # the x32 numbers


def test_arguments(call):
    clone, thread = (56, 220), 0x3D0F00
    assert call(clone, thread) == ALLOW
    assert call(clone, 17) == call(clone, 0x1200011) == call(clone, 1 << 48) == EPERM
    assert call((435, 435), 0) == ENOSYS
    for kill in ((62, 129), (234, 131)):
        assert call(kill, PID) == ALLOW
        assert call(kill, 1) == call(kill, 0) == call(kill, 2**32 - 1) == EPERM
    assert call((302, 261), 0, 3) == ALLOW
    assert call((302, 261), PID, 3) == EPERM
    fcntl = (72, 25)
    assert call(fcntl, 0, 3) == ALLOW
    assert call(fcntl, 0, 8) == call(fcntl, 0, 10) == EPERM
    assert call((16, 29), 0, 0x5401) == ALLOW
    assert call((16, 29), 0, 0x5412) == EPERM  # types into a terminal
    assert call((53, 199), 1) == ALLOW
    assert call((53, 199), 2) == EPERM
    send = (44, 206)
    assert call(send, 3, 4096, 1, 0, 0) == ALLOW
    assert call(send, 3, 4096, 1, 0, 4096) == call(send, 3, 4096, 1, 0, 1 << 32) == EPERM


@pytest.mark.parametrize(("numbers", "first"), [((2, None), 1), ((257, 56), 2)], ids=["open", "openat"])
def test_opening(call, numbers, first):
    def opened(flags: int, *, has_landlock: bool) -> int:
        return call(numbers, *[0] * first, flags, has_landlock=has_landlock)

    read, write, both, create, truncate = 0, 1, 2, 0o100, 0o1000
    for has_landlock in (True, False):
        assert opened(read, has_landlock=has_landlock) == ALLOW
        assert opened(read | truncate, has_landlock=has_landlock) == EPERM
    for flags in (write, both, write | create, write | create | truncate):
        assert opened(flags, has_landlock=True) == ALLOW  # Landlock decides, by the path
        assert opened(flags, has_landlock=False) == EPERM
    assert opened(read | create, has_landlock=False) == EPERM


def test_another_architecture_is_killed():
    assert decide(seccomp_filter("x86_64", PID, has_landlock=True), 0x40000003, 4) == KILL


def test_the_sandbox_works_here():
    assert check_sandbox(Limits(2**28)) == []


def test_a_system_without_the_means_is_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(IsolationError, match="64-bit Linux on x86_64 or aarch64 only, got darwin on"):
        architecture()
    monkeypatch.undo()
    monkeypatch.setattr(isolation, "_CREATE_RULESET", 100_000)  # a kernel without Landlock
    with pytest.raises(IsolationError, match=r"no Landlock.* Use Linux 5.13 or later.*allow_file_reads to true"):
        Isolation()


def patch_launcher(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have launchers execute code before they start; it sees the module `isolation`."""
    start = "from grpo_lightning.rewards.sandbox.launcher"
    before = f"import struct\nfrom grpo_lightning.rewards.sandbox import isolation\n{code}\n"
    command = client.START_LAUNCHER.replace(start, before + start)
    assert before in command
    monkeypatch.setattr(client, "START_LAUNCHER", command)


def test_without_landlock_files_are_readable_and_nothing_else(monkeypatch):
    patch_launcher(monkeypatch, "isolation._CREATE_RULESET = 100_000")
    with pytest.raises(SandboxError, match=r"programs cannot be sandboxed: .* no Landlock"):
        Sandbox("", Limits(2**28))
    assert check_sandbox(Limits(2**28, allow_file_reads=True)) == ["read a file"]


def test_without_a_filter_nothing_starts(monkeypatch):
    """A child that cannot be restricted does not run the program."""
    patch_launcher(monkeypatch, "isolation._PR_SET_SECCOMP = 10_000")
    with Sandbox("print(1)", Limits(2**28)) as sandbox, pytest.raises(SandboxError, match="not enter the sandbox"):
        sandbox.run_main(b"", seconds=5, max_output=100)


@pytest.mark.parametrize(
    "refusal", ["os.memfd_create = lambda *_: os.open('/missing', 0)", "fcntl.F_ADD_SEALS = -1"], ids=["file", "seals"]
)
def test_without_files_in_memory_the_input_is_a_pipe(monkeypatch, refusal):
    patch_launcher(monkeypatch, f"import fcntl, os\n{refusal}")
    program = "import os, stat\nprint(stat.S_ISFIFO(os.fstat(0).st_mode), len(input()))"
    with Sandbox(program, Limits(2**28)) as sandbox:
        for _ in range(2):
            ended = sandbox.run_main(b"x" * 10**6, seconds=5, max_output=100)
            assert (ended.how, ended.output) == ("exit", b"True 1000000\n")


def test_the_probe_sees_a_sandbox_that_does_not_hold(monkeypatch):
    """Teeth: a filter that allows everything."""
    patch_launcher(monkeypatch, "isolation.seccomp_filter = lambda *_, **__: struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)")
    with pytest.raises(SandboxError, match="on this system: a program can open a socket, start a process"):
        check_sandbox(Limits(2**28))


def test_readable_paths_hold_no_installed_packages():
    paths = isolation.readable_paths()
    assert any(path.endswith("/os.py") for path in paths)
    for path in paths:
        assert "-packages" not in path
        assert not os.path.isdir(f"{path}/torch")
