"""On one process nothing is told to anybody; on several, tests/distributed has it."""

import torch

from grpo_lightning.core import ranks


def test_one_process_hears_itself():
    assert (ranks.world_size(), ranks.rank()) == (1, 0)
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(ranks.sum_over_ranks(values), values)
    assert torch.equal(ranks.max_over_ranks(values), values)
    assert ranks.gather_objects({"a": 1}) == [{"a": 1}]
    assert ranks.is_any(True)
    assert not ranks.is_any(False)
