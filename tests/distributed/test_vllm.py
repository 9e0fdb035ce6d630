"""Two ranks that sample with vLLM, on one server or each with a vLLM of its own, train as one device does."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.distributed import vllm_colocate
from tests.distributed.harness import once, run_ranks
from tests.distributed.steps import save_policy
from tests.distributed.vllm import STEPS, train
from tests.marks import NIGHTLY, SLOW, by_turns, only, selected
from tests.vllm.fakes import serving


def trained(
    strategy: str, folder: Path, kind: str, *, is_killed: bool = False
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Run with an own server. Returns: the logs, and the weights.

    Args:
        strategy: Strategy of the run.
        folder: Folder of the policy.
        kind: What is sent and when; a key of `RATES`.
        is_killed: The server dies in the middle of the rollout that it samples from the weights of the second step, and
            is started again.
    """
    with serving(AutoConfig.from_pretrained(folder / "policy"), name=str(folder / "policy")) as server:
        deaths: list[int] = []

        def die_once(count: int) -> None:
            fake = server.fake
            names = [name.split("-")[2:3] for name in (fake.adapters if kind == "adapters" else [fake.version])]
            is_second = names == [["3" if kind == "adapters" else "2"]]  # the base is the first update
            if is_killed and not deaths and is_second and count % 8 == 5:
                deaths.append(count)
                server.kill()
                restart = threading.Timer(0.3, server.restart)
                restart.daemon = True
                restart.start()

        server.before_completion = die_once
        if strategy == "one":
            train(strategy, server.url, folder, kind)
        else:
            run_ranks("tests.distributed.vllm", strategy, server.url, folder, kind)
        # One update per step: the second rank sends nothing. The restarted server got the second and the third one. An
        # asynchronous rollout that is lost is sampled again from the third one.
        assert len(deaths) == is_killed
        lost = is_killed * (2 if kind == "asynchronous" else 1)
        sent = 1 if kind == "asynchronous, one rank loses" else STEPS - lost  # its weights do not change
        event, others = ("adapter", 1) if kind == "adapters" else ("start", sent)
        assert server.fake.events.count(event) == sent
        assert server.fake.events.count("start") == others
    return json.loads((folder / f"{strategy}.json").read_text()), torch.load(folder / f"{strategy}.pt")


@SLOW
@pytest.mark.parametrize(
    ("strategy", "kind", "is_killed"),
    [
        pytest.param("ddp", "merged", False, marks=NIGHTLY),
        pytest.param("ddp", "merged", True, marks=NIGHTLY),
        ("ddp", "adapters", True),
        pytest.param("zero2", "merged", True, marks=NIGHTLY),
        pytest.param("zero3", "merged", True, marks=NIGHTLY),
        ("zero3", "adapters", False),
        pytest.param("fsdp2", "merged", False, marks=NIGHTLY),
    ],
)
def test_two_ranks_on_a_server_train_as_one_device(strategy, kind, is_killed, tmp_path):
    """Also if the server dies: both ranks wait until rank 0 has sent the weights again."""
    save_policy(tmp_path)
    steps, weights = trained("one", tmp_path, kind)
    found, own = trained(strategy, tmp_path, kind, is_killed=is_killed)
    for name in ("reward/mean", "rollout/length"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in steps]), name
    assert max(step["policy/rollout_difference_max"] for step in found) < 1e-4
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@SLOW
@pytest.mark.parametrize(
    ("strategy", "is_killed"),
    [
        pytest.param("ddp", False, marks=NIGHTLY),
        ("ddp", True),
        pytest.param("zero3", True, marks=NIGHTLY),
        pytest.param("fsdp2", False, marks=NIGHTLY),
    ],
)
def test_two_ranks_with_asynchronous_rollouts_train_as_one_device(strategy, is_killed, tmp_path):
    """Also if the server dies during a rollout in the background: it is sampled again, from newer weights."""
    save_policy(tmp_path)
    steps, weights = trained("one", tmp_path, "asynchronous", is_killed=is_killed)
    found, own = trained(strategy, tmp_path, "asynchronous", is_killed=is_killed)
    staleness = [0, 1, 0 if is_killed else 1]
    for name in ("reward/mean", "rollout/length", "policy/rollout_kl"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in steps], abs=1e-4), name
    for run in (steps, found):
        assert [step["rollout/staleness"] for step in run] == staleness
        assert [step["policy/rollout_difference_max"] > 1e-2 for step in run] == [lag > 0 for lag in staleness]
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@SLOW
@pytest.mark.parametrize("strategy", only([], ["ddp", "zero3"], nightly=["zero3"]))
def test_one_of_two_ranks_may_lose_its_rollout(strategy, tmp_path):
    """It samples its prompts again, while the other rank has its groups. The weights stay, so nothing else changes."""
    save_policy(tmp_path)
    kind = "asynchronous, one rank loses"
    steps, _ = trained("one", tmp_path, kind)
    found, _ = trained(strategy, tmp_path, kind)
    assert [step["rollout/staleness"] for step in steps] == [0, 1, 1]
    assert [step["rollout/staleness"] for step in found] == [0, 0.5, 1]
    for name in ("reward/mean", "rollout/length"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in steps]), name


# ------------------------------------------------------------------------------------- colocate, with the fake vLLM

EXACT = ["full", "lora", "adapters", "adapters, asleep", "asleep", "a rank without prompts"]
TOGETHER = {
    "tensor-parallel": "full",
    "tensor-parallel, a rank without prompts": "a rank without prompts",
    "tensor-parallel, shared groups": "full",
}
"""Cases of tensor-parallel groups, and those of one device with the same prompts."""


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Runs the cases of a strategy that are selected, once. Returns what a case logged, the errors, and the weights."""
    folder = tmp_path_factory.mktemp("colocate")
    vllm_colocate.save_policy(folder)

    @once
    def run(strategy: str, world_size: int) -> None:
        if strategy == "one":
            names = {TOGETHER.get(name, name) for name in selected(request, "name")} & set(EXACT)
        else:
            names = set(selected(request, "name", strategy=strategy, world_size=world_size))
        run_ranks("tests.distributed.vllm_colocate", "FAKE", strategy, folder, *sorted(names), world_size=world_size)

    def result(strategy: str, name: str, world_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        run(strategy, world_size)
        path = folder / f"{strategy} {world_size}, {name}"
        return json.loads(path.with_suffix(".json").read_text()), torch.load(path.with_suffix(".pt"))

    return result


STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")


def matrix(runs_under: Mapping[str, str]) -> pytest.MarkDecorator:
    """All strategies and cases. Args: runs_under: Cases, and the strategy under which each is not nightly."""
    cases = [
        pytest.param(strategy, name, marks=() if strategy == own else NIGHTLY)
        for strategy in STRATEGIES
        for name, own in runs_under.items()
    ]
    return pytest.mark.parametrize(("strategy", "name"), cases)


TWO = pytest.mark.parametrize("world_size", [2])


@SLOW
@TWO
@matrix(by_turns(EXACT, ("zero3", "fsdp2", "fsdp2")))
def test_two_ranks_with_a_vllm_each_train_as_one_device(results, strategy, name, world_size):
    """Also the completions are those of one device: they follow from the seeds of the prompts."""
    compare(results("one", name, 1), results(strategy, name, world_size))


@SLOW
@TWO
@matrix(by_turns(TOGETHER, ("fsdp2", "zero3")))
def test_tensor_parallel_groups_train_as_one_device(results, strategy, name, world_size):
    """The fake asserts that the ranks of a group sample the same requests."""
    compare(results("one", TOGETHER[name], 1), results(strategy, name, world_size))


@SLOW
@pytest.mark.parametrize("name", list(TOGETHER)[:2])
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 4), pytest.param("hsdp", 4, marks=NIGHTLY)])
def test_two_tensor_parallel_groups_train_as_one_device(results, strategy, name, world_size):
    compare(results("one", TOGETHER[name], 1), results(strategy, name, world_size))


def compare(of_one: Any, of_several: Any) -> None:
    """Compare metrics and weights of one device and of several ranks."""
    (one, weights), (two, own) = of_one, of_several
    assert len(two["steps"]) == vllm_colocate.STEPS
    for metric in ("reward/mean", "rollout/length", "policy/entropy"):
        values = [[step[metric] for step in found["steps"]] for found in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-4), metric
    assert max(step["policy/rollout_difference_max"] for step in two["steps"]) < 1e-4
    assert own.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(own[key], weight, rtol=1e-3, atol=1e-4, msg=key)


@SLOW
@TWO
@matrix({"late": "fsdp2"})
def test_weights_that_come_late_are_found_with_two_ranks(results, strategy, name, world_size):
    first, *later = (step["policy/rollout_difference_max"] for step in results(strategy, name, world_size)[0]["steps"])
    assert first < 1e-4
    assert min(later) > 0.1


@SLOW
@TWO
@matrix({"dropped": "fsdp2"})
def test_a_missing_group_of_layers_is_found_with_two_ranks(results, strategy, name, world_size):
    for error in results(strategy, name, world_size)[0]["errors"]:
        assert "The trainer sent no value for model.layers.0." in error


@SLOW
@TWO
@matrix({"failing": "zero3"})
def test_an_error_of_one_rank_raises_on_all_ranks(results, strategy, name, world_size):
    """The other ranks would otherwise wait in the collective of the next layer."""
    first, last = results(strategy, name, world_size)[0]["errors"]
    assert last == "KeyError: 'a fault of the last rank'"
    assert first == f"RuntimeError: {last}"


@SLOW
@TWO
@pytest.mark.parametrize(
    ("name", "owner", "message"),
    [
        ("tensor-parallel, too long", 0, "ValueError: a prompt is too long"),
        ("tensor-parallel, a reward fails", 1, "KeyError: 'a fault of the last rank'"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp"])
def test_an_error_of_one_rank_ends_its_tensor_parallel_group(results, strategy, name, owner, message, world_size):
    """The other rank would otherwise wait in vLLM's collectives."""
    errors = results(strategy, name, world_size)[0]["errors"]
    assert errors[owner] == message
    assert errors[1 - owner] == f"RuntimeError: Sampling failed on rank {owner}: {message}"
