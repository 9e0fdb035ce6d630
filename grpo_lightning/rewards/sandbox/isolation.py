"""Sandbox of one process on Linux: Landlock (files), seccomp (system calls) and resource limits.

After `Isolation.enter`, a process can compute, start threads, and use the pipes that are already open. It can read
`readable_paths`, and read and write `/dev/null`. The kernel refuses everything else:

| it cannot | because |
|---|---|
| start a process or program, or leave its process group | seccomp allows `clone` for threads only, and not `execve` |
| open a socket | seccomp refuses `socket`, and allows only `socketpair`, which connects a process with itself |
| write (except `/dev/null`), create, delete or rename a file | Landlock, seccomp, and RLIMIT_FSIZE 0 |
| read any other file, `/proc`, or the memory or environment of other processes | Landlock |
| signal or trace another process, or change the resource limits of another process | seccomp |
| gain privileges | no_new_privs, and all capabilities are dropped |

Landlock needs Linux 5.13, but no privileges. A kernel without Landlock is accepted only with `allow_file_reads`. On
such a kernel, a program can read every file that the program's user can read, also in `/proc`. The table's row "read
any other file" then does not hold. All other rows hold. Even with Landlock, a program can see the names, sizes and
dates of files (`stat`), the time, and the load of the machine.

This module imports only the standard library, because the launcher runs without installed packages.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

MAX_THREADS = 64
"""Maximum number of threads of a program."""

STACK_BYTES = 64 * 2**20
"""Maximum size of the main thread's stack, large because contest programs recurse deeply."""

MAX_FILES = 64
"""Maximum number of open file descriptors."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAP_DAC_READ_SEARCH = 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# System call: its number on x86_64 and on aarch64 (None: it does not exist there).
_HARMLESS: dict[str, tuple[int, int | None]] = {
    # open files, and metadata of files
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67)},
    **{"close": (3, 57), "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"stat": (4, None), "lstat": (6, None), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439)},
    **{"readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61)},
    **{
        "getcwd": (79, 17),
        "chdir": (80, 49),
        "fchdir": (81, 50),
        "dup": (32, 23),
        "dup2": (33, None),
        "dup3": (292, 24),
    },
    **{"pipe": (22, None), "pipe2": (293, 59), "eventfd": (284, None), "eventfd2": (290, 19)},
    **{"poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72)},
    **{"epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None)},
    **{"epoll_pwait": (281, 22), "recvfrom": (45, 207), "shutdown": (48, 210)},
    # memory
    **{"mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "brk": (12, 214)},
    **{"madvise": (28, 233), "membarrier": (324, 283)},
    # own signals and timers
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136)},
    **{"rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None)},
    **{"setitimer": (38, 103), "getitimer": (36, 102), "alarm": (37, None)},
    # threads
    **{"futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99), "set_tid_address": (218, 96)},
    **{"rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "arch_prctl": (158, None)},
    **{
        "exit": (60, 93),
        "exit_group": (231, 94),
        "restart_syscall": (219, 128),
        "wait4": (61, 260),
        "waitid": (247, 95),
    },
    # ids, clocks, random numbers
    **{"getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175)},
    **{"getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148)},
    **{"getresgid": (120, 150), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156)},
    **{"uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168), "getrlimit": (97, None), "getrusage": (98, 165)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101)},
    **{"gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrandom": (318, 278)},
}
_CLONE, _CLONE3, _FCNTL, _IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
_OPEN, _OPENAT, _PRLIMIT, _KILL, _TGKILL = (2, None), (257, 56), (302, 261), (62, 129), (234, 131)
_SOCKETPAIR, _SENDTO = (53, 199), (44, 206)

_CLONE_THREAD = 0x10000
# Commands that duplicate a descriptor, or get or set its flags. F_SETOWN and F_SETSIG are refused, because they let a
# process signal other processes.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, window size, FIONREAD, FIONBIO, FIOCLEX
_ACCESS_MODE, _O_CREAT, _O_TRUNC = 0o3, 0o100, 0o1000


class IsolationError(RuntimeError):
    """The kernel or the architecture lacks what the sandbox needs."""


class Isolation:
    """The sandbox that the launcher prepares once, and that each of its children enters.

    Args:
        allow_file_reads: Continue without Landlock if the kernel lacks it.

    Raises:
        IsolationError: If the system is not 64-bit Linux, or the CPU is neither x86_64 nor aarch64.
        IsolationError: If `allow_file_reads` is false, and the kernel has no Landlock.
    """

    def __init__(self, *, allow_file_reads: bool = False) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._arch = architecture()
        self.landlock_abi = max(0, self._libc.syscall(_CREATE_RULESET, None, 0, 1))
        """Version of Landlock; 0 if the kernel has none."""
        if not self.landlock_abi and not allow_file_reads:
            raise IsolationError(
                f"the kernel (Linux {os.uname().release}) has no Landlock, so programs could read every file of this "
                "user, the expected answers too. Use Linux 5.13 or later with Landlock enabled, or set "
                "allow_file_reads to true in a container that holds nothing secret"
            )
        self.ruleset = self._make_ruleset() if self.landlock_abi else None
        """File descriptor of the Landlock ruleset."""
        self._drop_privileges()

    def enter(self, memory_bytes: int, cpu_seconds: int) -> None:
        """Restrict this process for the rest of its life.

        Call this method while the process has only one thread. Landlock and seccomp do not restrict other threads that
        already run.

        `memory_bytes` is in addition to the current address space.

        Raises:
            OSError: If the kernel refuses.
        """
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        limits = [
            (resource.RLIMIT_AS, now + memory_bytes),
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_NOFILE, MAX_FILES),
            (resource.RLIMIT_STACK, STACK_BYTES),
            *((limit, 0) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK)),
        ]
        for limit, value in limits:
            hard = resource.getrlimit(limit)[1]
            new = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (new, new))
        if self.ruleset is not None:
            self._check(self._libc.syscall(_RESTRICT_SELF, self.ruleset, 0))
            os.close(self.ruleset)
        code = seccomp_filter(self._arch, os.getpid(), has_landlock=self.ruleset is not None)
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
        self._check(self._libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))

    def end_with(self, parent: int) -> None:
        """Have the kernel kill this process when its parent ends."""
        self._check(self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    def _drop_privileges(self) -> None:
        """Drop all capabilities, except that root keeps the one to read files if Landlock restricts reading."""
        self._check(self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        kept = 1 << _CAP_DAC_READ_SEARCH if self.ruleset is not None and os.geteuid() == 0 else 0
        header = struct.pack("Ii", 0x20080522, 0)
        for capabilities in (kept, 0):
            if not self._libc.syscall(_CAPSET[self._arch], header, struct.pack("6I", *[capabilities] * 2, *[0] * 4)):
                return
        raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")

    def _make_ruleset(self) -> int:
        """Make the Landlock ruleset. Returns: its file descriptor."""
        abi = self.landlock_abi
        # Versions 2, 3 and 5 of Landlock each add a right for files. Version 4 adds a field for TCP, and version 6 adds
        # a field for signals and abstract sockets.
        bits = 13 + sum(abi >= version for version in (2, 3)) + (abi >= 5)
        fields = [(1 << bits) - 1, *([0b11] if abi >= 4 else []), *([0b11] if abi >= 6 else [])]
        attributes = struct.pack(f"{len(fields)}Q", *fields)
        ruleset: int = self._check(self._libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
        for path in readable_paths():
            self._allow(ruleset, path, _READ_FILE)
        self._allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0))
        self._allow(ruleset, ".", _READ_DIR)  # the empty folder
        return ruleset

    def _allow(self, ruleset: int, path: str, access: int) -> None:
        """Allow an access to a path, or to everything in a folder; a missing path is skipped."""
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # any of the paths may be missing on some system
            return
        if os.path.isdir(path) and access & _READ_FILE:
            access |= _READ_DIR
        rule = struct.pack("=Qi", access, place)
        self._check(self._libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
        os.close(place)

    def _check(self, result: int) -> int:
        """Raises: OSError if a system call failed."""
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the sandbox could not be set up: {os.strerror(number)}")
        return result


def architecture() -> str:
    """The architecture.

    Raises:
        IsolationError: If the system is not 64-bit Linux, or the CPU is neither x86_64 nor aarch64.
    """
    machine = os.uname().machine if hasattr(os, "uname") else "another architecture"
    if sys.platform != "linux" or machine not in _AUDIT_ARCH or struct.calcsize("P") != 8:
        raise IsolationError(f"programs run on 64-bit Linux on x86_64 or aarch64 only, got {sys.platform} on {machine}")
    return machine


def readable_paths() -> list[str]:
    """The standard library without installed packages, shared libraries, and three system files."""
    library = os.path.dirname(os.__file__)
    hidden = {"site-packages", "dist-packages", "test", "ensurepip"}
    paths = [f"{library}/{name}" for name in os.listdir(library) if name not in hidden]
    for folder in (f"{sys.base_prefix}/lib", "/usr/lib64", "/lib64"):
        if os.path.isdir(folder):
            paths += [f"{folder}/{name}" for name in os.listdir(folder) if ".so" in name]
    places = getattr(sys.implementation, "_multiarch", "")
    paths += [f"{root}/{places}" for root in ("/lib", "/usr/lib") if places]
    return [*paths, "/etc/ld.so.cache", "/dev/zero", "/dev/urandom"]


# ------------------------------------------------------------------------------------------------------------- seccomp

_LOAD, _JEQ, _JSET, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def seccomp_filter(arch: str, pid: int, *, has_landlock: bool) -> bytes:
    """Assemble the seccomp filter, which allows a list of system calls.

    Some of these calls are allowed only with certain arguments. A filter cannot see the arguments of `clone3`, so
    `clone3` fails with ENOSYS. libc then uses `clone`. Every other forbidden call fails with EPERM.

    The process `pid` may signal only itself. Without Landlock, no file can be opened for writing, not even `/dev/null`.
    """
    column = list(_AUDIT_ARCH).index(arch)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[arch]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for numbers in _HARMLESS.values():
        if numbers[column] is not None:
            code += [(_JEQ, 0, 1, numbers[column] or 0), (_RETURN, 0, 0, _ALLOW)]
    special: list[tuple[tuple[int, int | None], list[Instruction]]] = [
        (_CLONE, [*_argument(0), (_JSET, 0, 1, _CLONE_THREAD), (_RETURN, 0, 0, _ALLOW)]),
        (_CLONE3, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)]),
        (_FCNTL, _one_of(1, _FCNTL_COMMANDS)),
        (_IOCTL, _one_of(1, _IOCTL_COMMANDS)),
        (_PRLIMIT, _one_of(0, (0,))),
        (_KILL, _one_of(0, (pid,))),
        (_TGKILL, _one_of(0, (pid,))),
        (_SOCKETPAIR, _one_of(0, (1,))),
        (_SENDTO, _no_pointer(4)),
        (_OPEN, _read_only(1, has_landlock=has_landlock)),
        (_OPENAT, _read_only(2, has_landlock=has_landlock)),
    ]
    for numbers, allowed in special:
        if numbers[column] is not None:
            body = [*allowed, (_RETURN, 0, 0, _ERRNO | _EPERM)]
            code += [(_JEQ, 0, len(body), numbers[column] or 0), *body]
    code.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _argument(number: int) -> list[Instruction]:
    """Load the low half of an argument."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * number)]


def _one_of(number: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow the call if an argument has one of these values."""
    tests: list[Instruction] = []
    for value in values:
        tests += [(_JEQ, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*_argument(number), *tests]


def _no_pointer(number: int) -> list[Instruction]:
    """Allow the call if an argument is a null pointer: both halves are 0."""
    low, high = _ARGUMENTS + 8 * number, _ARGUMENTS + 8 * number + 4
    return [(_LOAD, 0, 0, low), (_JEQ, 0, 3, 0), (_LOAD, 0, 0, high), (_JEQ, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)]


def _read_only(number: int, *, has_landlock: bool) -> list[Instruction]:
    """Allow opening files for reading. With Landlock, also allow opening for writing, which Landlock restricts by path.

    O_TRUNC with reading is always refused, because Landlock before Linux 6.2 does not check truncation.
    """
    if has_landlock:
        return [
            *_argument(number),
            *[(_JSET, 1, 0, _O_TRUNC), (_RETURN, 0, 0, _ALLOW)],
            *[(_AND, 0, 0, _ACCESS_MODE), (_JEQ, 1, 0, 0), (_RETURN, 0, 0, _ALLOW)],
        ]
    return [*_argument(number), (_JSET, 1, 0, _ACCESS_MODE | _O_CREAT | _O_TRUNC), (_RETURN, 0, 0, _ALLOW)]
