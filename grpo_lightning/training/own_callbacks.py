"""The callbacks that every training run has, whatever the user adds."""

from __future__ import annotations

import lightning as L

from grpo_lightning.training.checkpoints import StepEnds
from grpo_lightning.training.requeue import RequeueAtStepEnd
from grpo_lightning.training.step_log import StepLog
from grpo_lightning.training.update_log import UpdateLog


def own_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Nothing logged twice, the step's log, the ends of steps for checkpoints and the reference, requeuing.

    Those of an earlier run of the same Trainer are removed: Lightning would replace them too, but report that it
    overrides the user's callbacks.
    """
    own = [StepLog(), UpdateLog(), StepEnds(), RequeueAtStepEnd()]
    kinds = {type(callback) for callback in own}
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if type(callback) not in kinds]
    return own
