"""`grpo-lightning recipes`: found, listed, shown and copied."""

import shutil
from pathlib import Path

import pytest

from grpo_lightning.cli import main, recipes
from grpo_lightning.cli.errors import ConfigurationError
from tests.helpers.paths import RECIPES


def test_every_recipe_has_a_name_whole_ones_first():
    names = recipes.names()
    assert {RECIPES / f"{name}.yaml" for name in names} == set(RECIPES.rglob("*.yaml"))
    assert "/" not in names[0]
    assert ["/" in name for name in names] == sorted("/" in name for name in names)


def test_recipes_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "site" / "grpo_lightning"
    shutil.copytree(RECIPES, package / "recipes")
    monkeypatch.setattr(recipes, "PACKAGE", package)
    assert recipes.folder() == package / "recipes"
    shutil.rmtree(package / "recipes")
    with pytest.raises(ConfigurationError, match="The recipes are missing"):
        recipes.folder()


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml", "./recipes/quickstart.yml"]
)
def test_a_recipe_is_found_by_every_spelling(name):
    assert recipes.find(name) == recipes.folder() / "quickstart.yaml"


@pytest.mark.parametrize(
    ("name", "path"), [("dapo", "objectives/dapo"), ("rec_lora.yaml", "vlm/rec_lora"), ("zero3", "strategies/zero3")]
)
def test_a_recipe_in_a_folder_is_found_by_its_last_name(name, path, tmp_path, monkeypatch):
    assert recipes.find(name) == recipes.folder() / f"{path}.yaml"
    shutil.copytree(RECIPES, tmp_path / "recipes")
    shutil.copy(RECIPES / f"{path}.yaml", tmp_path / "recipes" / "vlm" / f"other_{path.rpartition('/')[2]}.yaml")
    (tmp_path / "recipes" / "more").mkdir()
    shutil.copy(RECIPES / f"{path}.yaml", tmp_path / "recipes" / "more" / f"{path.rpartition('/')[2]}.yaml")
    monkeypatch.setattr(recipes, "PACKAGE", tmp_path)
    assert recipes.find(name) is None, "of two it is not known which"


@pytest.mark.parametrize("name", ["", "quick", "../README", "recipes", "objectives"])
def test_what_is_no_recipe_is_not_found(name):
    assert recipes.find(name) is None


@pytest.mark.parametrize(("name", "near"), [("quikstart", "quickstart"), ("rec_lroa", "vlm/rec_lora")])
def test_the_nearest_name_is_offered(name, near):
    with pytest.raises(ConfigurationError, match=f"There is no recipe '{name}'. Did you mean .*{near}"):
        recipes.recipe_path(name)


def test_header_by_hand(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("# Shows: one.\n#   Two.\n# Hardware: a CPU: any.\nmodel: {}\n# Expect: nothing\n")
    assert recipes.header(path) == {"Shows": "one. Two.", "Hardware": "a CPU: any."}
    path.write_text("# Dr. GRPO (paper): centered.\nmodel: {}\n")
    assert recipes.header(path) == {"Shows": "Dr. GRPO (paper): centered."}


def test_first_sentence():
    assert recipes.first_sentence("Dr. GRPO is centered by the mean. More.") == "Dr. GRPO is centered by the mean."
    assert recipes.first_sentence("all of DAPO (Yu et al. 2025). More.") == "all of DAPO (Yu et al. 2025)."
    assert recipes.first_sentence("no full stop") == "no full stop"


def test_list_shows_every_recipe_in_two_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    main(["recipes", "list"])
    said = capsys.readouterr().out
    for name in recipes.names():
        assert f"\n{name}\n    " in f"\n{said}"
    task = "A tiny model learns to write its steps before it answers with the sum of eight digits modulo 6."
    assert f"quickstart\n    {task}\n" in said
    assert len(said.splitlines()) == 2 * len(recipes.names()) + 4


def test_show_prints_the_file(capsys):
    main(["recipes", "show", "objectives/gspo"])
    assert capsys.readouterr().out == (RECIPES / "objectives" / "gspo.yaml").read_text()


@pytest.mark.parametrize(
    ("target", "path"), [([], "dapo.yaml"), (["new/folder"], "new/folder/dapo.yaml"), (["own.yaml"], "own.yaml")]
)
def test_copy_writes_the_file_and_says_what_to_run(tmp_path, monkeypatch, capsys, target, path):
    monkeypatch.chdir(tmp_path)
    main(["recipes", "copy", "objectives/dapo", *target])
    assert Path(path).read_bytes() == (RECIPES / "objectives" / "dapo.yaml").read_bytes()
    assert f"grpo-lightning fit --config quickstart --config {path}" in capsys.readouterr().out
    main(["recipes", "copy", "vlm/rec_lora", path, "--force"])
    assert f"grpo-lightning fit --config {path}" in capsys.readouterr().out, "a whole recipe in a folder"


@pytest.mark.parametrize("name", ["objectives/dapo", "quickstart"])
def test_the_command_after_a_copy_is_quoted(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    main(["recipes", "copy", name, "my recipe.yaml"])
    assert capsys.readouterr().out.endswith("--config 'my recipe.yaml'\n")


def test_copy_overwrites_only_by_force(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("mine")
    with pytest.raises(SystemExit) as exit_:
        main(["recipes", "copy", "quickstart", "own.yaml"])
    assert exit_.value.code == 2
    assert "own.yaml already exists" in capsys.readouterr().err
    assert Path("own.yaml").read_text() == "mine"
    main(["recipes", "copy", "quickstart", "own.yaml", "--force"])
    assert Path("own.yaml").read_bytes() == (RECIPES / "quickstart.yaml").read_bytes()
    assert "fit --config own.yaml" in capsys.readouterr().out
