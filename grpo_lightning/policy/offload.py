"""Making room for sampling: what a rollout has no use for waits on the CPU.

On request (`model.offload`), because it costs a transfer there and back in every cycle. What the strategy keeps on the
CPU anyway stays there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.policy.reference import FrozenCopy

Offloadable = Literal["reference", "optimizer"]
ROOM = torch.device("cpu")


def check(offload: Sequence[str], *, has_copy: bool) -> None:
    """Refuse what cannot be moved. Raises: ValueError.

    Args:
        offload: What was asked for.
        has_copy: True if there is a reference that is a second model.
    """
    if unknown := [name for name in offload if name not in ("reference", "optimizer")]:
        raise ValueError(f"model.offload must name 'reference' or 'optimizer', got {unknown[0]!r}.")
    if "reference" in offload and not has_copy:
        raise ValueError(
            "model.offload names the reference, and there is no second model: objective.beta is 0, or it is the policy "
            "without its LoRA adapters. Leave 'reference' out."
        )


def check_optimizer(offload: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
    """Refuse to move the states of an optimizer that moves them itself. Raises: ValueError."""
    if "optimizer" in offload and getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"model.offload names the optimizer, and {type(optimizer).__name__} pages its states to the CPU itself: "
            "leave 'optimizer' out of model.offload, or take AdamW8bit."
        )


@contextlib.contextmanager
def offloaded(
    names: Sequence[str], policy: nn.Module, reference: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Inside, the named things are on the CPU.

    Args:
        names: "reference", "optimizer".
        policy: Stays where it is, with the weights that the reference shares with it.
        reference: A `FrozenCopy`, if it is named.
        optimizers: The first one's states are moved; there may be none yet.
    """
    with contextlib.ExitStack() as stack:
        if "reference" in names:
            stack.enter_context(reference_offloaded(reference, policy))
        if "optimizer" in names and optimizers:
            stack.enter_context(moved(states(optimizers[0])))
        if names and torch.cuda.is_available():
            torch.cuda.empty_cache()  # or the room stays with the allocator, in pieces of the wrong sizes
        yield


@contextlib.contextmanager
def reference_offloaded(reference: FrozenCopy, policy: nn.Module) -> Iterator[None]:
    """Inside, the reference's weights are on the CPU, but for those that are the policy's own as well."""
    if is_fully_sharded(reference.model):  # FSDP2 keeps track of its shards' storage
        device = next(reference.model.parameters()).device
        reference.model.to(ROOM)
        try:
            yield
        finally:
            reference.model.to(device)
        return
    own = {id(parameter) for parameter in policy.parameters()}
    weights = [parameter for parameter in reference.model.parameters() if id(parameter) not in own]
    with moved(getattr(weight, "ds_tensor", weight) for weight in weights):  # of partitioned weights, the partitions
        yield


@contextlib.contextmanager
def moved(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, these tensors are on the CPU; the same objects, their data elsewhere."""
    devices = []
    for tensor in tensors:
        devices.append((tensor, tensor.device))
        tensor.data = tensor.data.to(ROOM)
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)


def is_fully_sharded(model: nn.Module) -> bool:
    """True of a model that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def states(optimizer: Any) -> Iterator[Tensor]:
    """The tensors among an optimizer's states. DeepSpeed's wraps the one that has them; its float32 masters stay."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
