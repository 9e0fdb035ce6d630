"""Read the files of a run into the data of a report.

The report of an unfinished run can be made too. An incomplete last line of a file is left out. If a file is missing,
the report is made without this file.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.core.files import plain
from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.report.non_default_settings import different_settings

Line = dict[str, Any]

FILES = ("completions.jsonl", "metrics.csv", "config.yaml", "run.json", "summary.json")
"""Files by which the folder of a run is recognized."""

TRAINING_OUTPUTS = ("completions.jsonl", "run.json", "checkpoints")
"""Files and a folder that only training writes."""

NUM_BINS = 20
"""Bins of a histogram."""

MAX_IMAGES = 400
THUMBNAIL = 256
"""Maximum longer side of an image in the report, in pixels."""

TOKENS_READ = ("old_logprobs", "logprobs", "turn_advantages")

FIELDS = frozenset(
    {
        *("step", "epoch", "rollout", "rank", "source", "prompt_index", "row", "prompt", "columns", "completion"),
        *("length", "finish_reason", "turns", "reward", "rewards", "advantage", "images", "boxes"),
    }
)
"""Fields of `completions.jsonl` with a place of their own in the report."""


def find_run(path: Path) -> Path:
    """Find a run's folder, which is `path` itself or the newest `version_<N>` in `path` that is a training run.

    If none is a training run, the newest `version_<N>` is returned.

    Raises:
        ValueError: If there is no run.
    """

    def is_run(folder: Path) -> bool:
        return any((folder / name).is_file() for name in FILES)

    if is_run(path):
        return path
    matches = ((re.fullmatch(r"version_(\d+)", folder.name), folder) for folder in path.glob("version_*"))
    versions = sorted((int(match[1]), folder) for match, folder in matches if match and is_run(folder))
    trained = [
        (number, folder) for number, folder in versions if any((folder / name).exists() for name in TRAINING_OUTPUTS)
    ]
    if versions:
        return (trained or versions)[-1][1]
    if not path.exists():
        raise ValueError(f"There is no folder {path}. Give the folder of a run, for example runs/quickstart/version_0.")
    raise ValueError(
        f"{path} is not the folder of a run: it has none of the files {', '.join(FILES)}, and no folder version_<N> "
        "with one of them. Give the folder of a run, for example runs/quickstart/version_0. If the run is from your "
        "own script, train again with Trainer(callbacks=[CompletionLog()], logger=CSVLogger(...)), which writes the "
        "first two of these files."
    )


def read_run(folder: Path, *, max_completions: int = 20_000) -> dict[str, Any]:
    """Read the data that `report.html` shows, in JSON types.

    If the run has more than `max_completions`, the report shows only every n-th rollout. The histograms count all
    completions.
    """
    record = read_json(folder / "run.json")
    metrics = read_metrics(folder / "metrics.csv")
    log = folder / "completions.jsonl"
    end = log.stat().st_size if log.is_file() else 0  # the log is read several times, and the run may append to it
    counts, statistics = count_rollouts(read_lines(log, end))
    kept = thin_out(counts, max_completions)
    lines = [line for line in read_lines(log, end) if line["rollout"] in kept]
    config = read_config(folder / "config.yaml")
    groups = split_groups(lines, num_generations(config))
    positions = {id(line): place for place, line in enumerate(lines)}
    run: dict[str, Any] = plain(
        {
            "name": "/".join(folder.resolve().parts[-2:]),
            "folder": str(folder),
            "read_at": time.time(),
            "written_at": max((path.stat().st_mtime for path in folder.iterdir() if path.is_file()), default=None),
            "record": record,
            "settings": different_settings(config),
            "seed": config.get("seed_everything", record.get("seed")),
            "max_steps": (config.get("trainer") or {}).get("max_steps"),
            "summary": read_json(folder / "summary.json"),
            "curves": metrics or curves_of(statistics),
            "are_curves_logged": bool(metrics),
            "histograms": histograms(read_lines(log, end), statistics),
            "num_completions": sum(counts.values()),
            "num_incomplete_lines": int(has_incomplete_line(log, end)),
            "finish_reasons": merge_counts(each["finish_reasons"] for each in statistics.values()),
            "rewards": list(dict.fromkeys(name for line in lines for name in line["rewards"])),
            "columns": completion_columns(lines),
            "groups": [group_record(group, positions[id(group[0])]) for group in groups],
            "tokens": read_tokens(folder / "tokens.jsonl", lines),
            "images": read_images(lines),
        }
    )
    return run


# --------------------------------------------------------------------------------------------------------------- files


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it is missing, incomplete, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that was killed while it wrote the file
        return {}
    return value if isinstance(value, dict) else {}


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of the run; {} if the file is missing or not YAML."""
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path, end: int) -> Iterator[Line]:
    """Yield the lines in the first `end` bytes of `completions.jsonl`, except an incomplete last line.

    Raises:
        ValueError: If a complete line does not belong to a completion log.
    """

    def is_valid(line: Line) -> bool:
        return isinstance(line["rewards"], dict) and isinstance(line["rollout"], int)

    yield from json_lines(path, is_valid, end)


def json_lines(path: Path, is_valid: Callable[[Line], bool], end: float = math.inf) -> Iterator[Line]:
    """Yield the JSON lines of a file, except an incomplete last line. Raises: ValueError if a line is not valid."""
    if not path.is_file():
        return
    place = 0
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            place += len(content)
            if place > end or not content.endswith(b"\n"):  # the run is writing the line, or was killed
                return
            text = content.decode("utf-8", "replace")
            try:
                line = json.loads(text)
                valid = is_valid(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(wrong_line(path, number, text)) from error
            if not valid:
                raise ValueError(wrong_line(path, number, text))
            yield line


def wrong_line(path: Path, number: int, text: str) -> str:
    """Error message for a line of another kind of file."""
    return f"{path}:{number} is not a line of a log of completions: {text[:80]!r}. Move the file out of the folder."


def has_incomplete_line(path: Path, end: int) -> bool:
    """True if the first `end` bytes of the file do not end with a line break."""
    if not end:
        return False
    with path.open("rb") as file:
        file.seek(end - 1)
        return file.read(1) != b"\n"


def read_metrics(path: Path) -> dict[str, list[list[float | None]]]:
    """Read `metrics.csv` as [steps, values] by metric. Values that are not finite are None.

    An incomplete last row is left out. If a metric has several values for the same step, the last value is used. A
    resumed run logs some steps again.
    """
    points: dict[str, dict[int, float | None]] = {}
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if line.endswith("\n")):
            step = row.get("step") or ""
            if None in row or not step.isdigit():
                continue
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    points.setdefault(name, {})[int(step)] = finite(text)
    return {name: [list(own), list(own.values())] for name, own in sorted(points.items())}


def finite(text: str) -> float | None:
    """Parse a number; None if it is not finite, or not a number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def num_generations(config: Mapping[str, Any]) -> int | None:
    """Completions per group, from the settings; None if unknown."""
    size = (config.get("model") or {}).get("num_generations")
    return size if isinstance(size, int) and size > 0 else None


# --------------------------------------------------------------------------------------------------------- completions


def count_rollouts(lines: Iterable[Line]) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
    """Count the completions of each rollout, and compute their statistics."""
    counts: dict[int, int] = {}
    statistics: dict[int, dict[str, Any]] = {}
    for line in lines:
        rollout = line["rollout"]
        counts[rollout] = counts.get(rollout, 0) + 1
        own = statistics.setdefault(rollout, {"step": line["step"], "values": {}, "finish_reasons": {}})
        reason = str(line.get("finish_reason"))
        own["finish_reasons"][reason] = own["finish_reasons"].get(reason, 0) + 1
        for name, value in values_of(line).items():
            if value is not None:
                total, count, low, high = own["values"].get(name, (0.0, 0, math.inf, -math.inf))
                own["values"][name] = total + value, count + 1, min(low, value), max(high, value)
    return counts, statistics


def values_of(line: Line) -> dict[str, float | None]:
    """Numbers of a completion, by metric."""
    rewards = {f"reward/{name}": value for name, value in line["rewards"].items()}
    return {"reward/mean": line.get("reward"), **rewards, "rollout/length": line.get("length")}


def curves_of(statistics: Mapping[int, Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Means of each rollout, for a run without `metrics.csv`: [steps, values] by metric."""
    curves: dict[str, list[list[float]]] = {}
    for own in statistics.values():
        means = {name: total / count for name, (total, count, _, _) in own["values"].items()}
        reasons = own["finish_reasons"]
        means["rollout/truncated"] = 1 - reasons.get("stop", 0) / sum(reasons.values())
        for name, value in means.items():
            steps, values = curves.setdefault(name, [[], []])
            steps.append(own["step"])
            values.append(value)
    return curves


def histograms(lines: Iterable[Line], statistics: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Histogram of each reward and of the lengths, for every rollout.

    Returns:
        By metric: the range (low, high) of the `NUM_BINS` bins, the counts of each rollout, and the steps of the
        rollouts.
    """
    names = list(dict.fromkeys(name for own in statistics.values() for name in own["values"]))
    places = {rollout: place for place, rollout in enumerate(statistics)}
    steps = [own["step"] for own in statistics.values()]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        bounds = [own["values"][name] for own in statistics.values() if name in own["values"]]
        low, high = min(each[2] for each in bounds), max(each[3] for each in bounds)
        high = high if high > low else low + 1
        counts = [[0] * NUM_BINS for _ in steps]
        found[name] = {"low": low, "high": high, "steps": steps, "counts": counts}
    for line in lines:
        for name, value in values_of(line).items():
            if value is not None:
                own = found[name]
                place = int((value - own["low"]) / (own["high"] - own["low"]) * NUM_BINS)
                own["counts"][places[line["rollout"]]][min(place, NUM_BINS - 1)] += 1
    return found


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of counts by name."""
    merged: dict[str, int] = {}
    for name, count in itertools.chain.from_iterable(own.items() for own in counts):
        merged[name] = merged.get(name, 0) + count
    return merged


def thin_out(counts: Mapping[int, int], limit: int) -> set[int]:
    """Choose rollouts at equal distances, so that the chosen rollouts together have at most `limit` completions.

    The last rollout is always chosen, even if it has more than `limit` completions.
    """
    rollouts = list(counts)
    for distance in range(1, len(rollouts) + 1):
        chosen = rollouts[::-1][::distance]  # with the last rollout, which shows what was learned
        if sum(counts[rollout] for rollout in chosen) <= limit or len(chosen) == 1:
            return set(chosen)
    return set(rollouts)


def split_groups(lines: Sequence[Line], size: int | None) -> list[list[Line]]:
    """Split lines into groups of at most `size` with the same rollout and prompt."""

    def prompt(line: Line) -> str:
        return json.dumps([line["rollout"], line.get("source"), line.get("prompt_index"), line.get("prompt")])

    groups = []
    for _, own in itertools.groupby(lines, prompt):
        same = list(own)
        groups += [same[start : start + (size or len(same))] for start in range(0, len(same), size or len(same))]
    return groups


def group_record(group: Sequence[Line], first: int) -> dict[str, Any]:
    """A group's prompt, range of completions, and mean, minimum and maximum reward."""
    rewards = [line["reward"] for line in group if line.get("reward") is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    line = group[0]
    return {
        **{name: line.get(name) for name in ("step", "rollout", "epoch", "source", "prompt_index", "row", "prompt")},
        "columns": line.get("columns") or {},
        "images": line.get("images") or [],
        "first": first,
        "count": len(group),
        "mean": mean,
        "low": min(rewards, default=None),
        "high": max(rewards, default=None),
    }


def completion_columns(lines: Sequence[Line]) -> dict[str, Any]:
    """Columns of the completions.

    The columns `turns`, `boxes` and `extras` are dicts {index of the completion: value}. Completions without a value
    are left out of these dicts.
    """

    def sparse(value: Callable[[Line], Any]) -> dict[str, Any]:
        found = ((str(place), value(line)) for place, line in enumerate(lines))
        return {place: own for place, own in found if own}

    names = list(dict.fromkeys(name for line in lines for name in line["rewards"]))
    return {
        "completion": [line.get("completion") for line in lines],
        "reward": [line.get("reward") for line in lines],
        "rewards": {name: [line["rewards"].get(name) for line in lines] for name in names},
        "advantage": [line.get("advantage") for line in lines],
        "length": [line.get("length") for line in lines],
        "finish_reason": [line.get("finish_reason") for line in lines],
        "rank": [line.get("rank") for line in lines],
        "turns": sparse(lambda line: line.get("turns")),
        "boxes": sparse(boxes_of),
        "extras": sparse(
            lambda line: {name: value for name, value in line.items() if name not in FIELDS and value is not None}
        ),
    }


def boxes_of(line: Line) -> dict[str, Any] | None:
    """Read a completion's boxes from the column `boxes` or `<reward>/boxes`."""
    found = [value for name, value in line.items() if name == "boxes" or name.endswith("/boxes")]
    return next((value for value in found if isinstance(value, dict)), None)


def read_tokens(path: Path, lines: Sequence[Line]) -> dict[str, Any]:
    """[texts, old log-probs, log-probs, turn advantages] by index of the completion."""
    places: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for place, line in enumerate(lines):
        number = seen.get(line["rollout"], 0)
        places[line["rollout"], number] = place
        seen[line["rollout"]] = number + 1
    found: dict[str, Any] = {}
    for record in json_lines(path, lambda line: isinstance(line["tokens"], list)):
        own = places.get((record["rollout"], record["completion"]))
        if own is not None:
            found[str(own)] = [record["tokens"], *(record.get(name) for name in TOKENS_READ)]
    return found


# -------------------------------------------------------------------------------------------------------------- images


def read_images(lines: Sequence[Line]) -> dict[str, str]:
    """Make thumbnails of the prompts' images, as `data:` URIs by image name.

    Beyond `MAX_IMAGES`, only every n-th image is read. An unreadable image is left out.
    """
    names = list(dict.fromkeys(str(image["name"]) for line in lines for image in line.get("images") or ()))
    chosen = names[:: max(1, -(-len(names) // MAX_IMAGES))]
    found = {}
    for name in chosen:
        if uri := thumbnail(Path(name)):
            found[name] = uri
    return found


def thumbnail(path: Path) -> str | None:
    """Return a `data:` URI with a thumbnail of an image; None if the image cannot be read.

    The longer side of the thumbnail has at most `THUMBNAIL` pixels.
    """
    try:
        image = ImageRef(path).read().copy()
    except (ImageError, ImportError):
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
