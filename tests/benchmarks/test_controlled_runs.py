"""The proofs of learning run every seed and every control, and check their bars."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import versus_trl
from tests.marks import SLOW

BENCHMARKS = Path(versus_trl.__file__).parent
SCRIPT = """
import json, sys
from pathlib import Path

import proofs
from controlled_runs import TRAINED, ControlledRuns

proofs.PATH = Path("proofs.json").resolve()

def learned(seed):
    Path("summary.json").write_text(json.dumps({"seed": seed, "after": 0.9 - seed / 10, "other": seed}))

def broken(seed):
    raise ValueError(f"no luck with seed {seed}")

def bars(runs):
    return {f"{name} >= 0.75": all(run["after"] >= 0.75 for run in some) for name, some in runs.items()}

controls = {TRAINED: learned, "a control": CONTROL}
if __name__ == "__main__":
    sys.exit(ControlledRuns("tiny", controls, "summary.json", ["after"], bars).main("Proves nothing."))
"""


def run(
    folder: Path, *arguments: str, control: str = "learned", script: str = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """The script in this folder."""
    path = folder / "prove_tiny.py"
    path.write_text(script.replace("CONTROL", control))
    command = [sys.executable, str(path), *arguments]
    paths = {"PYTHONPATH": str(BENCHMARKS)}
    return subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, check=False)


@SLOW
def test_every_seed_and_control_runs_in_a_folder_of_its_own(tmp_path: Path):
    outcome = run(tmp_path, "--seeds", "0", "1", "--control-seeds", "1", "--record")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert lines[:3] == ["running: trained, seed 0", "running: trained, seed 1", "running: a control, seed 1"]
    assert lines[-2:] == ["holds: trained >= 0.75", "holds: a control >= 0.75"]
    assert not (tmp_path / "summary.json").exists()
    recorded = json.loads((tmp_path / "proofs.json").read_text())["tiny"]
    assert recorded["command"] == "python benchmarks/prove_tiny.py --seeds 0 1 --control-seeds 1 --record"
    spread = {kind: numbers["after"] for kind, numbers in recorded["spread"].items()}
    assert spread == {"mean": pytest.approx(0.85), "least": 0.8, "greatest": 0.9}
    assert recorded["runs"] == {
        "trained": [{"seed": 0, "after": 0.9}, {"seed": 1, "after": 0.8}],
        "a control": [{"seed": 1, "after": 0.8}],
    }


def test_a_bar_that_does_not_hold_is_an_exit_code(tmp_path: Path):
    outcome = run(tmp_path, "--seeds", "0", "--control-seeds", "2")
    assert outcome.returncode == 1
    assert outcome.stdout.splitlines()[-2:] == ["holds: trained >= 0.75", "FAILS: a control >= 0.75"]
    assert not (tmp_path / "proofs.json").exists()


@SLOW
def test_several_runs_may_have_to_learn(tmp_path: Path):
    """They take the seeds of `--seeds`, of which a proof has its own ones by default."""
    changed = SCRIPT.replace(", bars)", ', bars, learning=(TRAINED, "a control"), seeds=(0, 1))')
    outcome = run(tmp_path, "--record", script=changed)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    recorded = json.loads((tmp_path / "proofs.json").read_text())["tiny"]
    runs = [{"seed": 0, "after": 0.9}, {"seed": 1, "after": 0.8}]
    assert recorded["runs"] == {"trained": runs, "a control": runs}
    assert recorded["spread"]["a control"]["least"] == {"after": 0.8}
    assert recorded["spread"].keys() == {"trained", "a control"}
    assert recorded["versions"]["torch"] == version("torch")  # packages that are not installed are left out


@SLOW
def test_a_run_that_fails_says_why(tmp_path: Path):
    outcome = run(tmp_path, "--seeds", "0", control="broken")
    assert outcome.returncode == 1
    assert "a control, seed 0, failed" in outcome.stderr
    assert "no luck with seed 0" in outcome.stderr
