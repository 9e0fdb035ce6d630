"""The environment of vLLM in tests: small, quiet, offline."""

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
if find_spec("vllm"):
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    """Seed the generators. Unlike in other tests, process groups stay: an engine lives for all tests of a file."""
    random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_grad_enabled(True)
