"""A process that has imported what ranks need, and of which every rank is a fork.

The imports take longer than most of what ranks do in the tests: `harness.py` starts one such process and has it start
the ranks. A request is a line of JSON on its standard input, answered by a line:

    {"start": {"module": ..., "arguments": [...], "environment": {...}, "folder": ..., "output": ...}}  ->  its pid
    {"poll": pid}  ->  its exit code, minus the signal's number if one ended it, or null while it runs

It ends where its input does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = [
    "grpo_lightning",
    "grpo_lightning.training.strategies",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "lightning.pytorch.strategies.deepspeed",
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
]
"""Modules that all ranks or most of them import."""

THREADS = Path("/proc/self/task")
"""A folder for each thread of this process, on Linux."""


def serve(answers: IO[str]) -> dict[str, Any] | None:
    """Answer requests. Returns: in a fork, what it was started for; None at the end of the input."""
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                answers.close()  # if this server ends, nobody who waits for its answer is to wait for the ranks
                return request["start"]
            answer = pid
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()
    return None


def become(rank: dict[str, Any]) -> None:
    """Do as `python -m module arguments` does in a session of its own."""
    os.setsid()
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(rank["environment"])
    os.chdir(rank["folder"])
    sys.argv[1:] = rank["arguments"]
    runpy.run_module(rank["module"], run_name="__main__", alter_sys=True)


def run(rank: dict[str, Any]) -> NoReturn:
    """Run a rank to its end, without the end of the interpreter, which frees all modules in 2 CPU seconds."""
    code: Any = 0
    is_interrupted = False
    try:
        become(rank)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):  # Python prints such a value and exits with 1
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException as error:  # noqa: BLE001 - as Python ends after any error
        traceback.print_exc()
        code = 1
        is_interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # waits for other threads, and ends those of pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_interrupted:  # the exit status tells the caller that it was Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def main() -> None:
    """Import, then serve."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    if THREADS.exists():
        started = len(list(THREADS.iterdir())) - 1
        assert not started, f"imports have started {started} threads, which a fork does not have"
    gc.freeze()  # a collection in a rank is spared all that was imported, whose pages it would copy
    rank = serve(answers)
    if rank is not None:
        run(rank)


if __name__ == "__main__":
    main()
