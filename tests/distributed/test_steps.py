"""The same weights after a step on one device and on several ranks, under every strategy."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.distributed import runs, steps
from tests.distributed.harness import once, run_ranks
from tests.marks import NIGHTLY, SLOW, by_turns, selected

STRATEGIES = [name for name in runs.STRATEGIES if name != "one" and "one file" not in name]
FAST = [
    "plain",
    "accumulate 4, kl",
    "two updates",
    "a rank without prompts",
    "lora",
    "shared groups, kl",
]
"""Cases that run in `make test`, under DDP and ZeRO-3."""
OF_THE_LOSS = [
    "clip-cov",
    "kl in the reward",
    "gspo, corrected",
    "cispo, entropy",
    "high entropy",
    "kl-cov",
    "length-weighted",
    "sequence",
    "shared groups, clip-cov",
    "shared groups, kl in the reward",
]
"""Cases that differ in what the ranks gather for the loss, which no strategy takes part in: they run under DDP and
FSDP2, and are nightly under ZeRO-3, which takes three times as long."""
OF_A_FORWARD_PASS = ["chunks", "layers", "dense", "sliced head", "float32 head, kl", "reward model"]
"""Cases that say nothing of how gradients are divided, all that tells ZeRO-1 from ZeRO-2: they run under the latter."""
OF_GRADIENTS = [
    "plain",
    "kl",
    "accumulate 4, kl",
    "clipped",
    "two updates",
    "a rank of blanks",
    "a rank without prompts",
    "lora, kl, accumulate 4, clipped",
    "experts, a rank without prompts",
    "shared groups, lora, equal and truncated ones",
]
"""Cases of all that ZeRO-2 does otherwise than DDP, which is to divide gradients: the others are nightly under it."""
OF_COPIES = [
    "clipped",
    "conversations in lockstep, kl",
    "copies, kl",
    "lora, kl, accumulate 4, clipped",
    "reference follows",
    "a rank without prompts",
    "conversations of shared groups",
]
"""Cases of all that hybrid sharding does otherwise than FSDP2: gradients that are summed over the copies as well, their
norm, weights that are gathered or set, and ranks that must keep step. They run on four ranks; all but the first two are
nightly."""
BY_TURNS = by_turns(
    [
        "accumulate 2",
        "a rank of equals",
        "a rank of truncated, much longer ones",
        "fewer prompts",
        "chunks",
        "layers",
        "dense",
        "float32 head, kl",
        "lora, kl, two updates",
        "lora, kl, accumulate 4, clipped",
        "copies, kl",
        "lora of the head",
        "lora, fewer prompts",
        "reference follows",
        "reward model, a rank without prompts",
        "a shared group, two updates",
        "shared groups, reward model",
        "experts, a rank without prompts",
        "given adapter, kl",
        "sliced head",
        "reward model",
    ],
    ("zero3", "fsdp2", "fsdp2"),
)
"""Cases whose parts run under both strategies that shard the weights. They run under one of them by turns, every third
under ZeRO-3, and are nightly under the other."""


def is_run(strategy: str, case: str) -> bool:
    """Whether a case runs under a strategy."""
    if strategy == "hsdp":
        return case in OF_COPIES
    if case in OF_THE_LOSS:
        return strategy in ("ddp", "fsdp2", "zero3")
    return strategy != "zero1" or case not in OF_A_FORWARD_PASS


def is_fast(strategy: str, case: str) -> bool:
    """Whether a case runs under a strategy in `make test`."""
    return (strategy in ("ddp", "zero3") and case in FAST) or (strategy, case) == ("ddp", "clip-cov")


def is_nightly(strategy: str, case: str) -> bool:
    """Whether the parts of a case run under a strategy in other cases."""
    if strategy == "hsdp":
        return case not in OF_COPIES[:2]
    if case in BY_TURNS and strategy in ("zero3", "fsdp2"):
        return strategy != BY_TURNS[case]
    if case in OF_THE_LOSS:
        return strategy == "zero3"
    return strategy == "zero1" or (strategy == "zero2" and case not in OF_GRADIENTS)


def matrix(cases: Iterable[str]) -> list[Any]:
    """Parameters for all strategies and cases that run under them."""
    pairs = [(strategy, case) for strategy in STRATEGIES for case in cases if is_run(strategy, case)]
    marks = {pair: () if is_fast(*pair) else NIGHTLY if is_nightly(*pair) else SLOW for pair in pairs}
    return [pytest.param(*pair, id="-".join(pair), marks=marks[pair]) for pair in pairs]


assert {*FAST, *OF_THE_LOSS, *OF_A_FORWARD_PASS, *OF_GRADIENTS, *OF_COPIES, *BY_TURNS} <= steps.CASES.keys()
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy is, and the results of the cases on one device."""
    folder = tmp_path_factory.mktemp("steps")
    steps.save_policy(folder)
    run_ranks("tests.distributed.steps", "one", folder, *selected(request, "case"), world_size=1)
    return folder


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], None]:
    """Runs the cases of a strategy on its ranks, in one process group."""

    @once
    def run(strategy: str) -> None:
        cases = selected(request, "case", strategy=strategy)
        ranks = runs.ranks_of(strategy)
        run_ranks("tests.distributed.steps", strategy, folder, *cases, world_size=ranks, timeout=400)

    return run


@pytest.mark.parametrize(("strategy", "case"), matrix(steps.CASES))
def test_several_ranks_train_what_one_does(folder: Path, run: Callable[[str], None], strategy: str, case: str):
    run(strategy)
    expected = torch.load(folder / f"one-{case}-0.pt")
    ranks = range(runs.ranks_of(strategy))
    for rank in ranks:
        found = torch.load(folder / f"{strategy}-{case}-{rank}.pt")
        if (strategy, case) in steps.REFUSED:
            assert "the strategy is ZeRO-3" in found["refused"]
            continue
        assert found["before"].keys() == expected["before"].keys()
        assert found["trained"] == expected["trained"]
        if not steps.CASES[case].is_given:
            assert all(not weight.any() for name, weight in found["before"].items() if "lora_B" in name)
        if case.startswith("conversations"):
            turns = [torch.load(folder / f"{strategy}-{case}-{each}.pt")["turns"] for each in ranks]
            assert {1, 5} <= set(expected["turns"]) == {number for own in turns for number in own}
            if "shared" not in case:  # the prompts with one turn and with five are on one rank each
                assert set(turns[0]) == {1}
                assert set(turns[1]) == {5}
        for name, after in expected["after"].items():
            difference = (found["after"][name] - after).norm() / after.norm()
            assert difference <= TOLERANCE, f"{name} differs by {difference:.1e} on rank {rank}"
        for name, before in expected["before"].items():
            assert torch.equal(found["before"][name], before), f"{name} starts from other weights"
            assert torch.equal(found["after"][name], before) != (name in found["trained"]), f"did {name} move?"


@pytest.mark.parametrize(("strategy", "case"), [pytest.param("hsdp", "clipped", marks=SLOW)])
def test_ranks_that_follow_each_other_share_a_copy(folder: Path, run: Callable[[str], None], strategy: str, case: str):
    """Bit for bit: of four ranks, the first two have the whole weights, and the others have the same shards."""
    run(strategy)
    found = [torch.load(folder / f"{strategy}-{case}-{rank}.pt") for rank in range(4)]
    for name, whole in found[0]["after"].items():
        first, second, third, fourth = (rank["shards"][name] for rank in found)
        assert torch.equal(torch.cat([first, second]), whole), name
        assert torch.equal(first, third), name
        assert torch.equal(second, fourth), name


@pytest.mark.parametrize(
    ("strategy", "case"),
    matrix(name for name, case in steps.CASES.items() if case.is_scored_by_model),
)
def test_a_reward_model_scores_on_every_rank_as_alone(
    folder: Path, run: Callable[[str], None], strategy: str, case: str
):
    """Against transformers, one sequence at a time. Ranks have other sequences, one of them has none."""
    run(strategy)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    ranks = [torch.load(folder / f"{strategy}-{case}-{rank}.pt")["scored"] for rank in (0, 1)]
    assert bool(ranks[1]) == ("without" not in case and "shared" not in case)
    for prompt, completion, score in [*ranks[0], *ranks[1]]:
        with torch.no_grad():
            alone = model(**tokenizer(prompt + completion, return_tensors="pt")).logits.item()
        assert score == pytest.approx(alone, abs=1e-5)
