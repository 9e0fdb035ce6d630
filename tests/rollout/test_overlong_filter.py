"""Completions that the length limit cut: trained on, left out of the loss, or left out of their group too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_lightning.objective import Objective
from tests.helpers.module_runs import ScriptedEngine, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import EOS
from tests.marks import SLOW, few

A, E, X = (ord(c) - 30 for c in "aex")
COMPLETIONS = [[A, E, EOS], [X, A, X, X], [X, EOS], [X, X, A, EOS]]
"""Vowels: 2, 1, 0, 1; the second is cut."""

EVERY = ("none", "loss", "group")


def num_vowels(completions: list[str]) -> list[float]:
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def trained(overlong_filter: Any, completions: Any = COMPLETIONS, beta: float = 0.0, **options: Any) -> Any:
    """A module after one optimizer step on two prompts."""
    module = make_module(
        engine=ScriptedEngine(completions),
        overlong_filter=overlong_filter,
        **{"rewards": [num_vowels], "objective": Objective(beta=beta), **options},
    )
    fit(module, ["one", "a longer one"], batch_size=2, shuffle=False, max_steps=1)
    return module


def advantages(*rewards: float) -> list[float]:
    """Compute the advantages of a group by hand."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    mean = sum(known) / len(known)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
    return [0.0 if math.isnan(reward) else (reward - mean) / (std + 1e-4) for reward in rewards]


@pytest.mark.parametrize(
    ("overlong_filter", "rewards", "num_tokens"),
    [("none", (2, 1, 0, 1), 13), ("loss", (2, 1, 0, 1), 9), ("group", (2, math.nan, 0, 1), 9)],
)
def test_by_hand(overlong_filter: str, rewards: tuple[float, ...], num_tokens: int):
    module = trained(overlong_filter)
    scores, found = module.rollout.scores, module.rollout.advantages
    torch.testing.assert_close(found, torch.tensor([advantages(*rewards)] * 2))
    assert scores.total.tolist() == [[2, 1, 0, 1]] * 2, "what is logged is the reward of all"
    (counts,) = module.run.cycle.counts
    assert counts == (2 * num_tokens, 2 * (3 if overlong_filter != "none" else 4))
    tokens = sum(int(batch.completion_mask.sum()) for batch in module.run.cycle.micro_batches)
    # Those of advantage 0 are not computed without a KL: of every group the first and the third are.
    assert tokens == 2 * (3 + 2)


@SLOW
def test_what_is_masked_is_not_computed():
    """With a KL all trained completions are, and only these."""
    rows = {name: trained(name, beta=0.04).run.cycle.micro_batches for name in EVERY}
    assert {name: sum(len(batch.advantages) for batch in found) for name, found in rows.items()} == {
        "none": 8,
        "loss": 6,
        "group": 6,
    }


@few(1)
@pytest.mark.parametrize("overlong_filter", EVERY)
def test_nothing_is_cut(overlong_filter: str):
    whole = [[A, E, EOS], [X, A, EOS], [X, EOS], [X, X, A, EOS]]
    plain, filtered = (weights_of(trained(name, whole, lr=1e-2)) for name in ("none", overlong_filter))
    assert are_equal(plain, filtered)


@few(1, slow=True)
@pytest.mark.parametrize("overlong_filter", ["loss", "group"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_everything_is_cut(overlong_filter: str, beta: float):
    """Finite, and nothing is learned."""
    cut = [[A, E], [X, A], [X, X], [E, E]]
    module = trained(overlong_filter, cut, beta, lr=1e-2)
    assert are_equal(weights_of(module), weights_of(trained("none", cut, beta, lr=0.0)))
    assert module.run.cycle.counts == [(0, 0)]


@SLOW
def test_a_filter_changes_what_is_learned():
    plain, loss, group = (weights_of(trained(name, lr=1e-2, beta=0.04)) for name in EVERY)
    assert not are_equal(plain, loss)
    assert not are_equal(loss, group)


def test_an_unknown_filter_is_named():
    with pytest.raises(ValueError, match=r"model\.overlong_filter must be one of none, loss, group, got 'drop'"):
        make_module(overlong_filter="drop")


@pytest.mark.parametrize(("overlong_filter", "lengths"), [("none", [3, 4, 2, 4]), ("loss", [3, 0, 2, 4])])
def test_the_length_weighted_baseline_counts_trained_tokens(overlong_filter, lengths):
    """The second completion is cut: masked, it has no gradient whose variance the baseline could lower."""
    objective = Objective(beta=0.0, baseline="length_weighted", scale="none")
    module = trained(overlong_filter, objective=objective)
    rewards = [2.0, 1.0, 0.0, 1.0]
    baseline = sum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
    assert module.rollout.advantages[0].tolist() == pytest.approx([reward - baseline for reward in rewards])


def test_rewards_that_are_normalized_one_by_one_leave_excluded_completions_out():
    """The two rewards favor opposite completions, and the truncated one has an outlier."""

    def first(completions: list[str]) -> list[float]:
        return [1.0, 10.0, 0.0] * (len(completions) // 3)

    def second(completions: list[str]) -> list[float]:
        return [0.0, 0.0, 1.0] * (len(completions) // 3)

    objective = Objective(beta=0.0, multi_objective_aggregation="normalize_then_sum")
    module = trained("group", COMPLETIONS[:3], objective=objective, rewards=[first, second], num_generations=3)
    assert module.rollout.advantages.tolist() == [[0.0, 0.0, 0.0]] * 2
