"""The callbacks that every training run has, whatever the user adds."""

from __future__ import annotations

import lightning as L

from grpo_lightning.checkpoints import StepEnds
from grpo_lightning.logged import StepLog
from grpo_lightning.requeue import RequeueAtStepEnd
from grpo_lightning.sync_reference import ReferenceMover
from grpo_lightning.update_log import UpdateLog


def own_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Nothing logged twice, the step's log, a reference that follows, checkpoints at the ends of steps, requeuing.

    In this order: a checkpoint that waited for the end of the step must hold the reference as the step leaves it.

    Those of an earlier run of the same Trainer are removed: Lightning would replace them too, but report that it
    overrides the user's callbacks.
    """
    own = [StepLog(), UpdateLog(), ReferenceMover(), StepEnds(), RequeueAtStepEnd()]
    kinds = {type(callback) for callback in own}
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if type(callback) not in kinds]
    return own
