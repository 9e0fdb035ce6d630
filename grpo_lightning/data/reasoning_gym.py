"""Checks settings of reasoning-gym tasks, writes the tasks' items to files, and creates verifiers for the reward.

reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760) has about a hundred question generators, each with an answer
verifier.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import enum
import functools
import json
import logging
import numbers
import random
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_lightning.core.files import put_whole
from grpo_lightning.core.log_messages import nearest
from grpo_lightning.core.seeding import derived_seed, run_seed

log = logging.getLogger(__name__)

CODE_VERSION = 2
"""Version of the files that this module writes. Increase it when a code change changes the files: existing output
folders are then rebuilt."""

COUNTS = "counts.json"
"""The file with the number of rows, and of dropped questions, per task."""

Entry = dict[str, Any]
"""An item of reasoning-gym: `question`, `answer` (None if many answers are correct) and `metadata`."""

OWN_SETTINGS = ("size", "seed")
"""Settings of reasoning-gym that cannot be set per task, because they are set once for all tasks."""

COMPOSITE = "composite"
"""Name of reasoning-gym's own mixture of tasks. It is not supported: list the files of several tasks as datasets."""

EVALUATES_ANSWERS = frozenset(
    [
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),  # call `eval` directly
        *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
    ]
)
"""Tasks whose verifiers pass the answer to Python's `eval`, directly or through `sympy.parse_expr`. These verifiers
execute any code in a completion."""


def package() -> Any:
    """Import the module `reasoning_gym`. Raises: ImportError if it is missing."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "reasoning-gym is not installed: pip install 'grpo-lightning[reasoning-gym]'. Its tasks and the reward "
            "ReasoningGym need it."
        ) from error
    return reasoning_gym


def task_names() -> list[str]:
    """All task names, sorted. Raises: ImportError if reasoning-gym is not installed."""
    package()
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {COMPOSITE})


def create_task(task: str, config: Mapping[str, Any], *, size: int = 1, seed: int = 0) -> Any:
    """Create the object of a reasoning-gym task.

    After `dataset = create_task(...)`, `dataset[index]` generates an item, and `dataset.score_answer(answer, item)`
    scores an answer to this item.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If the task does not exist, or does not accept the settings.
    """
    check_name(task)
    from reasoning_gym.factory import DATASETS

    _, config_class = DATASETS[task]
    allowed = [field.name for field in dataclasses.fields(config_class) if field.name not in OWN_SETTINGS]
    for name in config:
        if name in OWN_SETTINGS:
            raise ValueError(f"tasks.{task}.{name}: {name} cannot be set for one task; set it once for all tasks.")
        if name not in allowed:
            raise ValueError(f"tasks.{task}: there is no setting {name!r}{_nearest(name, allowed)}.")
    defaults = config_class()
    try:
        given = {name: _as_kind_of(getattr(defaults, name), value) for name, value in config.items()}
        return package().create_dataset(task, size=size, seed=seed, **given)
    # reasoning-gym validates settings with `assert`, and compares values without checking their types.
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tasks.{task}: reasoning-gym does not accept the settings {dict(config)!r:.200}: "
            f"{type(error).__name__}{f': {error}' if str(error) else ''}."
        ) from error


def check_name(task: Any) -> None:
    """Check that a task exists. Raises: ValueError with the nearest names if not; ImportError without reasoning-gym."""
    names = task_names()
    if task == COMPOSITE:
        raise ValueError(
            f"tasks.{COMPOSITE}: this is a mixture of tasks; name the tasks themselves and mix their files."
        )
    if task not in names:
        raise ValueError(
            f"tasks: reasoning-gym has no task {task!r}{_nearest(str(task), names)}. "
            "`grpo_lightning.data.reasoning_gym.task_names()` lists all."
        )


def make_item(dataset: Any, task: str, index: int) -> Entry:
    """Generate item `index` of a task.

    For some tasks, the item also depends on Python's hash seed.

    Raises:
        ValueError: If reasoning-gym fails to generate the item, or its question is not text.
    """
    # Some generators also use the global random state (`list_functions`), or seed it (`pool_matrix`).
    with _global_random(derived_seed(task, dataset.seed, index)):
        try:
            entry: Entry = dataset[index]
        except Exception as error:
            raise ValueError(
                f"tasks.{task}: reasoning-gym cannot generate item {index} with the settings {dataset.config!r:.300}: "
                f"{type(error).__name__}: {error}. Change the settings, or remove the task."
            ) from error
    if not isinstance(entry.get("question"), str) or not entry["question"].strip():
        raise ValueError(f"tasks.{task}: item {index} must have a text question, got {entry.get('question')!r:.80}.")
    return entry


@functools.lru_cache(maxsize=256)
def verifier(task: str, config_text: str) -> Any:
    """Create the object whose method `score_answer` scores answers to the questions of a task.

    `config_text` has the settings of the task as JSON.

    Raises:
        ImportError, ValueError: As in `create_task`.
    """
    return create_task(task, json.loads(config_text))


@contextlib.contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global random generator, and restore it and numpy's generator on exit."""
    import numpy  # a dependency of reasoning-gym, not of this package

    state, array_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(array_state)


def _as_kind_of(default: Any, value: Any) -> Any:
    """Convert a YAML value to the type of the default value that it replaces, if YAML lacks this type."""
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
    """A hint with the closest names, or with all names if there are few."""
    close = nearest(name, allowed, n=3, cutoff=0.5)
    if close:
        return f" (did you mean {' or '.join(map(repr, close))}?)"
    return f"; there are {', '.join(allowed)}" if len(allowed) <= 20 else ""


class ReasoningGymTasks:
    """Writes questions of reasoning-gym tasks to training and validation files.

    Pass an instance to `PromptDataModule` as `prepare`.

    Each task gets two files, `train/<task>.jsonl` and `heldout/<task>.jsonl`. A row has the columns `question` and
    `answer` (null if reasoning-gym has no single answer). It has three more columns for the reward `ReasoningGym`:
    `task`, `task_config` (the settings as JSON) and `entry` (reasoning-gym's full item as a Python literal). Held-out
    questions that are also training questions are dropped, and so are duplicate held-out questions.

    The folder is written atomically. A later run rebuilds the folder only if a setting or the version of reasoning-gym
    has changed.

    Args:
        tasks: The reasoning-gym settings of each task. The keys are task names. If the settings of a task are null or
            `{}`, the task has reasoning-gym's default settings.
        folder: Output folder. A rebuild replaces the whole folder.
        size: Training rows per task.
        heldout_size: Number of held-out questions to generate per task. If some of these questions are dropped, the
            task has fewer validation rows.
        seed: Seed of the questions; null for the seed of `seed_everything`.
    """

    def __init__(
        self,
        tasks: dict[str, dict[str, Any] | None],
        folder: str,
        size: int = 1000,
        heldout_size: int = 100,
        seed: int | None = None,
    ) -> None:
        """Raises: ImportError if reasoning-gym is missing; ValueError if a task, a setting or a size is wrong."""
        if not tasks:
            raise ValueError("ReasoningGymTasks.tasks is empty: name at least one, as in {chain_sum: {max_terms: 3}}.")
        for name, number in (("size", size), ("heldout_size", heldout_size)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        self.tasks = {task: dict(config or {}) for task, config in tasks.items()}
        for task, config in self.tasks.items():
            try:
                create_task(task, config)
            except ValueError as error:  # name the class too: a recipe may have other `tasks`
                raise ValueError(f"{type(self).__name__}.{error}") from error.__cause__
        self.folder, self.size, self.heldout_size, self.seed = Path(folder), size, heldout_size, seed

    def __call__(self) -> None:
        """Write the files, unless they are up to date.

        Raises:
            ValueError: If all held-out questions of a task are also training questions, or `folder` holds other files.
        """
        seed = run_seed(self.seed)
        recipe = {
            "tasks": self.tasks,
            "size": self.size,
            "heldout_size": self.heldout_size,
            "seed": seed,
            "reasoning-gym": version("reasoning-gym"),
            "code": CODE_VERSION,
        }
        put_whole(self.folder, json.dumps(recipe, indent=2, default=str) + "\n", partial(self._fill, seed))

    def _fill(self, seed: int, folder: Path) -> None:
        """Write all files into an empty folder."""
        counts = {}
        for task, config in self.tasks.items():
            train = entries(task, config, seed, range(self.size))
            later = entries(task, config, seed, range(self.size, self.size + self.heldout_size))
            heldout = new_questions(later, train)
            counts[task] = {"train": len(train), "heldout": len(heldout), "left_out": len(later) - len(heldout)}
            if not heldout:
                raise ValueError(
                    f"tasks.{task}: all {len(later)} held-out questions are also trained on: the task has too few "
                    "questions. Change its settings to allow more, or lower size."
                )
            if len(heldout) < len(later):
                log.info(
                    "%s: %d of %d held-out questions are dropped: they are also trained on, or are duplicates.",
                    *(task, len(later) - len(heldout), len(later)),
                )
            write_rows(folder / "train" / f"{task}.jsonl", task, config, train)
            write_rows(folder / "heldout" / f"{task}.jsonl", task, config, heldout)
        (folder / COUNTS).write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


def entries(task: str, config: Mapping[str, Any], seed: int, indices: range) -> list[Entry]:
    """Generate items of a task. Different seeds give independent items.

    reasoning-gym seeds item i with seed + i, so nearly all items of the seeds 0 and 1 would be equal. Therefore a seed
    derived from `seed` and the task name is used.

    Raises:
        ImportError, ValueError: As in `create_task` and `make_item`.
    """
    base = derived_seed(seed, "reasoning-gym", task) % 2**31
    dataset = create_task(task, config, size=indices.stop, seed=base)
    return [make_item(dataset, task, index) for index in indices]


def new_questions(later: list[Entry], *earlier: list[Entry]) -> list[Entry]:
    """Return `later` without items whose question is in `earlier` or in a previous item of `later`."""
    seen = {entry["question"] for known in earlier for entry in known}
    new = []
    for entry in later:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            new.append(entry)
    return new


def row(task: str, config: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
    """Convert an item to a row. Raises: ValueError if the item has values that cannot be written."""
    try:
        text = write_entry(entry)
    except ValueError as error:
        raise ValueError(f"tasks.{task}: an item cannot be written to a file: {error}") from error
    return {
        "question": entry["question"],
        "answer": entry["answer"] if isinstance(entry["answer"], str) else None,
        "task": task,
        "task_config": json.dumps(config, default=str),
        "entry": text,
    }


def write_entry(entry: Entry) -> str:
    """Serialize an item as a Python literal for `read_entry`. Tuples stay tuples, and numeric keys stay numbers.

    In JSON, tuples would become lists, and numeric keys would become strings. The verifiers of `arc_agi` and `rearc`
    would then score a correct answer as wrong. The item must be stored and not generated again, because the items of
    some tasks depend on Python's hash seed.

    Raises:
        ValueError: If the item has a value that cannot be written as a Python literal, such as infinity or a date.
    """
    text = repr(_plain(entry))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{text:.200} is not a Python literal ({error}).") from error
    return text


def read_entry(text: str) -> Entry:
    """Parse the output of `write_entry`. No code is executed. Raises: ValueError if the text is not an item."""
    try:
        entry = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is not a Python literal ({error}).") from error
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        raise ValueError(f"it must have question, answer and metadata, got {text:.80}.")
    return entry


def _plain(value: Any) -> Any:
    """Convert numpy numbers, fractions and `Enum` members inside a value to plain numbers and strings."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def write_rows(path: Path, task: str, config: Mapping[str, Any], items: list[Entry]) -> None:
    """Write the rows of a task's items. Raises: ValueError if `row` raises one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row(task, config, item), ensure_ascii=False) + "\n" for item in items]
    path.write_text("".join(lines), encoding="utf-8")
