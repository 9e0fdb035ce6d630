"""Proves that the quickstart learns when vLLM samples, on a CPU: in the process, on a server, and asynchronously.

    .venv-vllm/bin/python benchmarks/prove_vllm.py            # every mode once; `make prove-vllm` also installs vLLM
    .venv-vllm/bin/python benchmarks/prove_vllm.py --record   # also writes the outcome to benchmarks/proofs.json

The task and the settings are those of the quickstart; its model has two attention heads, because vLLM's kernels for
CPUs need 32 features per head. The seed is 1: after the warm-up with seed 0, 13 % of this model's worked completions
are right, so that there is nothing to find; with the seeds 1, 2 and 3, all of them are. The bars for every run: the
sampled accuracy is at most 0.40 before training and at least 0.90 after, in at most 8 minutes (including the warm-up of
the model and the start of the server). In the synchronous modes, the KL of vLLM's distribution to the policy's is at
most 1e-5 nats per token in every step (`rollout_kl`), and the largest difference of the log-probs of a token is at most
1e-3 nats (`rollout_difference`). With `max_staleness: 1`, all rollouts but the first are sampled from weights that are
one step old, so that the largest difference is at least 1e-2 nats.
The control is an asynchronous run without the off-policy correction. Its gradient is biased, but with weights that are
one step old, this need not show in the accuracy (`rollout_ess` is the least effective sample size of the importance
weights, as a fraction of the tokens): `tests/module/test_asynchronous.py` computes the bias exactly, over all
completions of a small example. Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from controlled_runs import ControlledRuns, Runs

from grpo_lightning.cli import main as run_cli
from grpo_lightning.demo.arithmetic import DemoModel, DemoRecipe, Quickstart
from tests.vllm.real.vllm_server import PROCESSED, SCALE_OUT, SETTINGS, TRANSFER, free_port, serving

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
TASK = Path("runs/quickstart/task")
RUN = Path("runs/quickstart/version_0")
MOST_SEQUENCES = 128
"""Completions of a rollout, which vLLM decodes together."""

ONE_AHEAD = ["--model.max_staleness=1"]
NOT_CORRECTED = ["--model.objective.rollout_correction=none"]
SYNCHRONOUS = ("colocate", "server")
ASYNCHRONOUS = ("asynchronous",)


@dataclass(frozen=True)
class TwoHeadsRecipe(DemoRecipe):
    """The quickstart's task, with a model of two attention heads."""

    model: DemoModel = field(default_factory=lambda: DemoModel(num_heads=2))


class TwoHeads(Quickstart):
    """Builds them."""

    recipe = TwoHeadsRecipe


def verdicts(runs: Runs) -> dict[str, bool]:
    """Every bar, and whether it is reached."""
    bars = {}
    for mode in (*SYNCHRONOUS, *ASYNCHRONOUS):
        of_mode = runs[mode]
        bars |= {
            f"{mode}: sampled before <= 0.40": all(run["accuracy_before"] <= 0.40 for run in of_mode),
            f"{mode}: sampled after >= 0.90": all(run["accuracy_after"] >= 0.90 for run in of_mode),
            f"{mode}: seconds <= 480": all(run["seconds"] <= 480 for run in of_mode),
        }
        if mode in SYNCHRONOUS:
            bars[f"{mode}: |rollout_kl| <= 1e-5"] = all(run["rollout_kl"] <= 1e-5 for run in of_mode)
            bars[f"{mode}: rollout_difference <= 1e-3"] = all(run["rollout_difference"] <= 1e-3 for run in of_mode)
        else:
            bars[f"{mode}: rollout_difference >= 1e-2"] = all(run["rollout_difference"] >= 1e-2 for run in of_mode)
            bars[f"{mode}: one rollout ahead"] = all(run["staleness"] == 1 for run in of_mode)
    return bars


def fit(seed: int, engine: dict[str, Any], *flags: str) -> None:
    """Run the quickstart with vLLM, and add to its summary how far vLLM's log-probs are from the policy's."""
    given = json.dumps({"class_path": "grpo_lightning.VLLMEngine", "init_args": engine})
    prepare = json.dumps({"class_path": f"{Path(__file__).stem}.TwoHeads", "init_args": {"folder": str(TASK)}})
    arguments = [f"--seed_everything={seed}", f"--data.prepare={prepare}", f"--model.engine={given}", *flags]
    run_cli(["fit", "--config", str(RECIPE), *arguments])
    path = RUN / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(summary | differences(RUN / "metrics.csv")), encoding="utf-8")


def differences(path: Path) -> dict[str, float]:
    """Extremes of KL, difference and effective sample size over a run's steps; mean staleness without the first."""

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name)]

    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    staleness = column("rollout/staleness")[1:]
    return {
        "rollout_kl": max(map(abs, column("policy/rollout_kl"))),
        "rollout_difference": max(column("policy/rollout_difference_max")),
        "rollout_ess": min(column("policy/rollout_ess")),
        "staleness": sum(staleness) / max(1, len(staleness)),
    }


def colocate(seed: int) -> None:
    """Sample with a vLLM in the training process."""
    fit(seed, {"mode": "colocate", "enforce_eager": True, "max_num_seqs": MOST_SEQUENCES, "max_model_len": 128})


@contextlib.contextmanager
def server_of(seed: int) -> Iterator[dict[str, Any]]:
    """Start a `vllm serve` with the task's model. Yields: the settings of the engine."""
    L.seed_everything(seed)
    TwoHeads(str(TASK))()
    flags = [*TRANSFER, *PROCESSED, *SCALE_OUT, "--max-num-seqs", str(MOST_SEQUENCES)]
    with serving(TASK / "model", *flags) as running:
        port = {"base_url": running.url, "group_port": free_port()}
        yield {"mode": "server", "weight_transfer_backend": "gloo", **port}


def on_server(seed: int, *flags: str) -> None:
    """Sample on a `vllm serve` in a process of its own."""
    with server_of(seed) as engine:
        fit(seed, engine, *flags)


PROOF = ControlledRuns(
    name="vllm",
    controls={
        "colocate": colocate,
        "server": on_server,
        "asynchronous": lambda seed: on_server(seed, *ONE_AHEAD),
        "asynchronous, not corrected": lambda seed: on_server(seed, *ONE_AHEAD, *NOT_CORRECTED),
    },
    summary=str(RUN / "summary.json"),
    numbers=[
        *("accuracy_before", "accuracy_after", "greedy_after", "rollout_kl", "rollout_difference", "rollout_ess"),
        *("staleness", "seconds"),
    ],
    verdicts=verdicts,
    learning=(*SYNCHRONOUS, *ASYNCHRONOUS),
    seeds=(1,),
    control_seeds=(1,),
)

if __name__ == "__main__":
    os.environ.update(SETTINGS | os.environ)
    torch.set_num_threads(1)
    sys.exit(PROOF.main(__doc__))
