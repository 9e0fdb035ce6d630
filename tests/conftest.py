"""Every test is offline and seeded, and leaves no state for the next one."""

import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec

# Before transformers and datasets are imported: they read these once. Child processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")

IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_XDIST_WORKER:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers already use every core

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.paths import TESTS
from tests.marks import mark_cases

if IS_XDIST_WORKER:
    torch.set_num_threads(1)

# No deadline: the first example of a test pays for imports and compilation. A failure in CI must be repeatable.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole trainings first, so that no worker waits for one at the end. Skip tests that lack a GPU or vLLM."""
    mark_cases(items)
    first = {TESTS, *(TESTS / name for name in ("benchmarks", "distributed", "docs", "module", "recipes", "training"))}
    items.sort(key=lambda item: item.path.parent not in first)
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "vllm": None if find_spec("vllm") else "needs vLLM: make test-vllm",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Spare every later garbage collection the million objects that imports and collection have made."""
    gc.collect()
    gc.freeze()


def quiet_package() -> None:
    """Undo what a command line of this process did to the package's logger."""
    logger = logging.getLogger("grpo_lightning")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    """Seed every generator; afterwards undo what a Trainer or a test left behind in this process."""
    environment, arguments = dict(os.environ), sys.argv
    quiet_package()  # a fixture of the whole module may have run a command
    root_level = logging.getLogger().level
    sys.argv = arguments[:1]  # LightningCLI warns about pytest's own arguments
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    quiet_package()
    logging.getLogger().setLevel(root_level)
    sys.argv = arguments
    os.environ.clear()  # Lightning leaves PL_GLOBAL_SEED, MASTER_PORT and others
    os.environ.update(environment)
