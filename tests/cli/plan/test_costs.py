"""Lines about memory and time."""

import pytest
import torch

from grpo_lightning.cli.plan.costs import device_line, duration, host_lines, time_lines
from grpo_lightning.cli.plan.parts import ALWAYS, GIB, Part
from grpo_lightning.cli.plan.times import StepTimes


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.5, "0.5 s"), (8, "8 s"), (90, "90 s"), (150, "2.5 min"), (3000, "50 min"), (7200, "2 h"), (172_800, "2 days")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_what_is_on_the_host():
    """The highest moment, not the sum of all parts."""
    parts = [
        Part("weights", 2 * GIB, ALWAYS, True, "", "host"),
        Part("optimizer, parked", GIB, frozenset({"sampling"}), True, "", "host"),
        Part("32-bit gradients", GIB, frozenset({"step"}), True, "", "host"),
        Part("cache", GIB, ALWAYS, True, ""),
    ]
    (line,) = host_lines(parts)
    assert line.startswith("On the CPU, for every device of a node: 3.00 GiB (weights 2.00, optimizer, parked 1.00")
    assert host_lines(parts[-1:]) == []


def test_times_of_a_cycle_and_a_run():
    lines = time_lines(StepTimes(600, 300, 60), 10)
    assert "at least 10 min to draw the completions (5 min of it collecting weights), 60 s to score" in lines[0]
    assert "The run, 10 rollouts: at least 110 min" in lines[1]
    assert "Not measured" in lines[2]
    assert "drawing not known" in time_lines(StepTimes(0, 0, 60), None)[0]
    assert len(time_lines(StepTimes(0, 0, 60), None)) == 2


def test_the_device_is_compared(monkeypatch):
    class Device:
        name = "Tiny GPU"
        total_memory = 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "No CUDA device is here" in device_line(2**29)
    assert device_line(2**29, 0.5) == "It may not fit: 0.5 of 0.5 GiB."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    assert device_line(2**29) == "It fits: 0.5 GiB of the 1.0 GiB of this machine's Tiny GPU (50%)."
    assert device_line(2**30 - 2**20).startswith("It may not fit")
    assert device_line(2**31).startswith("It does not fit")
