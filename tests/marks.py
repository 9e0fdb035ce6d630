"""Marks select the cases of `make test`; other cases are slow (`make test-slow`) or nightly (`make test-nightly`)."""

import ctypes
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow

NIGHTLY = pytest.mark.nightly
"""The mark of a test whose parts run in other tests: every strategy, way of saving and subject runs without it.
`conftest.py` marks it as slow too."""

few = pytest.mark.few
"""`@few(2)`: two of the test's fast cases, evenly spaced, stay in `make test`; the other fast cases are nightly. Cases
that are slow stay as they are. With `@few(2, slow=True)`, the two cases are slow."""

CREATE_RULESET = 444
"""Number of the system call that reports the version of Landlock, on every architecture."""

NEEDS_LANDLOCK = pytest.mark.skipif(
    ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1,
    reason="this kernel has no Landlock, without which programs are not run",
)


def only(fast: Collection[str], cases: Iterable[Any], *, nightly: Collection[str] = ()) -> list[Any]:
    """Parameters for all `cases`, by their names (of a path: the stem); those not in `fast` or `nightly` are slow.

    Raises:
        ValueError: If a name in `fast` or `nightly` is none of the cases'.
    """
    names = {getattr(case, "stem", case): case for case in cases}
    if unknown := {*fast, *nightly} - set(names):
        raise ValueError(f"no case is called {sorted(unknown)}; there are {sorted(names)}")
    marks: dict[str, Any] = dict.fromkeys(fast, ()) | dict.fromkeys(nightly, NIGHTLY)
    return [pytest.param(case, id=name, marks=marks.get(name, SLOW)) for name, case in names.items()]


def by_turns(cases: Iterable[str], strategies: Sequence[str]) -> dict[str, str]:
    """The strategy under which each case runs: the strategies take turns. Under the others the case is nightly."""
    return dict(zip(cases, itertools.cycle(strategies), strict=False))


def mark_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that `few` leaves out as nightly, and all nightly tests as slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not any(map(item.get_closest_marker, ("slow", "nightly"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for every in cases.values():
        mark = every[0].get_closest_marker("few")
        (number,) = mark.args
        kept = {index * len(every) // number for index in range(number)}
        for index, item in enumerate(every):
            if index not in kept:
                item.add_marker(NIGHTLY)
            elif mark.kwargs.get("slow"):
                item.add_marker(SLOW)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(SLOW)


def selected(request: pytest.FixtureRequest, name: str, **others: object) -> list[str]:
    """The values of the parameter `name` in the selected tests of the module, in their order.

    For a module-scoped fixture that computes several cases at once. Only tests with the parameters `others` count.
    """
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(own[name] for own in parameters if name in own and others.items() <= own.items()))
