"""The callbacks that every training run has, whatever the user adds."""

from __future__ import annotations

import lightning as L

from grpo_lightning.checkpoints import StepEnds
from grpo_lightning.logged import StepLog
from grpo_lightning.requeue import RequeueAtStepEnd
from grpo_lightning.update_log import UpdateLog


def own_callbacks() -> list[L.Callback]:
    """Nothing logged twice, the step's log, the ends of steps for checkpoints and the reference, requeuing."""
    return [StepLog(), UpdateLog(), StepEnds(), RequeueAtStepEnd()]
