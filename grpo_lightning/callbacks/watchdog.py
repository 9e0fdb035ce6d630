"""Watchdog: ends a run whose rollout hangs, so that a scheduler can restart it."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L

from grpo_lightning.core import ranks
from grpo_lightning.training.failed_ranks import end_launched

log = logging.getLogger(__name__)

WATCHED = "rollout"
"""The phase in which engines report progress: the update of the engine's weights, followed by sampling."""

SIGNALS = ("SIGUSR2", "SIGUSR1", "SIGVTALRM")
"""Candidates for the signal that interrupts the main thread. The first one without a handler is used."""

EXIT_STATUS = 75
"""Exit status if the main thread does not react: EX_TEMPFAIL, "try again later"."""

LOOKS = 20
"""Number of times that the clock is checked within `stall_seconds`."""


class StallInterrupt(SystemExit):
    """Exception that ends a stalled rollout.

    The process then prints the message and exits with status 1. This class is not a subclass of `Exception`, so that
    engines and rewards do not catch it.
    """


class Watchdog(L.Callback):
    """Ends a training run if a rollout, of training or of validation, makes no progress for `stall_seconds`.

    Each decoding step, or each completion from a server, counts as progress. If a rank stalls, the watchdog logs the
    stall, writes the Python stacks of all threads to stderr, and interrupts the main thread with a signal. The run then
    ends with an error. In a run with one process, a checkpoint of the last optimizer step is saved first, unless the
    run was validating. If the main thread does not react, the process exits after `grace_seconds`, with status 75. A
    process that has started other ranks as subprocesses also ends these.

    Rewards and updates are not watched, because they report no progress. In validation, the clock starts at the first
    decoding step of each batch. Evaluations before training are not watched.

    Args:
        stall_seconds: Seconds without progress; null turns the watchdog off.
        grace_seconds: Seconds within which the main thread must end the run, including the time to save the checkpoint.
        dirpath: Folder of the checkpoint; null is the folder of the run's other checkpoints. With null, a run without
            other checkpoints saves none.
    """

    def __init__(
        self, stall_seconds: float | None = 1800.0, grace_seconds: float = 300.0, dirpath: str | None = None
    ) -> None:
        limits = {"stall_seconds": stall_seconds is None or stall_seconds > 0, "grace_seconds": grace_seconds > 0}
        for name, is_valid in limits.items():
            if not is_valid:
                off = ", or null" * (name == "stall_seconds")
                raise ValueError(f"Watchdog.{name} must be above 0{off}, got {locals()[name]}.")
        self.stall_seconds, self.grace_seconds, self.dirpath = stall_seconds, grace_seconds, dirpath
        self.phase, self.detail = "", ""
        self.since = 0.0
        self.is_evaluating = False
        self.old_handler: tuple[signal.Signals, Any] | None = None
        self.stop = threading.Event()
        self.message: str | None = None
        """The reason why the run ends; None until a stall is found."""

    # ------------------------------------------------------------------------------------------------------- progress

    def on_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Record the phase that begins."""
        self.begin(phase, is_evaluating=False)

    def on_evaluation_phase(self, trainer: L.Trainer, phase: str) -> None:
        """Record the phase of an evaluation that begins."""
        self.begin(phase, is_evaluating=True)

    def begin(self, phase: str, *, is_evaluating: bool) -> None:
        """Record the phase that begins."""
        # In an evaluation, a rank may wait for the rewards of the other ranks before its first decoding step.
        self.since = math.inf if is_evaluating else time.monotonic()
        self.detail, self.is_evaluating = "", is_evaluating
        self.phase = phase  # last, because the thread that watches reads it first

    def on_decode(self, trainer: L.Trainer, done: int, total: int) -> None:
        """Record progress."""
        self.detail, self.since = f" after {done} of at most {total} tokens per completion", time.monotonic()

    def on_rollout(self, *_: Any) -> None:
        """Record that the rollout has ended."""
        self.phase = ""

    def on_train_batch_end(self, *_: Any) -> None:
        """Record that the training step has ended."""
        self.phase = ""

    # ------------------------------------------------------------------------------------------------------ the clock

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to watch.

        The main thread can be interrupted under two conditions: it calls this hook, and at least one of `SIGNALS` has
        no handler yet.
        """
        self.phase, self.message = "", None
        if self.stall_seconds is None:
            return
        if threading.current_thread() is threading.main_thread():
            free = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
            free = [signum for signum in free if signal.getsignal(signum) == signal.SIG_DFL]
            if free:
                self.old_handler = free[0], signal.signal(free[0], self.interrupt)
        self.stop = threading.Event()
        thread = threading.Thread(target=self.watch, args=(trainer, self.stop), name="watchdog", daemon=True)
        thread.start()

    def watch(self, trainer: L.Trainer, stop: threading.Event) -> None:
        """Check the clock until training ends or a rollout makes no progress."""
        assert self.stall_seconds is not None
        while not stop.wait(self.stall_seconds / LOOKS):
            if self.phase == WATCHED and (seconds := time.monotonic() - self.since) > self.stall_seconds:
                self.end(trainer, stop, seconds)
                return

    def end(self, trainer: L.Trainer, stop: threading.Event, seconds: float) -> None:
        """Interrupt the main thread. If it does not end the run in time, exit."""
        step = trainer.global_step
        where = f"of an evaluation after step {step}" if self.is_evaluating else f"before step {step + 1}"
        self.message = (
            f"Rank {ranks.rank()}: the {self.phase} {where} has made no progress for {seconds:.0f} "
            f"seconds{self.detail} (Watchdog.stall_seconds)."
        )
        log.error("%s The stacks of all threads follow.", self.message)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self.old_handler is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, self.old_handler[0])
            if stop.wait(self.grace_seconds):
                return
        log.error(
            "Rank %d: the main thread does not react, so the process exits. Resume the run from its newest checkpoint "
            "(on the command line: --ckpt_path auto).",
            ranks.rank(),
        )
        end_launched(trainer, seconds=0)
        logging.shutdown()
        os._exit(EXIT_STATUS)

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal by ending a stalled rollout.

        Raises:
            StallInterrupt: If a rollout is stalled.
        """
        if self.message is None:
            log.warning("%s is ignored: during training, the watchdog uses it.", signal.Signals(signum).name)
            return
        raise StallInterrupt(self.message)

    # -------------------------------------------------------------------------------------------------------- the end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """After a stall of a run with one process, save a checkpoint of the last optimizer step.

        A run that was validating saves none, because the checkpoint would contain a half-finished validation.
        """
        if isinstance(exception, StallInterrupt):
            folder = self.folder(trainer)
            if ranks.world_size() > 1:
                log.error("Resume the run from its newest checkpoint: with several ranks, a stalled run saves none.")
            elif self.is_evaluating:
                log.error("Resume the run from its newest checkpoint: a run that stalls in an evaluation saves none.")
            elif folder is not None:
                path = folder / f"stalled-step={trainer.global_step}.ckpt"
                trainer.save_checkpoint(path)
                log.error("Saved %s. To resume, use the same command and --ckpt_path auto.", path)
        self.rest()

    def on_train_end(self, *_: Any) -> None:
        """Stop watching."""
        self.rest()

    def rest(self) -> None:
        """Stop the thread, and restore the old signal handler."""
        self.stop.set()
        if self.old_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(*self.old_handler)
            self.old_handler = None

    def folder(self, trainer: L.Trainer) -> Path | None:
        """Folder of the checkpoint; None if the run saves no checkpoints."""
        if self.dirpath is not None:
            return Path(self.dirpath).expanduser()
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        return None if folder is None else Path(folder)
