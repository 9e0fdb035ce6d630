"""The peaks of GPU memory by phase, on a CUDA that is played."""

from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.training.metrics import PeakMemory
from tests.helpers.module_runs import fit, make_module


class Module:
    """Keeps what is logged."""

    def __init__(self):
        self.logged = {}

    def log(self, name, value, **options):
        self.logged[name] = value


@pytest.fixture
def use(monkeypatch):
    """Says how much memory is allocated at the most from now on; a reset goes down to 1 GiB."""
    peak = [0.0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 1.0))
    return lambda gib: peak.__setitem__(0, max(peak[0], gib))


def trainer(device="cuda", accumulate=1):
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), accumulate_grad_batches=accumulate
    )


def test_each_phase_has_its_own_peak(use):
    callback, module, runs = PeakMemory(), Module(), trainer(accumulate=2)
    use(50.0)  # what was before is of no phase
    for phase, gib in (("rollout", 7.0), ("reward", 2.0), ("rollout", 5.0), ("update", 9.0)):
        callback.on_phase(runs, phase)
        use(gib)
    callback.on_train_batch_end(runs, module, None, None, 0)
    assert module.logged == {}  # inside an optimizer step
    callback.on_phase(runs, "update")
    use(8.0)
    callback.on_train_batch_end(runs, module, None, None, 1)
    assert module.logged == {"memory/reward_gib": 2.0, "memory/rollout_gib": 7.0, "memory/update_gib": 9.0}
    callback.on_phase(runs, "update")
    module.logged.clear()
    callback.on_train_batch_end(runs, module, None, None, 3)
    assert module.logged == {"memory/update_gib": 1.0}


def test_nothing_is_logged_on_a_cpu(use):
    module = make_module(length=2)
    fit(module, batch_size=4, max_steps=1)
    assert not [name for name in module.trainer.callback_metrics if name.startswith("memory/")]


@pytest.mark.gpu
def test_a_run_on_a_gpu_logs_its_phases():
    module = make_module(length=2)
    fit(module, batch_size=4, max_steps=1, accelerator="gpu")
    found = {name for name in module.trainer.callback_metrics if name.startswith("memory/")}
    assert found >= {"memory/rollout_gib", "memory/reward_gib", "memory/update_gib"}
