"""Teams of two, three and four ranks that share groups train, log and score what one device does, and never wait."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed import shared_errors, teams
from tests.distributed.harness import once, run_ranks
from tests.distributed.steps import save_policy
from tests.distributed.test_logs import is_own
from tests.marks import NIGHTLY, SLOW, selected

TOLERANCE = 1e-6


class Layout(NamedTuple):
    """Ranks under a strategy."""

    strategy: str
    world_size: int
    ranks_per_group: int

    def __str__(self) -> str:
        return f"{self.strategy}, {self.world_size} ranks in teams of {self.ranks_per_group}"


UNEQUAL = [
    "one prompt, dynamic, kl",
    "some further prompts, dynamic",
    "nothing but equals, fixed, kl",
    "images of equals, dynamic, kl",
]
"""The cases with the most unequal teams."""
ONE_TEAM = ["a team of equals, dynamic, kl in the reward", "images of equals, dynamic, kl"]
"""Where all ranks are one team, no team waits for another: of the cases, these have the most unequal members."""
CASES = {
    Layout("ddp", 4, 2): list(teams.CASES),
    Layout("zero3", 4, 2): UNEQUAL,
    Layout("fsdp2", 4, 2): UNEQUAL,
    Layout("ddp", 3, 3): [*ONE_TEAM, "one prompt, dynamic, kl", "nothing but equals, fixed, kl"],
    Layout("zero3", 3, 3): ONE_TEAM,
    Layout("fsdp2", 3, 3): ONE_TEAM,
    Layout("ddp", 4, 4): [*ONE_TEAM, "one prompt, dynamic, kl"],
    Layout("ddp", 2, 1): ["nothing but equals, fixed, kl", "images of equals, dynamic, kl"],
}

FURTHER = {Layout("ddp", 4, 2), Layout("ddp", 4, 4), Layout("fsdp2", 4, 2), Layout("zero3", 3, 3)}
"""Layouts of which the others have the strategies and the sizes of teams."""


def is_nightly(layout: Layout, case: str) -> bool:
    """Whether the parts of a case run in a layout in other cases, or in other layouts."""
    return layout in FURTHER or (layout == Layout("zero3", 4, 2) and case in UNEQUAL[2:])


pytestmark = SLOW


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policies are, and the results of the cases on one device."""
    folder = tmp_path_factory.mktemp("teams")
    teams.save_policies(folder)
    run_ranks("tests.distributed.teams", "one", 1, folder, *selected(request, "case"), world_size=1)
    return folder


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, folder: Path) -> Callable[[Layout], None]:
    """Runs the cases of a layout, in one process group. A hang fails after the timeout."""

    @once
    def run(layout: Layout) -> None:
        cases = selected(request, "case", layout=layout)
        run_ranks(
            "tests.distributed.teams", layout.strategy, layout.ranks_per_group, folder, *cases,
            world_size=layout.world_size, timeout=1500,
        )  # fmt: skip

    return run


def shared(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on ranks and strategy. DeepSpeed knows the gradient's norm only after a step."""
    return {name: value for name, value in metrics.items() if not is_own(name) and name != "policy/grad_norm"}


def lines_of(
    folder: Path, strategy: str, ranks_per_group: int, case: str, name: str = "completions.jsonl"
) -> list[dict[str, Any]]:
    path = folder / "logs" / f"{strategy}-{ranks_per_group}-{case}" / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def compare_tokens(ones: list[dict[str, Any]], tokens: list[dict[str, Any]]) -> None:
    """Compare the recorded tokens of a run on several ranks with those of one device."""
    for want, got in zip(ones, tokens, strict=True):
        for name in ("old_logprobs", "logprobs"):
            assert got.pop(name) == pytest.approx(want.pop(name), abs=2e-3), name
        assert got == want


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, id=f"{layout}-{case}", marks=NIGHTLY if is_nightly(layout, case) else ())
        for layout, cases in CASES.items()
        for case in cases
    ],
)
def test_teams_train_what_one_device_does(folder: Path, run: Callable[[Layout], None], layout: Layout, case: str):
    """Compare everything that the ranks found with what one device found."""
    run(layout)
    expected = torch.load(folder / f"one-1-{case}-0.pt")
    found = [
        torch.load(folder / f"{layout.strategy}-{layout.ranks_per_group}-{case}-{rank}.pt")
        for rank in range(layout.world_size)
    ]

    has_gradient = any(any(advantages) for rollout in expected["groups"] for *_, advantages in rollout)
    assert has_gradient == ("nothing" not in case)
    for name, after in expected["after"].items():
        for rank, of_rank in enumerate(found):
            difference = (of_rank["after"][name] - after).norm() / after.norm()
            assert difference <= TOLERANCE, f"{name} differs by {difference:.1e} on rank {rank}"
    moved = [name for name, before in expected["before"].items() if not torch.equal(before, expected["after"][name])]
    assert bool(moved) == has_gradient

    # The first members have the groups, the prompts going round the teams.
    firsts = found[:: layout.ranks_per_group]
    assert all(not any(of_rank["groups"]) for rank, of_rank in enumerate(found) if rank % layout.ranks_per_group)
    for number, rollout in enumerate(expected["groups"]):
        for team, first in enumerate(firsts):
            want = rollout[team :: len(firsts)]
            assert [group[:2] for group in first["groups"][number]] == [group[:2] for group in want]
            for (*_, advantages), (*_, of_one) in zip(first["groups"][number], want, strict=True):
                assert advantages == pytest.approx(of_one, abs=1e-5)

    # Each completion once, those of the validation too.
    assert sorted(pair for of_rank in found for pair in of_rank["scored"]) == sorted(expected["scored"])

    for want, *others in zip(expected["steps"], *(of_rank["steps"] for of_rank in found), strict=True):
        for got in others:
            assert shared(got) == pytest.approx(shared(want), rel=1e-4, abs=1e-6)

    assert expected["validated"] or "one prompt" not in case
    for of_rank in found:
        assert of_rank["validated"] == pytest.approx(expected["validated"], rel=1e-4)

    ones = lines_of(folder, "one", 1, case)
    lines = lines_of(folder, layout.strategy, layout.ranks_per_group, case)
    for row, (want, got) in enumerate(zip(ones, lines, strict=True)):
        assert want.pop("rank") == 0
        team = [index for index, *_ in expected["groups"][got["rollout"]]].index(got["prompt_index"]) % len(firsts)
        assert got.pop("rank") == team * layout.ranks_per_group + row % teams.NUM_GENERATIONS % layout.ranks_per_group
        assert got.pop("advantage") == pytest.approx(want.pop("advantage"), abs=1e-5)
        assert got == want
    ones = lines_of(folder, "one", 1, case, "tokens.jsonl")
    assert ones or not has_gradient
    compare_tokens(ones, lines_of(folder, layout.strategy, layout.ranks_per_group, case, "tokens.jsonl"))


def test_an_error_of_a_team_is_raised_on_each_of_its_ranks(tmp_path: Path):
    """Only the first member sees it; the others would wait for it."""
    save_policy(tmp_path)
    run_ranks("tests.distributed.shared_errors", tmp_path)
    first, second = (torch.load(tmp_path / f"errors-{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first == second
    assert "gives the ranks that share groups different prompts" in first["other prompts"]
    assert "must return groups of `self.generate`" in first["own groups"]
    assert first["timeout"].total_seconds() == pytest.approx(shared_errors.TIMEOUT.total_seconds(), abs=1)
