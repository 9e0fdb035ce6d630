"""Ranks that are ended because another rank has failed."""

import logging
import subprocess
import sys
from types import SimpleNamespace

from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from grpo_lightning.training.failed_ranks import end_launched
from tests.marks import SLOW


def started(*scripts):
    """A trainer that has launched these."""
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=len(scripts) + 1, num_nodes=1)
    launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", script]) for script in scripts]
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher)), list(launcher.procs)


@SLOW
def test_who_ends_in_time_is_waited_for_and_who_does_not_is_ended(caplog):
    trainer, processes = started("import time; time.sleep(0.2)", "import time; time.sleep(600)", "raise SystemExit(2)")
    end_launched(trainer, seconds=2)
    assert [process.returncode for process in processes] == [0, -9, 2]
    assert trainer.strategy.launcher.procs == [], "Lightning watches them, and would end this process"
    assert caplog.text == "", "of one that was ended here, or said itself why, there is nothing to say"


def test_a_rank_that_was_killed_cannot_say_so(caplog):
    caplog.set_level(logging.ERROR, logger="grpo_lightning")
    trainer, _ = started("import os; os.kill(os.getpid(), 9)")
    end_launched(trainer, seconds=30)
    assert "Rank 1 was ended by SIGKILL (often the system, out of memory)." in caplog.text


def test_what_others_have_launched_is_theirs():
    end_launched(SimpleNamespace(strategy=SimpleNamespace(launcher=None)), seconds=0)
