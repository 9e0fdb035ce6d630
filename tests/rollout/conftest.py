"""Fixtures of the tests of engines."""

import pytest

from grpo_lightning.rollout import fused
from grpo_lightning.rollout.fused import Fused


@pytest.fixture
def fused_functions(monkeypatch):
    """The fused functions of a test, which are compiled anew instead of those that an earlier test has compiled."""
    functions = []
    fused.fused_states.cache_clear()
    monkeypatch.setattr(fused, "Fused", lambda *arguments: functions.append(Fused(*arguments)) or functions[-1])
    yield functions
    fused.fused_states.cache_clear()
