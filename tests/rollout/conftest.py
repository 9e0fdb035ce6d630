"""Fixtures of the tests of engines."""

import pytest

from grpo_lightning.rollout import kernel_fusion
from grpo_lightning.rollout.kernel_fusion import Fused


@pytest.fixture
def fused_functions(monkeypatch):
    """The fused functions of a test, which are compiled anew instead of those that an earlier test has compiled."""
    functions = []
    kernel_fusion.fused_states.cache_clear()
    monkeypatch.setattr(kernel_fusion, "Fused", lambda *arguments: functions.append(Fused(*arguments)) or functions[-1])
    yield functions
    kernel_fusion.fused_states.cache_clear()
