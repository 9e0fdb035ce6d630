"""A run that resumes on another number of ranks continues with the same prompts, completions and losses."""

import pytest
import torch

from tests.distributed import vision
from tests.distributed.elastic import Leg, run_legs
from tests.distributed.resume import FAMILY
from tests.distributed.steps import save_policy
from tests.marks import SLOW


def compare(folder, *legs, unbroken=None, tolerance=1e-6):
    """Run the legs, and a run on one rank that nothing interrupts; compare rows and metrics."""
    if "images" in legs[0].subject:
        vision.save_policy(folder, FAMILY)
    else:
        save_policy(folder)
    *got, want = run_legs(folder, *legs, unbroken or Leg(1, subject=legs[0].subject, name="unbroken"))
    assert [leg.get("error") for leg in [*got, want]] == [None] * (len(got) + 1)
    assert [rollout for leg in got for rollout in leg["rollouts"]] == want["rollouts"]
    steps = {number: metrics for leg in got for number, metrics in leg["steps"].items()}
    assert steps.keys() == want["steps"].keys()
    for number, metrics in want["steps"].items():
        assert steps[number] == pytest.approx(metrics, rel=tolerance, abs=tolerance), number
    for name, weight in want["weights"].items():
        torch.testing.assert_close(got[-1]["weights"][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([Leg(1, 3), Leg(2, 9), Leg(1)], id="inside cycles"),
        pytest.param([Leg(1, 4), Leg(2, 12), Leg(1)], id="between cycles, in the middle of an epoch", marks=SLOW),
        pytest.param([Leg(2, 3), Leg(2, 9, ranks_per_group=2), Leg(1)], id="shared groups", marks=SLOW),
        pytest.param(
            [Leg(1, 3), Leg(2, 8, accumulate=1), Leg(1, 10, accumulate=4), Leg(1)], id="micro-batches", marks=SLOW
        ),
    ],
)
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, legs):
    compare(tmp_path, *legs)
