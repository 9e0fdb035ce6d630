"""A CUDA device that the CPU computes: real values, device checks, and counts of what a GPU would wait for and launch.

    with EmulatedCuda() as gpu:
        model.to("cuda")
        x = torch.ones(3, device="cuda")        # an `OnCuda`: its data is in CPU memory, its `device` is cuda:0
        (x + 1).tolist()                        # a synchronization
        x + torch.ones(3)                       # RuntimeError: mixed devices
    gpu.launches, gpu.syncs

`OnCuda` is a tensor subclass, so that autograd, autocast and every operation of the code under test are torch's own.
Operations reach `__torch_dispatch__`, after autograd, where devices are checked and operations are counted. A launch is
an operation that computes or copies: views and allocations are none, and a kernel that torch composes of several on a
GPU counts once. A synchronization is a read of a value by the host, a shape that depends on values, or a copy between
host and device that waits (all are pageable here). Speed, rounding, streams and graphs are not emulated.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lightning.rollout import local_engine

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
aten = torch.ops.aten

ANSWERS: dict[str, Any] = {
    "_lazy_init": None,
    "is_available": True,
    "current_device": 0,
    "device_count": 1,
    "set_device": None,
    "get_device_name": "emulated",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "max_memory_allocated": 0,
    "reset_peak_memory_stats": None,
    "mem_get_info": (80 * 2**30, 80 * 2**30),
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
    "get_rng_state_all": [],
    "manual_seed_all": None,
    "empty_cache": None,
    "is_current_stream_capturing": False,
}
"""Return values of functions of `torch.cuda`."""

ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
}
VALUE_SHAPED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
HEALTH_CHECK = "_accelerator_graph_capture_health_check"
"""Method of optimizers in newer releases of torch that asks the driver whether a graph is being captured."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class OnCuda(torch.Tensor):
    """A tensor of the emulated device. To torch's C++ code it is a CPU tensor, to Python code it is on cuda:0."""

    is_offloaded = False
    """True while its data is that of a CPU tensor: `tensor.data = tensor.data.to("cpu")`."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU if self.is_offloaded else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.is_offloaded

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.is_offloaded

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        values = on_host(self)
        return values if self.is_offloaded else on_cuda(values)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
        self.is_offloaded = not is_here(values)

    def get_device(self) -> int:
        return -1 if self.is_offloaded else 0

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        options = {"copy": kwargs.pop("copy")} if "copy" in kwargs else {}
        device, dtype, non_blocking, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if self.is_offloaded:
            return on_host(self).to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return running().to_host(self, dtype)
        return super().to(self.dtype if dtype is None else dtype, non_blocking=non_blocking, **options)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")  # type: ignore[no-any-return]

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OnCuda:
        # torch's own would set the storage of an alias
        if id(self) not in memo:
            copied = on_cuda(on_host(self).detach().clone()).requires_grad_(self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return format(self.cpu(), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.cpu())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return running().run(func, args, kwargs or {})


def on_cuda(values: torch.Tensor) -> OnCuda:
    """The emulated tensor on the memory of a CPU tensor."""
    made: OnCuda = torch.Tensor._make_subclass(OnCuda, values.detach())  # type: ignore[assignment]
    return made


def is_here(tensor: Any) -> bool:
    """True for a tensor of the emulated device."""
    return isinstance(tensor, OnCuda) and not tensor.is_offloaded


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor on the memory of an emulated one."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(torch.Tensor, tensor)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the contents of lists, tuples and dicts at any depth; any other value itself. Much faster than pytree."""
    if type(value) in (list, tuple):
        for part in value:
            yield from leaves(part)
    elif type(value) is dict:
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with the function's results in the place of its `leaves`."""
    if type(value) in (list, tuple):
        return type(value)([mapped(function, part) for part in value])
    if type(value) is dict:
        return {name: mapped(function, part) for name, part in value.items()}
    return function(value)


def host_alias(value: Any) -> Any:
    """The CPU tensor on the memory of an emulated one; anything else as it is."""
    return on_host(value) if isinstance(value, OnCuda) else value


def cuda_alias(value: Any) -> Any:
    """The emulated tensor on the memory of a CPU tensor; anything else as it is."""
    return on_cuda(value) if type(value) is torch.Tensor else value


class Indexed(TorchFunctionMode):
    """Names the device cuda:0 where code says "cuda": torch would ask the driver for the current device.

    Also notes whether C++ code would create new tensors on the device, because it was called with tensors of it.
    """

    inherits = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.inherits
        self.inherits = any(map(is_here, leaves((args, kwargs or {}))))
        try:
            return self.call(func, args, dict(kwargs or {}))
        finally:
            self.inherits = before

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the function with devices that have an index."""
        if kwargs.get("device") is not None:
            kwargs["device"] = with_index(kwargs["device"])
            self.inherits = False
        if getattr(func, "__name__", "") in ("to", "cuda"):
            args = tuple(with_index(x) if isinstance(x, (str, torch.device)) else x for x in args)
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.frombuffer) and kwargs.get("device") == CUDA:
            return func(*args, **{**kwargs, "device": CPU}).to(CUDA)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and is_here(args[0]):
            # C++ code would make the index of a list on the device of the data, which is the CPU
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x).to(CUDA) if isinstance(x, list) else x for x in parts)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


def with_index(device: Any) -> Any:
    """The device; cuda:0 for "cuda"."""
    is_cuda = isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")
    return CUDA if is_cuda else device


class EmulatedCuda(TorchDispatchMode):
    """The device; see the module's docstring. Only one can be active."""

    active: EmulatedCuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: collections.Counter[str] = collections.Counter()
        """Operations, by name."""
        self.syncs: collections.Counter[str] = collections.Counter()
        """Synchronizations, by kind and line of code."""
        self.attention: collections.Counter[str] = collections.Counter()
        """Calls of `scaled_dot_product_attention`, by what torch chooses the kernel by: see `backend`."""
        self.patches: list[Any] = []

    def reset(self) -> None:
        """Forget what was counted."""
        for counter in (self.launches, self.syncs, self.attention):
            counter.clear()

    # ---------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check devices, count, and compute an operation on the CPU."""
        name = func.overloadpacket.__name__
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if is_here(x)]
        device = kwargs.get("device")
        goes_here = device is not None and torch.device(device).type == "cuda"
        goes_here |= device is not None and self.indexed.inherits
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
            kwargs.pop("pin_memory", None)
        if not here and not goes_here:
            args, kwargs = mapped(host_alias, (args, kwargs))
            return func(*args, **kwargs)
        if device is not None and not goes_here and name == "_to_copy" and here:
            return self.to_host(args[0], kwargs.get("dtype"))
        self.check_devices(name, args, tensors)
        self.count(func, name, args, here, tensors)
        written = kwargs.get("out", here[0] if here else None)
        args, kwargs = mapped(host_alias, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            out = EMULATED.get(name, func)(*args, **kwargs)
        if device is not None and not goes_here:
            return out
        if func._schema.is_mutable and not name.startswith("_"):
            return written if isinstance(out, torch.Tensor) else out
        return mapped(cuda_alias, out)

    def check_devices(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        """Raise RuntimeError for tensors of both devices, as CUDA does: numbers and indices may be on the CPU."""
        others = [x for x in tensors if not is_here(x) and x.dim()]
        if others and name in INDEXED:
            self.sync("index from the host")
            others = [x for x in tensors[2:] if not is_here(x) and x.dim()] if name != "index" else []
        if others and name not in ("copy_", "_to_copy") and not name.endswith("_like"):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"cpu {[tuple(x.shape) for x in others]}"
            )
        if name == "copy_" and others and not (len(args) > 2 and args[2]):  # copies from and to pinned memory
            self.sync("copy to the device" if is_here(tensors[0]) else "copy to the host")

    def count(self, func: Any, name: str, args: Any, here: list[Any], tensors: list[torch.Tensor]) -> None:
        """Count the operation's launches and synchronizations."""
        if name in ("_local_scalar_dense", "equal", "is_nonzero") or name in VALUE_SHAPED:
            self.sync(name)
        elif name in INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.sync(f"{name} by a mask")
        elif name == "repeat_interleave" and isinstance(args[-1], torch.Tensor):
            self.sync("repeat_interleave by a tensor")
        elif name == "_to_copy" and not here:
            self.sync("copy to the device")
        if not func.is_view and name not in ALLOCATIONS and name != "_local_scalar_dense":
            self.launches[name] += 1

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Copy to the host, which waits for the device."""
        self.sync("copy to the host")
        return on_host(tensor).detach().clone().to(tensor.dtype if dtype is None else dtype)

    def sync(self, kind: str) -> None:
        """Count a synchronization at the line of the package (else of whoever calls torch) that causes it."""
        codes, frame = [], sys._getframe()
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back  # type: ignore[assignment]
        callers = [c for c in codes if "/torch/" not in c.co_filename and not c.co_filename.endswith("emulated.py")]
        caller = next((c for c in callers if "/grpo_lightning/" in c.co_filename), callers[0])
        file = caller.co_filename.split("/grpo_lightning/")[-1].split("/site-packages/")[-1]
        self.syncs[f"{kind}: {file} {caller.co_name}"] += 1

    # ------------------------------------------------------------------------------------------- what else is CUDA's

    def __enter__(self) -> EmulatedCuda:  # type: ignore[override]
        assert EmulatedCuda.active is None, "another emulated device is active"
        EmulatedCuda.active = self
        usual = {name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")}
        init = torch.autocast.__init__
        attend = torch.nn.functional.scaled_dot_product_attention

        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def backward(*args: Any, **kwargs: Any) -> Any:
            with self.indexed:  # for the code that activation checkpointing runs again
                return run_backward(*args, **kwargs)

        def synchronize(device: Any = None) -> None:
            self.sync("torch.cuda.synchronize")

        def autocast(own: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            init(own, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        def of_cpu(function: Any, device_type: str = "cuda") -> Any:
            return function("cpu" if device_type == "cuda" else device_type)

        def recorded(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            if is_here(query):
                gqa = bool(kwargs.get("enable_gqa", False))
                casts = torch.is_autocast_enabled("cpu")  # which stands for the device
                dtype = torch.get_autocast_dtype("cpu") if casts else query.dtype
                self.attention[backend(dtype, query.shape[-1], mask=attn_mask is not None, gqa=gqa)] += 1
            return attend(query, key, value, attn_mask, *args, **kwargs)

        self.patches = [
            *(mock.patch.object(torch.cuda, n, return_value=answer) for n, answer in ANSWERS.items()),
            mock.patch.object(torch.optim.Optimizer, HEALTH_CHECK, return_value=None, create=True),
            mock.patch.object(torch, "compile", refuse_to_compile),
            mock.patch.dict(local_engine.CAPTURES, clear=True),  # no graphs: their launches could not be counted
            mock.patch.object(torch.cuda, "synchronize", synchronize),
            mock.patch.object(torch.autograd, "_engine_run_backward", backward),
            mock.patch.object(torch.autocast, "__init__", autocast),
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", recorded),
            *(mock.patch.object(torch, n, functools.partial(of_cpu, function)) for n, function in usual.items()),
        ]
        for patch in self.patches:
            patch.start()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self.indexed = Indexed()
        self.indexed.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.indexed.__exit__(kind, error, trace)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        for patch in reversed(self.patches):
            patch.stop()
        EmulatedCuda.active = None


def refuse_to_compile(function: Any, **options: Any) -> Any:
    """`torch.compile` of the device, which runs operations one by one."""
    raise RuntimeError("the emulated device has no compiler")


def running() -> EmulatedCuda:
    """The active device."""
    assert EmulatedCuda.active is not None, "a tensor of the emulated device outlived it"
    return EmulatedCuda.active


def backend(dtype: torch.dtype, head_size: int, *, mask: bool, gqa: bool) -> str:
    """The kernel that torch's `sdp_utils.cpp` chooses on sm_80 and later GPUs, without cuDNN.

    flash: 16 bits, no mask, heads up to 256, also with GQA. efficient: any mask, any float dtype, no GQA.
    """
    if dtype in (torch.float16, torch.bfloat16) and not mask and head_size <= 256:
        return "flash"
    return "math" if gqa else "efficient"


def efficient_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """`aten._scaled_dot_product_efficient_attention`, with the conditions and output shapes of the CUDA kernel.

    Conditions (`attention.cu`, `kernel_forward.h`): equal numbers of heads, contiguous last dimensions, a bias of the
    query's dtype, expanded to the scores' shape, whose strides and start are multiples of 8 numbers in 16 bits and of 4
    in 32. The output is stored as [B, q, heads, head size]; the log-sum-exps are padded to a multiple of 32 queries.
    """
    assert (dropout_p, is_causal) == (0, False)
    assert query.shape[1] == keys.shape[1] == values.shape[1], "the kernel has no GQA"
    assert query.dtype == keys.dtype == values.dtype, (query.dtype, keys.dtype, values.dtype)
    assert all(x.stride(-1) == 1 for x in (query, keys, values))
    scores = query.float() @ keys.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        assert (bias.dtype, bias.shape, bias.stride(-1)) == (query.dtype, scores.shape, 1)
        assert not [s for s in (bias.storage_offset(), *bias.stride()[:-1]) if s % (16 // bias.element_size())]
        scores = scores + bias.float()
    padding = -query.shape[2] % 32 if compute_log_sumexp else -query.shape[2]
    sums = torch.nn.functional.pad(scores.logsumexp(-1), (0, padding), value=float("inf"))
    output = (scores.softmax(-1) @ values.float()).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    nothing = torch.zeros((), dtype=torch.int64)
    return output, sums, nothing, nothing


EMULATED = {"_scaled_dot_product_efficient_attention": efficient_attention}
"""Kernels that the CPU does not have."""
