"""Metrics of boxes are those of all ranks' prompts, and one rank draws them all."""

import json

import pytest

from tests.distributed.harness import run_ranks
from tests.marks import SLOW

pytestmark = SLOW


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the results of one device and of two ranks, by number of ranks and rank."""
    folder = tmp_path_factory.mktemp("grounding")
    for world_size in (1, 2):
        said = run_ranks("tests.distributed.grounding", folder, world_size, world_size=world_size, timeout=240)
        assert "".join(said).count("iou covers 3 of 4 prompts") == 1
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("of1-0", "of2-0", "of2-1")}


def test_the_metrics_are_those_of_one_device(found):
    """IoU 1, 1/2 and 1/4; the second and third are of one source."""
    alone = {name: value for name, value in found["of1-0"]["metrics"].items() if "iou" in name or "rec" in name}
    assert alone == {
        "val/iou": pytest.approx(7 / 12),
        "val/rec_accuracy@0.5": pytest.approx(1 / 3),
        "val/source/far/iou": pytest.approx(3 / 8),
        "val/source/far/rec_accuracy@0.5": 0.0,
        "val/source/near/iou": 1.0,
        "val/source/near/rec_accuracy@0.5": 1.0,
    }
    for rank in ("of2-0", "of2-1"):
        assert found[rank]["metrics"] == found["of1-0"]["metrics"]


def test_one_rank_draws_the_images_of_all_in_their_order(found):
    (drawn,) = found["of1-0"]["drawn"]
    assert [panel[0] for panel in drawn] == ["where is thing 0?", "where is thing 1?", "where is thing 2?"]
    assert [panel[2] for panel in drawn] == [1.0, 0.5, 0.25]
    assert found["of2-0"]["drawn"] == [drawn]
    assert found["of2-1"]["drawn"] == []
