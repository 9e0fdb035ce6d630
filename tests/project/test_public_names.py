"""The package's front door."""

import subprocess
import sys

import pytest

import grpo_lightning


@pytest.mark.parametrize("name", grpo_lightning.__all__)
def test_every_public_name_loads(name: str):
    assert name in dir(grpo_lightning)
    assert getattr(grpo_lightning, name) is not None


def test_a_name_that_is_not_public_says_which_are():
    with pytest.raises(AttributeError, match=r"no attribute 'GRPOTrainer'. Public names: DatasetEntry, "):
        _ = grpo_lightning.GRPOTrainer


def test_submodules_import_by_their_path():
    program = "import grpo_lightning; from grpo_lightning.core import types; assert types is grpo_lightning.core.types"
    subprocess.run([sys.executable, "-c", program], check=True)
