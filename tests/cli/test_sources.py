"""Settings as they were written: flags, files and names of recipes."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lightning.cli import recipes, sources
from grpo_lightning.cli.errors import ConfigurationError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_flags_and_files_as_trees_in_their_order():
    Path("r.yaml").write_text("model: {seed: 1}\n")
    args = ["fit", "--config", "r.yaml", "--trainer.max_steps=3", "--model.policy", "x", "--print_config"]
    found = [(source.where, source.tree) for source in sources.read(args)]
    assert found == [
        ("in r.yaml", {"model": {"seed": 1}}),
        ("on the command line", {"trainer": {"max_steps": 3}}),
        ("on the command line", {"model": {"policy": "x"}}),
        ("on the command line", {"print_config": None}),
    ]
    assert sources.config_files(args) == [Path("r.yaml")]


def test_files_come_before_flags():
    args = ["fit", "--a=1", "--config", "r.yaml", "--b", "-c", "s.yaml", "--d", "2", "--config=t.yaml", "--e"]
    first = ["--config", "r.yaml", "-c", "s.yaml", "--config=t.yaml"]
    assert sources.files_first(args) == ["fit", *first, "--a=1", "--b", "--d", "2", "--e"]


def test_a_file_may_follow_the_short_flag_without_a_space():
    assert sources.split_short_flags(["fit", "-cr.yaml", "-c=s.yaml", "-c", "t.yaml", "--a", "-1"]) == [
        *("fit", "-c", "r.yaml", "-c=s.yaml", "-c", "t.yaml", "--a", "-1")
    ]


def test_a_negative_number_is_a_value():
    assert [source.tree for source in sources.read(["--a", "-1"])] == [{"a": -1}]


@pytest.mark.parametrize(
    "args", [["--config", "quickstart"], ["--config=quickstart"], ["-c", "recipes/quickstart.yaml"]]
)
def test_names_of_recipes_become_files(args):
    found, (notice,) = sources.find_configs(["fit", *args, "--trainer.max_steps=1"])
    assert sources.config_files(found) == [recipes.folder() / "quickstart.yaml"]
    assert str(recipes.folder() / "quickstart.yaml") in notice
    assert found[-1] == "--trainer.max_steps=1"


def test_a_file_of_ones_own_comes_before_a_recipe_of_that_name():
    Path("quickstart").write_text("model: {}")
    assert sources.find_configs(["--config", "quickstart"]) == (["--config", "quickstart"], [])


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("model: {}")
    path = str(tmp_path / "r.yaml")
    assert sources.find_configs(["--config=~/r.yaml"]) == ([f"--config={path}"], [])
    assert sources.find_configs(["-c", "~/r.yaml"]) == (["-c", path], [])


def test_settings_may_stand_in_the_place_of_a_file():
    args = ["--config", "{trainer: {max_steps: 1}}"]
    assert sources.find_configs(args) == (args, [])
    assert sources.read(args)[0].tree == {"trainer": {"max_steps": 1}}


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
        sources.find_configs(args)


def test_a_syntax_error_has_file_line_and_column():
    Path("r.yaml").write_text("model:\n  seed: 1\n  a: b: c\n")
    with pytest.raises(ConfigurationError, match=r"^r.yaml:3:7 is not valid YAML: .*\n.*a: b: c"):
        sources.read(["--config", "r.yaml"])


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n"])
def test_a_file_without_keys_is_refused(text):
    Path("r.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"r\.yaml must hold settings"):
        sources.read(["--config", "r.yaml"])


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_named_with_what_to_do(text):
    Path("r.yaml").write_text(text)
    with pytest.raises(
        ConfigurationError, match=r"^r\.yaml is empty: .*Write settings .*or remove --config r\.yaml\.$"
    ):
        sources.read(["--config", "r.yaml"])


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
        sources.read(["--config", "r.yaml"])
    with pytest.raises(ConfigurationError, match=r"^--config has the key"):
        sources.read(["--config", text])


def test_a_merged_block_may_be_overridden():
    Path("r.yaml").write_text("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}\n")
    assert sources.read(["--config", "r.yaml"])[0].tree["b"] == {"x": 2, "y": 1}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fit", "--config", "quickstrat"], "Did you mean quickstart"),
        (["fit", "quickstart"], "write --config quickstart"),
        (["fit", "--config", "broken.yaml"], "broken.yaml:1:5 is not valid YAML"),
        (["plan", "--config", "broken.yaml"], "broken.yaml:1:5 is not valid YAML"),
    ],
)
def test_what_needs_no_parser_is_refused_before_torch_is_imported(args, said):
    Path("broken.yaml").write_text("a: b: c\n")
    start = f"""
import sys
from grpo_lightning.cli import main
try:
    main({args!r})
finally:
    assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert said in result.stderr
