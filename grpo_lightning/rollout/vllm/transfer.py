"""Weight transfer to vLLM: backends that receive weights, and process groups through which the trainer sends them.

vLLM's own backend `nccl` needs GPUs. `register` adds two backends that need no GPU. The backend `tensors` passes
tensors within one process. The backend `gloo` broadcasts tensors over TCP. This package has the entry point
`vllm.general_plugins`, through which every vLLM process calls `register`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from grpo_lightning.core.background import in_background

T = TypeVar("T")


class BroadcastGroup(Protocol):
    """A process group of the trainer (rank 0) and the server's workers."""

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the `tensor` of rank 0 into the `tensor` of every other rank."""

    def close(self) -> None:
        """Close the connections and free the port, even if a traceback still refers to the group."""


def call_within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Call a function in another thread. Raises: RuntimeError if the call takes too long; the thread continues."""
    future = in_background(call)
    wait((future,), seconds)
    if not future.done():
        raise RuntimeError(f"{what} has not ended within model.engine.timeout ({seconds:g} seconds).")
    return future.result()


class GlooGroup:
    """A group over TCP, separate from the global process groups of torch and vLLM."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        distributed: Any = torch.distributed  # whose stubs lack these names
        store = distributed.TCPStore(host, port, world_size, is_master=rank == 0, timeout=limit)
        self.group: Any = distributed.ProcessGroupGloo(store, rank, world_size, limit)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a CPU tensor directly, and a tensor of another device as a CPU copy."""
        options: Any = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor.cpu().contiguous()], options).wait()

    def close(self) -> None:
        """Close the connections and free the port."""
        self.group = None


class NCCLGroup:
    """The trainer's process group for vLLM's backend `nccl`, on the current CUDA device.

    NCCL itself has no time limit, and would wait forever for a server that has died.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.device, self.timeout = torch.cuda.current_device(), timeout
        # A broadcast that never ends blocks this stream, but not the policy's stream.
        self.stream = torch.cuda.Stream(self.device)

        def open_group() -> Any:
            with torch.cuda.device(self.device):
                group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
                return PyNcclCommunicator(group, device=self.device)

        self.communicator: Any = call_within(timeout, "opening the NCCL group", open_group)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor, from the GPU."""
        computed = torch.cuda.current_stream(self.device)

        def send() -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                self.stream.wait_stream(computed)
                on_device = tensor.to(f"cuda:{self.device}").contiguous()
                self.communicator.broadcast(on_device, src=0, stream=self.stream)
                self.stream.synchronize()  # the tensor is kept until it has been sent

        call_within(self.timeout, "a broadcast by NCCL", send)

    def close(self) -> None:
        """Drop the communicator, which frees the port."""
        self.communicator = None


GROUPS: dict[str, type[GlooGroup | NCCLGroup]] = {"gloo": GlooGroup, "nccl": NCCLGroup}
"""The trainer's process group by the name of the server's backend."""


def describe(group: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """The message that announces a group of weights to the server's workers."""
    return {
        "names": [name for name, _ in group],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in group],
        "shapes": [list(weight.shape) for _, weight in group],
    }


# ------------------------------------------------------------------------------------------------- in vLLM's processes


def register() -> None:
    """Register the backends `tensors` and `gloo`, if this vLLM supports weight transfer."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # an older vLLM in the same environment must still start
        return
    for name, kind in (("tensors", InProcess), ("gloo", Broadcast)):
        backend = type(kind.__name__, (kind, WeightTransferEngine), {})
        with contextlib.suppress(ValueError):  # vLLM loads its plugins several times in a process
            WeightTransferEngineFactory.register_engine(name, backend)


@dataclass
class NoInit:
    """Setup of the backend `tensors`, which needs none."""


@dataclass
class Tensors:
    """Named weights as tensors."""

    weights: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass
class GroupInit:
    """Setup of the backend `gloo`. `timeout` is in seconds. The other fields are those of the backend `nccl`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout: float = 600.0


@dataclass
class Announced:
    """Weights that the trainer broadcasts next. The fields are those of `nccl`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Reload:
    """Loads full weights layer by layer, and checks that every weight of the model got a value.

    `register` adds vLLM's base class `WeightTransferEngine`, which sets `model`, `model_config`, `parallel_config` and
    `device`.
    """

    init_info_cls: type = NoInit
    update_info_cls: type
    model: Any
    model_config: Any
    parallel_config: Any
    device: torch.device
    expected: set[str]
    loaded: set[str]

    def init_transfer_engine(self, init_info: Any) -> None:
        """Set up the connection."""

    def start_weight_update(self) -> None:
        """Start to collect the weights of each layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        computed = self.names()  # a tied weight has one name before the next line, and several after it
        initialize_layerwise_reload(self.model)
        # Weights that vLLM computes from other weights are not expected.
        self.expected, self.loaded = computed & self.names(), set()

    def names(self) -> set[str]:
        """Names of the weights that the model has now."""
        return {plain(name) for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: Any) -> None:
        """Load one group of weights."""
        self.loaded |= set(map(plain, self.model.load_weights(self.receive(update_info)) or ()))

    def finish_weight_update(self) -> None:
        """Put the collected weights into place. Raises: RuntimeError if a weight is missing.

        If a weight is missing, only the first call raises. A second call ends the update (`Served.end_update`).
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)
        missing, total = sorted(self.expected - self.loaded), len(self.expected)
        self.expected = set()
        if missing:
            raise RuntimeError(
                f"The trainer sent no value for {missing[0]}, and {len(missing) - 1} more of the {total} "
                "weights: the policy and vLLM's model differ."
            )

    def receive(self, update_info: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights of one message."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Close the connection."""


class InProcess(Reload):
    """The backend `tensors`."""

    update_info_cls = Tensors

    def receive(self, update_info: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the given tensors."""
        yield from update_info.weights


class Broadcast(Reload):
    """The backend `gloo`."""

    init_info_cls = GroupInit
    update_info_cls = Announced
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """Join the trainer's group. A resumed trainer opens a new group."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        address = init_info.master_address, init_info.master_port
        self.group = GlooGroup(*address, rank, init_info.world_size, init_info.timeout)

    def receive(self, update_info: Announced) -> Iterator[tuple[str, Tensor]]:
        """Receive the announced weights one by one."""
        if self.group is None:
            raise RuntimeError("The trainer has not opened a group: call /init_weight_transfer_engine first.")
        announced = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in announced:
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            self.group.broadcast(weight)
            yield name, weight.to(self.device)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def plain(name: str) -> str:
    """Name of a weight without vLLM's wrapper around adapted layers."""
    return name.replace(".base_layer.", ".")


def repack_heads(model: nn.Module) -> None:
    """On a CPU, repack the weights of all vocabulary heads. vLLM itself repacks only heads that received weights.

    A head that is tied to the embeddings receives no weights, so its packed copy would keep the old values.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
