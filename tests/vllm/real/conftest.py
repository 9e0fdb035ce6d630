"""The environment of vLLM in tests: small, quiet, offline."""

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.vllm.real.vllm_server import SETTINGS

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
