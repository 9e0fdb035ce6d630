"""The lines of a plan."""

import pytest
import torch
from jsonargparse import Namespace

from grpo_lightning.cli.plan import output
from grpo_lightning.cli.plan.batches import BatchPlan, plan_run
from grpo_lightning.cli.plan.memory import ALWAYS, GIB, STEP, Division, MemorySettings, Part, Precision, ScoredBatch
from tests.cli.plan.test_memory import MODEL


@pytest.mark.parametrize(
    ("interval", "epochs", "line"),
    [
        (None, 1, "every epoch."),
        (1.0, 3, "every 3 epochs."),
        (4, None, "every 2 optimizer steps (4 micro-steps)."),
        (0.4, 1, "every 2 optimizer steps of an epoch."),  # of 5
    ],
)
def test_validation(interval, epochs, line):
    trainer = Namespace(val_check_interval=interval, check_val_every_n_epoch=epochs)
    batches = BatchPlan(2, 4, accumulate_grad_batches=2)
    length = plan_run(batches, 10, max_epochs=1)
    assert output.validation_line(trainer, batches, length, 3) == f"Validation on 3 prompts {line}"


def token_text(checkpointing="none", **changes):
    batch = ScoredBatch(2, 8, 10, 6, **changes)
    return " ".join(output.token_lines(MemorySettings(batch, Precision(4, 4), checkpointing=checkpointing), ""))


def test_tokens_and_chunks():
    whole = token_text()
    assert (
        "2 x 10 prompt + 8 x 6 completion tokens = 68; with a copy of the prompt in every row it would be 128, 1.9"
        in whole
    )
    assert "policy.chunk_size null: all 8 completions in one forward" in whole
    assert "3 forwards of at most 3 completions. All their activations are kept" in token_text(chunk_size=3)
    assert "3 completions, each recomputed in the backward pass" in token_text("chunks", chunk_size=3)
    assert "8 x (10 + 6) = 128 tokens (dense path)" in token_text(path="dense")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fewer_copies_are_a_lever_where_there_are_several(num_replicas):
    division = Division(4, 4, 4, num_replicas=num_replicas, gathers_layers=True)
    settings = MemorySettings(ScoredBatch(2, 8, 10, 6), Precision(4, 4), division=division)
    for moment in ("sampling", "update", "step"):
        found = " ".join(output.levers(MODEL, settings, moment))
        assert ("a smaller strategy.num_replicas" in found) == (num_replicas > 1)
        assert "more devices" in found


def test_what_is_on_the_cpu():
    """The highest moment, not the sum of all parts."""
    parts = [
        Part("weights", 2 * GIB, ALWAYS, "", is_on_cpu=True),
        Part("optimizer states, offloaded", GIB, frozenset({"sampling"}), "", is_on_cpu=True),
        Part("gradients", GIB, STEP, "", is_on_cpu=True),
        Part("cache", GIB, ALWAYS, ""),
    ]
    (line,) = output.cpu_lines(parts)
    assert line.startswith(
        "On the CPU, for every device of a node: 3.00 GiB (weights 2.00, optimizer states, offloaded 1.00"
    )
    assert output.cpu_lines(parts[-1:]) == []


def test_the_device_is_compared(monkeypatch):
    class Device:
        name = "Tiny GPU"
        total_memory = 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "No CUDA device to compare with" in output.device_line(2**29, None)
    assert output.device_line(2**29, 0.5) == "It may not fit: 0.5 of 0.5 GiB."
    assert output.device_line(2**30, 1.0) == "It may not fit: 1.0 of 1 GiB."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    assert output.device_line(2**29, None) == "It fits: 0.5 GiB of the 1.0 GiB of this machine's Tiny GPU (50%)."
    assert output.device_line(2**31, None).startswith("It does not fit")
