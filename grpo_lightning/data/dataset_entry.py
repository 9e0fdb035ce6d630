"""DatasetEntry: location, row selection and columns of one dataset of a mixture."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast, get_args

from grpo_lightning.core.log_messages import nearest
from grpo_lightning.data.images.box_checks import Boxes

log = logging.getLogger(__name__)

DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
"""Suffixes of data files; `readers.READERS` has a reader for each."""

_STRATEGY = re.compile(r"(?P<take>first|end|random):(?P<amount>[0-9]+(?:\.[0-9]+)?)(?P<percent>%?)")
_ALLOWED = "all, first:N, end:N or random:N, with N rows (first:100) or a percentage (first:12.5%)"


def is_data_file(path: str | os.PathLike[str]) -> bool:
    """True if a path has the suffix of a data file."""
    return Path(path).suffix.lower() in DATA_FILES


@dataclass
class DatasetEntry:
    """One dataset of a mixture, either a file (`json_path`), or a dataset of the library `datasets` (`dataset`)."""

    json_path: str | None = None
    """A UTF-8 file: `.jsonl` (one object per line), `.json` (a list of objects), `.csv` (with a header) or
    `.parquet`."""

    sampling_strategy: str = "all"
    """The rows to use: `all`, `first:N`, `end:N` or `random:N`. N is a number of rows, or a percentage such as `12.5%`,
    for which the number of rows is rounded up."""

    dataset: str | None = None
    """A name on the hub, a folder with data files, or a folder written by `save_to_disk`. `name:subset` selects a
    subset, and `name#1000` selects 1000 random rows."""

    subset: str | None = None
    """The subset (configuration) of `dataset`."""

    split: str = "train"
    """The split of `dataset`."""

    revision: str | None = None
    """Branch, tag or commit of `dataset` on the hub."""

    streaming: bool = False
    """Read each row when it is used, for datasets larger than memory. The run needs `trainer.max_steps`."""

    columns: dict[str, str | None] | None = None
    """New column names by old name, for example `{instruction: question}`. Null drops a column: `{messages: null}`."""

    name: str | None = None
    """Name in logs; by default the name of the file or dataset."""

    rewards: list[str] | None = None
    """Names of the rewards that apply to these rows; null for all."""

    accu_reward_method: str | None = None
    """Value of the column `accu_reward_method` (VLM-R1's scoring method) for rows without a value in this column."""

    image_root: str | None = None
    """Base folder of relative image paths; null uses `image_root` of the data module. If both are null, the base folder
    is the folder that contains the file `json_path`, or the folder that `dataset` names."""

    boxes: Boxes = "auto"
    """Form of the column `solution` in rows with images. `original`: a box [x1, y1, x2, y2] in pixels. `norm1000`: a
    box with coordinates from 0 to 1000 (VLM-R1's InternVL data). The box is converted to pixels when the row is read,
    so leave `gold_coordinates` of rewards and metrics at `original`. `auto`: a solution counts as a box in pixels if it
    has four values, at least one of which is a number, and if its row has one image; other solutions are not checked.
    `none`: no solution is checked. `bad_images` of the data module sets what happens to a row whose box is outside its
    image."""

    def __post_init__(self) -> None:
        """Raises: ValueError if settings contradict each other or the sampling strategy is invalid."""
        if (self.json_path is None) == (self.dataset is None):
            raise ValueError(
                "A dataset must have either json_path (a file) or dataset (a hub name or folder), got "
                f"json_path={self.json_path!r}, dataset={self.dataset!r}."
            )
        given = [name for name in ("subset", "revision") if getattr(self, name) is not None]
        given += ["split"] if self.split != "train" else []
        if self.json_path is not None and given:
            raise ValueError(f"{', '.join(given)} of {self.label!r} is for dataset, not for json_path: remove it.")
        parse_strategy(self.sampling_strategy, name=self.label)
        if self.boxes not in get_args(Boxes):
            raise ValueError(
                f"boxes of {self.label!r} must be one of {', '.join(get_args(Boxes))}, got {self.boxes!r:.80}."
            )
        location = self.location
        if location.num_rows is not None and self.sampling_strategy != "all":
            raise ValueError(
                f"dataset {self.dataset!r} selects {location.num_rows} random rows, but sampling_strategy is "
                f"{self.sampling_strategy!r}: set only one of them."
            )
        if self.subset is not None and location.subset is not None:
            raise ValueError(
                f"dataset {self.dataset!r} names a subset, but subset is {self.subset!r}: set only one of them."
            )
        if self.streaming:
            self._check_stream()

    @property
    def label(self) -> str:
        """The path (`json_path`) or name (`dataset`), as in the configuration."""
        return cast(str, self.dataset if self.json_path is None else self.json_path)

    @property
    def location(self) -> Location:
        """The path or name, parsed into name, subset and number of rows."""
        return Location(self.label) if self.json_path is not None else parse_location(self.label)

    @property
    def source(self) -> str:
        """The name in logs. It is `name`, or by default, the name of the file or dataset."""
        path = Path(self.location.name)
        # A dot starts a file's suffix, but is part of a dataset's name (`NuminaMath-1.5`).
        return self.name or (path.stem if self.json_path is not None else path.name or path.resolve().name)

    @property
    def strategy(self) -> str:
        """The sampling strategy. If `dataset` is `name#N`, it is `random:N`. Otherwise, it is `sampling_strategy`."""
        num_rows = self.location.num_rows
        return self.sampling_strategy if num_rows is None else f"random:{num_rows}"

    def image_folder(self, run_root: str | None = None) -> Path | None:
        """The base folder of relative image paths, or None for the current folder.

        Raises:
            FileNotFoundError: If the folder `image_root` does not exist.
        """
        image_root = self.image_root or run_root
        if image_root is None:
            folder = Path(self.location.name).expanduser()
            return folder.parent if self.json_path is not None else folder if folder.is_dir() else None
        root = Path(image_root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(
                f"image_root {image_root!r} of {self.label!r}: no folder {root.resolve()}. The current folder is "
                f"{Path.cwd()}."
            )
        return root

    def _check_stream(self) -> None:
        """Raises: ValueError for settings that streaming does not support."""
        strategy = parse_strategy(self.strategy, name=self.label)
        if strategy.take not in ("all", "first") or strategy.is_percent:
            raise ValueError(
                f"{self.label!r} is streaming: its length is not known, so {self.strategy!r} cannot be selected. "
                "Use all or first:N with a count, or set streaming to false."
            )
        if self.json_path is not None and Path(self.json_path).suffix.lower() == ".json":
            raise ValueError(f"{self.json_path!r} must be read as a whole: for streaming, convert it to .jsonl.")

    @classmethod
    def of(cls, item: Any, *, where: str) -> DatasetEntry:
        """Create an entry from the path of a data file or from a mapping of fields.

        If `item` already is an entry, `item` is returned unchanged.

        Raises:
            ValueError: If `item` is not a valid entry.
        """
        if isinstance(item, cls):
            return item
        if isinstance(item, str):
            if not is_data_file(item):
                raise ValueError(
                    f"{where}: {item!r} is not a data file ({', '.join(DATA_FILES)}). For a hub dataset or a folder, "
                    f"write {{dataset: {item}}}; give a YAML file of entries on its own, not in a list."
                )
            return cls(item)
        if not isinstance(item, Mapping):
            raise ValueError(f"{where} must be a data file, or have the key json_path or dataset, got {item!r:.80}.")
        check_keys(item, [field.name for field in fields(cls)], where=where)
        for key, value in item.items():
            if key == "sampling_strategy":
                continue  # parse_strategy has a better message
            kind = _KINDS.get(key, str)
            is_right = isinstance(value, kind) or (value is None and key not in ("split", "streaming"))
            if not is_right:
                raise ValueError(f"{where}: {key} must be {_WORDS[kind]}, got {value!r:.80}.")
            if key == "columns" and not all(isinstance(name, str | None) for name in (value or {}).values()):
                raise ValueError(
                    f"{where}: columns must map names to names, or to null to drop a column, got {value!r:.80}."
                )
        return cls(**item)


_KINDS: dict[str, type] = {"streaming": bool, "columns": dict, "rewards": list}
_WORDS = {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}


@dataclass(frozen=True)
class Location:
    """The parsed parts of a `dataset` string."""

    name: str
    """File, hub name or folder."""

    subset: str | None = None
    num_rows: int | None = None


def parse_location(dataset: str) -> Location:
    """Split `name:subset#1000` into its parts. Raises: ValueError if `#` is not followed by a count.

    The path of an existing file or folder is not split.
    """
    if Path(dataset).expanduser().exists():
        return Location(dataset)
    name, mark, count = dataset.partition("#")
    if mark and not re.fullmatch(r"[0-9]+", count):
        raise ValueError(f"dataset {dataset!r}: a number of rows must follow '#', as in 'name#1000', got {count!r}.")
    name, _, subset = name.partition(":")
    return Location(name, subset or None, int(count) if mark else None)


def check_keys(found: Iterable[Any], allowed: list[str], *, where: str) -> None:
    """Raises: ValueError if there are unknown keys."""
    unknown = [str(key) for key in found if key not in allowed]
    if unknown:
        named = [
            f"{key!r} (did you mean {near!r}?)" if (near := _nearest(key, allowed)) else repr(key) for key in unknown
        ]
        raise ValueError(f"{where}: unknown keys {', '.join(named)}; allowed are {', '.join(allowed)}.")


def _nearest(key: str, allowed: list[str]) -> str | None:
    """The first allowed key that starts with `key`, else the key of most similar spelling; None if none is similar."""
    longer = [name for name in allowed if key and name.startswith(key)]
    return next(iter(longer + nearest(key, allowed, n=1, cutoff=0.5)), None)


@dataclass(frozen=True)
class Strategy:
    """A sampling strategy, parsed."""

    take: Literal["all", "first", "end", "random"]

    amount: Fraction = Fraction(0)
    """Number or percentage of rows; unused for `all`."""

    is_percent: bool = False

    def num_rows(self, rows_count: int) -> int:
        """The number of rows requested: N or, for a percentage P, ceil(P x rows_count / 100)."""
        if self.take == "all":
            return rows_count
        # Exact fractions: in floats 7 % of 100 rows is 7.000000000000001, which rounds up to 8.
        return math.ceil(self.amount * rows_count / 100 if self.is_percent else self.amount)


def parse_strategy(strategy: str, *, name: str) -> Strategy:
    """Parse `all`, `first:N`, `end:N` or `random:N`.

    Raises:
        ValueError: If `strategy` has another form.
    """
    if strategy == "all":
        return Strategy("all")
    match = _STRATEGY.fullmatch(strategy) if isinstance(strategy, str) else None
    is_percent = match is not None and bool(match["percent"])
    amount = Fraction(match["amount"]) if match is not None else Fraction(-1)
    if match is None or (is_percent and amount > 100) or (not is_percent and "." in match["amount"]):
        raise ValueError(f"sampling_strategy of {name!r} is {strategy!r}; it must be {_ALLOWED}.")
    return Strategy(cast(Literal["first", "end", "random"], match["take"]), amount, is_percent)


def select(rows_count: int, strategy: str, *, seed: int, name: str) -> list[int]:
    """Select rows by a sampling strategy.

    Random rows are sampled without replacement. They depend only on `seed`, `name` and `rows_count`. The rows of
    `random:10` are a subset of the rows of `random:20`.

    Returns:
        Positions of the selected rows, in ascending order. If there are too few rows, all are selected and a warning is
        logged.

    Raises:
        ValueError: If `strategy` is invalid.
    """
    parsed = parse_strategy(strategy, name=name)
    wanted = parsed.num_rows(rows_count)
    if wanted > rows_count:
        log.warning("%s: %s requests more than the %d available rows; all are used.", name, strategy, rows_count)
    rows = range(rows_count)
    if parsed.take == "end":
        rows = rows[max(rows_count - wanted, 0) :]
    elif parsed.take == "random":
        # Python guarantees the same numbers in every version for random(), but not for sample() and shuffle().
        generator = random.Random(f"{seed}:{name}")
        keys = [generator.random() for _ in rows]
        return sorted(sorted(rows, key=keys.__getitem__)[:wanted])
    return list(rows[:wanted])
