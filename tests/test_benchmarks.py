"""`make bench`: its workload, its two children on a minute version of it, and the arithmetic of its summary."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import versus_trl
from benchmarks.memory import mib, peak_bytes
from benchmarks.versus_trl import Bench, Meter, Workload, build_policy, make_prompts, summarize
from grpo_lightning.cli import parse

MINUTE = {
    "model": {"layers": 2, "width": 16, "heads": 2, "key_value_heads": 1, "feed_forward": 32, "vocabulary": 64},
    "prompt_tokens": [3, 6],
    "mean_completion_tokens": 4,
    "max_completion_tokens": 8,
    "prompts_per_step": 2,
    "num_generations": 2,
    "steps": 1,
    "sweep_steps": 1,
    "repeats": 1,
    "at_once": [4, 2],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "minute.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(versus_trl.WORKLOAD.read_text()) | MINUTE))
    workload = Workload.load(path)
    with torch.random.fork_rng():
        build_policy(workload, folder / "policy")
    return Bench(workload, path, folder / "policy", threads=1)


def test_the_workload_file_parses():
    workload = Workload.load(versus_trl.WORKLOAD)
    assert workload.completions_per_step == workload.prompts_per_step * workload.num_generations
    assert all(workload.completions_per_step % count == 0 for count in workload.at_once)
    assert workload.mean_completion_tokens < workload.max_completion_tokens


def test_an_unknown_key_in_the_workload_is_refused(tmp_path: Path):
    path = tmp_path / "workload.yaml"
    path.write_text(versus_trl.WORKLOAD.read_text() + "\nstep: 3\n")
    with pytest.raises(TypeError, match="step"):
        Workload.load(path)


def test_prompts_are_as_many_and_as_long_as_asked_for():
    workload = Workload.load(versus_trl.WORKLOAD)
    lengths = [len(text.split()) for text in make_prompts(workload)]
    assert len(lengths) == workload.prompts_per_step * (workload.warmup_steps + workload.steps)
    assert workload.prompt_tokens[0] <= min(lengths) <= max(lengths) <= workload.prompt_tokens[1]


def test_the_stop_token_is_equally_likely_everywhere(bench: Bench):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.folder)
    tokenizer = versus_trl.load_tokenizer(bench.folder)
    ids = torch.tensor([tokenizer(text)["input_ids"][:3] for text in make_prompts(bench.workload)])
    assert len(ids.unique()) > 1
    with torch.no_grad():
        stop = model(ids).logits.softmax(-1)[..., versus_trl.EOS]
    torch.testing.assert_close(stop, torch.full_like(stop, 1 / 4), atol=0.02, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "beta"), [(2, 0.04), (4, 0.0)])
@pytest.mark.parametrize("side", versus_trl.SIDES)
def test_a_child_measures_one_run(bench: Bench, side: str, at_once: int, beta: float):
    if side == "trl":
        pytest.importorskip("trl", minversion="1.16")
    workload = dataclasses.replace(bench.workload, beta=beta)
    outcome = Bench(workload, bench.path, bench.folder, threads=1).measure(side, at_once, steps=1, seed=0)
    assert outcome.keys() == {"ms_per_token", "cpu_seconds", "steps", "tokens", "completions", "mean_length"}
    assert outcome["steps"] == 1
    assert outcome["completions"] <= workload.completions_per_step
    if beta:  # without, ours leaves out groups of equal rewards
        assert outcome["completions"] == workload.completions_per_step
    assert outcome["tokens"] <= 8 * outcome["completions"]
    assert outcome["ms_per_token"] == pytest.approx(1000 * outcome["cpu_seconds"] / outcome["tokens"])


def test_a_failing_child_is_shown(bench: Bench):
    with pytest.raises(RuntimeError, match=r"ours failed:(.|\n)*at-once"):
        bench.measure("ours", "none", steps=1, seed=0)  # type: ignore[arg-type]


def test_the_meter_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([10.0, 10.0, 13.0, 14.0])  # start and stop at the end of the warm-up, then the end of two steps
    monkeypatch.setattr(versus_trl.time, "process_time", lambda: next(seconds))
    meter = Meter(warmup_steps=1)
    for mask in [[1, 1, 1]], [[1, 1, 0], [1, 0, 0]], [[1, 1, 1]]:
        meter.trained(torch.tensor(mask))
        meter.step_ended()
    assert meter.outcome() == {
        "ms_per_token": pytest.approx(4000 / 6),
        "cpu_seconds": 4.0,
        "steps": 2,
        "tokens": 6,
        "completions": 3,
        "mean_length": 2.0,
    }


def test_summary_by_hand():
    def outcome(milliseconds: float, tokens: int, completions: int) -> dict[str, float]:
        seconds = milliseconds * tokens / 1000
        return {
            "ms_per_token": milliseconds,
            "cpu_seconds": seconds,
            "steps": 2,
            "tokens": tokens,
            "completions": completions,
        }

    summary = summarize(
        [
            {"trl": outcome(4.0, 100, 10), "ours": outcome(2.0, 110, 10)},  # ratio 2
            {"trl": outcome(9.0, 300, 10), "ours": outcome(3.0, 290, 10)},  # ratio 3
            {"trl": outcome(5.0, 200, 20), "ours": outcome(4.0, 260, 20)},  # ratio 1.25
        ]
    )
    assert summary["ratio"] == {"median": 2.0, "min": 1.25, "max": 3.0}
    assert summary["trl"]["ms_per_token"] == {"median": 5.0, "min": 4.0, "max": 9.0}
    assert summary["trl"]["seconds_per_step"] == pytest.approx({"median": 0.5, "min": 0.2, "max": 1.35})
    assert (summary["trl"]["tokens"], summary["trl"]["completions"], summary["trl"]["mean_length"]) == (600, 40, 15.0)
    assert summary["ours"]["mean_length"] == 16.5
    assert summary["length_difference"] == pytest.approx(0.1)


def test_a_recorded_result_replaces_only_its_own_beta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl")  # its version is recorded
    monkeypatch.setattr(versus_trl, "RESULT", tmp_path / "results" / "versus_trl.json")
    workload = Workload.load(versus_trl.WORKLOAD)
    for beta, value in (0.04, 1), (0.0, 2), (0.04, 3):
        versus_trl.write({"value": value}, dataclasses.replace(workload, beta=beta), threads=1)
    results = json.loads(versus_trl.RESULT.read_text())
    assert {name: entry["value"] for name, entry in results.items()} == {"beta 0.04": 3, "beta 0": 2}


def test_the_peak_is_the_largest_sum_held_at_once():
    """Two tensors of 4 MiB after one of 8 that is gone by then."""

    def work() -> None:
        torch.zeros(2 * 2**20).sum()
        kept = [torch.zeros(2**20) for _ in range(2)]
        kept.append(torch.zeros(2**18))

    assert peak_bytes(work) == pytest.approx(9 * 2**20, rel=1e-3)
    assert mib(9 * 2**20) == 9


@pytest.fixture
def prove_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script: what it imports lies beside it."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_ranks")


def test_the_runs_on_ranks_are_configurations_of_the_quickstart(prove_ranks: Any):
    for strategy, flags in prove_ranks.STRATEGIES.items():
        trainer = parse(["--config", str(prove_ranks.RECIPE), *flags]).trainer
        assert str(trainer.strategy).startswith("auto") == (strategy == "one device")
        if strategy == "zero3":
            assert trainer.strategy.init_args.stage == 3
            assert trainer.strategy.init_args.stage3_param_persistence_threshold == 0
    recipe = yaml.safe_load(prove_ranks.RECIPE.read_text())
    assert recipe["data"]["batch_size"] == prove_ranks.BATCH_SIZE


def test_runs_on_ranks_are_compared_by_hand(prove_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prove_ranks, "STEPS", 2)

    def trained(name: str, order: list[int], last: str, reward: float, weight: float) -> Any:
        """Two steps of two completions; another number of ranks writes them in another order."""
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": 0, "prompt": f"{i}", "completion": "x"} for i in order]
        lines += [{"step": 1, "prompt": f"{i}", "completion": last} for i in order]
        (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "metrics.csv").write_text(f"reward/mean,step\n0.5,0\n,0\n{reward},1\n")
        torch.save({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([weight])}, folder / "weights.pt")
        return prove_ranks.Trained(folder, folder)

    one = trained("one", [0, 1], "y", 0.25, 2.0)
    assert trained("same", [1, 0], "y", 0.25, 2.0).against(one) == {
        "steps_with_equal_completions": 2,
        "steps_with_equal_rewards": 2,
        "weights": 0.0,
    }
    assert trained("other", [0, 1], "z", 0.5, 2.5).against(one) == {
        "steps_with_equal_completions": 1,
        "steps_with_equal_rewards": 1,
        "weights": 0.25,
    }
