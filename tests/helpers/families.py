"""Matrices of model families: a few members run with every commit, all of them with `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest

PER_COMMIT = {"qwen2", "gemma3", "qwen3.5", "mamba2", "qwen2_5_vl", "internvl"}
"""Full attention, sliding windows, linear attention, a state that cannot be fanned out; pixels and tiles."""


def families(names: Iterable[str]) -> list[Any]:
    """Parameters of a test for these families; those that no commit waits for are marked slow."""
    return [pytest.param(name, marks=() if name in PER_COMMIT else pytest.mark.slow) for name in names]
