"""Two ranks learn what one does."""

import json
from pathlib import Path

import pytest

from tests.distributed import learning
from tests.distributed.harness import run_ranks
from tests.distributed.steps import save_policy
from tests.marks import SLOW


@SLOW
def test_training_under_zero3_raises_the_reward_as_on_one_device(tmp_path: Path):
    """The quickstart itself takes minutes: `make prove-ranks`."""
    save_policy(tmp_path)
    run_ranks("tests.distributed.learning", "zero3", tmp_path)
    rewards = json.loads((tmp_path / "rewards-zero3.json").read_text())
    assert len(rewards) == learning.STEPS
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.7
    # Later, rounding may have changed a token.
    assert rewards[:5] == pytest.approx(learning.rewards("one", tmp_path)[:5], abs=1e-6)
