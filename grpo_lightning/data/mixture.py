"""A mixture: several files, of each all rows or the first, last or random ones, one after the other.

In YAML:

    datasets:
      - json_path: data/gsm8k.jsonl
        sampling_strategy: random:50%
      - json_path: data/counting.json

Every choice follows from the seed alone, so all ranks and all runs see the same rows.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from grpo_lightning.data.formats import to_prompt
from grpo_lightning.types import Prompt

logger = logging.getLogger(__name__)

_STRATEGY = re.compile(r"(?P<take>first|end|random):(?P<amount>[0-9]+(?:\.[0-9]+)?)(?P<percent>%?)")
_ALLOWED = "all, first:N, end:N or random:N, with N rows (first:100) or a percentage (first:12.5%)"


@dataclass
class DatasetEntry:
    """One file of a mixture."""

    json_path: str
    """A `.json` file (a list of objects) or a `.jsonl` file (one object per line), UTF-8."""

    sampling_strategy: str = "all"
    """Which rows: `all`, `first:N`, `end:N` or `random:N`; N is a count, or a percentage (`P%`) rounded up."""

    def __post_init__(self) -> None:
        """Raises: ValueError if the strategy is none."""
        parse_strategy(self.sampling_strategy, name=self.json_path)


@dataclass(frozen=True)
class Strategy:
    """A sampling strategy, parsed."""

    take: Literal["all", "first", "end", "random"]

    amount: Fraction = Fraction(0)
    """Rows, or hundredths of the rows; not read for `all`."""

    is_percent: bool = False

    def num_rows(self, rows_count: int) -> int:
        """How many of `rows_count` rows are asked for: N, or ceil(P x rows_count / 100)."""
        if self.take == "all":
            return rows_count
        # Exact fractions: in floats 7 % of 100 rows is 7.000000000000001, which rounds up to 8.
        return math.ceil(self.amount * rows_count / 100 if self.is_percent else self.amount)


def parse_strategy(strategy: str, *, name: str) -> Strategy:
    """Read `all`, `first:N`, `end:N` or `random:N`.

    Args:
        strategy: N is a whole number of rows, or a percentage from 0% to 100%, which may have a fraction.
        name: The entry, for error messages.

    Raises:
        ValueError: If it is anything else.
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
    """Choose rows by a sampling strategy.

    Random rows are drawn without replacement, from `seed` and `name` alone: no other random state is read or moved.
    With the same seed, the rows of a smaller `random:N` are among those of a larger one.

    Args:
        rows_count: Rows there are.
        strategy: See `parse_strategy`.
        seed: Another seed draws other random rows.
        name: The entry: two entries draw independently.

    Returns:
        Row numbers, rising. All of them, with a warning in the log, if more are asked for than there are.

    Raises:
        ValueError: If `strategy` is none.
    """
    parsed = parse_strategy(strategy, name=name)
    wanted = parsed.num_rows(rows_count)
    if wanted > rows_count:
        logger.warning("%s: %s asks for more than the %d rows there are; all are used.", name, strategy, rows_count)
    rows = range(rows_count)
    if parsed.take == "end":
        rows = rows[max(rows_count - wanted, 0) :]
    elif parsed.take == "random":
        # Only random() is promised to give the same numbers in every Python version; sample() and shuffle() are not.
        generator = random.Random(f"{seed}:{name}")
        keys = [generator.random() for _ in rows]
        return sorted(sorted(rows, key=keys.__getitem__)[:wanted])
    return list(rows[:wanted])


def load_mixture(entries: Sequence[DatasetEntry] | str | os.PathLike[str], *, seed: int) -> list[Prompt]:
    """Read the chosen rows of every entry, entry after entry, each in the order of its file.

    Args:
        entries: The entries, or the path of a YAML file with them (see `read_mixture_yaml`).
        seed: Chooses the rows of `random:N`.

    Returns:
        Prompts; `index` is the position in this list and `source` the file's name without suffix (`train`, and
        `train#2` for a second entry of that name).

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If a file or row is not what it should be (said with file and line), or nothing is left.
    """
    if isinstance(entries, str | os.PathLike):
        entries = read_mixture_yaml(entries)
    prompts: list[Prompt] = []
    seen: Counter[str] = Counter()
    for entry in entries:
        path = _existing(entry.json_path)
        seen[path.stem] += 1
        source = path.stem if seen[path.stem] == 1 else f"{path.stem}#{seen[path.stem]}"
        rows = _read_rows(path)
        chosen = select(len(rows), entry.sampling_strategy, seed=seed, name=source)
        logger.info("%s: %d of %d rows of %s (%s)", source, len(chosen), len(rows), path, entry.sampling_strategy)
        for number in chosen:
            row = rows[number]
            prompts.append(to_prompt(row.parse(), where=row.where, index=len(prompts), source=source))
    if not prompts:
        listed = ", ".join(f"{entry.json_path} ({entry.sampling_strategy})" for entry in entries) or "no entries"
        raise ValueError(f"The mixture has no rows: {listed}. Add a file, or take more of its rows.")
    return prompts


def read_mixture_yaml(path: str | os.PathLike[str]) -> list[DatasetEntry]:
    """Read the entries of a mixture from a YAML file with the key `datasets` (VLM-R1's form).

    A relative `json_path` is looked up in the current folder first, then in the YAML file's.

    Raises:
        FileNotFoundError: If the YAML file, or a file it names, is not there.
        ValueError: If `datasets` is missing or empty, or a key is unknown.
    """
    file = _existing(path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"{file} must end in .yaml or .yml. A data file by itself: [DatasetEntry({str(path)!r})].")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), list) or not content["datasets"]:
        raise ValueError(f"{file} must have the key 'datasets' with a list of entries, got {content!r:.80}.")
    _check_keys(content, ["datasets"], where=str(file))
    allowed = [field.name for field in fields(DatasetEntry)]
    entries = []
    for number, item in enumerate(content["datasets"], start=1):
        where = f"{file}, entry {number}"
        if not isinstance(item, dict) or not isinstance(item.get("json_path"), str):
            raise ValueError(f"{where} must have the key 'json_path' with a file name, got {item!r:.80}.")
        _check_keys(item, allowed, where=where)
        entries.append(DatasetEntry(**item | {"json_path": str(_existing(item["json_path"], file.parent))}))
    return entries


@dataclass(frozen=True)
class _Row:
    """A row that is read but, in a `.jsonl` file, not parsed: rows that are not chosen cost nothing."""

    where: str
    content: Any
    is_parsed: bool

    def parse(self) -> dict[str, Any]:
        """The row's columns. Raises: ValueError naming file and line if it is not a JSON object."""
        value = self.content if self.is_parsed else _parse_json(self.content, self.where)
        if not isinstance(value, dict):
            raise ValueError(f'{self.where}: a row must be an object like {{"prompt": "..."}}, got {value!r:.80}.')
        return value


def _read_rows(path: Path) -> list[_Row]:
    """All rows of a `.json` or `.jsonl` file. Raises: ValueError if it is no such file, or empty."""
    readers = {".json": _read_json, ".jsonl": _read_jsonl}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path} must end in {' or '.join(readers)}: convert the file, or rename it.")
    try:
        rows = list(readers[path.suffix.lower()](path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert the file.") from error
    if not rows:
        raise ValueError(f"{path} is empty: it must have at least one row.")
    return rows


def _read_jsonl(path: Path) -> Iterator[_Row]:
    """One row per line; blank lines are skipped but counted."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _Row(f"{path}:{number}", line, is_parsed=False)


def _read_json(path: Path) -> Iterator[_Row]:
    """One row per element of the list."""
    text = path.read_text(encoding="utf-8-sig")
    elements = _parse_json(text, str(path)) if text.strip() else []
    if not isinstance(elements, list):
        raise ValueError(f"{path} must be a list of objects, got {elements!r:.80}. One object per line is .jsonl.")
    for number, element in enumerate(elements, start=1):
        yield _Row(f"{path}, element {number}", element, is_parsed=True)


def _parse_json(text: str, where: str) -> Any:
    """The value. Raises: ValueError naming the place."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object per line is .jsonl, not .json." if error.msg == "Extra data" else ""
        raise ValueError(f"{where}: not valid JSON: {error}.{hint}") from error


def _existing(path: str | os.PathLike[str], *folders: Path) -> Path:
    """The file, looked up in the current folder, then in `folders`. Raises: FileNotFoundError naming all tried."""
    given = Path(path).expanduser()
    tried = [given, *(folder / given for folder in folders)]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    places = " or ".join(dict.fromkeys(str(candidate.resolve()) for candidate in tried))
    raise FileNotFoundError(f"{str(path)!r}: no file {places}. The current folder is {Path.cwd()}.")


def _check_keys(found: dict[str, Any], allowed: Sequence[str], *, where: str) -> None:
    """Raises: ValueError naming the keys that are not allowed."""
    unknown = [str(key) for key in found if key not in allowed]
    if unknown:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
