"""On one process nothing is told to anybody; on several, tests/distributed has it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.core import ranks


def test_one_process_hears_itself():
    assert (ranks.world_size(), ranks.rank()) == (1, 0)
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(ranks.sum_over_ranks(values), values)
    assert torch.equal(ranks.max_over_ranks(values), values)
    assert ranks.gather_objects({"a": 1}) == [{"a": 1}]
    assert ranks.is_any(True)
    assert not ranks.is_any(False)


@given(st.integers(0, 20), st.integers(1, 5))
def test_ranks_take_turns(num_prompts, world_size):
    prompts = list(range(num_prompts))
    assert ranks.in_order_of_prompts([prompts[rank::world_size] for rank in range(world_size)]) == prompts


def test_of_ranks_of_any_number_of_items_none_is_lost():
    assert ranks.in_order_of_prompts([["a"], [], ["b", "c"]]) == ["a", "b", "c"]
