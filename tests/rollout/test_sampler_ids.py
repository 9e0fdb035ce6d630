"""Which tokens can be drawn: the last ones that cannot are cut off, others are named."""

import pytest

from grpo_lightning.rollout.token_sampler import sampled_ids


@pytest.mark.parametrize(
    ("never", "size", "expected"),
    [
        ((), 5, (5, ())),
        ((3, 4), 5, (3, ())),
        ((1, 4), 5, (4, (1,))),
        ((1, 2), 5, (5, (1, 2))),
        ((1, 7), 5, (5, (1,))),  # the model has no score for it
        ((2, 3, 4, 9), 5, (2, ())),
    ],
)
def test_what_can_be_drawn(never, size, expected):
    assert sampled_ids(never, size) == expected
