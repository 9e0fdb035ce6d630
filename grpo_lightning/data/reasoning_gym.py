"""reasoning-gym's tasks: their settings checked, their items as files of rows, their verifiers for the reward.

reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760) has about a hundred generators of questions, each with a
verifier of answers.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import difflib
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
from grpo_lightning.core.seeding import derived_seed, run_seed

logger = logging.getLogger(__name__)

CODE_VERSION = 2
"""Part of the recipe of a folder: raise it when code here changes what is written."""

COUNTS = "counts.json"
"""The file that says how many rows every task has, and how many were left out."""

Entry = dict[str, Any]
"""A question as reasoning-gym gives it: `question`, `answer` (None where there are many) and `metadata`."""

OWN_SETTINGS = ("size", "seed")
"""Settings of every task of reasoning-gym, which here are set once, for all tasks."""

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


def create_task(task: str, config: Mapping[str, Any], *, size: int = 1, seed: int = 0) -> Any:
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
            "`grpo_lightning.data.reasoning_gym.task_names()` lists all."
        )


def make_item(dataset: Any, task: str, index: int) -> Entry:
    """Item `index` of a task: the same for the same settings and seed, whatever was made before.

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
        ImportError, ValueError: As `create_task`.
    """
    return create_task(task, json.loads(config_text))


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


class ReasoningGymTasks:
    """Writes questions of reasoning-gym's tasks as rows to train and validate on; a data module's `prepare`.

    Every task gets two files, `train/<task>.jsonl` and `heldout/<task>.jsonl`, which the mixture names like any other.
    A row has the `question`, the `answer` (null where reasoning-gym has none to show), and for the reward
    `ReasoningGym` the `task`, its settings (`task_config`) and the whole `entry` of reasoning-gym, both as JSON text. A
    held-out question that is also trained on, or was held out before, is left out; how many is logged, and stands in
    `counts.json`.

    The folder is written as a whole, and once: it is made again when a setting here or the version of reasoning-gym
    changes.

    Args:
        tasks: The tasks by name, each with its settings in reasoning-gym; null or `{}` for its defaults.
        folder: Gets the files. It is replaced as a whole.
        size: Rows of each task to train on.
        heldout_size: Rows of each task to validate on, before those that are trained on are left out.
        seed: Draws the questions; null takes `seed_everything`.
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
            except ValueError as error:  # which names `tasks`; a recipe has more than these
                raise ValueError(f"{type(self).__name__}.{error}") from error.__cause__
        self.folder, self.size, self.heldout_size, self.seed = Path(folder), size, heldout_size, seed

    def __call__(self) -> None:
        """Write the files, unless they are there.

        Raises:
            ValueError: If a task makes no question that could be held out, or the folder holds somebody else's files.
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
                    f"tasks.{task}: all {len(later)} held-out questions are trained on too: it has too few questions. "
                    "Let its settings make more of them, or lower size."
                )
            if len(heldout) < len(later):
                logger.info(
                    "%s: %d of %d held-out questions are left out: they are trained on too, or are equal.",
                    *(task, len(later) - len(heldout), len(later)),
                )
            write_rows(folder / "train" / f"{task}.jsonl", task, config, train)
            write_rows(folder / "heldout" / f"{task}.jsonl", task, config, heldout)
        (folder / COUNTS).write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


def entries(task: str, config: Mapping[str, Any], seed: int, indices: range) -> list[Entry]:
    """Items of a task. Each index and each seed gives items of its own.

    reasoning-gym draws item i with seed + i, so that the tasks of seeds 0 and 1 would have nearly the same items.

    Raises:
        ImportError, ValueError: As `create_task` and `make_item`.
    """
    base = derived_seed(seed, "reasoning-gym", task) % 2**31
    dataset = create_task(task, config, size=indices.stop, seed=base)
    return [make_item(dataset, task, index) for index in indices]


def new_questions(later: list[Entry], *earlier: list[Entry]) -> list[Entry]:
    """Those of the later items whose questions are in no earlier list, and not twice among them; in their order."""
    seen = {entry["question"] for known in earlier for entry in known}
    new = []
    for entry in later:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            new.append(entry)
    return new


def row(task: str, config: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
    """The row of an item. Raises: ValueError if it holds something that cannot be written."""
    try:
        text = write_entry(entry)
    except ValueError as error:
        raise ValueError(f"tasks.{task}: an item of it cannot be written to a file: {error}") from error
    return {
        "question": entry["question"],
        "answer": entry["answer"] if isinstance(entry["answer"], str) else None,
        "task": task,
        "task_config": json.dumps(config, default=str),
        "entry": text,
    }


def write_entry(entry: Entry) -> str:
    """An item as a Python literal, which `read_entry` reads: tuples stay tuples and numbers stay keys.

    JSON would make lists and text of them, and `arc_agi` and `rearc` would take a right answer for a wrong one. Nor
    can the item be made again where the reward needs it: some tasks follow Python's hash seed, which differs between
    processes.

    Raises:
        ValueError: If it holds something other than text, numbers, None and their lists, tuples, sets and mappings.
    """
    text = repr(_plain(entry))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{text:.200} is not a Python literal ({error}).") from error
    return text


def read_entry(text: str) -> Entry:
    """The item that `write_entry` wrote; nothing is executed. Raises: ValueError if the text is no item."""
    try:
        entry = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is no Python literal ({error}).") from error
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        raise ValueError(f"it must have question, answer and metadata, got {text:.80}.")
    return entry


def _plain(value: Any) -> Any:
    """The value with plain numbers and texts in the place of numpy's, of fractions and of members of an `Enum`."""
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
    """Write the rows of a task's items. Raises: ValueError as `row`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row(task, config, item), ensure_ascii=False) + "\n" for item in items]
    path.write_text("".join(lines), encoding="utf-8")
