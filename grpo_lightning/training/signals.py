"""SLURM auto-requeue: the checkpoint is saved at an optimizer-step boundary on all ranks."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from grpo_lightning.core.ranks import is_any
from grpo_lightning.training.run_state import is_between_steps


class RequeueAtStepEnd(L.Callback):
    """Lets Lightning's answer to SLURM's signal (`hpc_ckpt_<N>.ckpt`, `scontrol requeue`) wait for the end of the step.

    Lightning answers inside the signal handler. The ranks get the signal at different moments, and saving is a matter
    of all of them: each would wait for the others in another place. And a checkpoint holds no gradients, so that the
    micro-batches of the step would be lost. After the answer the run ends, as on SIGTERM.
    """

    def __init__(self) -> None:
        self.answer: Any = None
        self.received: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the place of Lightning's handler, if there is one: a job of SLURM with auto-requeue."""
        self.received = None
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
            return
        handler = signal.getsignal(environment.requeue_signal)
        if isinstance(handler, _HandlersCompose) and threading.current_thread() is threading.main_thread():
            self.answer = handler
            signal.signal(environment.requeue_signal, self.receive)

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Remember the signal."""
        self.received = signum

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """At the end of a step: if a rank got the signal, all answer it, and the run ends."""
        if self.answer is None or not is_between_steps(trainer) or not is_any(self.received is not None):
            return
        is_last_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.global_step != trainer.max_steps and not is_last_epoch:  # there is something left to do
            environment: Any = trainer._accelerator_connector.cluster_environment
            self.answer(environment.requeue_signal, None)
            trainer._signal_connector.received_sigterm = True
        self.received = None
