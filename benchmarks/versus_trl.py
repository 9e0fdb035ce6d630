"""CPU time and memory of a GRPO training step, with TRL's GRPOTrainer and here, on the workloads of `workloads/`.

    python benchmarks/versus_trl.py                       # all workloads
    python benchmarks/versus_trl.py --workloads w1 w2     # some of them
    python benchmarks/versus_trl.py --steps 2 --repeats 1 # a short look
    python benchmarks/versus_trl.py --record              # also writes benchmarks/results/versus_trl.json
    python benchmarks/versus_trl.py --curves              # cost against G, prompt, completion and model size
    python benchmarks/versus_trl.py --workloads w5        # 0.6B parameters in bf16-mixed on a GPU, by the wall clock

Both sides load the same folder: a Qwen2, or with images a Qwen2.5-VL, with random weights. It ends completions at
random, with the same distribution of lengths on both sides: geometric, or log-normal (`workload.py`). Prompts, images,
reward, optimizer, loss (clipped, token mean, KL to the reference), threads and completions per optimizer step are the
same on both sides. Neither side logs, saves or recomputes.

First, both sides compute loss and gradient of one fixed rollout (`fixed_rollout.py`). Then TRL tries several batch
shapes (`per_device_train_batch_size` x `gradient_accumulation_steps`, for the same optimizer step) and keeps the
fastest; our side has its defaults. Then the processes of both sides alternate.

The result is the CPU time of the process (user and system, all threads) in milliseconds per completion token that
enters the loss, over the optimizer steps after the warm-up. It covers sampling, rewards, reference and update, but no
imports or loading. The memory is the peak resident memory of the process. The floor is the time that the matrix
products of the step would take at the rate of a large float32 matrix product in the same process, with each prompt
computed once per pass and no padding. Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cost_curves
from rich.console import Console
from rich.table import Table
from workload import Workload, build_policy

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "versus_trl.json"
WORKLOADS = ("w1", "w2", "w3", "w4")
ON_CUDA = ("w5",)
SIDES = ("trl", "ours")
PACKAGES = ("torch", "transformers", "trl", "lightning", "grpo-lightning")
LENGTH_TOLERANCE = 4
"""Standard errors by which the sides' mean lengths may differ."""

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of loss and gradient on the fixed rollout."""


def workload_file(name: str) -> Path:
    """File of a workload."""
    return FOLDER / "workloads" / f"{name}.yaml"


# ---------------------------------------------------------------------------------------------------------- processes


class Bench:
    """Measures in child processes, so that no measurement has the memory or the caches of another.

    Args:
        workload: The workload.
        folder: An empty folder, for the policy, the images and what the runs write.
        threads: Number of threads of each child.
    """

    def __init__(self, workload: Workload, folder: Path, threads: int) -> None:
        self.workload, self.folder, self.threads = workload, folder, threads
        workload.save(folder / "workload.yaml")

    def build(self) -> None:
        """Save the policy."""
        self.call("build")

    def losses(self) -> dict[str, float]:
        """Compare the losses on one fixed rollout."""
        return self.call("losses")

    def measure(self, side: str, accumulation: int, steps: int, seed: int) -> dict[str, Any]:
        """Train on one side. Returns: the measurements."""
        return self.call(side, accumulation=accumulation, steps=steps, seed=seed)

    def sweep(self) -> dict[int, float]:
        """TRL's milliseconds per token, by gradient_accumulation_steps."""
        steps = self.workload.sweep_steps
        return {n: self.measure("trl", n, steps, seed=0)["ms_per_token"] for n in self.workload.accumulation}

    def call(self, task: str, **settings: int) -> dict[str, Any]:
        """Run a task of `child` in a process of its own. Returns: what it printed."""
        settings |= {"threads": self.threads}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", task, "--folder", str(self.folder)]
        command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        one_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        offline = {"HF_HUB_OFFLINE": "1", "CI": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.workload.device == "cpu":
            offline |= {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment = os.environ | one_core | offline
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{task} failed:\n{result.stderr[-3000:]}")
        outcome: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return outcome


def child(options: argparse.Namespace) -> None:
    """Do one task in this process; the last line that is printed has the outcome as JSON."""
    import torch

    torch.set_num_threads(options.threads)
    workload = Workload.load(options.folder / "workload.yaml")
    outcome: dict[str, Any] = {}
    if options.child == "build":
        build_policy(workload, options.folder)
    elif options.child == "losses":
        from fixed_rollout import compare_losses

        outcome = compare_losses(workload, options.folder)
    else:
        from training_runs import SIDES as RUNS

        run = RUNS[options.child]
        outcome = run(workload, options.folder, options.accumulation, options.steps, options.seed).outcome()
    print(json.dumps(outcome))


# ------------------------------------------------------------------------------------------------------------ summary


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize_side(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time and memory of the runs of a side. Times are over optimizer steps, phases are means per step."""
    steps = [step for run in runs for step in run["steps"]]
    tokens, completions = (sum(run[name] for run in runs) for name in ("tokens", "completions"))
    summary = {
        "steps": len(steps),
        "ms_per_token": spread([1000 * step["cpu_seconds"] / step["tokens"] for step in steps]),
        "cpu_seconds_per_step": spread([step["cpu_seconds"] for step in steps]),
        "tokens": tokens,
        "completions": completions,
        "mean_length": tokens / completions,
        "mean_length_error": statistics.fmean(run["length_std"] for run in runs) / completions**0.5,
        "peak_mib": max(run["peak_mib"] for run in runs),
        "training_mib": max(run["training_mib"] for run in runs),
    }
    for name in ("padding", "images"):
        if name in runs[0]:
            summary[name] = mean_of([run[name] for run in runs])
    return summary


def mean_of(values: Sequence[Any]) -> Any:
    """Mean of numbers, or of dicts of numbers by key; a key that a dict lacks counts as 0."""
    if not isinstance(values[0], dict):
        return statistics.fmean(values)
    names = dict.fromkeys(name for each in values for name in each)
    return {name: statistics.fmean(each.get(name, 0.0) for each in values) for name in names}


def summarize(pairs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Both sides, their ratio per token for each pair, and for our side the phases of a step and the floor."""
    ours = [pair["ours"] for pair in pairs]
    summary: dict[str, Any] = {
        "ratio": spread([pair["trl"]["ms_per_token"] / pair["ours"]["ms_per_token"] for pair in pairs])
    }
    summary |= {side: summarize_side([pair[side] for pair in pairs]) for side in SIDES}
    summary["ours"]["phases"] = mean_of([step["phases"] for run in ours for step in run["steps"]])
    floors = [(step["gflops"] / run["gflops_per_second"], step) for run in ours for step in run["steps"]]
    summary["floor"] = {
        "gflops_per_second": spread([run["gflops_per_second"] for run in ours]),
        "cpu_seconds_per_step": spread([floor for floor, _ in floors]),
        "step_over_floor": spread([step["cpu_seconds"] / floor for floor, step in floors]),
    }
    error = math.hypot(*(summary[side]["mean_length_error"] for side in SIDES))
    summary["length_difference"] = (summary["ours"]["mean_length"] - summary["trl"]["mean_length"]) / error
    return summary


def bars_of(summary: dict[str, Any], losses: dict[str, float] | None, workload: Workload) -> dict[str, bool]:
    """What has to hold, and whether it does."""
    ours, trl = summary["ours"], summary["trl"]
    bars = {
        f"median ratio >= {workload.required_ratio:g}": summary["ratio"]["median"] >= workload.required_ratio,
        "peak memory at most TRL's": ours["peak_mib"] <= trl["peak_mib"],
        f"mean lengths within {LENGTH_TOLERANCE} standard errors": abs(summary["length_difference"])
        <= LENGTH_TOLERANCE,
    }
    if losses is not None:
        largest = max(losses["difference"], losses["gradient_difference"])
        bars[f"loss and gradient within {LOSS_TOLERANCE:g} of TRL's"] = largest <= LOSS_TOLERANCE
    if "images" in ours:
        once = ("read", "preprocessed", "encoded by the reference")
        each = max(ours["images"][name] for name in once)
        bars["each image read, preprocessed and encoded once"] = each <= workload.prompts_per_step
    return bars


# ------------------------------------------------------------------------------------------------------------- report


def report(name: str, workload: Workload, summary: dict[str, Any], best: int) -> list[Table]:
    """Format the tables: both sides, and where our time goes."""
    table = Table("", "ms per token", "(min - max)", "s per step", "mean length", "peak MiB", "of training", "padding")
    for side in SIDES:
        row = summary[side]
        each = row["ms_per_token"]
        table.add_row(
            side if side == "ours" else f"trl, {workload.completions_per_step // best} x {best}",
            f"{each['median']:.3f}",
            f"{each['min']:.3f} - {each['max']:.3f}",
            f"{row['cpu_seconds_per_step']['median']:.2f}",
            f"{row['mean_length']:.1f}",
            f"{row['peak_mib']:.0f}",
            f"{row['training_mib']:.0f}",
            f"{row['padding']:.1%}" if "padding" in row else "",
        )
    ratio = summary["ratio"]
    table.add_section()
    table.add_row("trl / ours", f"{ratio['median']:.2f}", f"{ratio['min']:.2f} - {ratio['max']:.2f}")
    table.title = f"{name}: {workload.title}; {summary['ours']['steps']} steps of {workload.completions_per_step}"
    phases = summary["ours"]["phases"]
    total = sum(phases.values())
    parts = Table("ours", "CPU s per step", "share", title="phases, means")
    for phase, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        parts.add_row(phase, f"{seconds:.3f}", f"{seconds / total:.0%}")
    floor = summary["floor"]
    parts.add_section()
    parts.add_row("floor", f"{floor['cpu_seconds_per_step']['median']:.3f}", "")
    parts.add_row("step / floor", f"{floor['step_over_floor']['median']:.2f}", "")
    tables = [table, parts]
    if "images" in summary["ours"]:
        images = Table("images per step", *SIDES)
        for row in summary["ours"]["images"]:
            images.add_row(row, *(f"{summary[side]['images'][row]:g}" for side in SIDES))
        tables.append(images)
    return tables


def write(name: str, outcome: dict[str, Any], workload: Workload, threads: int) -> None:
    """Replace the recorded result of a workload with this beta."""
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results[f"{name}, beta {workload.beta:g}"] = provenance(workload, threads) | outcome
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


def provenance(workload: Workload, threads: int) -> dict[str, Any]:
    """Date, command, versions, machine and settings of a result."""
    return {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/versus_trl.py {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": threads},
        "workload": dataclasses.asdict(workload),
    }


# -------------------------------------------------------------------------------------------------------- command line


def compare(name: str, workload: Workload, options: argparse.Namespace, console: Console) -> bool:
    """Compare the losses, sweep, measure both sides alternately, print, record. Returns: whether all bars hold."""
    console.print(f"{name}: {workload.title}", style="bold")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(workload, Path(folder), options.threads)
        bench.build()
        losses = bench.losses() if workload.device == "cpu" else None  # float32 has no noise to hide a difference in
        if losses is not None:
            console.print(
                f"loss of a fixed rollout: trl {losses['trl']:.7f}, ours {losses['ours']:.7f}; relative difference "
                f"{losses['difference']:.1e}, of the gradient {losses['gradient_difference']:.1e}"
            )
        sweep = bench.sweep()
        best = min(sweep, key=lambda count: sweep[count])
        tried = ", ".join(f"{workload.completions_per_step // n} x {n}: {value:.2f}" for n, value in sweep.items())
        console.print(f"trl, ms per token by batch size x accumulation: {tried}")
        shapes, pairs = {"trl": best, "ours": 1}, []
        for repeat in range(workload.repeats):
            order = SIDES if repeat % 2 == 0 else SIDES[::-1]
            pair = {side: bench.measure(side, shapes[side], workload.steps, seed=repeat + 1) for side in order}
            pairs.append(pair)
            trl, ours = (pair[side]["ms_per_token"] for side in SIDES)
            console.print(
                f"pair {repeat + 1} of {workload.repeats}: {trl:.3f} / {ours:.3f} ms per token = {trl / ours:.2f}"
            )
    summary = summarize(pairs)
    for table in report(name, workload, summary, best):
        console.print(table)
    bars = bars_of(summary, losses, workload)
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        outcome = {"losses": losses, "sweep": sweep, "accumulation": best, "bars": bars, "summary": summary}
        write(name, outcome | {"pairs": pairs}, workload, options.threads)
    return all(bars.values())


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, *ON_CUDA], default=WORKLOADS, metavar="NAME")
    parser.add_argument("--curves", action="store_true", help="measure the curves instead of the workloads")
    parser.add_argument("--axes", nargs="+", choices=cost_curves.AXES, help="some of the curves")
    parser.add_argument("--beta", type=float, help="instead of the workload's")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--steps", type=int, help="measured steps per process, instead of the workload's")
    parser.add_argument("--repeats", type=int, help="pairs of processes, instead of the workload's")
    parser.add_argument("--record", action="store_true", help=f"write benchmarks/results/{RESULT.name}")
    parser.add_argument("--output", type=Path, help="folder of curves.json and pictures, instead of the recorded ones")
    for name in ("--accumulation", "--seed"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=["build", "losses", *SIDES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    given = {name: getattr(options, name) for name in ("beta", "steps", "repeats")}
    changes = {name: value for name, value in given.items() if value is not None}
    console = Console()
    if options.curves:
        curves = cost_curves.Curves.load(workload_file("curves"), changes, options.axes)
        result = options.output / "curves.json" if options.output else cost_curves.RESULT
        pictures = options.output or cost_curves.PICTURES
        cost_curves.draw_all(curves, Bench, provenance, options.threads, console, result=result, pictures=pictures)
        return 0
    workloads = {name: Workload.load(workload_file(name)).changed(changes) for name in options.workloads}
    outcomes = [compare(name, workload, options, console) for name, workload in workloads.items()]  # all of them run
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
