"""On one process nothing is told to anybody; on several, tests/distributed has it."""

import datetime

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from grpo_lightning.core import ranks


def test_one_process_hears_itself():
    assert (ranks.world_size(), ranks.rank()) == (1, 0)
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(ranks.sum_over_ranks(values), values)
    assert torch.equal(ranks.max_over_ranks(values), values)
    assert ranks.gather_objects({"a": 1}) == [{"a": 1}]
    assert ranks.any_over_ranks(True)
    assert not ranks.any_over_ranks(False)


@given(st.integers(0, 20), st.integers(1, 5))
def test_ranks_take_turns(num_prompts, world_size):
    prompts = list(range(num_prompts))
    assert ranks.interleave([prompts[rank::world_size] for rank in range(world_size)]) == prompts


def test_of_ranks_of_any_number_of_items_none_is_lost():
    assert ranks.interleave([["a"], [], ["b", "c"]]) == ["a", "b", "c"]


@pytest.mark.parametrize(("world_size", "ranks_per_group"), [(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)])
def test_a_team_is_consecutive_ranks(monkeypatch, world_size, ranks_per_group):
    """Nodes have consecutive ranks, so a team is on one node."""
    teams, found = ranks.Teams(ranks_per_group), []
    monkeypatch.setattr(ranks, "world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        found.append((teams.team, teams.member, teams.first_rank, teams.is_first))
    assert found == [
        (team, member, team * ranks_per_group, member == 0)
        for team in range(world_size // ranks_per_group)
        for member in range(ranks_per_group)
    ]


def test_a_team_waits_as_long_as_the_run(tmp_path):
    """A member waits for the slowest reward of the first one; gloo's own timeout, 30 minutes, may be too short."""
    timeout = datetime.timedelta(hours=5)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        seconds = ranks.timeout_of(ranks.Teams(1)._process_group).total_seconds()
        assert seconds == pytest.approx(timeout.total_seconds(), abs=1)
    finally:
        dist.destroy_process_group()


@given(st.integers(1, 20), st.integers(1, 5))
def test_the_parts_of_a_group_are_its_completions(num_generations, ranks_per_group):
    parts = [ranks.part_of_group(num_generations, member, ranks_per_group) for member in range(ranks_per_group)]
    assert ranks.interleave(parts) == list(range(num_generations))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_wait_for_each_other_only_if_they_must(monkeypatch):
    """Here the others have three waves, and open rows but no prompts that wait."""
    monkeypatch.setattr(ranks, "max_over_ranks", lambda values: values.clamp(min=3))
    together, alone = ranks.Lockstep(is_needed=True), ranks.Lockstep(is_needed=False)
    assert (together.num_waves(1), together.num_waves(4), alone.num_waves(1)) == (3, 4, 1)
    monkeypatch.setattr(ranks, "max_over_ranks", lambda flags: flags.clamp(min=torch.tensor([1, 0])))
    assert together.agree(False, False) == [True, False]
    assert together.agree(False, True) == [True, True]
    assert alone.agree(False, True) == [False, True]
