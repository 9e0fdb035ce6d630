"""Two ranks that need further prompts unequally: nobody waits for ever, and both train on what one device would."""

from pathlib import Path

import pytest
import torch

from tests.distributed import dynamic
from tests.distributed.harness import run_ranks
from tests.distributed.resume import CYCLE, kill_and_resume
from tests.distributed.steps import save_policy
from tests.marks import NIGHTLY, SLOW, only

# Of the first rollout: rounds, prompts drawn for nothing, groups left equal over all ranks.
COUNTS = {
    "one rank all rounds, one none": (3, 6, 2),
    "one rank some rounds": (2, 2, 0),
    "both ranks, unlike": (3, 5, 0),
    "the epoch ends within a round": (1, 2, 1),
    "nothing is left to draw": (0, 0, 2),
    "a rank without prompts": (0, 0, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is, and what one device trains on."""
    folder = tmp_path_factory.mktemp("dynamic")
    save_policy(folder)
    run_ranks("tests.distributed.dynamic", "one", folder, world_size=1)
    return folder


@SLOW
@pytest.mark.parametrize("strategy", only(["ddp"], ["ddp", "zero3", "fsdp2"], nightly=["zero3"]))
def test_two_ranks_train_on_what_one_device_does(folder: Path, strategy: str):
    run_ranks("tests.distributed.dynamic", strategy, folder)
    one = torch.load(folder / "one-0.pt")
    ranks = [torch.load(folder / f"{strategy}-{rank}.pt") for rank in (0, 1)]
    for case, counts in COUNTS.items():
        want, metrics = one[case]
        assert tuple(metrics.values()) == counts, case
        for rank, found in enumerate(ranks):
            groups, own_metrics = found[case]
            assert own_metrics == metrics, case
            assert [group[:2] for group in groups] == [group[:2] for group in want[rank::2]], case
            for (*_, advantages), (*_, expected) in zip(groups, want[rank::2], strict=True):
                assert advantages == pytest.approx(expected), case

    shared = [torch.load(folder / f"{strategy}-shared-{rank}.pt") for rank in (0, 1)]
    for case in dynamic.SHARED:
        (groups, metrics), (others, other_metrics) = (of_rank[case] for of_rank in shared)
        want, expected = one[case]
        assert metrics == other_metrics == expected, case
        assert not others, case
        assert [group[:2] for group in groups] == [group[:2] for group in want], case
        for (*_, advantages), (*_, of_one) in zip(groups, want, strict=True):
            assert advantages == pytest.approx(of_one), case

    for rank in (0, 1):
        early = torch.load(folder / f"{strategy}-early-{rank}.pt")
        (found, num_early, num_unused), (late, *late_counts) = early["early"], early["late"]
        assert found == late
        assert (num_early >= 2, num_unused, late_counts) == (True, 0, [0, 0])
        assert early["shared"][1:] == (0, 0), "no rank has a complete group while it samples"


@SLOW
def test_no_good_group_gives_way(folder: Path):
    for case, (groups, _) in torch.load(folder / "one-0.pt").items():
        first = dynamic.prompts_of(case)[:4]
        for before, (prompt, _, advantages) in zip(first, groups, strict=True):
            assert prompt == before or dynamic.EQUAL in before
            assert any(advantages) == (dynamic.OPEN in prompt)


@pytest.mark.parametrize(
    ("strategy", "hook", "rank"),
    [
        pytest.param("ddp", "on_after_backward", 1, id="ddp, one rank", marks=NIGHTLY),
        pytest.param("zero3", "on_train_batch_start", None, id="zero3, all ranks", marks=NIGHTLY),
        pytest.param("fsdp2", "on_train_batch_start", None, id="fsdp2, all ranks", marks=SLOW),
    ],
)
def test_a_killed_run_resumes_exactly(tmp_path: Path, strategy, hook, rank):
    """In the middle of the second cycle, after two that have drawn further prompts."""
    outcome = kill_and_resume(strategy, tmp_path, micro_step=CYCLE + 5, hook=hook, rank=rank, subject="further prompts")
    assert outcome == {"equal": True, "difference": 0.0, "went on from": "step=6.ckpt"}


@NIGHTLY
def test_a_killed_run_on_images_resumes_exactly(tmp_path: Path):
    """The images of prompts that were drawn further are read again."""
    outcome = kill_and_resume(
        "ddp", tmp_path, micro_step=CYCLE + 5, hook="on_after_backward", rank=1, subject="further images"
    )
    assert outcome == {"equal": True, "difference": 0.0, "went on from": "step=6.ckpt"}
