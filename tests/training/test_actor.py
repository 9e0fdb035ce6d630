"""Micro-batches of the actor: balanced by what the scorer computes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.core.ranks import Teams
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.policy.completion_logprobs import AutoChunks, Scorer
from grpo_lightning.training import actor
from grpo_lightning.training.micro_batches import CycleShape


@pytest.mark.parametrize(("chunk_size", "prompts"), [(AutoChunks(1), 4), (None, 8)])
def test_micro_batches_are_balanced_by_what_the_scorer_computes(chunk_size, prompts):
    """One pass pads 1 token to 50, so that a prompt of 20 tokens is better run twice. Chunks do not pad it."""
    groups = [
        Group(Prompt("p"), [5] * 20, [Completion([7] * length, [0.0] * length, "length") for length in (1, 50)])
        for _ in range(4)
    ]
    of_run = actor.Actor(
        policy=None,
        reference=None,
        scorer=Scorer(chunk_size=chunk_size),
        encoder=SimpleNamespace(is_multimodal=False),
        sharding=None,
        temperature=1.0,
        pad_id=0,
        teams=Teams(),
        device="cpu",
        phase=contextlib.nullcontext,
    )
    micro_batches, _ = of_run.micro_batches(groups, torch.ones(4, 2), CycleShape(2, 1, 1))
    assert sum(len(batch.prompt_ids) for batch in micro_batches) == prompts
