"""Cases: tests in which one constructor argument changes a result, and who has to have them."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

CASES: set[tuple[type, str]] = set()
"""Classes and arguments that have a test."""

NOT_CONFIGURED = {
    *("DemoFiles", "DemoSplit", "Encoder", "Measured", "Schedule", "Scores", "FSDP2Strategy", "GRPODeepSpeedStrategy"),
}
"""Public classes that are results, which nobody but the package makes; bases; and strategies, which need ranks to
show what an argument changes (`tests/training/test_strategies.py`, `tests/distributed/`)."""

LATE_NAMES = {"PreTrainedTokenizerBase": transformers.PreTrainedTokenizerBase}
"""Classes in the hints of constructors that the package imports for type checkers only."""


Test = Callable[..., None]


def case(owner: type, *arguments: str) -> Callable[[Test], Test]:
    """A test in which `owner` is made at least twice, and differs in this argument only.

    That the results differ as promised is the test's own matter. Checked here is that the argument is varied, and in a
    second, slow test that the first one fails where the constructor ignores it. With several arguments, all of them are
    varied, one at a time.
    """

    def register(test: Test) -> Test:
        return checked(test, [owner], arguments)

    return register


def case_of_each(owners: Sequence[type], *arguments: str) -> Callable[[Test], Test]:
    """The same for several classes that have these arguments in common; the test's argument `owner` is one of them."""

    def register(test: Test) -> Test:
        return checked(test, owners, arguments)

    return register


def checked(test: Test, owners: Sequence[type], arguments: Sequence[str]) -> Test:
    """The test for every owner: as it is, and once for every argument with a constructor that ignores it."""
    parameters = dict(inspect.signature(test).parameters)
    takes_owner = parameters.pop("owner", None) is not None
    CASES.update(itertools.product(owners, arguments))
    variants = [
        pytest.param(
            owner,
            ignored,
            id=f"{owner.__name__}{f' without {ignored}' if ignored else ''}",
            marks=[pytest.mark.slow] if ignored else [],
        )
        for owner, ignored in itertools.product(owners, [None, *arguments])
    ]

    @functools.wraps(test)
    def run(owner: type, ignored: str | None, **fixtures: Any) -> None:
        if takes_owner:
            fixtures["owner"] = owner
        if ignored is None:
            with varied(test.__name__, owner, arguments):
                test(**fixtures)
            return
        with ignoring(owner, ignored), pytest.raises((Exception, pytest.fail.Exception)):
            test(**fixtures)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("owner", "ignored")]
    run.__signature__ = inspect.Signature([*parameters.values(), *added])  # type: ignore[attr-defined]
    parametrized: Test = pytest.mark.parametrize(("owner", "ignored"), variants)(run)
    return parametrized


@contextmanager
def ignoring(owner: type, argument: str) -> Iterator[None]:
    """With a constructor that takes the argument's first value for all others."""
    values: list[Any] = []
    construct = owner.__init__

    @functools.wraps(construct)
    def ignore(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(construct).bind(self, *args, **kwargs)
        bound.apply_defaults()
        values.append(bound.arguments[argument])
        bound.arguments[argument] = values[0]
        construct(*bound.args, **bound.kwargs)

    with mock.patch.object(owner, "__init__", ignore):
        yield


@contextmanager
def varied(name: str, owner: type, arguments: Iterable[str]) -> Iterator[None]:
    """A test that has to vary each of the arguments alone."""
    with recorded(owner) as calls:
        yield
    for argument in arguments:
        assert is_varied_alone(calls, argument), f"{name} makes no two {owner.__name__} that differ in {argument} only."


@contextmanager
def recorded(owner: type) -> Iterator[list[Mapping[str, Any]]]:
    """The arguments of every `owner` made meanwhile, defaults filled in."""
    calls: list[Mapping[str, Any]] = []
    construct = owner.__init__

    @functools.wraps(construct)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is owner:
            bound = inspect.signature(construct).bind(self, *args, **kwargs)
            bound.apply_defaults()
            # Lists and mappings as they were: a constructor may put more into them.
            given = {name: copy.copy(v) if isinstance(v, list | dict) else v for name, v in bound.arguments.items()}
            calls.append({name: value for name, value in given.items() if value is not self})
        construct(self, *args, **kwargs)

    with mock.patch.object(owner, "__init__", note):
        yield calls


def is_varied_alone(calls: Iterable[Mapping[str, Any]], argument: str) -> bool:
    """Whether two of the calls differ in one argument and in no other."""
    return any(
        not is_equal(one[argument], other[argument])
        and all(is_alike(one[name], other[name]) for name in one if name != argument)
        for one, other in itertools.combinations(calls, 2)
    )


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; tensors are by identity."""
    if one is other or type(one) is not type(other) or isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def is_alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, or objects of one kind that only identity tells apart (two models, two lambdas)."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    has_no_value = isinstance(one, torch.Tensor) or type(one).__eq__ is object.__eq__
    return is_equal(one, other) or (type(one) is type(other) and has_no_value)


def arguments_of(owner: type) -> list[str]:
    """The names of the constructor's arguments."""
    parameters = inspect.signature(owner).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def configured(*modules: Any) -> set[type]:
    """The classes that users configure: those public in the modules, and those that constructors of them take."""
    found: set[type] = set()
    waiting = [value for module in modules for value in public_classes(module)]
    while waiting:
        owner = waiting.pop()
        if owner in found or owner.__name__ in NOT_CONFIGURED:
            continue
        found.add(owner)
        hints = typing.get_type_hints(owner.__init__, localns=LATE_NAMES)
        waiting += [kind for hint in hints.values() for kind in classes_in(hint)]
    return {owner for owner in found if not is_contract(owner)}


def public_classes(module: Any) -> list[type]:
    """The classes in a module's `__all__`, or without one those without an underscore that it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, v in vars(module).items() if not n.startswith("_") and is_own(v, module.__name__)]
    return [value for name in names if isinstance(value := getattr(module, name), type)]


def classes_in(hint: Any) -> Iterator[type]:
    """The classes of the package that a type hint names, at any depth."""
    if isinstance(hint, list):  # the arguments of a Callable
        for part in hint:
            yield from classes_in(part)
    elif parts := typing.get_args(hint):
        yield from classes_in(list(parts))
    elif is_own(hint, "grpo_lightning"):
        yield hint


def is_own(value: Any, package: str) -> bool:
    """Whether a value is a class that a module or package defines."""
    return isinstance(value, type) and f"{value.__module__}.".startswith(f"{package}.")


def is_contract(owner: type) -> bool:
    """Whether a class only says what others have to be: a base with methods to be written."""
    return any(getattr(getattr(owner, name, None), "__isabstractmethod__", False) for name in dir(owner))


def problems(owners: Iterable[type], cases: Set[tuple[type, str]]) -> list[str]:
    """Arguments without a case, and cases of arguments that do not exist."""
    wanted = {(owner, argument) for owner in owners for argument in arguments_of(owner)}
    said = [f"{owner.__name__}.{name} has no case: nothing shows what it changes." for owner, name in wanted - cases]
    return sorted(said + [f"{owner.__name__}.{name} has a case, and is no argument." for owner, name in cases - wanted])
