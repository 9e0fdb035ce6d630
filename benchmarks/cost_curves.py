"""Cost per trained token against completions per prompt, prompt length, completion length and model size.

A curve changes one setting of a workload (`workloads/curves.yaml`). At every value, TRL has the fastest of its batch
shapes and grpo_lightning its defaults. Each curve becomes a picture, `cost_<setting>.png`; `curves.json` has the
numbers and is written after every point.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from workload import Workload

RESULT = Path(__file__).parent / "results" / "curves.json"
PICTURES = Path(__file__).parents[1] / "docs" / "images"
NAMES = {"trl": "TRL, fastest batch shape", "ours": "grpo-lightning, defaults"}
COLORS = {"trl": "tab:orange", "ours": "tab:blue"}


def with_width(workload: Workload, width: int) -> Workload:
    """Change the width of the model; heads have 32 numbers, four share a key."""
    heads = max(width // 32, 4)
    shape = {"width": width, "feed_forward": 3 * width, "heads": heads, "key_value_heads": heads // 4}
    return dataclasses.replace(workload, model=workload.model | shape)


def with_completions(workload: Workload, tokens: int) -> Workload:
    """Change the mean length before truncation at four times the mean."""
    return dataclasses.replace(workload, mean_completion_tokens=tokens, max_completion_tokens=4 * tokens)


AXES: dict[str, tuple[str, Callable[[Workload, int], Workload]]] = {
    "num_generations": ("completions per prompt", lambda workload, n: dataclasses.replace(workload, num_generations=n)),
    "prompt_tokens": ("prompt tokens", lambda workload, n: dataclasses.replace(workload, prompt_tokens=[n, n])),
    "completion_tokens": ("mean completion tokens", with_completions),
    "width": ("width of the model (4 layers)", with_width),
}
"""Label of each axis, and the function that changes a workload."""


@dataclasses.dataclass
class Curves:
    """The workload of the curves, and the values on each axis."""

    base: Workload
    axes: dict[str, list[int]]

    @classmethod
    def load(cls, path: Path, changes: Mapping[str, Any], only: Sequence[str] | None = None) -> Curves:
        """Read the file. Args: changes: settings instead of the file's; only: some axes, None for all."""
        settings = yaml.safe_load(path.read_text())
        axes = {name: values for name, values in settings["axes"].items() if only is None or name in only}
        if unknown := axes.keys() - AXES.keys():
            raise ValueError(f"{path.name}: axes must be of {', '.join(AXES)}, got {', '.join(sorted(unknown))}.")
        return cls(Workload(**settings["base"]).changed(changes), axes)


def measure_point(bench: Any) -> dict[str, Any]:
    """Milliseconds per trained token of both sides. Args: bench: a `Bench` of the point's workload."""
    bench.build()
    sweep = bench.sweep()
    ours = bench.measure("ours", 1, bench.workload.sweep_steps, seed=0)
    trl = min(sweep.values())
    return {"trl": trl, "ours": ours["ms_per_token"], "ratio": trl / ours["ms_per_token"], "sweep": sweep}


def draw_all(
    curves: Curves,
    bench_of: Callable[[Workload, Path, int], Any],
    provenance: Callable[[Workload, int], dict[str, Any]],
    threads: int,
    console: Any,
    *,
    result: Path,
    pictures: Path,
) -> None:
    """Measure every point, and write the numbers and a picture per curve.

    Args:
        curves: What to measure.
        bench_of: Makes a `Bench` of a workload, a folder and a number of threads.
        provenance: Date, versions and settings of a result.
        threads: Number of threads of each process.
        console: Where progress is printed.
        result: File of the numbers; other curves in it are kept.
        pictures: Folder of the pictures.
    """
    for folder in (result.parent, pictures):
        folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(result.read_text()) if result.exists() else {}
    for name, values in curves.axes.items():
        label, change = AXES[name]
        points: dict[int, dict[str, Any]] = {}
        for value in values:
            with tempfile.TemporaryDirectory() as scratch:
                point = measure_point(bench_of(change(curves.base, value), Path(scratch), threads))
            points[value] = point
            console.print(
                f"{label} {value}: {point['trl']:.3f} / {point['ours']:.3f} ms per token = {point['ratio']:.2f}"
            )
            results[name] = provenance(curves.base, threads) | {"label": label, "points": points}
            result.write_text(json.dumps(results, indent=2) + "\n")
        draw(label, points, pictures / f"cost_{name}.png")
    console.print(f"Curves: {result}, {pictures}")


def draw(label: str, points: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Draw a curve: cost per trained token on the left, ratio on the right."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    costs, ratios = figure.subplots(1, 2)
    for side, name in NAMES.items():
        costs.plot(list(points), [point[side] for point in points.values()], "o-", color=COLORS[side], label=name)
    costs.set(ylabel="CPU ms per trained token")
    costs.legend(frameon=False)
    ratios.plot(list(points), [point["ratio"] for point in points.values()], "o-", color="tab:green")
    ratios.set(ylabel="TRL / grpo-lightning")
    for axes in (costs, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), [str(value) for value in points])
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
