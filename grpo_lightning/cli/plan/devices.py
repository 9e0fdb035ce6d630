"""How many ranks a run has: from the Trainer's settings, this machine, and what a cluster says of the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jsonargparse import Namespace

SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class Ranks(NamedTuple):
    """The processes of a run."""

    per_node: int
    num_nodes: int
    why: str
    idle: str = ""
    """What is said of devices that have nothing to do."""

    @property
    def world_size(self) -> int:
        """All of them."""
        return self.per_node * self.num_nodes


def ranks_of(trainer: Namespace, devices: str | int | None, nodes: int | None) -> Ranks:
    """The ranks of a trainer's configuration.

    Args:
        trainer: Its settings.
        devices: Per node, instead of the settings'; several numbers, "8,8", are one for each node.
        nodes: Instead of the settings'.

    Raises:
        ValueError: If there is no device or node, or nodes have unequal numbers of devices.
    """
    num_nodes = trainer.num_nodes if nodes is None else nodes
    if isinstance(devices, str):
        devices, num_nodes = per_node(devices, num_nodes)
    check_environment(os.environ)
    why, given = "", trainer.devices if devices is None else devices
    count = count_devices(given)
    here = visible(str(trainer.accelerator))
    if count is None:
        count = max(1, here)
        why = f"trainer.devices is {trainer.devices}: {count} on this machine; --devices N plans for another"
    if count < 1 or num_nodes < 1:
        raise ValueError(f"A run needs at least one device and one node, got {count} and {num_nodes}.")
    idle = ""
    if devices is None and here > count:
        rest = here - count
        idle = (
            f"{rest} of this machine's {here} devices {'is' if rest == 1 else 'are'} idle: trainer.devices is "
            f"{trainer.devices}. Set it to {here} or auto to train on all of them."
        )
    return Ranks(count, num_nodes, why or f"{count} per node x {num_nodes} node(s)", idle)


def per_node(devices: str, num_nodes: int) -> tuple[int, int]:
    """("8", nodes) to (8, nodes); ("8,8", ...) to (8, 2). Raises: ValueError if they differ."""
    try:
        counts = [int(part) for part in devices.split(",")]
    except ValueError:
        raise ValueError(
            f"--devices must be the devices of a node (8), or those of every node (8,8), got {devices!r}."
        ) from None
    refuse_unequal(counts, f"--devices {devices}")
    return counts[0], num_nodes if len(counts) == 1 else len(counts)


def count_devices(given: Any) -> int | None:
    """Devices of a node as the Trainer takes them: a number, a list of indices, or None for all there are."""
    if isinstance(given, str):
        given = given.strip()
        with suppress(ValueError):
            given = int(given)
    if isinstance(given, str) and given != "auto":
        given = [part for part in given.split(",") if part.strip()]
    if isinstance(given, list | tuple):
        return len(given)
    return None if given in ("auto", -1) else int(given)


def visible(accelerator: str) -> int:
    """Accelerators of this machine that a run with this `trainer.accelerator` would use."""
    import torch

    return torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0


def check_environment(environment: Mapping[str, str]) -> None:
    """Check what a cluster says of the nodes: of SLURM the tasks per node, of torchrun the processes.

    Raises:
        ValueError: If nodes have unequal numbers of them.
    """
    for name in SLURM_TASKS:
        if tasks := environment.get(name):
            refuse_unequal(slurm_counts(tasks), f"{name}={tasks}")
    world, local = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world.isdigit() and local.isdigit() and int(local) and int(world) % int(local):
        raise ValueError(
            f"{UNEQUAL} WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={local}, the processes of this node. "
            "Start torchrun with the same --nproc-per-node on every node."
        )


UNEQUAL = "Every node must have the same number of devices, as Lightning counts ranks by devices x num_nodes:"


def refuse_unequal(counts: list[int], where: str) -> None:
    """Raise ValueError if nodes have unequal numbers of devices."""
    if len(set(counts)) > 1:
        raise ValueError(
            f"{UNEQUAL} {where} is {', '.join(map(str, counts))}. Use {min(counts)} on each, or leave nodes out."
        )


def slurm_counts(tasks: str) -> list[int]:
    """SLURM's short form of the tasks of every node: "8(x2),4" to [8, 8, 4]; what is not understood says nothing."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
