"""`make bench`: its workloads, its children on minute versions of them, and the arithmetic of its summary."""

import dataclasses
import importlib
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cost_curves
import profile_step
import pytest
import torch
import training_runs
import versus_trl
import yaml
from torch.utils.flop_counter import FlopCounterMode
from training_runs import Meter
from versus_trl import WORKLOADS, Bench, bars_of, summarize, workload_file
from workload import EOS, Workload, build_policy, forward_flops, make_prompts, stages, words_of_stage

from benchmarks.memory import mib, peak_bytes
from grpo_lightning.cli import parse
from tests.marks import NIGHTLY, SLOW

MINUTE = {
    "model": {"layers": 2, "width": 32, "heads": 2, "key_value_heads": 1, "feed_forward": 32, "vocabulary": 96},
    "prompt_tokens": [3, 6],
    "mean_completion_tokens": 4,
    "max_completion_tokens": 8,
    "length_sigma": 0,
    "prompts_per_step": 2,
    "num_generations": 2,
    "steps": 1,
    "sweep_steps": 1,
    "repeats": 1,
    "accumulation": [1, 2],
}


def minute(name: str, **changes: Any) -> Workload:
    """A shrunken workload."""
    workload = Workload.load(workload_file(name)).changed(MINUTE)
    return workload.changed({"image_side": workload.image_side and 56} | changes)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds policies."""

    def built(workload: Workload) -> Bench:
        bench = Bench(workload, tmp_path_factory.mktemp("bench"), threads=1)
        with torch.random.fork_rng():
            build_policy(workload, bench.folder)
        return bench

    return built


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_workload_files_ask_for_what_is_reported(name: str):
    workload = Workload.load(workload_file(name))
    assert workload.num_generations == 8
    assert len(workload.accumulation) >= 4
    assert workload.steps * workload.repeats >= 5
    assert workload.mean_completion_tokens < workload.max_completion_tokens


def test_the_workload_of_a_gpu_has_the_shape_of_its_title():
    """Qwen2.5-0.5B; the loss is compared in float32 on the other workloads."""
    workload = Workload.load(workload_file("w5"))
    assert workload.device == "cuda"
    assert list(workload.model.values()) == [24, 896, 14, 2, 4864, 151936]
    side = {"peak_mib": 1.0}
    summary = {"ours": side, "trl": side, "ratio": {"median": 4.5}, "length_difference": 0.0}
    assert len(bars_of(summary, None, workload)) == 3


def test_an_unknown_key_in_the_workload_is_refused(tmp_path: Path):
    path = tmp_path / "workload.yaml"
    path.write_text(workload_file("w1").read_text() + "\nstep: 3\n")
    with pytest.raises(TypeError, match="step"):
        Workload.load(path)


@pytest.mark.parametrize(("key", "value"), [("accumulation", [1, 3]), ("image_side", 30)])
def test_sizes_that_do_not_fit_are_refused(key: str, value: Any):
    with pytest.raises(ValueError, match=f"{key} must .*, got 3"):
        Workload.load(workload_file("w1")).changed({key: value})


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_as_many_and_as_long_as_asked_for(name: str):
    workload = Workload.load(workload_file(name))
    lengths = [len(text.split()) for text in make_prompts(workload)]
    assert len(lengths) == workload.prompts_per_step * (workload.warmup_steps + workload.steps)
    assert workload.prompt_tokens[0] <= min(lengths) <= max(lengths) <= workload.prompt_tokens[1]


# ------------------------------------------------------------------------------------------------ completion lengths


def survival(mean: float, sigma: float, most: int) -> torch.Tensor:
    """[most] P(T > t) of the chain, by its transition matrix."""
    stop, advance = (torch.tensor(values, dtype=torch.float64) for values in stages(mean, sigma))
    matrix = torch.diag(1 - stop - advance) + torch.diag(advance[:-1], 1)
    state, left = torch.zeros(len(stop), dtype=torch.float64), []
    state[0] = 1
    for _ in range(most):
        state = state @ matrix
        left.append(state.sum())
    return torch.stack(left)


def test_a_geometric_length_has_one_stage():
    assert stages(40, 0) == ([1 / 40], [0.0])
    torch.testing.assert_close(survival(40, 0, 3), torch.tensor([39 / 40, (39 / 40) ** 2, (39 / 40) ** 3]).double())


def test_the_stages_have_the_mean_and_nearly_the_distribution_of_a_log_normal():
    left = survival(200, 1.0, 20_000)
    assert 1 + left.sum() == pytest.approx(200, rel=1e-3)
    normal = statistics.NormalDist(math.log(200) - 0.5, 1.0)
    exact = torch.tensor([1 - normal.cdf(math.log(t)) for t in range(1, 1025)]).double()
    assert (left[:1024] - exact).abs().max() < 0.035
    geometric = torch.tensor([(1 - 1 / 200) ** t for t in range(1, 1025)]).double()
    assert (geometric - exact).abs().max() > 0.05


def test_too_short_log_normal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"mean_completion_tokens is too small for length_sigma 1\.0, got 3"):
        stages(3, 1.0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("w1", {}), ("w3", {}), ("w4", {"mean_completion_tokens": 60, "length_sigma": 1.0})],
)
def test_the_stop_token_has_the_probability_of_the_stage(build: Any, name: str, changes: dict[str, Any]):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    bench = build(minute(name, **changes))
    loader = AutoModelForImageTextToText if bench.workload.image_side else AutoModelForCausalLM
    model = loader.from_pretrained(bench.folder)
    stop, advance = stages(bench.workload.mean_completion_tokens, bench.workload.length_sigma)
    for k, (stops, advances) in enumerate(zip(stop, advance, strict=True)):
        ids = torch.tensor([words_of_stage(bench.workload, k)[:5]])
        with torch.no_grad():
            probabilities = model(input_ids=ids).logits.softmax(-1)
        torch.testing.assert_close(probabilities[..., EOS], torch.full(ids.shape, stops), atol=0.02, rtol=0.05)
        following = probabilities[..., list(words_of_stage(bench.workload, k + 1))].sum(-1) if advances else 0 * ids
        torch.testing.assert_close(following.float(), torch.full(ids.shape, advances), atol=0.02, rtol=0.05)


# ------------------------------------------------------------------------------------------------------------- floor


def test_operations_of_a_forward_pass_are_those_that_are_counted():
    """Two completions of 1 token need no input of their own; eager attention multiplies with masked keys, too."""
    import transformers as tf

    shape = {"layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "feed_forward": 24, "vocabulary": 50}
    config = tf.Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = tf.Qwen2ForCausalLM(config).eval()
        model(input_ids=torch.ones(1, 7, dtype=torch.long), logits_to_keep=1)
    masked = 2 * 2 * 2 * 16 * (7 * 7 - 7 * 8 // 2)
    assert forward_flops(shape, 7, [1]) == counter.get_total_flops() - masked
    assert forward_flops(shape, 7, [1, 1]) - forward_flops(shape, 7, [1]) == 2 * 16 * 50
    # A completion of 3 tokens: 2 inputs and 2 further logits. As a longer prompt, it has the same inputs.
    assert forward_flops(shape, 7, [3]) == forward_flops(shape, 9, [1]) + 2 * (2 * 16 * 50)


# ------------------------------------------------------------------------------------------------------------ the runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accumulation", "beta"), [pytest.param("w1", 1, 0.0, marks=NIGHTLY), ("w3", 2, 0.04)])
@pytest.mark.parametrize("side", versus_trl.SIDES)
def test_a_child_measures_one_run(build: Any, name: str, side: str, accumulation: int, beta: float):
    if side == "trl":
        pytest.importorskip("trl", minversion="1.16")
    bench = build(minute(name, beta=beta))
    outcome = bench.measure(side, accumulation if side == "trl" else 1, steps=2, seed=0)
    steps = outcome["steps"]
    assert len(steps) == 2
    assert outcome["completions"] <= 2 * bench.workload.completions_per_step
    if beta:  # without, ours leaves out groups of equal rewards
        assert outcome["completions"] == 2 * bench.workload.completions_per_step
    assert outcome["tokens"] == sum(step["tokens"] for step in steps) <= 8 * outcome["completions"]
    assert outcome["cpu_seconds"] == pytest.approx(sum(sum(step["phases"].values()) for step in steps))
    assert outcome["ms_per_token"] == pytest.approx(1000 * outcome["cpu_seconds"] / outcome["tokens"])
    assert 0 <= outcome["training_mib"] < outcome["peak_mib"]  # 0: loading took more than so small a training
    if side == "ours":
        expected = {"sampling", "rewards", "update forward", "update backward", "optimizer", "other", "child processes"}
        assert steps[0]["phases"].keys() == expected | ({"reference"} if beta else set())
        assert 0 <= outcome["padding"] < 1
        assert all(step["gflops"] > 0 for step in steps)
    if name == "w3" and side == "ours":
        assert outcome["images"] == {
            "read": 2,
            "preprocessed": 2,
            "encoded by the policy": 4,
            "encoded by the reference": 2,
        }
    if name == "w3" and side == "trl":  # once per completion and micro-batch
        assert all(count >= 4 for count in outcome["images"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("w1", marks=NIGHTLY), "w3"])
def test_both_sides_have_one_loss(build: Any, name: str):
    pytest.importorskip("trl", minversion="1.16")
    losses = build(minute(name)).losses()
    assert abs(losses["trl"]) > 1e-2
    assert losses["difference"] < versus_trl.LOSS_TOLERANCE
    assert losses["gradient_difference"] < versus_trl.LOSS_TOLERANCE


def test_our_side_has_no_batch_shape(build: Any):
    with pytest.raises(ValueError, match="accumulation must be 1, got 2"):
        training_runs.run_ours(minute("w1"), Path(), 2, steps=1, seed=0)


def test_a_failing_child_is_shown(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"ours failed:(.|\n)*accumulation"):
        Bench(minute("w1"), tmp_path, threads=1).measure("ours", "none", steps=1, seed=0)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the arithmetic


def test_the_meter_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch):
    """Marks at 1 (construction), 3 (end of the warm-up), 5 (sampling begins), 9, 10 (other begins, end), 14."""
    seconds = iter([1.0, 3.0, 5.0, 9.0, 10.0, 14.0])
    monkeypatch.setattr(training_runs.time, "process_time", lambda: next(seconds))
    children = iter([(7.0, 10.0), (7.5, 30.0), (7.5, 20.0)])  # CPU seconds and MiB at the end of each step
    monkeypatch.setattr(training_runs, "children_usage", lambda: next(children))
    monkeypatch.setattr(training_runs, "peak_mib", lambda device: 100.0)
    meter = Meter(Workload.load(workload_file("w1")))
    meter.trained(torch.tensor([[1, 1, 1]]))
    meter.step_ended()
    meter.begin("sampling")
    meter.begin("other")
    meter.trained(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    meter.step_ended()
    meter.trained(torch.tensor([[1, 1, 1]]))
    meter.step_ended()
    outcome = meter.outcome()
    assert [step["phases"] for step in outcome["steps"]] == [
        {"other": 3.0, "sampling": 4.0, "child processes": 0.5},
        {"other": 4.0, "child processes": 0.0},
    ]
    assert [step["cpu_seconds"] for step in outcome["steps"]] == [7.5, 4.0]
    assert [step["tokens"] for step in outcome["steps"]] == [3, 3]
    assert (outcome["cpu_seconds"], outcome["tokens"], outcome["completions"]) == (11.5, 6, 3)
    assert outcome["ms_per_token"] == pytest.approx(11500 / 6)
    assert (outcome["peak_mib"], outcome["training_mib"]) == (130.0, 30.0)


def run_outcome(steps: list[tuple[float, int]], completions: int, **more: Any) -> dict[str, Any]:
    """Return the output of a child. Args: steps: CPU seconds and tokens."""
    seconds, tokens = (sum(values) for values in zip(*steps, strict=True))
    phases = [{"sampling": 0.75 * s, "other": 0.25 * s} for s, _ in steps]
    each = [
        {"cpu_seconds": s, "tokens": n, "gflops": 10.0, "phases": p} for (s, n), p in zip(steps, phases, strict=True)
    ]
    result = {"ms_per_token": 1000 * seconds / tokens, "cpu_seconds": seconds, "tokens": tokens, "steps": each}
    memory = {"peak_mib": 500.0, "training_mib": 200.0, "completions": completions, "length_std": 3.0}
    return result | memory | more


def a_summary() -> dict[str, Any]:
    """Two pairs, of two steps each."""
    rate = {"gflops_per_second": 20.0, "padding": 0.25}
    return summarize(
        [
            {"trl": run_outcome([(1.0, 100), (3.0, 100)], 9), "ours": run_outcome([(0.5, 100), (0.5, 100)], 9, **rate)},
            {
                "trl": run_outcome([(4.0, 200), (4.0, 200)], 16, peak_mib=700.0),
                "ours": run_outcome([(1.0, 250), (3.0, 250)], 16, **rate),
            },
        ]
    )


def test_summary_by_hand():
    summary = a_summary()
    assert summary["ratio"] == {"median": 3.25, "min": 2.5, "max": 4.0}  # 20 / 5 and 20 / 8 ms per token
    assert summary["trl"]["ms_per_token"] == {"median": 20.0, "min": 10.0, "max": 30.0}  # of the four steps
    assert summary["ours"]["cpu_seconds_per_step"] == {"median": 0.75, "min": 0.5, "max": 3.0}
    assert (summary["trl"]["steps"], summary["trl"]["tokens"], summary["trl"]["mean_length"]) == (4, 600, 24.0)
    assert (summary["trl"]["peak_mib"], summary["ours"]["peak_mib"]) == (700.0, 500.0)
    assert summary["ours"]["padding"] == 0.25
    assert summary["ours"]["phases"] == {"sampling": 0.9375, "other": 0.3125}
    assert summary["floor"]["cpu_seconds_per_step"] == {"median": 0.5, "min": 0.5, "max": 0.5}  # 10 over 20
    assert summary["floor"]["step_over_floor"] == {"median": 1.5, "min": 1.0, "max": 6.0}
    assert summary["length_difference"] == pytest.approx((28 - 24) / math.hypot(0.6, 0.6))


def test_each_bar_can_fail():
    workload, losses = minute("w3", required_ratio=3.0), {"difference": 1e-6, "gradient_difference": 1e-6}
    summary = a_summary()
    summary["length_difference"] = 3.9
    once = dict.fromkeys(("read", "preprocessed", "encoded by the reference"), 2.0)
    summary["ours"]["images"] = once
    assert all(bars_of(summary, losses, workload).values())

    def failing(losses: dict[str, float] = losses, workload: Workload = workload, **of_ours: Any) -> list[str]:
        changed = summary | {"ours": summary["ours"] | of_ours}
        return [bar for bar, holds in bars_of(changed, losses, workload).items() if not holds]

    assert failing(workload=workload.changed({"required_ratio": 3.5})) == ["median ratio >= 3.5"]
    assert failing(peak_mib=701.0) == ["peak memory at most TRL's"]
    assert failing(losses | {"gradient_difference": 2e-5}) == ["loss and gradient within 1e-05 of TRL's"]
    assert failing(images=once | {"read": 4.0}) == ["each image read, preprocessed and encoded once"]
    summary["length_difference"] = -4.1
    assert failing() == ["mean lengths within 4 standard errors"]


@SLOW
def test_a_recorded_result_replaces_only_its_own_workload_and_beta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl")  # its version is recorded
    monkeypatch.setattr(versus_trl, "RESULT", tmp_path / "results" / "versus_trl.json")
    for name, beta, value in ("w1", 0.04, 1), ("w1", 0.0, 2), ("w2", 0.04, 3), ("w1", 0.04, 4):
        versus_trl.write(name, {"value": value}, minute(name, beta=beta), threads=1)
    results = json.loads(versus_trl.RESULT.read_text())
    assert {name: entry["value"] for name, entry in results.items()} == {
        "w1, beta 0.04": 4,
        "w1, beta 0": 2,
        "w2, beta 0.04": 3,
    }
    assert results["w1, beta 0.04"].keys() >= {"date", "versions", "command", "machine", "workload"}


# ----------------------------------------------------------------------------------------------------------- the curves


def test_every_point_of_the_curves_is_a_workload():
    curves = cost_curves.Curves.load(workload_file("curves"), {})
    assert curves.axes.keys() == cost_curves.AXES.keys()
    for name, values in curves.axes.items():
        points = [cost_curves.AXES[name][1](curves.base, value) for value in values]
        assert len({str(dataclasses.asdict(point)) for point in points}) == len(values) >= 3
        assert all(point.model["width"] % point.model["heads"] == 0 for point in points)


def test_an_unknown_axis_is_refused(tmp_path: Path):
    settings = yaml.safe_load(workload_file("curves").read_text())
    settings["axes"] = {"layers": [1, 2]}
    path = tmp_path / "curves.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"axes must be of num_generations, .*got layers"):
        cost_curves.Curves.load(path, {})


class FakeBench:
    """Costs by hand: TRL 8 / accumulation, ours 2."""

    def __init__(self, workload: Workload, folder: Path, threads: int) -> None:
        self.workload = workload

    def build(self) -> None:
        pass

    def sweep(self) -> dict[int, float]:
        return {n: 8 / n for n in self.workload.accumulation}

    def measure(self, side: str, accumulation: int, steps: int, seed: int) -> dict[str, float]:
        assert (side, accumulation) == ("ours", 1)
        return {"ms_per_token": 2.0 * self.workload.num_generations}


def test_curves_are_drawn_and_written(tmp_path: Path):
    from rich.console import Console

    curves = cost_curves.Curves(minute("w1"), {"num_generations": [1, 2]})
    (result := tmp_path / "curves.json").write_text('{"width": 1}')
    facts = {"date": "today"}
    pictures = tmp_path / "pictures"
    cost_curves.draw_all(curves, FakeBench, lambda *_: facts, 1, Console(quiet=True), result=result, pictures=pictures)
    results = json.loads(result.read_text())
    assert results["width"] == 1
    points = results["num_generations"]["points"]
    assert results["num_generations"]["date"] == "today"
    assert {n: (point["trl"], point["ours"], point["ratio"]) for n, point in points.items()} == {
        "1": (4.0, 2.0, 2.0),
        "2": (4.0, 4.0, 1.0),
    }
    assert (pictures / "cost_num_generations.png").read_bytes().startswith(b"\x89PNG")


def test_the_peak_is_the_largest_sum_held_at_once():
    """Two tensors of 4 MiB after one of 8 that is gone by then."""

    def work() -> None:
        torch.zeros(2 * 2**20).sum()
        kept = [torch.zeros(2**20) for _ in range(2)]
        kept.append(torch.zeros(2**18))

    assert peak_bytes(work) == pytest.approx(9 * 2**20, rel=1e-3)
    assert mib(9 * 2**20) == 9


def event(name: str, start: float, own: float = 0.0, *, is_user: bool = False) -> SimpleNamespace:
    """An event of torch's profiler: times in microseconds, self time only."""
    times = SimpleNamespace(start=start)
    return SimpleNamespace(name=name, time_range=times, self_cpu_time_total=own, is_user_annotation=is_user)


def test_the_profile_of_a_step_by_hand():
    events = [
        event("aten::mm", 50e6, 9e6),  # before the first mark
        event(profile_step.MARK + "sampling", 100e6, is_user=True),
        event("Optimizer.step#AdamW.step", 101e6, 3e6, is_user=True),
        event("aten::mm", 102e6, 4e6),
        event(profile_step.MARK + "rewards", 110e6, is_user=True),
        event("aten::mul", 111e6, 1e6),
        event(profile_step.MARK + "sampling", 113e6, is_user=True),
        event("aten::addmm", 114e6, 0.5e6),
        event(profile_step.MARK + "other", 115e6, is_user=True),
    ]
    # Half of the time, the process did not run.
    phases = profile_step.seconds_by_phase(reversed(events), {"sampling": 6.0, "rewards": 1.5})
    assert phases == {
        "sampling": {"Python": (6 + 1.5) / 2, "matrix products": 4.5 / 2},
        "rewards": {"Python": 2 / 2, "elementwise, reductions": 1 / 2},
    }


def test_operators_have_groups():
    names = {
        "matrix products": ["aten::mm", "aten::bmm"],
        "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu_backward"],
        "softmax, log-softmax": ["aten::_log_softmax_backward_data", "aten::_softmax"],
        "copies, indexing": ["aten::copy_", "aten::index_select", "aten::slice_backward"],
        "dispatch": ["aten::linear", "aten::t", "aten::slice", "aten::to", "MmBackward0", "autograd::engine::x"],
        "elementwise, reductions": ["aten::tanh", "aten::mul", "aten::sum"],
    }
    assert {group: [profile_step.group_of(name) for name in some] for group, some in names.items()} == {
        group: [group] * len(some) for group, some in names.items()
    }


@pytest.fixture
def prove_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script: what it imports lies beside it."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_ranks")


@SLOW
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
