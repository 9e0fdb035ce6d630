"""Shutting down the ranks that Lightning's subprocess launcher started, without cutting off their last output."""

from __future__ import annotations

import logging
import signal
import subprocess
import time

import lightning as L
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

log = logging.getLogger(__name__)

OUT_OF_MEMORY = " (often the system, out of memory)"


def end_with(trainer: L.Trainer, seconds: float) -> None:
    """Wait for the launched processes, which stop or fail like this one; end those that do not.

    A rank that fails alone leaves the others waiting for it in a collective, where no other signal reaches them.

    Args:
        trainer: The run's; nothing is done where something else (torchrun, SLURM) launched the processes.
        seconds: Given to all of them together.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return
    # Lightning watches this very list, and kills this process, too, as soon as one of them ends with an error.
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
        if code < 0:  # it could not say so itself
            name = signal.Signals(-code).name
            log.error("Rank %d was ended by %s%s.", local_rank, name, OUT_OF_MEMORY if name == "SIGKILL" else "")
