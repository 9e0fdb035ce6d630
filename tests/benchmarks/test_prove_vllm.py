"""`make prove-vllm`: its runs without vLLM, and its bars by hand."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versus_trl
from grpo_lightning.cli import parse
from tests.marks import SLOW


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; it imports its neighbors."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_vllm")


def test_the_bars_by_hand(prove: Any):
    numbers = {"accuracy_before": 0.4, "accuracy_after": 0.9, "seconds": 480.0}
    numbers |= {"rollout_kl": 1e-5, "rollout_difference": 1e-3, "staleness": 0.0}
    good = {mode: [numbers, numbers] for mode in prove.SYNCHRONOUS}
    good["asynchronous"] = [numbers | {"rollout_kl": 0.1, "rollout_difference": 1e-2, "staleness": 1.0}]
    assert all(prove.verdicts(good).values())
    for mode, changed, bar in (
        ("colocate", {"accuracy_before": 0.41}, "sampled before <= 0.40"),
        ("server", {"accuracy_after": 0.89}, "sampled after >= 0.90"),
        ("server", {"seconds": 481.0}, "seconds <= 480"),
        ("colocate", {"rollout_kl": 1.1e-5}, "|rollout_kl| <= 1e-5"),
        ("server", {"rollout_difference": 1.1e-3}, "rollout_difference <= 1e-3"),
        ("asynchronous", {"rollout_difference": 9e-3}, "rollout_difference >= 1e-2"),
        ("asynchronous", {"staleness": 0.99}, "one rollout ahead"),
    ):
        runs = good | {mode: [good[mode][0], good[mode][0] | changed]}
        assert [name for name, holds in prove.verdicts(runs).items() if not holds] == [f"{mode}: {bar}"]


def test_the_numbers_of_a_run_are_those_of_its_steps(prove: Any, tmp_path: Path):
    path, names = tmp_path / "metrics.csv", "policy/rollout_kl,policy/rollout_difference_max,policy/rollout_ess"
    path.write_text(f"{names}\n0.1,0.2,0.9\n,,\n-0.3,0.1,0.8\n")
    expected = {"rollout_kl": 0.3, "rollout_difference": 0.2, "rollout_ess": 0.8, "staleness": 0}
    assert prove.differences(path) == expected
    path.write_text(f"{names},rollout/staleness\n0.1,0.2,1,0\n0.1,0.2,1,1\n0.1,0.2,1,0.5\n")
    assert prove.differences(path)["staleness"] == 0.75


@SLOW
@pytest.mark.parametrize("name", ["colocate", "server", "asynchronous", "asynchronous, not corrected"])
def test_the_runs_are_configurations_of_the_quickstart(
    prove: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "server_of", lambda seed: nullcontext({"mode": "server", "port": 1}))
    monkeypatch.setattr(prove, "run_cli", seen.append)
    monkeypatch.setattr(prove, "differences", lambda path: {})
    with pytest.raises(FileNotFoundError):  # no summary, because nothing ran
        prove.PROOF.controls[name](3)
    (arguments,) = seen
    settings = parse(arguments[1:])
    assert settings.seed_everything == 3
    assert settings.model.engine.init_args.mode == ("colocate" if name == "colocate" else "server")
    assert settings.model.max_staleness == int(name.startswith("asynchronous"))
    objective = settings.model.objective  # None has the defaults
    assert (objective and objective.rollout_correction) == ("none" if name.endswith("corrected") else None)
    heads = {settings.data.prepare.class_path: settings.data.prepare.init_args.folder}
    assert heads == {"prove_vllm.TwoHeads": "runs/quickstart/task"}
    assert prove.TwoHeads.recipe().model.num_heads == 2
