"""Shared by the tests of the mathematics."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def broken() -> Callable[..., Callable[..., Any]]:
    """Return `broken(function, old, new)`: the function as it would be with one piece of its file replaced.

    A by-hand check that still passes on a broken function checks nothing.
    """

    def break_source(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
        source = inspect.getsource(sys.modules[function.__module__])
        if source.count(old) != 1:  # no AssertionError, which the tests expect of the broken function
            raise LookupError(f"{old!r} occurs {source.count(old)} times in {function.__module__}, not once")
        module = ModuleType(function.__module__)
        exec(compile(source.replace(old, new), function.__module__, "exec"), vars(module))
        result: Callable[..., Any] = getattr(module, function.__name__)
        return result

    return break_source
