"""Signals that end a training run after the current optimizer step: SLURM auto-requeue, Ctrl-C, SIGTERM and SIGHUP.

A signal handler records the signal, but saves no checkpoint. At the end of the step, if any rank got a signal, all
ranks together save a checkpoint. There are two reasons why a handler itself saves no checkpoint:

- Saving is collective, and a signal may reach only one rank.
- Checkpoints contain no gradients, so a checkpoint in the middle of a step would lose the gradients of the step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment

from grpo_lightning.core.ranks import any_over_ranks
from grpo_lightning.training.lightning_internals import (
    cluster_environment,
    is_lightning_handler,
    stop_as_on_sigterm,
    subprocess_launcher,
)
from grpo_lightning.training.run_state import is_between_steps

log = logging.getLogger(__name__)

SIGHUP = getattr(signal, "SIGHUP", None)
"""None on Windows."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([] if SIGHUP is None else [SIGHUP]))
PATTERN = "stopped-*.ckpt"
REPEAT_SECONDS = 0.2
"""Time after a signal in which the same signal counts as a copy. `timeout` and `make` send a signal twice."""
PHASES_BEFORE_UPDATE = ("rollout", "reward")
"""Phases of a training step before weights and optimizer change."""


class RequeueAtStepEnd(L.Callback):
    """Delays SLURM auto-requeue until the end of the current optimizer step.

    Lightning's own signal handler saves `hpc_ckpt_<N>.ckpt` and calls `scontrol requeue`. This callback calls the
    handler at the end of the step, and then ends the run as Lightning does on SIGTERM.
    """

    def __init__(self) -> None:
        self.answer: Any = None
        self.received: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In a SLURM job with auto-requeue, replace Lightning's signal handler."""
        self.received = None
        environment = cluster_environment(trainer)
        if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
            return
        handler = signal.getsignal(environment.requeue_signal)
        if is_lightning_handler(handler) and threading.current_thread() is threading.main_thread():
            self.answer = handler
            signal.signal(environment.requeue_signal, self.receive)

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Remember the signal."""
        self.received = signum

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """At the end of a step, if any rank got the signal, requeue the job and end the run.

        The method calls Lightning's signal handler on every rank. After the last step of the training, the job is not
        requeued.
        """
        if self.answer is None or not is_between_steps(trainer) or not any_over_ranks(self.received is not None):
            return
        is_last_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.global_step != trainer.max_steps and not is_last_epoch:  # there is something left to do
            self.answer(cluster_environment(trainer).requeue_signal, None)
            stop_as_on_sigterm(trainer)
        self.received = None


class GracefulStop(L.Callback):
    """Turns the first SIGINT, SIGTERM or SIGHUP of a training run into a stop at the end of the current optimizer step.

    At the end of the step, all ranks save a checkpoint, and the run ends without validation. A resumed run continues
    with the rest of the epoch's data.

    After the first signal:

    - A SIGTERM or a SIGHUP is ignored.
    - A SIGINT (Ctrl-C) is ignored if the first signal was also a SIGINT and came less than `REPEAT_SECONDS` earlier.
    - In all other cases, a SIGINT goes to the signal handler that this callback has replaced.

    SIGHUP means that the terminal was closed or that the SSH connection broke. All further output to the terminal or to
    a pipe goes to `os.devnull` then, because a write to a closed terminal raises an error. If the process ignores
    SIGHUP, as under `nohup`, or has a handler of its own for it, this callback leaves SIGHUP alone.

    If an error is raised while a training rollout is sampled or scored, a run with one rank saves
    `stopped-step=<N>.ckpt` with the state after the previous step. A run with several ranks saves none, because saving
    is collective.

    Args:
        folder: Folder of the checkpoint `stopped-step=<N>.ckpt`. The checkpoint of an earlier stop is removed.
        is_saving: If false, no checkpoint is saved.
    """

    def __init__(self, folder: str | Path, *, is_saving: bool = True) -> None:
        self.folder = Path(folder)
        self.is_saving = is_saving
        self.received: int | None = None
        self.received_at = 0.0
        self.stopped_at: int | None = None
        self.is_interrupted = False
        """True if a KeyboardInterrupt has ended the run without a checkpoint."""
        self.checkpoint: Path | None = None
        self.old_handlers: dict[int, Any] = {}
        self.terminals: list[int] = []
        """Those of the file descriptors of stdin, stdout and stderr that are a terminal."""
        self.trainer: L.Trainer | None = None
        self.first_step = 0
        self.phase: str | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Register the signal handlers."""
        self.first_step, self.phase, self.received = trainer.global_step, None, None
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only in the main thread
        self.trainer = trainer
        self.terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        for signum in SIGNALS:
            if signum != SIGHUP or signal.getsignal(signum) == signal.SIG_DFL:
                self.old_handlers[signum] = signal.signal(signum, self.receive)

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Remember the first signal. A later Ctrl-C that is no copy of the first signal goes to the old handler."""
        if signum == SIGHUP:
            self.leave_terminal()
        if self.received is not None:
            # Others are ignored. Lightning's handler of SIGTERM would start a collective in the middle of a step.
            is_copy = signum == self.received and time.monotonic() - self.received_at < REPEAT_SECONDS
            if signum == signal.SIGINT and not is_copy:
                self.restore()
                signal.raise_signal(signum)
            return
        self.received, self.received_at = signum, time.monotonic()
        launcher = subprocess_launcher(self.trainer) if self.trainer is not None else None
        # SIGTERM often reaches only the first process.
        if signum == signal.SIGTERM and launcher is not None:
            launcher.kill(signal.SIGTERM)
        # Not through logging, because a handler may interrupt a write to stderr, and a second write raises an error.
        if self.trainer is None or self.trainer.is_global_zero:
            again = "; Ctrl-C again stops at once without saving a checkpoint" if signum == signal.SIGINT else ""
            name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
            with contextlib.suppress(OSError):  # the reader of a pipe may have ended
                os.write(2, f"\n{name}: stopping after this step{again}.\n".encode())

    def leave_terminal(self) -> None:
        """If the terminal is closed, send further output to `os.devnull`, if it went to this terminal or to a pipe.

        The reader of a pipe, for example `tee`, often ends with the terminal, and a write to its pipe then fails.
        """
        closed = [descriptor for descriptor in self.terminals if not os.isatty(descriptor)]
        if not closed:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            if descriptor in closed or is_pipe(descriptor):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def restore(self) -> None:
        """Put the old handlers back."""
        for signum, handler in self.old_handlers.items():
            signal.signal(signum, handler)
        self.old_handlers = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """At the end of a step, if any rank got a signal, save a checkpoint and end the run."""
        if not is_between_steps(trainer):
            return
        # A signal on one rank stops all ranks, which would otherwise wait for it forever.
        is_received = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
        if not is_received or trainer.global_step == trainer.max_steps:
            return
        self.stopped_at = trainer.global_step
        if self.is_saving:
            self.checkpoint = self.save(trainer)
        stop_as_on_sigterm(trainer)

    def save(self, trainer: L.Trainer) -> Path:
        """Save a checkpoint and return its path. Collective: all ranks call this method.

        The checkpoints of earlier stops are removed after the new checkpoint has been saved.
        """
        folder = Path(trainer.strategy.broadcast(str(self.folder)))
        checkpoint = folder / f"stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(checkpoint)
        for old in sorted(folder.glob(PATTERN)) if trainer.is_global_zero else []:
            if old != checkpoint:
                trainer.strategy.remove_checkpoint(old)
        return checkpoint

    def on_phase(self, trainer: L.Trainer, name: str) -> None:
        """Remember the phase of the training step."""
        self.phase = name

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the old handlers back."""
        self.restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the old handlers back. If an error ended sampling or scoring, save a checkpoint."""
        self.restore()
        self.is_interrupted = isinstance(exception, KeyboardInterrupt) and self.received is not None
        if isinstance(exception, Exception) and self.is_saving and self.can_save_after_error(trainer):
            self.save_after_error(trainer)

    def can_save_after_error(self, trainer: L.Trainer) -> bool:
        """True if the run has one rank, was sampling or scoring, and has done a step since it started or resumed."""
        is_before_update = self.phase in PHASES_BEFORE_UPDATE
        return trainer.world_size == 1 and is_before_update and trainer.global_step > self.first_step

    def save_after_error(self, trainer: L.Trainer) -> None:
        """Save a checkpoint, and log how to resume. A failed save is only logged."""
        try:
            checkpoint = self.save(trainer)
        except Exception as error:  # noqa: BLE001 - for example a full disk, or a GPU that the first error has broken
            log.warning(
                "The steps since the last checkpoint are lost, because no checkpoint of step %d could be saved: %s: %s",
                trainer.global_step,
                type(error).__name__,
                error,
            )
            return
        log.info(
            "An error ended the run in the rollout after step %d. The end of that step is saved: %s. Fix the cause, "
            "and resume with the same command and --ckpt_path auto (or %s).",
            trainer.global_step,
            checkpoint,
            checkpoint,
        )

    @property
    def exit_code(self) -> int:
        """Exit code 128 + signal; SIGTERM if only other ranks got a signal."""
        return 128 + (self.received or signal.SIGTERM)

    def last_words(self) -> str:
        """Message with the step at which the run stopped, and how to resume."""
        resuming = "; resume with the same command and --ckpt_path auto" if self.checkpoint else ""
        return f"Stopped at step {self.stopped_at}{resuming}."


def is_pipe(descriptor: int) -> bool:
    """True if an open file descriptor is a pipe."""
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def words_without_checkpoint(step: int, newest: Path | None) -> str:
    """Message that no checkpoint was saved at `step`. The message names `newest`, the newest checkpoint of the run."""
    found = (
        "This run has no checkpoint."
        if newest is None
        else f"The newest checkpoint is {newest}. Resume with the same command and --ckpt_path auto."
    )
    return f"Stopped at step {step} without saving a checkpoint. {found}"
