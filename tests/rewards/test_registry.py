from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from grpo_lightning import rewards
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import Accuracy, Format, Plugin, Reward, RewardSet, Scores, available, reward
from grpo_lightning.rewards.registry import SHIPPED

GROUPS = [Group(Prompt("p"), [1], [Completion([1], [0.0], "stop", "a"), Completion([1, 2], [0.0] * 2, "stop", "bb")])]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with entry points as an installer leaves it: its module and its `dist-info` folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(package: str, source: str, folder: str = "", **points: str) -> None:
        root = tmp_path / folder
        if folder:
            root.mkdir()
            monkeypatch.syspath_prepend(str(root))
        (root / f"{package}.py").write_text(source)
        info = root / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[grpo_lightning.rewards]", *lines]) + "\n")

    yield write  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


SOURCE = """
class Scaled:
    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(text) for text in completions]


def shortness(completions):
    return [-float(len(text)) for text in completions]
"""


def score(*rewards: Any) -> Scores:
    return RewardSet(list(rewards)).score(GROUPS)


# --- shipped


def test_shipped_rewards_by_name():
    made = reward("format", tags=["plan"])
    assert isinstance(made, Format)
    assert made.tags == ["plan"]
    assert set(available()) == set(SHIPPED)
    assert set(available().values()) == {"grpo-lightning"}


def test_every_shipped_reward_is_listed():
    exported = {name: getattr(rewards, name) for name in rewards.__all__}
    subclasses = {
        name
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, Reward) and value is not Reward
    }
    assert {kind.__name__ for kind in SHIPPED.values()} == subclasses - {"WeightedReward", "Plugin"}


def test_editors_and_type_checkers_see_the_names_that_load():
    imported = re.findall(r"^    from (\S+) import (\w+) as (\w+)$", Path(rewards.__file__).read_text(), re.MULTILINE)
    assert [name for _, name, _ in imported] == [name for _, _, name in imported] == list(rewards._HOMES)
    assert {name: home.removeprefix("grpo_lightning.rewards.") for home, name, _ in imported} == rewards._HOMES
    assert all(name in dir(rewards) and getattr(rewards, name) for name in rewards.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Accurate'; available: Accuracy, AllMatch, "):
        _ = rewards.Accurate


def test_names_are_the_classes_in_snake_case():
    for name, kind in SHIPPED.items():
        assert name.replace("_", "") == kind.__name__.lower()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accuracies", r"Unknown reward 'accuracies'; available: accuracy, .*Did you mean 'accuracy'\?"),
        ("grpo_lightning.rewards.Accuracies", r"Did you mean 'accuracy'\?"),
        ("Format", r"Did you mean 'format'"),
        (
            "zzzzz",
            r"available: .*yes_no\. Name your own rewards by their import path, 'my_module\.my_reward', or by an "
            r"entry point in the group 'grpo_lightning\.rewards'",
        ),
    ],
)
def test_an_unknown_name_is_an_error(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        reward(name)


def test_a_name_of_an_argument_does_not_get_in_the_way():
    with pytest.raises(TypeError, match="unexpected keyword argument 'name'"):
        reward("format", name="x")


# --- installed packages


def test_a_plugin_by_its_entry_point(install: Install):
    install("acme_rewards", SOURCE, scaled="acme_rewards:Scaled", shortness="acme_rewards:shortness")
    assert available()["scaled"] == available()["shortness"] == "acme_rewards"
    assert score(reward("scaled", factor=2)).total.tolist() == [[2, 4]]
    assert score(reward("shortness")).total.tolist() == [[-1, -2]]
    with pytest.raises(ValueError, match=r"'shortness' is a function and takes no init_args, got {'factor': 2}"):
        reward("shortness", factor=2)
    with pytest.raises(ValueError, match=r"Unknown reward 'scale'; available: .*Did you mean 'scaled'\?"):
        reward("scale")


class Module:
    def __init__(self, rewards: list[Reward | Callable[..., Any]]) -> None:
        self.rewards = rewards


def test_a_plugin_in_yaml(install: Install):
    install("acme_rewards", SOURCE, scaled="acme_rewards:Scaled", shortness="acme_rewards:shortness")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Module, "model")
    config = parser.parse_string(
        """
        model:
          rewards:
            - class_path: grpo_lightning.rewards.Plugin
              init_args: {name: scaled, init_args: {factor: 3}, weight: 0.5}
            - {class_path: Plugin, init_args: {name: shortness, log_name: brief}}
            - {class_path: Plugin, init_args: {name: length, init_args: {max_tokens: 1, falloff_tokens: 2}}}
            - {class_path: Accuracy, init_args: {answer_column: gold}}
            - Format
        """
    )
    again = parser.parse_string(parser.dump(config))  # what a checkpoint or a saved config holds
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    rewards = instantiate(again).model.rewards
    assert isinstance(rewards[3], Accuracy)
    assert isinstance(rewards[4], Format)
    scores = score(*rewards[:3])
    assert {name: values.tolist() for name, values in scores.by_reward.items()} == {
        "scaled": [[3, 6]],
        "brief": [[-1, -2]],
        "length_reward": [[1, 0.5]],
    }
    assert scores.total.tolist() == [[1.5 - 1 + 1, 3 - 2 + 0.5]]


def test_a_plugin_has_a_failure_policy(install: Install):
    install("acme_rewards", "def bad(completions):\n    raise KeyError('x')\n", bad="acme_rewards:bad")
    assert score(Plugin("bad", on_error="value", error_value=-1)).total.tolist() == [[-1, -1]]
    with pytest.raises(RuntimeError, match="'bad' raised KeyError"):
        score(Plugin("bad"))


def test_a_name_that_two_packages_announce_is_an_error(install: Install):
    install("acme_one", SOURCE, scaled="acme_one:Scaled")
    install("acme_two", SOURCE, scaled="acme_two:Scaled")
    for look in (available, lambda: reward("scaled")):
        with pytest.raises(ValueError, match="Two packages register the reward 'scaled': acme_") as caught:
            look()
        assert "acme_one" in str(caught.value)
        assert "acme_two" in str(caught.value)


def test_a_name_that_is_shipped_is_an_error(install: Install):
    install("acme_rewards", SOURCE, format="acme_rewards:Scaled")
    with pytest.raises(ValueError, match="Two packages register the reward 'format': grpo-lightning and acme_rewards"):
        reward("format")


def test_a_package_that_is_on_the_path_twice_is_no_clash(install: Install):
    install("acme_rewards", SOURCE, scaled="acme_rewards:Scaled")
    install("acme_rewards", SOURCE, "again", scaled="acme_rewards:Scaled")
    assert score(reward("scaled")).total.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_package_that_is_missing", "ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("other = 1", "AttributeError"),
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_broken_plugin_names_package_and_entry_point(install: Install, source: str, cause: str):
    install("acme_rewards", source, broken="acme_rewards:broken")
    with pytest.raises(ImportError, match=cause) as caught:
        reward("broken")
    assert "'broken' of the package acme_rewards" in str(caught.value)
    assert "'acme_rewards:broken'" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert isinstance(reward("format"), Format)  # the others are not concerned
