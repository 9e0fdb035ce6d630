"""Proves that refactoring changes no result: two commits train to the same metrics and weights.

    python benchmarks/prove_unchanged.py --base main~3     # compares the working tree with that commit
    python benchmarks/prove_unchanged.py --base v0.2.0 --rename reward/total=reward/mean --ignore policy/entropy
    python benchmarks/prove_unchanged.py --base v0.2.0 --flags=--model.policy.chunk_size=null   # a default has changed

Both trees run the same command lines on one thread: the quickstart with two seeds, twenty steps of the grounding
quickstart, twenty steps on two ranks under ZeRO-3 with every weight sharded, and a run that is killed by SIGKILL and
resumes with `--ckpt_path auto`. The two trees must give, bit for bit, the same `metrics.csv` (apart from timings) and
the same weights as written by `export`. Exit code 1 if they differ. No files remain.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from proofs import record
from rich.console import Console
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
CLI = Path(sys.executable).with_name("grpo-lightning")  # imports the package from the tree in PYTHONPATH
TIMINGS = ("time/", "rollout/tokens_per_second")
"""Columns of metrics.csv that begin so differ from run to run."""

CHECKPOINTS = (
    "--trainer.enable_checkpointing=true",
    "--trainer.callbacks+={class_path: lightning.pytorch.callbacks.ModelCheckpoint, "
    "init_args: {dirpath: kept, every_n_train_steps: 5, save_top_k: 1, save_last: true}}",
)
KILLED_AFTER = 13
"""Rows of metrics.csv: between the checkpoints of steps 10 and 15."""

SHARDED = "--trainer.strategy.init_args.stage3_param_persistence_threshold=0"


@dataclass(frozen=True)
class Case:
    """One run, described by its command line."""

    recipe: str
    flags: tuple[str, ...] = ()
    is_killed: bool = False
    is_sharded: bool = False


CASES = {
    "quickstart, seed 0": Case("quickstart", ("--seed_everything=0",)),
    "quickstart, seed 1": Case("quickstart", ("--seed_everything=1",)),
    "grounding, 20 steps": Case("quickstart_grounding", ("--trainer.max_steps=20",)),
    "ZeRO-3 on two ranks, 20 steps": Case(
        "quickstart", ("--trainer.max_steps=20", "--trainer.devices=2", "--data.batch_size=8"), is_sharded=True
    ),
    "killed and resumed, 40 steps": Case("quickstart", ("--trainer.max_steps=40",), is_killed=True),
}


@dataclass(frozen=True)
class Outcome:
    """The metrics and weights of a run."""

    metrics: list[dict[str, str]]
    """The rows of metrics.csv without timings."""

    weights: dict[str, str]
    """The SHA-256 of every tensor."""


def main() -> int:
    """Run both trees and print the differences. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the commit to compare the working tree with")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rename", nargs="*", default=[], help="old=new names of metrics that the change renames")
    parser.add_argument("--flags", nargs="*", default=[], help="arguments of `fit` for both trees, as in --flags=--a=1")
    parser.add_argument("--ignore", nargs="*", default=[], help="metrics that the change alters on purpose")
    parser.add_argument("--record", action="store_true", help="write the outcome to benchmarks/proofs.json")
    options = parser.parse_args()
    renamed = dict(pair.split("=") for pair in options.rename)
    console = Console(width=max(100, Console().width))
    found = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        base = Path(name) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", base, options.base], cwd=ROOT, check=True)
        try:
            runs = {
                (case, tree): pool.submit(
                    run, tree, CASES[case], Path(name) / f"{number}-{tree is base}", options.flags
                )
                for number, case in enumerate(options.cases)
                for tree in (base, ROOT)
            }
            for case in options.cases:
                problems = differences(runs[case, base].result(), runs[case, ROOT].result(), renamed, options.ignore)
                found[case] = "differs" if problems else "equal"
                console.print(f"{'DIFFERS' if problems else 'equal'}: {case}", *problems, sep="\n  ", highlight=False)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    if options.record:
        record("unchanged", {"base": options.base, "cases": found})
    return 0 if set(found.values()) == {"equal"} else 1


def run(tree: Path, case: Case, folder: Path, flags: Sequence[str] = ()) -> Outcome:
    """Run a case in a tree, with `flags` added. Raises: RuntimeError if a process fails."""
    folder.mkdir()
    recipe = tree / "recipes" / f"{case.recipe}.yaml"
    command = ["fit", "--config", str(recipe), *case.flags, *flags, *CHECKPOINTS]
    if case.is_sharded:
        command += [f"--trainer.strategy={sharded_strategy(tree)}", SHARDED]
    log = folder / "log.txt"
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "GRPO_LIGHTNING_CACHE": str(folder / "cache"),
    }

    def start(*args: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen([CLI, *args], cwd=folder, env=environment, stdout=file, stderr=file)

    def finish(process: subprocess.Popen[bytes]) -> None:
        if process.wait(timeout=3000):
            raise RuntimeError(f"{case} in {tree} failed:\n{log.read_text(errors='replace')[-3000:]}")

    if case.is_killed:
        process = start(*command)
        # Lightning logs a step after saving its checkpoint: a kill in between would drop the step from metrics.csv.
        while process.poll() is None and len(metrics_of(folder)) < KILLED_AFTER:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        command.append("--ckpt_path=auto")
    finish(start(*command))
    last = newest(folder.glob("kept/last*.ckpt"))
    finish(start("export", str(last), "exported"))
    return Outcome(metrics_of(folder), weights_of(folder / "exported"))


def sharded_strategy(tree: Path) -> str:
    """The import path that the DeepSpeed strategy has in a tree."""
    files = (tree / "grpo_lightning").rglob("*.py")
    found = [path for path in files if "class GRPODeepSpeedStrategy" in path.read_text()]
    return ".".join(found[0].relative_to(tree).with_suffix("").parts) + ".GRPODeepSpeedStrategy"


def newest(paths: object) -> Path:
    """The path with the latest modification time."""
    return max(paths, key=lambda path: path.stat().st_mtime)  # type: ignore[no-any-return, call-overload]


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """One row per step, without timings and empty cells, from every metrics.csv below a folder.

    If a resumed run repeats a step in a folder of its own, the later values of the step count.
    """
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("runs/*/*/metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = {k: v for k, v in row.items() if v and not k.startswith(TIMINGS)}
                rows[row["step"]] = rows.get(row["step"], {}) | values
    return [row for row in rows.values() if row.keys() - {"step", "epoch"}]


def weights_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of every tensor in a folder's safetensors."""
    hashes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                hashes[name] = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
    return hashes


def differences(base: Outcome, now: Outcome, renamed: dict[str, str], ignored: Sequence[str]) -> list[str]:
    """Describe the differences between two outcomes."""
    problems = []
    if not base.weights or not base.metrics:
        problems.append("the run left no weights or no metrics behind")
    if changed := [name for name in base.weights.keys() | now.weights.keys()
                   if base.weights.get(name) != now.weights.get(name)]:  # fmt: skip
        problems.append(f"{len(changed)} of {len(base.weights)} weights differ, {sorted(changed)[0]} first")
    if len(base.metrics) != len(now.metrics):
        problems.append(f"{len(base.metrics)} rows of metrics.csv, now {len(now.metrics)}")
    for number, (old, new) in enumerate(zip(base.metrics, now.metrics, strict=False), start=1):
        was = {renamed.get(name, name): value for name, value in old.items()}
        names = sorted(name for name in (was.keys() | new.keys()) - set(ignored) if was.get(name) != new.get(name))
        if names:
            first = names[0]
            problems.append(f"row {number}: {', '.join(names)} ({first}: {was.get(first)}, now {new.get(first)})")
            break
    return problems


if __name__ == "__main__":
    sys.exit(main())
