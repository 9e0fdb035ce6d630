"""Metrics have every name that is documented, and values computed by hand."""

import functools
import itertools
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from grpo_lightning.objective import Objective
from grpo_lightning.rewards.base import WeightedReward
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.schedules import Linear
from tests.helpers.module_runs import History, ScriptedEngine, fit, make_module
from tests.helpers.tiny_models import EOS
from tests.marks import few

A, E, X = (ord(c) - 30 for c in "aex")
COMPLETIONS = [[A, E, EOS], [X, A, X, X], [X, EOS], [X, X, A, EOS]]  # rewards: see below; the second is truncated
PROMPTS = ["one", "a longer one"]


def num_vowels(completions):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def num_letters(completions):
    """Not weighed, only logged."""
    return [float(len(text)) for text in completions]


def run(accumulate=1, lr=0.0, prompts=PROMPTS, steps=1, **options):
    """The metrics of every step, on the same completions."""
    history = History()
    module = make_module(
        rewards=[num_vowels, num_letters],
        reward_weights=[2.0, 0.0],
        engine=ScriptedEngine(COMPLETIONS),
        lr=lr,
        **{"objective": Objective(beta=0.04), **options},
    )
    flags = {"max_steps": steps, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    fit(module, prompts, batch_size=2, shuffle=False, callbacks=[history], **flags)
    return history.steps


def test_every_metric_of_the_first_step():
    (metrics,) = run()
    seconds = {name: metrics.pop(name) for name in list(metrics) if name.startswith("time/")}
    assert set(seconds) == {f"time/{phase}" for phase in ("rollout", "reward", "ref_logprobs")}
    assert all(value > 0 for value in seconds.values())
    # Rewards 2 x (2, 1, 0, 1) = 4, 2, 0, 2: mean 2, unbiased variance s^2 = (4 + 0 + 4 + 0) / 3. Advantages
    # 2 / (s + 1e-4), 0, -2 / (s + 1e-4), 0 for completions of 3, 4, 2 and 4 tokens (13), the ratio 1 and the KL 0.
    std = math.sqrt(8 / 3)
    advantage = 2 / (std + 1e-4)
    assert metrics.pop("policy/grad_norm") > 0
    assert metrics.pop("policy/lr") == 0
    # The script claims the log-prob -1 for every token.
    assert metrics.pop("policy/rollout_kl") > 0
    assert metrics.pop("policy/rollout_difference_max") > 0
    assert 0 < metrics.pop("policy/rollout_ess") < 1
    assert metrics == {
        "rollout/length": pytest.approx(13 / 4),
        "rollout/length_stopped": pytest.approx((3 + 2 + 4) / 3),
        "rollout/length_min": 2,
        "rollout/length_max": 4,
        "rollout/truncated": pytest.approx(1 / 4),
        "rollout/tokens_per_second": pytest.approx(26 / seconds["time/rollout"], rel=1e-4),
        # Prompts of 3 and 12 tokens in 2 x 12 slots, 26 completion tokens in 8 x 4.
        "rollout/padding": pytest.approx((24 - 15 + 32 - 26) / (24 + 32)),
        "rollout/empty_updates": 0,
        "reward/mean": pytest.approx(2),
        "reward/std": pytest.approx(std),
        "reward/num_vowels": pytest.approx(1),
        "reward/std/num_vowels": pytest.approx(std / 2),
        "reward/num_letters": pytest.approx((2 + 4 + 1 + 3) / 4),
        "reward/std/num_letters": pytest.approx(math.sqrt((0.25 + 2.25 + 2.25 + 0.25) / 3)),
        "reward/zero_variance_groups": 0,
        "reward/not_scorable": 0,
        "policy/loss": pytest.approx(-(3 - 2) * advantage / 13, rel=1e-5),
        "policy/entropy": pytest.approx(1),  # by its log-probs: the script says -1 nat of every token
        "policy/kl": 0,
        "policy/kl_clamped": 0,
        "policy/ratio": 1,
        "policy/ratio_clamped": 0,
        "policy/clip_fraction": 0,
        "policy/clip_fraction_low": 0,
        "policy/clip_fraction_high": 0,
    }


def has_an_e(prompts, completions):
    """Whole groups of equals, and completions at the mean of their groups."""
    return [float(len(prompt) > 9) * text.count("e") for prompt, text in zip(prompts, completions, strict=True)]


@few(2, slow=True)
@pytest.mark.parametrize(
    "options", [{}, {"num_iterations": 2}, {"updates_per_rollout": 2}, {"updates_per_rollout": 2, "num_iterations": 2}]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_metric_depends_on_which_completions_are_skipped(accumulate, options):
    """Without a KL, completions of advantage 0 are not run through the policy; with the least KL they are."""
    steps, rows = {}, {}
    for beta in (0.0, 1e-9):
        history = History()
        module = make_module(rewards=[has_an_e], objective=Objective(beta=beta), length=12, **options)
        fit(module, max_steps=2, accumulate_grad_batches=accumulate, batch_size=8, callbacks=[history])
        steps[beta] = history.steps
        rows[beta] = sum(len(batch.completion_ids) for batch in module.run.cycle.micro_batches)
    assert rows[0.0] < rows[1e-9] == 32
    for skipped, whole in zip(steps[0.0], steps[1e-9], strict=True):
        names = {name for name in whole if name.startswith("policy/")} - {"policy/kl", "policy/kl_clamped"}
        assert {name for name in skipped if name.startswith("policy/")} == names
        for name in names:
            assert skipped[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_the_kl_in_the_reward_is_logged_of_all_completions():
    """A completion that is not scorable has advantage 0, and a KL all the same."""

    def some(completions):
        return [None if len(text) > 2 else 1.0 for text in completions]

    logged = []
    for kl_in in ("reward", "loss"):
        history = History()
        module = make_module(
            rewards=[some], engine=ScriptedEngine(COMPLETIONS), objective=Objective(beta=0.1, kl_in=kl_in)
        )
        module.configure_model()
        with torch.no_grad():
            module.policy.lm_head.weight.add_(
                0.05 * torch.randn(module.policy.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
            )
        fit(module, PROMPTS, batch_size=2, max_steps=1, callbacks=[history])
        logged += history.of("policy/kl")
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert logged[0] > 0


def test_without_a_reference_there_is_no_kl():
    (metrics,) = run(objective=Objective(beta=0.0))
    assert "policy/kl" not in metrics


def test_moved_weights_show_in_kl_ratio_and_clip_fractions():
    first, second = run(lr=3e-2, num_iterations=2, steps=2)
    assert first["policy/kl"] == 0
    assert second["policy/kl"] > 0
    assert second["policy/ratio"] != 1
    assert 0 < second["policy/clip_fraction"] < 1
    low, high = second["policy/clip_fraction_low"], second["policy/clip_fraction_high"]
    assert second["policy/clip_fraction"] == pytest.approx(low + high)


def test_the_kl_pulls_the_policy_back_to_the_reference():
    """Where the rewards say nothing, the loss is beta x KL, and a step on it makes the KL smaller."""

    def constant(completions):
        return [1.0] * len(completions)

    module = make_module(
        rewards=[constant],
        objective=Objective(beta=0.5),
        num_iterations=2,
        engine=ScriptedEngine(COMPLETIONS),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
    )
    module.configure_model()
    with torch.no_grad():
        module.policy.lm_head.weight.add_(0.05 * torch.randn(module.policy.lm_head.weight.shape))
    history = History()
    fit(module, PROMPTS, batch_size=2, max_steps=2, callbacks=[history])
    first, second = history.steps
    assert first["policy/kl"] > 0
    assert first["policy/loss"] == pytest.approx(0.5 * first["policy/kl"])
    assert second["policy/kl"] < 0.9 * first["policy/kl"]


@few(2, slow=True)
@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_means_over_micro_batches_weigh_every_token_alike(accumulate, aggregate):
    """However a step is cut into micro-batches of different size, it reports the same."""
    options = {"num_iterations": 2, "steps": 2, "lr": 3e-2, "objective": Objective(beta=0.04, aggregate=aggregate)}
    for want, got in zip(run(**options), run(accumulate, **options), strict=True):
        for name in want:
            if name not in ("rollout/padding", "rollout/tokens_per_second") and not name.startswith("time/"):
                assert got[name] == pytest.approx(want[name], rel=2e-3, abs=1e-5), name


def test_groups_of_equals_are_counted():
    def only_the_long_prompt(prompts, completions):
        return [float(len(prompt) > 3) * text.count("a") for prompt, text in zip(prompts, completions, strict=True)]

    history = History()
    module = make_module(rewards=[only_the_long_prompt], engine=ScriptedEngine(COMPLETIONS))
    fit(module, PROMPTS, batch_size=2, max_steps=1, callbacks=[history])
    assert history.of("reward/zero_variance_groups") == [0.5]
    # Stds of (0, 0, 0, 0) and (1, 1, 0, 1).
    assert history.of("reward/std") == [pytest.approx((0 + 0.5) / 2)]


def test_what_rewards_log_and_what_went_wrong_with_them():
    def talkative(completions, log_metric):
        log_metric("spread", 3.0)
        return [1.0, None, 0.0, math.inf]

    history = History()
    reward = WeightedReward(talkative, name="talkative", on_error="none")
    module = make_module(rewards=[reward], engine=ScriptedEngine(COMPLETIONS))
    fit(module, PROMPTS, batch_size=2, max_steps=1, callbacks=[history])
    (metrics,) = history.steps
    assert metrics["reward/spread"] == 3
    assert metrics["reward/not_scorable"] == 0.5
    assert metrics["reward/mean"] == metrics["reward/talkative"] == 0.5
    assert metrics["reward/failures/talkative/invalid_value"] == 2
    assert metrics["reward/failures/talkative/not_scorable"] == 4


def test_update_time_runs_from_forward_to_optimizer_step_over_all_micro_batches(monkeypatch):
    ticks = itertools.count(step=10.0)
    monkeypatch.setattr("grpo_lightning.training.metrics.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    module = make_module(engine=ScriptedEngine(COMPLETIONS))
    trainer = fit(module, PROMPTS, batch_size=2, max_steps=2, max_epochs=-1, accumulate_grad_batches=2)
    assert trainer.logged_metrics["time/update"] == 20.0


def test_the_learning_rate_is_the_one_that_the_step_uses():
    steps = run(accumulate=2, lr=0.4, steps=3, scheduler=functools.partial(Linear, warmup_steps=2))
    assert [step["policy/lr"] for step in steps] == pytest.approx([0.0, 0.2, 0.4])


def test_a_failed_fit_leaves_nothing_in_the_metrics_of_the_next_one():
    class Fails(L.Callback):
        def on_before_backward(self, trainer, module, loss):
            raise RuntimeError("the first micro-batch fails")

    module, history = make_module(rewards=[num_vowels], engine=ScriptedEngine(COMPLETIONS)), History()
    with pytest.raises(RuntimeError, match="the first micro-batch fails"):
        fit(module, PROMPTS, max_steps=1, callbacks=[Fails()])
    module.engine.token_ids = [[X, EOS]] * 4
    fit(module, PROMPTS, max_steps=1, callbacks=[history])
    assert history.of("rollout/length_max") == [2]
    assert history.of("reward/mean") == [0]


def test_what_a_reward_logs_counts_as_often_as_it_has_completions():
    """One rollout of three groups, of which two are sampled again."""

    def own_mean(prompts, completions, log_metric):
        values = [float(prompt == "p0" and i % 2) for i, prompt in enumerate(prompts)]
        log_metric("own_mean_again", sum(values) / len(values))
        return values

    history = History()
    module = make_module(rewards=[own_mean], dynamic_sampling=DynamicSampling(max_resample_times=1))
    prompts = [f"p{i}" for i in range(9)]
    fit(module, prompts, batch_size=3, shuffle=False, max_steps=1, max_epochs=-1, callbacks=[history])
    (metrics,) = history.steps
    assert metrics["rollout/resample_rounds"] == 1
    assert metrics["reward/own_mean_again"] == pytest.approx(metrics["reward/mean"])
    assert metrics["reward/mean"] == pytest.approx(2 / 20)
