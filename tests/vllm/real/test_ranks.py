"""The real vLLM on two ranks: one per rank with ZeRO-3, and one for both ranks with FSDP2."""

import json
from pathlib import Path

import pytest

from tests.distributed.harness import once, run_ranks
from tests.distributed.vllm_colocate import STEPS, save_policy
from tests.marks import SLOW

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CASES = {
    "zero3": ["full", "lora", "late", "dropped"],
    "fsdp2": ["tensor-parallel", "tensor-parallel, a rank without prompts"],
}
"""By strategy: the cases of one process group. An update that failed cannot be repeated, so that it comes last."""

FURTHER = {"zero3": ["adapters", "asleep"]}
"""Cases that `make prove-vllm` runs. On a CPU, vLLM keeps its memory when it sleeps; only the calls run."""

EXACT = [(strategy, name) for strategy, names in CASES.items() for name in names if name not in ("late", "dropped")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs all cases of a strategy, once. Returns what a case logged, and the errors of the ranks."""
    # With an external launcher, vLLM's shared memory on a CPU has the same name in every run; a killed run leaves it.
    for file in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
        file.unlink()
    folder = tmp_path_factory.mktemp("ranks")
    save_policy(folder)

    @once
    def run(strategy, names):
        run_ranks("tests.distributed.vllm_colocate", "REAL", strategy, folder, *names)

    def result(strategy, name):
        run(strategy, next(tuple(cases[strategy]) for cases in (CASES, FURTHER) if name in cases[strategy]))
        return json.loads((folder / f"{strategy} 2, {name}.json").read_text())

    return result


@pytest.mark.parametrize(
    ("strategy", "name"), [*EXACT, *(pytest.param("zero3", name, marks=SLOW) for name in FURTHER["zero3"])]
)
def test_after_each_of_three_updates_the_log_probs_are_those_of_the_new_policy(results, strategy, name):
    steps = results(strategy, name)["steps"]
    assert len(steps) == STEPS
    assert max(step["policy/rollout_difference_max"] for step in steps) < 1e-4
    assert max(abs(step["policy/rollout_kl"]) for step in steps) < 1e-6


def test_completions_do_not_depend_on_how_the_ranks_sample(results):
    """The same prompts: a vLLM on each rank, or one for both."""
    alone, together = results("zero3", "full")["steps"], results("fsdp2", "tensor-parallel")["steps"]
    for metric in ("reward/mean", "rollout/length"):
        assert [step[metric] for step in alone] == pytest.approx([step[metric] for step in together], rel=1e-4)


def test_late_and_missing_weights_are_found(results):
    first, *later = (step["policy/rollout_difference_max"] for step in results("zero3", "late")["steps"])
    assert first < 1e-4
    assert min(later) > 0.1
    for error in results("zero3", "dropped")["errors"]:
        assert "The trainer sent no value for model.layers.0." in error
