"""Questions of reasoning-gym as files of rows, made before a run reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_lightning.core.files import put_whole
from grpo_lightning.core.seeding import derived_seed, run_seed
from grpo_lightning.tasks.exact_json import exact_dumps
from grpo_lightning.tasks.reasoning_gym import Entry, created, drawn

logger = logging.getLogger(__name__)

CODE_VERSION = 1
"""Part of the recipe of a folder: raise it when code here changes what is written."""

COUNTS = "counts.json"
"""The file that says how many rows every task has, and how many were left out."""


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
                created(task, config)
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
    """Items of a task. No index is drawn as another one is, and no two seeds draw alike.

    reasoning-gym draws item i with seed + i, so that the tasks of seeds 0 and 1 would have nearly the same items.

    Raises:
        ImportError, ValueError: As `created` and `drawn`.
    """
    base = derived_seed(seed, "reasoning-gym", task) % 2**31
    dataset = created(task, config, size=indices.stop, seed=base)
    return [drawn(dataset, task, index) for index in indices]


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
    """The row of an item. Raises: ValueError if it holds what cannot be written."""
    try:
        text = exact_dumps(entry)
    except TypeError as error:
        raise ValueError(f"tasks.{task}: an item of it cannot be written to a file: {error}") from error
    return {
        "question": entry["question"],
        "answer": entry["answer"] if isinstance(entry["answer"], str) else None,
        "task": task,
        "task_config": json.dumps(config, default=str),
        "entry": text,
    }


def write_rows(path: Path, task: str, config: Mapping[str, Any], items: list[Entry]) -> None:
    """Write the rows of a task's items. Raises: ValueError as `row`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row(task, config, item), ensure_ascii=False) + "\n" for item in items]
    path.write_text("".join(lines), encoding="utf-8")
