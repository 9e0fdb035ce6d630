"""The callbacks that every training run has, whatever the user adds."""

from __future__ import annotations

import lightning as L

from grpo_lightning.checkpoints import StepEnds
from grpo_lightning.logged import StepLog
from grpo_lightning.requeue import RequeueAtStepEnd
from grpo_lightning.sync_reference import ReferenceMover
from grpo_lightning.update_log import UpdateLog


def own_callbacks() -> list[L.Callback]:
    """Checkpoints at the ends of steps, nothing logged twice, the step's log, a reference that follows, requeuing."""
    return [StepEnds(), StepLog(), UpdateLog(), ReferenceMover(), RequeueAtStepEnd()]
