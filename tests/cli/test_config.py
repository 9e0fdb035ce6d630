"""Settings as they were written: flags, files and names of recipes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lightning.cli import config, recipes
from grpo_lightning.cli.config import Key, arguments, num_call_arguments
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.core.types import SamplingParams
from grpo_lightning.optimizers import AdamW, OptimizerFactory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_flags_and_files_as_trees_in_their_order():
    Path("r.yaml").write_text("model: {seed: 1}\n")
    args = ["fit", "--config", "r.yaml", "--trainer.max_steps=3", "--model.policy", "x", "--print_config"]
    found = [(source.where, source.tree) for source in config.read(args)]
    assert found == [
        ("in r.yaml", {"model": {"seed": 1}}),
        ("on the command line", {"trainer": {"max_steps": 3}}),
        ("on the command line", {"model": {"policy": "x"}}),
        ("on the command line", {"print_config": None}),
    ]
    assert config.config_files(args) == [Path("r.yaml")]


def test_a_negative_number_is_a_value():
    assert [source.tree for source in config.read(["--a", "-1"])] == [{"a": -1}]


@pytest.mark.parametrize(
    "args", [["--config", "quickstart"], ["--config=quickstart"], ["-c", "recipes/quickstart.yaml"]]
)
def test_names_of_recipes_become_files(args):
    found, (notice,) = config.find_configs(["fit", *args, "--trainer.max_steps=1"])
    assert config.config_files(found) == [recipes.folder() / "quickstart.yaml"]
    assert str(recipes.folder() / "quickstart.yaml") in notice
    assert found[-1] == "--trainer.max_steps=1"


def test_a_file_of_ones_own_comes_before_a_recipe_of_that_name():
    Path("quickstart").write_text("model: {}")
    assert config.find_configs(["--config", "quickstart"]) == (["--config", "quickstart"], [])


def test_settings_may_stand_in_the_place_of_a_file():
    args = ["--config", "{trainer: {max_steps: 1}}"]
    assert config.find_configs(args) == (args, [])
    assert config.read(args)[0].tree == {"trainer": {"max_steps": 1}}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--config", "nowhere.yaml"], r"there is no file nowhere.yaml in .*Recipes: .*quickstart"),
        (["--config", "recipes/quickstrat.yaml"], "Did you mean quickstart"),
        (["--config", "my_rum.yaml"], r"no file my_rum.yaml in .*\. Did you mean 'my_run.yaml'\?$"),
        (["--config"], "--config needs a file or the name of a recipe"),
    ],
)
def test_what_is_no_file_is_named(args, said):
    Path("my_run.yaml").touch()
    with pytest.raises(ConfigurationError, match=said):
        config.find_configs(args)


def test_a_syntax_error_has_file_line_and_column():
    Path("r.yaml").write_text("model:\n  seed: 1\n  a: b: c\n")
    with pytest.raises(ConfigurationError, match=r"^r.yaml:3:7 is not valid YAML: .*\n.*a: b: c"):
        config.read(["--config", "r.yaml"])


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n"])
def test_a_file_without_keys_is_refused(text):
    Path("r.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"r\.yaml must hold settings"):
        config.read(["--config", "r.yaml"])


def test_an_empty_file_is_no_error():
    Path("r.yaml").write_text("# nothing yet\n")
    assert config.read(["--config", "r.yaml"]) == []


PASTED = """\
model:
  policy: x
  sampling: {top_p: 0.9}
trainer: {max_steps: 1}
model:
  num_generations: 8
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PASTED, "r.yaml has the key model twice, in lines 1 and 5. Keep one"),
        ("model:\n  seed: 1\n  seed: 1\n", "r.yaml has the key seed twice, in lines 2 and 3"),
        (
            "model:\n  rewards:\n  - {class_path: a,\n     class_path: b}\n",
            "the key class_path twice, in lines 3 and 4",
        ),
        ("model:\n  rewards: [a]\n  rewards+: [b]\n", "the keys rewards and rewards[+], in lines 2 and 3. Keep one"),
    ],
)
def test_a_key_given_twice_is_an_error_with_both_lines(text, said):
    Path("r.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=f"^{said}" if said.startswith("r.") else said):
        config.read(["--config", "r.yaml"])
    with pytest.raises(ConfigurationError, match=r"^--config has the key"):
        config.read(["--config", text])


def test_a_merged_block_may_be_overridden():
    Path("r.yaml").write_text("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}\n")
    assert config.read(["--config", "r.yaml"])[0].tree["b"] == {"x": 2, "y": 1}


def test_arguments_of_a_class_and_of_what_takes_any():
    assert list(arguments(AdamW, OptimizerFactory)) == ["lr", "betas", "eps", "weight_decay"], "params is no setting"
    assert arguments(AdamW)["lr"] is float
    assert arguments(lambda **columns: 0) == {}
    assert num_call_arguments(OptimizerFactory | None) == 1
    assert num_call_arguments(Callable[..., float] | int) == 0


def test_null_stands_for_the_defaults_of_a_dataclass():
    keys = {"model.sampling": Key(SamplingParams | None, None, ""), "model.seed": Key(int | None, None, "")}
    assert config.defaults_of_null(keys)["model.sampling"]["top_p"] == SamplingParams().top_p
    assert list(config.defaults_of_null(keys)) == ["model.sampling"]
