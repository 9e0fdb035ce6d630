"""Rollouts that teach nothing: training goes on, and nothing becomes NaN."""

import math

import lightning as L
import pytest
import torch

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.objective import Objective
from tests.helpers.module_runs import History, ScriptedEngine, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import EOS, tiny_tokenizer
from tests.marks import SLOW, few

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
    "zero reward variance": {"rewards": [constant]},
    "no rewards": {"rewards": [no_reward]},
    "a lone reward": {"rewards": [one_scorable]},
    "no tokens, no rewards": {"engine": ENGINES["no tokens"], "rewards": [no_reward]},
    "one token at most": {"sampling": SamplingParams(max_completion_length=1)},
}


@few(5, slow=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "objective",
    [
        Objective(beta=0.04),
        Objective(beta=0.0, ratio="sequence", aggregate="sequence"),
        Objective(beta=0.04, kl_in="reward"),
    ],
    ids=["default", "gspo", "kl_in_reward"],
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


@few(3)
@pytest.mark.parametrize("case", ["zero reward variance", "no rewards", "a lone reward", "all empty", "no tokens"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_what_teaches_nothing_moves_nothing(case, beta):
    """The KL has no gradient either, where policy and reference are still the same."""
    module = make_module(objective=Objective(beta=beta), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **CASES[case])
    module.configure_model()
    before = weights_of(module)
    fit(module, max_epochs=1)
    assert are_equal(weights_of(module), before)


def run_said(caplog, **options):
    """(share of empty updates per rollout, what was said about them) of two rollouts."""
    caplog.clear()
    history = History()
    fit(make_module(length=4, **options), max_steps=2 * options.get("updates_per_rollout", 1), callbacks=[history])
    said = [record.getMessage() for record in caplog.records if "advantage" in record.getMessage()]
    return [step["rollout/empty_updates"] for step in history.steps], said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rewards": [no_reward]}, "no completion is scorable"),
        ({"rewards": [constant]}, "zero reward variance"),
        ({"engine": ENGINES["all truncated"], "overlong_filter": "loss"}, "4 tokens (overlong_filter 'loss' masks"),
        ({"engine": ENGINES["all truncated"], "overlong_filter": "group"}, "overlong_filter 'group'"),
    ],
    ids=["not scorable", "equal", "loss", "group"],
)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_step_that_trains_on_nothing_is_counted_and_said_once(options, reason, beta, caplog):
    empty, said = run_said(caplog, objective=Objective(beta=beta), **options)
    assert empty == [1.0, 1.0]
    assert len(said) == 1
    assert reason in said[0]
    assert ("apart from the KL" in said[0]) == (beta > 0)
    assert "rollout/empty_updates" in said[0]


@SLOW
def test_a_step_that_trains_on_something_is_not(caplog):
    assert run_said(caplog) == ([0.0, 0.0], [])
    truncated = ScriptedEngine([[A, X], [E, X], [X, X], [A, A]], "length")
    assert run_said(caplog, engine=truncated) == ([0.0, 0.0], [])


def test_one_of_two_updates_is_empty(caplog):
    def of_the_first_prompts(prompts, completions):
        return [float(int(p[-1]) < 2) * place for place, p in enumerate(prompts)]

    history = History()
    module = make_module(length=4, rewards=[of_the_first_prompts], updates_per_rollout=2)
    fit(module, batch_size=4, max_steps=2, callbacks=[history], shuffle=False)
    assert history.steps[0]["rollout/empty_updates"] == 0.5
    assert caplog.text.count("zero reward variance") == 1


@SLOW
def test_the_metrics_say_so():
    history = History()
    fit(make_module(rewards=[no_reward]), max_steps=1, callbacks=[history])
    assert history.of("reward/not_scorable") == [1.0]
    assert history.of("reward/zero_variance_groups") == [1.0]
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


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_reward_that_reads_chats_as_texts_is_explained(caplog, is_chat):
    """Every completion of a chat is a list of one message, whatever its length."""

    def short(completions):
        return [-float(len(text)) if is_chat else 1.0 for text in completions]

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    column = "question" if is_chat else "prompt"
    prompts = [{column: text} for text in ("ab", "cd", "ef", "gh")]
    fit(make_module(rewards=[short], tokenizer=tokenizer), prompts, max_steps=1)
    assert "or a reward gives equal values" in caplog.text
    assert ("of a chat, a reward gets each completion as a list of messages" in caplog.text) == is_chat
