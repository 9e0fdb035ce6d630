"""docs/vision.md: its families are those of the package, its recipes are there, and its numbers are those of `plan`."""

import re

import pytest

from grpo_lightning.cli.plan.model import sizes_of
from grpo_lightning.grounding import MeanIoU, RECAccuracy
from grpo_lightning.policy.families import FAMILIES
from grpo_lightning.policy.loading import PolicyLoader, meta_model
from grpo_lightning.policy.tokenizer import SETTINGS
from tests.cli.plan.real_shapes import published
from tests.helpers.pages import read, tables
from tests.helpers.paths import RECIPES

PAGE = read("vision.md")


def rows(heading):
    return [row for row in tables(PAGE) if row.heading == heading]


def test_the_families_are_those_of_the_package():
    found = {row.names()[0]: row for row in rows("Families")}
    assert found.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        row = found[name]
        assert ("0 to 1000" in row.cells[2]) == (family.coordinates == "norm1000")
        limits = {setting for setting, resizing in SETTINGS.items() if resizing == family.resizing}
        assert {limit.removeprefix("model.policy.") for limit in row.names(3)} == limits


def test_every_recipe_is_named():
    named = set(re.findall(r"`(\w[\w.]+)`", PAGE.partition("are in `recipes/vlm/`.")[2].partition("[migrating.md]")[0]))
    assert named == {path.stem for path in (RECIPES / "vlm").glob("*.yaml")}


def test_the_metrics_are_named_as_they_log():
    logged = {row.names()[0]: row.names(1)[0] for row in rows("Evaluation")}
    assert logged == {"MeanIoU": MeanIoU().name, "RECAccuracy": RECAccuracy().name}


def test_the_weights_of_the_tower_are_what_plan_counts():
    sizes = sizes_of(meta_model(published("Qwen/Qwen2.5-VL-3B-Instruct")), PolicyLoader("policy"))
    assert "669 of the model's 3,755 million weights" in " ".join(PAGE.split())
    assert (round(sizes.num_vision_weights / 1e6), round(sizes.num_weights / 1e6)) == (669, 3755)
    features = float(re.search(r"([\d.]+) MiB", rows("Memory")[2].cells[1])[1])
    assert features == pytest.approx(391 * sizes.hidden_size * 2 / 2**20, rel=0.03)


def test_the_prompt_in_every_row_is_as_many_tokens_as_said():
    times = float(re.search(r"a micro-batch would have ([\d.]+) times the tokens", PAGE)[1])
    assert times == pytest.approx(8 * (391 + 256) / (391 + 8 * 256), rel=0.02)
