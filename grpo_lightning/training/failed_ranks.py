"""If a run fails or stops, end the ranks that Lightning launched.

If a signal has already killed a rank, log an error that names this rank and this signal.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time

import lightning as L

from grpo_lightning.training.lightning_internals import subprocess_launcher

log = logging.getLogger(__name__)


def end_launched(trainer: L.Trainer, seconds: float) -> None:
    """Wait at most `seconds` for the ranks of Lightning's subprocess launcher. Kill the ranks that have not ended then.

    If a rank fails, the other ranks can wait forever in a collective operation. Only SIGKILL ends these other ranks. If
    torchrun or SLURM launched the ranks, the function does nothing.
    """
    launcher = subprocess_launcher(trainer)
    if launcher is None:
        return
    # Cleared because Lightning kills this process as well if a process in the list fails.
    processes = list(launcher.procs)
    launcher.procs.clear()
    deadline = time.monotonic() + seconds
    for local_rank, process in enumerate(processes, start=1):
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            continue
        if code < 0:  # killed by a signal, which the rank could not log itself
            name = signal.Signals(-code).name
            hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
            log.error("Rank %d was ended by %s%s.", local_rank, name, hint)
