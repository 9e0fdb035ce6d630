"""`make prove-game` and `make prove-tools`: their bars by hand, and what their controls change."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import versus_trl
from grpo_lightning.core.types import Completion
from grpo_lightning.environments.tools import argument_problem
from grpo_lightning.environments.tools import calculator as shipped
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.training.run_state import RunState

Summary = dict[str, float]


@pytest.fixture(autouse=True)
def neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import each other."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))


@pytest.fixture
def game(neighbors: None) -> Any:
    return importlib.import_module("benchmarks.prove_game")


@pytest.fixture
def tools(neighbors: None) -> Any:
    return importlib.import_module("benchmarks.prove_tools")


def missed(script: Any, runs: dict[str, list[Summary]]) -> list[str]:
    """The bars that are not reached."""
    return [name for name, holds in script.verdicts(runs).items() if not holds]


def all_runs(script: Any, trained: list[Summary], control: Summary) -> dict[str, list[Summary]]:
    """Runs of all controls of a script."""
    return {name: trained if name == "trained" else [control] for name in script.PROOF.controls}


# ------------------------------------------------------------------------------------------------------------ the game


def game_summary(before: float = 0.3, after: float = 0.95, greedy: float = 0.95, seconds: float = 200.0) -> Summary:
    return {
        "seed": 0,
        "environment_reward_before": before,
        "environment_reward_after": after,
        "greedy_before": before,
        "greedy_after": greedy,
        "seconds": seconds,
    }


def test_the_summary_has_the_numbers_that_the_game_records(game):
    assert set(game_summary()) == {"seed", *game.PROOF.numbers}


def test_a_game_at_every_bar_passes(game):
    trained = [game_summary(), game_summary(0.40, 0.80, 0.80, 480.0)]
    runs = all_runs(game, trained, game_summary(after=0.475))
    assert missed(game, runs) == []
    assert len(game.verdicts(runs)) == 4 + 4  # the bars of training, and one per control


@pytest.mark.parametrize(
    ("broken", "bar"),
    [
        (game_summary(before=0.41), "sampled before <= 0.40"),
        (game_summary(after=0.79), "sampled after >= 0.80"),
        (game_summary(greedy=0.79), "greedy after >= 0.80"),
        (game_summary(seconds=481.0), "seconds <= 480"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_seed_below_a_bar_of_the_game_fails_it(game, broken, bar):
    for trained in ([broken, game_summary()], [game_summary(), broken]):
        assert missed(game, all_runs(game, trained, game_summary(after=0.3))) == [bar]


def test_every_control_of_the_game_that_learns_fails(game):
    good = all_runs(game, [game_summary()], game_summary(after=0.3))
    controls = [name for name in good if name != "trained"]
    assert controls == ["blank observations", "shuffled rewards", "flipped advantages", "learning rate 0"]
    for control in controls:
        runs = good | {control: [game_summary(after=0.3), game_summary(after=0.48)]}
        assert missed(game, runs) == [f"{control}: after < 0.48"]


def test_shuffled_rewards_are_the_same_rewards_at_other_completions(game):
    module = object.__new__(game.ShuffledRewards)
    torch.nn.Module.__init__(module)
    module.run, module.objective = RunState(), Objective(scale="none")
    rewards = torch.arange(8.0).view(2, 4)
    orders = []
    for index in (0, 1):
        module.run.rollout_index = index
        groups = [SimpleNamespace(completions=[Completion([1, 2], [0.0, 0.0], "stop")] * 4)] * 2
        rollout = module.compute_advantages(Rollout(groups, rewards=rewards.clone()))
        assert sorted(rollout.rewards.flatten().tolist()) == rewards.flatten().tolist()
        expected = rollout.rewards - rollout.rewards.mean(dim=1, keepdim=True)
        torch.testing.assert_close(rollout.advantages, expected)  # computed from the shuffled rewards
        orders.append(rollout.rewards)
    assert not torch.equal(orders[0], rewards)
    assert not torch.equal(*orders)  # another order in every rollout


# ----------------------------------------------------------------------------------------------------------- the tools


def tool_summary(
    before: float = 0.2,
    after: float = 0.95,
    greedy: float = 0.95,
    use: tuple[float, float] = (0.2, 0.9),
    seconds: float = 200.0,
) -> Summary:
    return {
        "seed": 0,
        "accuracy_before": before,
        "accuracy_after": after,
        "greedy_after": greedy,
        "tool_use_before": use[0],
        "tool_use_after": use[1],
        "seconds": seconds,
    }


def test_the_summary_has_the_numbers_that_the_tools_record(tools):
    assert set(tool_summary()) == {"seed", *tools.PROOF.numbers}


def test_a_calculator_at_every_bar_passes(tools):
    trained = [tool_summary(), tool_summary(0.30, 0.80, 0.80, (0.25, 0.75), 480.0)]
    runs = all_runs(tools, trained, tool_summary(after=0.29))
    assert missed(tools, runs) == []
    assert len(tools.verdicts(runs)) == 5 + 4  # the bars of training, and one per control


@pytest.mark.parametrize(
    ("broken", "bar"),
    [
        (tool_summary(before=0.31), "sampled before <= 0.30"),
        (tool_summary(after=0.79), "sampled after >= 0.80"),
        (tool_summary(greedy=0.79), "greedy after >= 0.80"),
        (tool_summary(use=(0.45, 0.94)), "tool use: gain >= 0.50"),
        (tool_summary(seconds=481.0), "seconds <= 480"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_seed_below_a_bar_of_the_tools_fails_it(tools, broken, bar):
    for trained in ([broken, tool_summary()], [tool_summary(), broken]):
        assert missed(tools, all_runs(tools, trained, tool_summary(after=0.2))) == [bar]


def test_every_control_of_the_tools_that_learns_fails(tools):
    good = all_runs(tools, [tool_summary()], tool_summary(after=0.2))
    controls = [name for name in good if name != "trained"]
    assert controls == ["a calculator that says 0", "shuffled rewards", "flipped advantages", "learning rate 0"]
    for control in controls:
        runs = good | {control: [tool_summary(after=0.2), tool_summary(after=0.31)]}
        assert missed(tools, runs) == [f"{control}: gain < 0.10"]


def test_the_calculator_of_the_control_takes_the_same_calls_and_says_0(tools):
    for call in ({"expression": "45+67+89"}, {"formula": "45+67+89"}, {"expression": 3}):
        assert bool(argument_problem(tools.calculator, call)) == bool(argument_problem(shipped, call))
    assert tools.calculator.__name__ == shipped.__name__  # the prompt names the tool
    assert tools.calculator("45+67+89") == "0" != shipped("45+67+89")


def test_the_tool_use_of_sampled_answers_is_added_to_the_summary(tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(tools.SUMMARY)
    path.parent.mkdir(parents=True)
    tables = {
        when: {"sampled": {"tool_use": used}, "greedy": {"tool_use": 9.0}}
        for when, used in (("before", 0.2), ("after", 1))
    }
    path.write_text(json.dumps({"accuracy_before": 0.1, **tables}))
    called: list[Any] = []
    monkeypatch.setattr(tools, "run_cli", lambda args, module_class: called.append((args, module_class)))
    tools.quickstart(tools.ShuffledRewards, 7, "--model.optimizer.init_args.lr=0")
    (command, module_class) = called[0]
    assert command == [
        *("fit", "--config", str(tools.RECIPE), "--seed_everything=7", "--model.optimizer.init_args.lr=0"),
    ]
    assert module_class is tools.ShuffledRewards
    assert json.loads(path.read_text()) == {
        **{"accuracy_before": 0.1, "tool_use_before": 0.2, "tool_use_after": 1},
        **tables,
    }
