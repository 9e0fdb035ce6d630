"""`make prove-same-learning`: its statistics and bars by hand, and both sides on a minute version of the quickstart."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from rich.console import Console

from benchmarks import versus_trl
from grpo_lightning.demo.arithmetic import DemoModel, DemoRecipe, DemoTask, Quickstart, WarmUp
from grpo_lightning.functional import losses
from tests.marks import SLOW

TINY = DemoRecipe(
    DemoTask(num_digits=4, num_warm_up=64, num_train=64, num_heldout=8),
    DemoModel(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2),
    WarmUp(batch_size=8, target_loss=10.0, num_short_steps=2),
)
RISING = [0.3, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95]


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; it imports its neighbors."""
    monkeypatch.syspath_prepend(str(Path(versus_trl.__file__).parent))
    return importlib.import_module("benchmarks.prove_same_learning")


def test_the_mean_reward_of_a_range_of_tokens_by_hand(prove: Any):
    curve = prove.Curve()
    curve.add(["b", "a", "a"], [0.0, 1.0, 0.5], [1, 2, 3])
    assert curve == prove.Curve([6], [0.5], [["a", "b"]])
    # Tokens 1 to 6 have the reward 0.5, tokens 7 and 8 the reward 1, tokens 9 to 12 the reward 0.
    curve = prove.Curve([6, 2, 4], [0.5, 1.0, 0.0], [["a"]] * 3)
    assert curve.means(12, 3) == pytest.approx([0.5, (2 * 0.5 + 2 * 1) / 4, 0.0])
    assert curve.means(7, 1) == pytest.approx([(6 * 0.5 + 1) / 7])


@pytest.mark.parametrize(
    ("probability", "freedom", "want"),
    [(0.95, 1, 6.3138), (0.975, 2, 4.3027), (0.975, 5, 2.5706), (0.9975, 5, 4.7733), (0.95, 7, 1.8946), (0.5, 3, 0.0)],
)
def test_quantiles_are_those_of_the_tables(prove: Any, probability: float, freedom: int, want: float):
    assert prove.student_quantile(probability, freedom) == pytest.approx(want, abs=1e-4)


def test_a_difference_by_hand(prove: Any):
    """Differences 0.1, 0.2 and 0.3: the mean is 0.2, the standard error 0.1 / sqrt(3), and t(0.95) is 2.92."""
    difference = prove.Difference.between([0.6, 0.6, 0.6], [0.5, 0.4, 0.3])
    assert (difference.mean, difference.error) == pytest.approx((0.2, 0.1 / 3**0.5))
    assert difference.bound == pytest.approx(0.2 + 2.92 * 0.1 / 3**0.5, abs=1e-4)
    assert not difference.is_significant()  # t is 3.46, below 4.30
    assert prove.Difference(0.25, 0.1 / 3**0.5, 3).is_significant()
    assert not prove.Difference(0.25, 0.1 / 3**0.5, 3).is_significant(10)


def test_every_bar_can_fail(prove: Any):
    def side(rewards: list[float] = RISING, end: float = 0.95, noise: float = 0.004) -> list[Any]:
        """Three seeds: a rise of 40 steps, each tenth with one reward, and 60 steps at the end."""
        values = [reward for reward in rewards for _ in range(4)] + [end] * 60
        return [prove.Curve([10] * 100, [value + shift for value in values]) for shift in (-noise, 0.0, noise)]

    def failing(**changed: Any) -> list[str]:
        curves = {prove.TRL: side(noise=0.0), prove.OURS: side(), prove.UNCLIPPED: side()}
        curves[prove.CONTROL] = side([r - 0.1 for r in RISING])
        curves |= {getattr(prove, name): some for name, some in changed.items()}
        return [bar for bar, holds in prove.bars_of(curves).items() if not holds]

    rise, last, each, unclipped, gain, control = prove.bars_of({name: side() for name in prove.RUNS})
    assert failing() == []
    assert failing(OURS=side([reward + 0.06 for reward in RISING])) == [rise, each]
    assert failing(OURS=side([*RISING[:4], 0.8, *RISING[5:]])) == [each]
    assert failing(OURS=side(end=0.91)) == [last]
    assert failing(UNCLIPPED=side(end=0.96)) == [unclipped]
    assert failing(OURS=side(noise=0.1)) == [rise, last]
    assert failing(TRL=side([0.3] * 10, noise=0.0), OURS=side([0.3] * 10), CONTROL=side([0.2] * 10)) == [gain]
    for same in (side(), side([r - 0.04 for r in RISING]), side([r - 0.1 for r in RISING], noise=0.1)):
        assert failing(CONTROL=same) == [control]


def test_other_prompts_are_an_error(prove: Any, monkeypatch: pytest.MonkeyPatch):
    curves = {side: prove.Curve([1], [0.5], [["a"]]) for side in prove.RUNS}
    monkeypatch.setattr(prove, "run", lambda side, *arguments: curves[side])
    found = prove.run_all([*prove.RUNS], [0, 1], [], 1, Console(quiet=True))
    assert found == {side: (curve, curve) for side, curve in curves.items()}
    curves[prove.TRL] = prove.Curve([1], [0.5], [["b"]])
    with pytest.raises(RuntimeError, match="TRL, seed 0, has other prompts than grpo-lightning"):
        prove.run_all([*prove.RUNS], [0, 1], [], 1, Console(quiet=True))


@SLOW
def test_the_outcome_is_recorded_and_evaluated_again(prove: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stored(name: str) -> Any:
        return json.loads((tmp_path / "new" / name).read_text())

    monkeypatch.setattr(prove, "RESULT", tmp_path / "new" / "curves.json")
    monkeypatch.setattr(prove, "PICTURE", tmp_path / "new" / "curves.png")
    monkeypatch.setattr(proofs, "PATH", tmp_path / "new" / "proofs.json")
    curve = prove.Curve([10, 20], [0.1, 0.5], [["a"]] * 2)
    monkeypatch.setattr(prove, "run", lambda *arguments: curve)
    monkeypatch.setattr(sys, "argv", ["prove_same_learning.py", "--seeds", "3", "4", "--record"])
    assert prove.main() == 1  # no side learns
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    outcome = stored("proofs.json")["same_learning"]
    assert (outcome["seeds"], outcome["tokens_of_rise"]) == ([3, 4], 30)
    assert outcome["differences"]["rise"] == {"mean": 0.0, "standard_error": 0.0, "equal_within": 0.0}
    assert outcome["reward_by_tenth_of_rise"][prove.OURS] == [[*[0.1] * 3, 0.3667, *[0.5] * 6]] * 2
    assert stored("curves.json")["curves"][prove.OURS] == [{"tokens": [10, 20], "rewards": [0.1, 0.5]}] * 2
    monkeypatch.setattr(prove, "run", None)
    monkeypatch.setattr(sys, "argv", ["prove_same_learning.py", "--sides", "--record"])
    prove.main()
    again = stored("proofs.json")["same_learning"]
    assert again == outcome | {"command": "python benchmarks/prove_same_learning.py --sides --record"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of TRL and transformers
def test_both_sides_train_on_the_same_prompts(prove: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl", minversion="1.16")
    monkeypatch.setattr(Quickstart, "recipe", staticmethod(lambda: TINY))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for name, value in {**prove.ENVIRONMENT, "GRPO_LIGHTNING_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(losses, "MAX_K3", losses.MAX_K3)  # a run changes it
    curves = {}
    for side, run in prove.RUNS.items():
        (tmp_path / side).mkdir()
        monkeypatch.chdir(tmp_path / side)
        curves[side] = run(1, "--trainer.max_steps=2")
        assert [len(step) for step in curves[side].prompts] == [16, 16]
        assert all(16 * 8 <= tokens <= 16 * 8 * 48 for tokens in curves[side].tokens)
        assert all(0 <= reward <= 1 for reward in curves[side].rewards)
    assert all(curve.prompts == curves[prove.TRL].prompts for curve in curves.values())
    # Half the learning rate changes nothing before the first update.
    assert curves[prove.OURS].tokens[0] == curves[prove.CONTROL].tokens[0]
