"""Launches of compiled code: the kernels that inductor generates for an H100, counted on a machine without a GPU.

Inductor generates the code for fake tensors and asks only for the properties of the device. The Triton kernels are
generated, but neither compiled nor run.
"""

from __future__ import annotations

import collections
import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.graph
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses import FakeTensorMode
from torch.utils._triton import has_triton

H100 = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    gcnArchName="",
)

CUDA_ANSWERS: dict[str, Any] = {
    "_exchange_device": 0,
    "_lazy_init": None,
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_properties": H100,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "_maybe_exchange_device": 0,
    "set_rng_state": None,
    "synchronize": None,
}
"""Return values of functions of `torch.cuda`."""

INTERFACE_ANSWERS: dict[str, Any] = {
    "current_device": 0,
    "device_count": 1,
    "exchange_device": 0,
    "get_device_properties": H100,
    "get_raw_stream": 0,
    "is_bf16_supported": True,
    "maybe_exchange_device": -1,
    "raise_if_triton_unavailable": None,
    "set_device": None,
    "synchronize": None,
}
"""Return values of the methods of inductor's interface to the device."""

CALL = re.compile(r"^\s+(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(")


def launches(code: str) -> collections.Counter[str]:
    """The launches of the generated code per call, by name: fused kernels, and operators of torch.

    An operator counts once, also one that launches several kernels, such as a sort.
    """
    body = code[code.index("def call(") :]
    return collections.Counter(found[1] for line in body.splitlines() if (found := CALL.match(line)))


@contextlib.contextmanager
def generating(codes: list[str]) -> Iterator[None]:
    """Context in which inductor generates code for an H100 and appends it to `codes`, and the code does nothing."""

    def generate(graph: Any) -> Any:
        code, _ = graph.codegen()
        codes.append(code.value)
        return types.SimpleNamespace(call=lambda arguments: None)

    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, where there is no driver
    has_triton.cache_clear()  # an earlier compilation for the CPU has found no GPU
    graph = torch._inductor.graph.GraphLowering
    settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "joint_graph_constant_folding": False}
    with contextlib.ExitStack() as stack:
        for name, answer in CUDA_ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        for name, answer in INTERFACE_ANSWERS.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, return_value=answer))
        for patch in (
            mock.patch.object(CudaInterface.Worker, "get_device_properties", return_value=H100),
            mock.patch.object(graph, "compile_to_module", generate),
            mock.patch.object(graph, "save_output_code", create=True),
            # Patterns of attention, and a name of the compiler in the cache, for which CUDA would be initialized.
            mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init"),
            mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
            # Workers would compile the kernels, if an earlier compilation for the CPU has started them.
            mock.patch("torch._inductor.async_compile.AsyncCompile.use_process_pool", return_value=False),
            mock.patch("torch._inductor.async_compile._set_triton_libdevice_path", create=True),
            torch._inductor.config.patch(settings),
            torch._functorch.config.patch(enable_autograd_cache=False),
            FakeTensorMode(),
        ):
            stack.enter_context(patch)
        yield
    has_triton.cache_clear()


def launches_on_cuda(run: Callable[[torch.device], Any]) -> collections.Counter[str]:
    """The launches of a compiled function on an H100.

    Args:
        run: Compiles a function, and calls it with tensors of the device that it is given.
    """
    codes: list[str] = []
    with generating(codes):
        try:
            run(torch.device("cuda", 0))
        except (AssertionError, AttributeError, TypeError):  # the generated code has no outputs
            if not codes:
                raise
    (code,) = codes
    return launches(code)
