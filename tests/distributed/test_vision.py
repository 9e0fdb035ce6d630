"""The same weights after steps on images on one device and on several ranks, some of which may have no image."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_lightning.policy.families import FAMILIES
from tests.distributed import vision
from tests.distributed.harness import once, run_ranks
from tests.distributed.runs import ranks_of
from tests.marks import NIGHTLY, SLOW, by_turns, selected

OF_SHARDED_WEIGHTS = [
    "sampled layer by layer",
    "sampled by a frozen tower layer by layer",
    "images in observations, layer by layer",
    "images in observations, frozen tower, layer by layer",
]
"""Where the weights are whole, they are sampled from as they are: these cases run under ZeRO-3 and FSDP2."""
OF_A_FORWARD_PASS = ["dense", "layers", "sampled, gathered"]
"""Cases that say nothing of how gradients are divided, all that tells ZeRO-2 from DDP: they do not run under ZeRO-2."""
OF_GRADIENTS = ["a rank without images, kl", "images in some micro-batches", "a rank without prompts"]
"""Cases of all that ZeRO-2 does otherwise than DDP, which is to divide gradients: the others are nightly under it."""
BY_TURNS = by_turns(
    [
        "images in observations, layer by layer",
        "no image anywhere",
        "images everywhere",
        "lora",
        "sampled by a frozen tower layer by layer",
        "dense",
        "layers",
        "shared groups, kl",
        "sampled layer by layer",
        "images in observations, frozen tower, layer by layer",
        "images in observations",
        "a rank without images",
        "images in observations of shared groups",
        "sampled, gathered",
        "sampled by a frozen tower",
        "shared groups, sampled by a frozen tower",
    ],
    ("zero3", "fsdp2", "fsdp2"),
)
"""Cases whose parts run under both strategies that shard the weights. They run under one of them by turns, every third
under ZeRO-3, which takes three times as long, and are nightly under the other."""


def is_run(strategy: str, case: str) -> bool:
    """Whether a case runs under a strategy."""
    if strategy == "hsdp":
        return case in ("a rank without images", "sampled by a frozen tower layer by layer")
    if case in OF_SHARDED_WEIGHTS:
        return strategy in ("zero3", "fsdp2")
    return strategy != "zero2" or case not in OF_A_FORWARD_PASS


def is_nightly(strategy: str, case: str) -> bool:
    """Whether the parts of a case run under a strategy in other cases."""
    if strategy == "hsdp":
        return True
    if case in BY_TURNS and strategy in ("zero3", "fsdp2"):
        return strategy != BY_TURNS[case]
    return strategy == "zero2" and case not in OF_GRADIENTS


RUNS = [
    pytest.param(strategy, case, id=f"{strategy}-{case}", marks=NIGHTLY if is_nightly(strategy, case) else ())
    for strategy in ("ddp", "zero2", "zero3", "fsdp2", "hsdp")
    for case in vision.CASES
    if is_run(strategy, case)
]
assert {*OF_SHARDED_WEIGHTS, *OF_A_FORWARD_PASS, *OF_GRADIENTS, *BY_TURNS} <= vision.CASES.keys()
pytestmark = SLOW
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where policy and pictures are, and the results of the cases on one device."""
    folder = tmp_path_factory.mktemp("vision")
    vision.save_policies(folder)
    run_ranks("tests.distributed.vision", "one", folder, *selected(request, "case"), world_size=1)
    return folder


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], None]:
    """Runs the cases of a strategy on its ranks, in one process group."""

    @once
    def run(strategy: str) -> None:
        cases = selected(request, "case", strategy=strategy)
        ranks = ranks_of(strategy)
        run_ranks("tests.distributed.vision", strategy, folder, *cases, world_size=ranks, timeout=400)

    return run


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_several_ranks_train_what_one_does(folder: Path, run: Callable[[str], None], strategy: str, case: str):
    run(strategy)
    expected = torch.load(folder / f"one-{case}-0.pt")
    for rank in range(ranks_of(strategy)):
        found = torch.load(folder / f"{strategy}-{case}-{rank}.pt")
        assert found["trained"] == expected["trained"]
        for name, after in expected["after"].items():
            difference = (found["after"][name] - after).norm() / after.norm()
            assert difference <= TOLERANCE, f"{name} differs by {difference:.1e} on rank {rank}"
    has_images = vision.CASES[case].prompts is not vision.TEXT
    moved = {name for name, weight in expected["before"].items() if not torch.equal(weight, expected["after"][name])}
    is_tower_trained = not vision.CASES[case].policy.keys() & {"freeze_vision_modules", "lora"}
    parts = FAMILIES[vision.CASES[case].family].vision
    assert any(f"{part}." in name for name in moved for part in parts) == (has_images and is_tower_trained)
