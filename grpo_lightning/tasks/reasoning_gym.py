"""The tasks of reasoning-gym by name: their settings checked, their items drawn, their verifiers.

reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760) has about a hundred generators of questions, each with a
verifier of answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import enum
import functools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.core.seeding import derived_seed

Entry = dict[str, Any]
"""A question as reasoning-gym gives it: `question`, `answer` (None where there are many) and `metadata`."""

OWN_SETTINGS = ("size", "seed")
"""Of every task of reasoning-gym; here they are said once, for all."""

COMPOSITE = "composite"
"""A mixture of other tasks, which is what a list of data sets is here."""

EVALUATES_ANSWERS = frozenset(
    [
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),  # by themselves
        *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
    ]
)
"""Tasks whose verifiers hand the answer to Python's `eval`, by themselves or by `sympy.parse_expr`. Whatever code a
completion holds is executed there."""


def package() -> Any:
    """The module `reasoning_gym`. Raises: ImportError naming the extra if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "reasoning-gym is not installed: pip install 'grpo-lightning[reasoning-gym]'. Its tasks and the reward "
            "ReasoningGym need it."
        ) from error
    return reasoning_gym


def task_names() -> list[str]:
    """All tasks, sorted. Raises: ImportError as `package`."""
    package()
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {COMPOSITE})


def created(task: str, config: Mapping[str, Any], *, size: int = 1, seed: int = 0) -> Any:
    """A task of reasoning-gym: `[index]` makes an item of it, `score_answer(answer, entry)` verifies.

    Args:
        task: Its name.
        config: Its settings; those not given have reasoning-gym's defaults. A list may stand for a tuple, a text for a
            date, a time or a choice: YAML has no others.
        size: Items it has. None is made here.
        seed: Of its items.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If there is no such task, or it does not take the settings.
    """
    check_name(task)
    from reasoning_gym.factory import DATASETS

    _, config_class = DATASETS[task]
    allowed = [field.name for field in dataclasses.fields(config_class) if field.name not in OWN_SETTINGS]
    for name in config:
        if name in OWN_SETTINGS:
            raise ValueError(f"tasks.{task}.{name}: {name} is not a setting of one task here; it is one for all tasks.")
        if name not in allowed:
            raise ValueError(f"tasks.{task}: there is no setting {name!r}{_nearest(name, allowed)}.")
    defaults = config_class()
    try:
        given = {name: _as_kind_of(getattr(defaults, name), value) for name, value in config.items()}
        return package().create_dataset(task, size=size, seed=seed, **given)
    # Its configurations check themselves with `assert`, and compare whatever they are given.
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tasks.{task}: reasoning-gym does not take the settings {dict(config)!r:.200}: "
            f"{type(error).__name__}{f': {error}' if str(error) else ''}."
        ) from error


def check_name(task: Any) -> None:
    """Check that there is such a task. Raises: ValueError naming the nearest ones; ImportError as `package`."""
    names = task_names()
    if task == COMPOSITE:
        raise ValueError(
            f"tasks.{COMPOSITE}: this is a mixture of tasks; name the tasks themselves, and mix their files."
        )
    if task not in names:
        raise ValueError(
            f"tasks: reasoning-gym has no task {task!r}{_nearest(str(task), names)}. "
            "`grpo_lightning.tasks.reasoning_gym.task_names()` lists all."
        )


def drawn(dataset: Any, task: str, index: int) -> Entry:
    """Item `index` of a task: the same for the same settings and seed, whatever was drawn before.

    Raises:
        ValueError: If reasoning-gym fails to make it, or it is not what it should be.
    """
    # Some generators draw from the global state too (`list_functions`), or seed it (`pool_matrix`).
    with _global_random(derived_seed(task, dataset.seed, index)):
        try:
            entry: Entry = dataset[index]
        except Exception as error:
            raise ValueError(
                f"tasks.{task}: reasoning-gym cannot make item {index} with the settings {dataset.config!r:.300}: "
                f"{type(error).__name__}: {error}. Change the settings, or leave the task out."
            ) from error
    if not isinstance(entry.get("question"), str) or not entry["question"].strip():
        raise ValueError(f"tasks.{task}: item {index} has no text for its question, got {entry.get('question')!r:.80}.")
    return entry


@functools.lru_cache(maxsize=256)
def verifier(task: str, config_text: str) -> Any:
    """A task for its `score_answer` alone, made once for the same settings.

    Args:
        task: Its name.
        config_text: Its settings as JSON.

    Raises:
        ImportError, ValueError: As `created`.
    """
    return created(task, json.loads(config_text))


@contextlib.contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global generator for a while, and give it and numpy's back as they were."""
    import numpy  # which reasoning-gym imports; not a dependency of ours

    state, array_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(array_state)


def _as_kind_of(default: Any, value: Any) -> Any:
    """A value of YAML in the type of the default it replaces, where YAML has no such type."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, enum.Enum):
        return type(default)(value)
    if isinstance(default, datetime.date | datetime.time) and isinstance(value, str):
        return type(default).fromisoformat(value)
    if dataclasses.is_dataclass(default) and not isinstance(default, type) and isinstance(value, Mapping):
        return dataclasses.replace(default, **value)
    return value


def _nearest(name: str, allowed: list[str]) -> str:
    """A hint at the names most like this one; all that there are, where there are few."""
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
    if close:
        return f" (did you mean {' or '.join(map(repr, close))}?)"
    return f"; there are {', '.join(allowed)}" if len(allowed) <= 20 else ""
