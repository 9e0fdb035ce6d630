"""Logs, evaluations and files cover all ranks, and equal those of one device."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.marks import SLOW

pytestmark = SLOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one device and two ranks have left what they found."""
    folder = tmp_path_factory.mktemp("logs")
    for world_size in (1, 2):
        said = run_ranks("tests.distributed.logs", folder, world_size, world_size=world_size, timeout=240)
        assert "sync_dist" not in "".join(said), "Lightning's warning about values that differ between ranks"
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """Return the results, by number of ranks and rank."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("of1-0", "of2-0", "of2-1")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def is_own(name: str) -> bool:
    """True for what is measured, and differs from run to run, and for the largest rounding error of a log-prob."""
    measured = ("rollout/tokens_per_second", "rollout/padding", "policy/rollout_difference_max")
    return name.startswith("time/") or name in measured


def test_every_rank_has_the_same_metrics_in_the_same_order(found):
    one, other = found["of2-0"]["train"], found["of2-1"]["train"]
    assert one["names"] == other["names"]
    for step, step_of_other in zip(one["steps"], other["steps"], strict=True):
        assert {k: v for k, v in step.items() if k != "time/update"} == {
            k: v for k, v in step_of_other.items() if k != "time/update"
        }


def test_training_metrics_are_those_of_one_device(found):
    assert len(found["of1-0"]["train"]["steps"]) == 2 * 3
    pairs = zip(found["of1-0"]["train"]["steps"], found["of2-0"]["train"]["steps"], strict=True)
    for number, (want, got) in enumerate(pairs):
        assert want.keys() == got.keys(), number
        for name in want:
            if not is_own(name):
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), (number, name)
    first = found["of2-0"]["train"]["steps"][0]
    assert first["reward/failures/fails/invalid_value"] == 8, "of the second rank's two prompts"
    assert first["reward/seen"] == 2
    assert "source/right/letters" in first


def test_what_callbacks_monitor_is_the_same_on_every_rank(found):
    results = [found[name]["train"] for name in ("of1-0", "of2-0", "of2-1")]
    assert {result["epochs"] for result in results} == {2}, "stopped after the second validation"
    for result in results[1:]:
        assert result["best"] == pytest.approx(results[0]["best"])
        assert result["monitored"] == pytest.approx(results[0]["monitored"])


def test_a_callback_can_read_a_validation_metric_on_one_rank_only(found):
    """Lightning reduces a metric over the ranks when it is first read."""
    one, *ranks = (found[name]["train"] for name in ("of1-0", "of2-0", "of2-1"))
    for result in (one, *ranks):
        assert result["read"] == pytest.approx(one["read"])
        assert result["read"][-1] == pytest.approx(one["monitored"]["val/letters"])


def test_completions_are_in_one_file_in_the_order_of_the_prompts(folder):
    one, two = (lines_of(folder / name / "train" / "completions.jsonl") for name in ("of1", "of2"))
    assert [line["prompt_index"] for line in two] == [i for i in range(9) for _ in range(4)] * 2
    assert [line.pop("rank") for line in two[:36]] == [0] * 4 + ([1] * 4 + [0] * 4) * 4
    for line, other in zip(one, two, strict=True):
        line.pop("rank"), other.pop("rank", None)
        assert other.pop("advantage") == pytest.approx(line.pop("advantage"), abs=1e-5)
        assert other == line
    assert one[0]["note"] == "x", "what cannot be sent is text"
    assert not list((folder / "of2" / "train").glob("*rank*"))


def test_tokens_of_all_ranks_belong_to_the_lines_of_their_completions(folder):
    one, two = (lines_of(folder / name / "train" / "tokens.jsonl") for name in ("of1", "of2"))
    completions = lines_of(folder / "of2" / "train" / "completions.jsonl")
    by_rollout = {rollout: [line for line in completions if line["rollout"] == rollout] for rollout in range(6)}
    assert len(one) > 20
    for line, other in zip(one, two, strict=True):
        assert len(other["tokens"]) == by_rollout[other["rollout"]][other["completion"]]["length"]
        for name in ("old_logprobs", "logprobs"):
            assert other.pop(name) == pytest.approx(line.pop(name), abs=1e-3), name
        assert other == line


def test_what_ran_is_recorded_once(folder):
    record = json.loads((folder / "of2" / "train" / "run.json").read_text())
    assert (record["status"], record["device"]["world_size"]) == ("finished", 2)


def test_before_and_after_are_of_all_prompts(folder):
    one, two = (json.loads((folder / name / "train" / "summary.json").read_text()) for name in ("of1", "of2"))
    assert two["num_prompts"] == one["num_prompts"] == 5
    for when in ("before", "after"):
        assert two[when]["sampled"] == pytest.approx(one[when]["sampled"])
        assert two[when]["greedy"] == pytest.approx(one[when]["greedy"])
    assert (folder / "of2" / "train" / "curves.png").stat().st_size > 0


def test_validation_counts_every_prompt_once(found):
    for rank in ("of2-0", "of2-1"):
        assert found[rank]["validate"] == pytest.approx(found["of1-0"]["validate"])


@pytest.mark.parametrize("loader", ["source", "loader"])
def test_predictions_are_in_one_file_in_the_order_of_the_prompts(folder, found, loader):
    one, two = (lines_of(folder / name / "predict" / loader / "predictions.jsonl") for name in ("of1", "of2"))
    assert two == one
    assert len(two) == 9 * 2
    assert {result["predict"]["num_lines"] for result in found.values()} == {18}
