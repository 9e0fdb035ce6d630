"""Tokens are selected over the whole optimizer step, however it is cut."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.functional import high_entropy_tokens
from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.training.token_selection import SELECTIONS, random_keys, select_tokens
from tests.helpers.module_runs import History, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model
from tests.marks import few
from tests.module.test_updates import gradients_of_the_first_step, relative_difference
from tests.training.test_micro_batches import plan, uneven_groups

OBJECTIVES = {
    "high_entropy": {"top_entropy_fraction": 0.3},
    "high_covariance": {"surrogate": "kl_cov", "covariance_fraction": 0.2},
    "random_covariance": {
        "surrogate": "clip_cov",
        "covariance_fraction": 0.1,
        "clip_cov_low": 0.05,
        "clip_cov_high": 9.0,
    },
}
each = pytest.mark.parametrize("name", OBJECTIVES)


def objective_of(name: str) -> Objective:
    return Objective(beta=0.0, **OBJECTIVES[name])


def selected(name: str, accumulate: int, seed: int = 0) -> dict[tuple[int, int], list[bool]]:
    """Return the selected tokens of every completion, by group and number."""
    model, objective = tiny_model("qwen2", dtype=torch.float64), objective_of(name)
    batches, _ = plan(*uneven_groups(), accumulate=accumulate)
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
    actor: Any = SimpleNamespace(
        phase=lambda name: contextlib.nullcontext(),
        token_logprobs=lambda batch: Scorer()(model, batch, temperature=1.0),
    )
    select_tokens(actor, objective, batches, seed=seed)
    found = {}
    for batch in batches:
        assert batch.selected is not None
        assert not (batch.selected & ~batch.completion_mask).any()
        for row, (prompt, number) in enumerate(zip(batch.prompt_index.tolist(), batch.numbers, strict=True)):
            if number >= 0:
                length = int(batch.attention_mask[row].sum())
                found[batch.groups[prompt], number] = batch.selected[row, :length].tolist()
    return found


def test_every_selection_is_in_the_tests():
    assert set(OBJECTIVES) == set(SELECTIONS)
    assert {objective_of(name).selection for name in OBJECTIVES} == set(OBJECTIVES)
    assert Objective().selection is None


@each
def test_what_is_selected_does_not_depend_on_how_an_update_is_cut(name):
    want = selected(name, 1)
    tokens = [token for row in want.values() for token in row]
    assert 0 < sum(tokens) < len(tokens)
    for accumulate in (2, 3, 20):  # 20: more than there are completions
        assert selected(name, accumulate) == want


def test_entropies_of_a_micro_batch_alone_turn_it_red(monkeypatch):
    """As in TRL: the quantile is that of the tokens of one forward pass."""

    def own_quantiles(actor, objective, batches, seed):
        for batch in batches:
            entropies = actor.token_logprobs(batch).entropy[batch.completion_mask]
            chosen = high_entropy_tokens(entropies, objective.top_entropy_fraction)
            batch.selected = torch.zeros_like(batch.completion_mask).masked_scatter(batch.completion_mask, chosen)

    want = selected("high_entropy", 1)
    monkeypatch.setattr("tests.training.test_token_selection.select_tokens", own_quantiles)
    assert selected("high_entropy", 1) == want
    assert selected("high_entropy", 3) != want


def test_the_random_choice_follows_the_seed():
    assert selected("random_covariance", 1, seed=1) != selected("random_covariance", 1, seed=2)
    assert selected("high_covariance", 1, seed=1) == selected("high_covariance", 1, seed=2)


def test_keys_follow_prompt_and_completion():
    (whole,), _ = plan(*uneven_groups(), accumulate=1)
    keys = random_keys(whole, seed=3)
    assert (keys[whole.attention_mask] >= 0).all()
    assert (keys[whole.attention_mask] < 1).all()
    assert not keys[~whole.attention_mask].any()
    values = keys[whole.attention_mask].tolist()
    assert len(set(values)) == len(values)
    assert not torch.equal(keys, random_keys(whole, seed=4))


@few(1, slow=True)
@each
def test_a_run_whatever_the_number_of_micro_batches(name):
    """Two epochs of two updates: tokens are selected anew before each, with the weights that it starts from."""
    logged, gradients = {}, {}
    for accumulate in (1, 2, 4):
        module = make_module(objective=objective_of(name), num_iterations=2, updates_per_rollout=2, length=12)
        history = History()
        fit(module, max_epochs=1, accumulate_grad_batches=accumulate, shuffle=False, callbacks=[history])
        logged[accumulate] = history
        assert all("time/token_selection" in step for step in history.steps)
        module = make_module(objective=objective_of(name), num_iterations=2, length=12)
        gradients[accumulate] = gradients_of_the_first_step(module, accumulate_grad_batches=accumulate, shuffle=False)
    fractions = logged[1].of("policy/selected")
    assert all(0 < fraction < 0.5 for fraction in fractions)
    assert logged[2].of("policy/selected")[:2] == pytest.approx(fractions[:2], abs=0.02)
    assert relative_difference(gradients[2], gradients[1]) < 1e-4
    assert relative_difference(gradients[4], gradients[1]) < 1e-4


@few(1, slow=True)
@each
def test_the_same_run_ends_with_the_same_weights(name):
    def run():
        module = make_module(objective=objective_of(name), num_iterations=2, length=12)
        fit(module, max_epochs=1, accumulate_grad_batches=2)
        return weights_of(module)

    assert are_equal(run(), run())


def test_completions_without_an_advantage_count_too():
    """Their tokens are not trained, but are among those of which some have the highest entropy."""

    def same(completions):
        return [1.0] * len(completions)

    for settings, num_rows in (({}, 0), ({"top_entropy_fraction": 0.3}, 16)):
        module = make_module(rewards=[same], objective=Objective(beta=0.0, **settings))
        fit(module, max_steps=1)
        batches = module.run.cycle.micro_batches
        assert sum(number >= 0 for batch in batches for number in batch.numbers) == num_rows
