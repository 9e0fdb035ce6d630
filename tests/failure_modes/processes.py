"""Programs in processes of their own that are given up on after a few seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

SECONDS = 2.5
"""Long after a program that does not hang is done: those here import nothing heavy."""


def printed_by(program: str, *arguments: str) -> Any:
    """The JSON that a program prints. Raises: subprocess.TimeoutExpired if it hangs; it and its children are killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return json.loads(output)
