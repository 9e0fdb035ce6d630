"""Offload the reference and the optimizer states to the CPU while completions are sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.policy.reference import FrozenCopy
from grpo_lightning.policy.sharding import fsdp_modules, own_part

Offloadable = Literal["reference", "optimizer"]
CPU = torch.device("cpu")


@contextlib.contextmanager
def offloaded(
    names: Sequence[str], policy: nn.Module, reference: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Keep the reference, the optimizer states or both on the CPU inside the `with` block.

    `names` contains "reference", "optimizer" or both. If `names` contains "reference", the reference must be a
    `FrozenCopy`. If a weight of the reference is shared with the policy, the weight is not offloaded. If there are
    several optimizers, only the states of the first optimizer are offloaded.
    """
    with contextlib.ExitStack() as stack:
        if "reference" in names:
            stack.enter_context(reference_offloaded(reference, policy))
        if "optimizer" in names and optimizers:
            stack.enter_context(offloaded_tensors(states(optimizers[0])))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # otherwise the allocator keeps the memory, in fragments
        yield


@contextlib.contextmanager
def reference_offloaded(reference: FrozenCopy, policy: nn.Module) -> Iterator[None]:
    """Keep the reference's weights on the CPU inside the `with` block, except those shared with the policy."""
    if fsdp_modules(reference.model):  # FSDP2 keeps track of its shards' storage
        device = next(reference.model.parameters()).device
        reference.model.to(CPU)
        try:
            yield
        finally:
            reference.model.to(device)
        return
    own = {id(parameter) for parameter in policy.parameters()}
    weights = [parameter for parameter in reference.model.parameters() if id(parameter) not in own]
    with offloaded_tensors(map(own_part, weights)):
        yield


@contextlib.contextmanager
def offloaded_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the data of these tensors on the CPU inside the `with` block."""
    devices = [(tensor, tensor.device) for tensor in tensors]
    for tensor, _ in devices:
        tensor.data = to_host(tensor.data)
    for device in {device for _, device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)  # the copies must be complete if a checkpoint is saved
    try:
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU. If the tensor is on a GPU, the function does not wait for the end of the copy."""
    if tensor.device.type != "cuda":
        return tensor.to(CPU)
    return torch.empty_like(tensor, device=CPU, pin_memory=True).copy_(tensor, non_blocking=True)


def states(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the state tensors of an optimizer or of DeepSpeed's wrapper, without DeepSpeed's float32 masters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
