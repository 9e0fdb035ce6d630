"""A run that resumes on another number of ranks continues with the same prompts, completions and losses."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from tests.distributed import harness, vision
from tests.distributed.elastic import Leg, run_legs
from tests.distributed.resume import FAMILY
from tests.distributed.steps import save_policy
from tests.marks import NIGHTLY, SLOW

METRICS = ("policy/loss", "policy/kl", "policy/grad_norm", "lr", "epoch")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The run on one rank that nothing interrupts, of a leg's subject and policy; done once for all its legs."""

    @harness.once
    def run(subject, policy):
        folder = tmp_path_factory.mktemp("unbroken")
        save(folder, subject)
        return run_legs(folder, Leg(1, subject=subject, policy=dict(policy)))[0]

    return lambda leg: run(leg.subject, tuple(leg.policy.items()))


def save(folder, subject="text"):
    """The policy that all runs start from."""
    if "images" in subject:
        vision.save_policy(folder, FAMILY)
    else:
        save_policy(folder)


def compare_runs(got, want, *, tolerance=1e-6, metrics=METRICS):
    """The same rows, completions and losses by optimizer step, and the same weights."""
    assert [leg.get("error") for leg in [*got, want]] == [None] * (len(got) + 1)
    assert [rollout for leg in got for rollout in leg["rollouts"]] == want["rollouts"]
    steps = {number: values for leg in got for number, values in leg["steps"].items()}
    assert steps.keys() == want["steps"].keys()
    for number, values in want["steps"].items():
        of_step = {name: values[name] for name in metrics if name in values}
        assert {name: steps[number][name] for name in of_step} == pytest.approx(
            of_step, rel=tolerance, abs=tolerance
        ), number
    for name, weight in want["weights"].items():
        torch.testing.assert_close(got[-1]["weights"][name], weight, atol=10 * tolerance, rtol=0)


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([Leg(1, 3), Leg(2, 9), Leg(1)], id="inside cycles", marks=SLOW),
        pytest.param([Leg(1, 4), Leg(2, 12), Leg(1)], id="between cycles, in the middle of an epoch", marks=NIGHTLY),
        pytest.param([Leg(2, 3), Leg(2, 9, ranks_per_group=2), Leg(1)], id="shared groups", marks=NIGHTLY),
        pytest.param(
            [Leg(1, 3), Leg(2, 8, accumulate=1), Leg(1, 10, accumulate=4), Leg(1)], id="micro-batches", marks=NIGHTLY
        ),
    ],
)
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, unbroken, legs):
    save(tmp_path)
    compare_runs(run_legs(tmp_path, *legs), unbroken(legs[0]))


@NIGHTLY
@pytest.mark.parametrize("subject", ["further text", "images", "further images"])
def test_replaced_prompts_and_images_are_those_of_the_unbroken_run(tmp_path, unbroken, subject):
    save(tmp_path, subject)
    legs = [Leg(1, 3), Leg(2, 9), Leg(2, 11, ranks_per_group=2), Leg(1)]
    legs = [replace(leg, subject=subject) for leg in legs]
    # The rounding of a vision model's gradients differs more between numbers of ranks, and AdamW amplifies it.
    tolerance = 1e-5 if "images" in subject else 1e-6
    compare_runs(run_legs(tmp_path, *legs), unbroken(legs[0]), tolerance=tolerance)


@SLOW
@pytest.mark.parametrize(
    "stops",
    [pytest.param((3, 9), id="inside cycles"), pytest.param((4, 12), id="between cycles", marks=NIGHTLY)],
)
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path, unbroken, stops):
    save(tmp_path)
    legs = [Leg(2, stops[0], "fsdp2"), Leg(1, stops[1], "fsdp2"), Leg(2, strategy="fsdp2")]
    compare_runs(run_legs(tmp_path, *legs), unbroken(legs[0]))


@SLOW
@pytest.mark.parametrize(
    "legs",
    [
        pytest.param(
            [Leg(4, 6, "hsdp"), Leg(2, 9, "fsdp2, one file"), Leg(2, strategy="fsdp2")], id="folder, then file"
        ),
        pytest.param([Leg(4, 3, "fsdp2"), Leg(4, strategy="hsdp")], id="fsdp2, then hybrid", marks=NIGHTLY),
        pytest.param([Leg(4, 5, "hsdp, one file"), Leg(4, strategy="hsdp")], id="file of hybrid", marks=NIGHTLY),
    ],
)
def test_hybrid_sharding_continues_runs_of_fsdp2_and_the_other_way_round(tmp_path, unbroken, legs):
    save(tmp_path)
    compare_runs(run_legs(tmp_path, *legs), unbroken(legs[0]))


@SLOW
@pytest.mark.parametrize(
    ("strategy", "before", "after", "policy"),
    [
        pytest.param("zero1", 1, 2, {}, id="zero1, 1 -> 2", marks=NIGHTLY),
        pytest.param("zero2", 2, 1, {}, id="zero2, 2 -> 1", marks=NIGHTLY),
        pytest.param("zero3", 2, 1, {"freeze_layers": 1}, id="zero3, 2 -> 1, frozen layer"),
        pytest.param("zero3", 1, 2, {}, id="zero3, 1 -> 2", marks=NIGHTLY),
    ],
)
def test_zero_resumes_on_another_number_of_ranks_after_the_command_that_it_names(
    tmp_path, unbroken, strategy, before, after, policy
):
    save(tmp_path)
    legs = [Leg(before, 3, strategy, policy=policy), Leg(after, strategy=strategy, policy=policy)]
    first, refused = run_legs(tmp_path, *legs)
    said = r"was saved by (\d) rank\(s\), and this run has (\d): merge .* by the command\n(.*)\nThen resume"
    saved, this, command = re.search(said, refused["error"]).groups()
    assert (int(saved), int(this)) == (before, after)
    python, option, module, *arguments = shlex.split(command)
    assert (python, option) == ("python", "-m")
    harness.run_ranks(module, *arguments, world_size=1)
    (resumed,) = run_legs(tmp_path, legs[1])
    # In the step after a resume, DeepSpeed has no gradient norm to log.
    compare_runs([first, resumed], unbroken(legs[0]), metrics=[*set(METRICS) - {"policy/grad_norm"}])
