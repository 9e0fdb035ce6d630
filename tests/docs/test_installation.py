"""docs/installation.md: its extras are those of the package, and its quickstarts are recipes."""

import re

import pytest

from grpo_lightning.cli import recipes
from tests.docs.newcomer import commands
from tests.helpers.pages import read, tables
from tests.helpers.paths import RECIPES, ROOT

PAGE = read("installation.md")


def test_the_extras_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = [row for row in tables(PAGE) if row.heading == "Extras"]
    named = {row.names()[0] for row in rows}
    assert named == set(extras) - {"bench", "test", "dev", "docs"}
    ((left_out,),) = [row.names(1) for row in rows if row.names() == ["all"]]
    (everything,) = extras["all"]
    assert set(re.findall(r"[\w-]+", everything.partition("[")[2])) == named - {"all", left_out}


def test_the_quickstarts_are_all_there():
    named = {row.names()[0].removeprefix("make ").replace("-", "_") for row in tables(PAGE) if "make" in row.cells[0]}
    assert named == {path.stem for path in RECIPES.glob("quickstart*.yaml")}


def test_the_command_is_a_recipe():
    assert commands(PAGE) == ["grpo-lightning fit --config quickstart"]
    assert recipes.find("quickstart") is not None


def test_a_wheel_has_the_name_shown():
    (name,) = re.findall(r"'grpo_lightning-([\d.]+)-py3", PAGE)
    assert f'\nversion = "{name}"' in (ROOT / "pyproject.toml").read_text()
