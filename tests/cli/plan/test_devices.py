"""Ranks, from the Trainer's settings, the machine and the cluster."""

import pytest
import torch
from jsonargparse import Namespace

from grpo_lightning.cli.plan.devices import check_environment, ranks_of, slurm_counts


def trainer(**changes):
    return Namespace(**({"devices": "auto", "num_nodes": 1, "accelerator": "cpu"} | changes))


@pytest.mark.parametrize(("devices", "ranks"), [("auto", 1), (-1, 1), (3, 3), ("2", 2), ("0,1,2", 3), ([0, 1], 2)])
def test_devices_as_the_trainer_takes_them(devices, ranks):
    given = trainer(devices=devices, num_nodes=2)
    assert ranks_of(given, None, None).world_size == 2 * ranks
    assert ranks_of(given, None, 1).world_size == ranks
    assert ranks_of(given, "5", 1).world_size == 5
    with pytest.raises(ValueError, match="at least one device and one node, got 0 and 2"):
        ranks_of(given, "0", None)


def test_one_number_for_each_node():
    ranks = ranks_of(trainer(), "8,8,8", None)
    assert (ranks.per_node, ranks.num_nodes, ranks.world_size) == (8, 3, 24)
    with pytest.raises(ValueError, match=r"--devices 8,8,4 is 8, 8, 4\. Use 4 on each, or leave nodes out"):
        ranks_of(trainer(), "8,8,4", None)
    with pytest.raises(ValueError, match="--devices must be the devices of a node"):
        ranks_of(trainer(), "eight", None)


@pytest.mark.parametrize(
    ("accelerator", "devices", "said"),
    [
        ("gpu", 4, "4 of this machine's 8 devices are idle: trainer.devices is 4. Set it to 8 or auto"),
        ("auto", [0, 1, 2, 3, 4, 5, 6], "1 of this machine's 8 devices is idle"),
        ("gpu", "auto", ""),
        ("gpu", 8, ""),
        ("gpu", 16, ""),
        ("cpu", 4, ""),
    ],
)
def test_idle_devices(monkeypatch, accelerator, devices, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    idle = ranks_of(trainer(accelerator=accelerator, devices=devices), None, None).idle
    assert idle.startswith(said)
    assert bool(idle) == bool(said)
    assert not ranks_of(trainer(accelerator=accelerator, devices=devices), "2", None).idle  # another machine


def test_all_devices_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert ranks_of(trainer(accelerator="gpu"), None, 2).world_size == 16
    assert ranks_of(trainer(accelerator="cpu"), None, 2).world_size == 2


@pytest.mark.parametrize(
    ("tasks", "counts"), [("8(x2),4", [8, 8, 4]), ("8", [8]), ("2,3(x2)", [2, 3, 3]), ("", []), ("some", [])]
)
def test_slurms_short_form(tasks, counts):
    assert slurm_counts(tasks) == counts


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, "SLURM_TASKS_PER_NODE=8(x2),4 is 8, 8, 4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, "SLURM_STEP_TASKS_PER_NODE=1,2"),
        ({"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE=12 is no multiple of LOCAL_WORLD_SIZE=8"),
    ],
)
def test_clusters_with_unequal_nodes_are_refused(environment, said):
    with pytest.raises(ValueError, match="Every node must have the same number") as refused:
        check_environment(environment)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_TASKS_PER_NODE": "8(x3)"}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"WORLD_SIZE": "16"}],
)
def test_clusters_with_equal_nodes_pass(environment):
    check_environment(environment)
