"""What follows from the settings of memory."""

import dataclasses

import pytest

from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.states import division_of

SETTINGS = MemorySettings(ScoredBatch(2, 8, 10, 6, chunk_size=4), 8, 2, Precision(4, 2, is_mixed=True), 8)


@pytest.mark.parametrize(("strategy", "expected"), [("zero1", Precision(2, 2)), ("fsdp2", SETTINGS.precision)])
def test_deepspeed_converts_the_model(strategy, expected):
    assert dataclasses.replace(SETTINGS, division=division_of(strategy, 2)).widths == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"accumulates": True}, True),
        ({"checkpointing": "chunks"}, True),
        ({"checkpointing": "layers"}, False),
    ],
)
def test_gradients_that_are_there_beside_activations(changes, expected):
    assert dataclasses.replace(SETTINGS, **changes).holds_gradients == expected
