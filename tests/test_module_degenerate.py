"""Rollouts that teach nothing: training goes on, and nothing becomes NaN."""

import math

import lightning as L
import pytest
import torch

from grpo_lightning.objective import Objective
from grpo_lightning.types import SamplingParams
from tests.module_runs import History, ScriptedEngine, are_equal, fit, make_module, weights_of
from tests.tiny_models import EOS

A, E, X = (ord(c) - 30 for c in "aex")


def no_reward(completions):
    return [None] * len(completions)


def one_scorable(completions):
    return [1.0, *[None] * (len(completions) - 1)]


def constant(completions):
    return [0.3] * len(completions)


ENGINES = {
    "all truncated": ScriptedEngine([[A, X], [E, X], [X, X], [A, A]], "length"),
    "all empty": ScriptedEngine([[EOS]] * 4),
    "no tokens": ScriptedEngine([[]] * 4, "stop"),
    "some without tokens": ScriptedEngine([[A, EOS], [], [X, EOS], []], "stop"),
}
CASES = {name: {"engine": engine} for name, engine in ENGINES.items()} | {
    "equal rewards": {"rewards": [constant]},
    "no rewards": {"rewards": [no_reward]},
    "a lone reward": {"rewards": [one_scorable]},
    "no tokens, no rewards": {"engine": ENGINES["no tokens"], "rewards": [no_reward]},
    "one token at most": {"sampling": SamplingParams(max_completion_length=1)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "objective",
    [
        Objective(beta=0.04),
        Objective(beta=0.0, ratio="sequence", aggregate="sequence"),
    ],
    ids=["default", "gspo"],
)
def test_training_goes_on(case, objective):
    history = History()
    module = make_module(objective=objective, updates_per_rollout=2, **CASES[case])
    trainer = fit(module, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[history])
    assert trainer.global_step == 4
    for name, parameter in module.policy.named_parameters():
        assert parameter.isfinite().all(), name
    for step in history.steps:
        assert all(math.isfinite(value) for value in step.values()), step


@pytest.mark.parametrize("case", ["equal rewards", "no rewards", "a lone reward", "all empty", "no tokens"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_what_teaches_nothing_moves_nothing(case, beta):
    """The KL has no gradient either, where policy and reference are still the same."""
    module = make_module(objective=Objective(beta=beta), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **CASES[case])
    module.configure_model()
    before = weights_of(module)
    fit(module, max_epochs=1)
    assert are_equal(weights_of(module), before)


def test_the_metrics_say_so():
    history = History()
    fit(make_module(rewards=[no_reward]), max_steps=1, callbacks=[history])
    assert history.of("reward/not_scorable") == [1.0]
    assert history.of("reward/equal_groups") == [1.0]
    assert "reward/mean" not in history.steps[0]
    history = History()
    fit(make_module(engine=ENGINES["all truncated"]), max_steps=1, callbacks=[history])
    assert history.of("rollout/truncated") == [1.0]
    history = History()
    fit(make_module(engine=ENGINES["no tokens"]), max_steps=1, callbacks=[history])
    assert history.of("rollout/length") == [0.0]
    assert history.of("policy/loss") == [0.0]


def test_a_policy_gone_nan_stops_with_advice():
    class Spoil(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                next(pl_module.policy.parameters()).data.fill_(math.nan)

    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        fit(make_module(), max_epochs=1, callbacks=[Spoil()])
