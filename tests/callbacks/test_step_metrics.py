"""When metrics of a step are recorded."""

from __future__ import annotations

from grpo_lightning.callbacks.step_metrics import StepMetrics
from grpo_lightning.training.metrics import logged_this_step
from tests.helpers.module_runs import fit, make_module


class Recorded(StepMetrics):
    """All metrics by step, and the number of calls."""

    def __init__(self):
        self.steps, self.calls = {}, []

    def note(self, trainer):
        self.calls.append(trainer.global_step)
        self.steps.setdefault(trainer.global_step, {}).update(logged_this_step(trainer))


def test_every_step_is_recorded_with_the_metrics_that_it_logs_late():
    recorded = Recorded()
    fit(make_module(), batch_size=2, max_steps=3, accumulate_grad_batches=2, callbacks=[recorded])
    assert sorted(step for step in recorded.steps if step) == [1, 2, 3]
    for step in (1, 2, 3):
        assert {"policy/loss", "time/update", "policy/grad_norm"} <= recorded.steps[step].keys(), step
    # Before each of three steps, after it, and at the end of the epoch: not once per micro-batch.
    assert len(recorded.calls) == 7
