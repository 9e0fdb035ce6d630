"""The report lists the settings that differ from their defaults, and no others."""

from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli.main import parse
from grpo_lightning.report.non_default_settings import dataclass_in, different_settings
from tests.marks import SLOW

pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")  # its name before jsonargparse 4.49

RECIPE = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_steps: 7
  callbacks:
    - {class_path: LearningCurves, init_args: {smoothing: 5}}
model:
  policy: my-policy
  num_generations: 6
  sampling: {temperature: 0.7}
  objective: {beta: 0.1}
  optimizer: {class_path: AdamW, init_args: {lr: 0.5}}
  rewards:
    - {class_path: WeightedReward, init_args: {reward: {class_path: ExactMatch}, weight: 2.0}}
data:
  datasets: [{json_path: rows.jsonl}]
  batch_size: 2
"""


@SLOW
def test_only_what_was_set_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    config = parse(["--config", "recipe.yaml"]).as_dict()
    del config["config"]  # the names of the files, which config.yaml does not have
    saved = yaml.safe_load(yaml.safe_dump(config))
    found = {key: (value, default) for key, value, default in different_settings(saved)}
    expected = {
        "seed_everything": 3,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 7,
        "trainer.callbacks[0]": "LearningCurves",
        "trainer.callbacks[0].smoothing": 5,
        "model.policy": "my-policy",
        "model.num_generations": 6,
        "model.sampling.temperature": 0.7,
        "model.objective.beta": 0.1,
        "model.optimizer.lr": 0.5,
        "model.rewards[0]": "WeightedReward",
        "model.rewards[0].reward": "ExactMatch",
        "model.rewards[0].weight": 2.0,
        "data.datasets[0].json_path": "rows.jsonl",
        "data.batch_size": 2,
        "run_name": "recipe",
    }
    assert {key: value for key, (value, _) in found.items()} == expected
    assert found["trainer.max_steps"] == (7, -1)
    assert found["model.sampling.temperature"] == (0.7, 1.0)
    assert found["model.optimizer.lr"] == (0.5, 1e-6)
    assert found["model.policy"] == ("my-policy", "-")


def test_a_class_that_is_not_there_any_more_is_listed_with_all_its_settings():
    config = {"model": {"rewards": [{"class_path": "gone.Reward", "init_args": {"a": 1, "b": None}}]}}
    assert different_settings(config) == [["model.rewards[0]", "Reward", "-"], ["model.rewards[0].a", 1, "-"]]


def test_files_that_are_no_recipe():
    assert different_settings({}) == []
    assert different_settings({"model": None, "trainer": [1]}) == [["trainer", [1], "-"]]


def test_types_without_a_dataclass():
    assert dataclass_in(list[int] | None) is None
    assert dataclass_in("unknown") is None
