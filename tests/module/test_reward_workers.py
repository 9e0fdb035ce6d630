"""A run whose rewards misbehave: it goes on, or stops, as the policy says, and the logs say what happened how often."""

import os

import pytest

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.rewards import EnvironmentReward, RewardWorkers, WeightedReward
from tests.environments.games import Counted
from tests.helpers.module_runs import History, fit, make_module, make_source, make_trainer
from tests.marks import SLOW
from tests.rewards import misbehaving

LIMITS = RewardWorkers(num_workers=2, timeout_seconds=6.0, memory_gb=0.5)
PROMPTS = ["one", "hang, hoard, is killed, raise", "two", "three"]
REWARDS = (misbehaving.loops, misbehaving.allocates, misbehaving.dies, misbehaving.wrong)
FAILURES = {"loops/timeout", "allocates/exception", "dies/crash", "wrong/exception"}


def run(rewards, **options):
    """Two steps over all prompts. Returns: the module and what was logged."""
    module, history = make_module(rewards=rewards, reward_workers=LIMITS, **options), History()
    fit(module, PROMPTS, max_steps=2, max_epochs=-1, callbacks=[history])
    return module, history


@SLOW
def test_a_run_goes_on_whatever_its_rewards_do():
    rewards = [WeightedReward(reward, on_error="none") for reward in REWARDS]
    module, history = run([*rewards, misbehaving.at_random], objective=Objective(beta=0.04))
    assert module.trainer.global_step == 2
    for step in history.steps:
        failures = {name for name in step if name.startswith("reward/failures/")}
        assert failures == {f"reward/failures/{name}" for name in FAILURES}
        assert {step[name] for name in failures} == {4}, "the completions of one prompt, in every rollout"
        assert step["reward/at_random"] > 0, "of all prompts, the bad one too"
        assert step["policy/loss"] == step["policy/loss"]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        pytest.param(misbehaving.loops, "'loops' was stopped: it took longer than the 6 s", marks=SLOW),
        (misbehaving.dies, "'dies' did not return: its process ended by signal 9"),
        (misbehaving.wrong, "'wrong' raised ValueError: no such luck"),
    ],
)
def test_a_run_stops_at_the_first_failure_by_default(reward, said):
    with pytest.raises(RuntimeError, match=said):
        run([reward])


@SLOW
def test_the_workers_end_with_each_run_and_start_again_for_the_next():
    """A process that trains many modules would otherwise keep the workers of all of them."""
    module = make_module(rewards=[misbehaving.process], reward_workers=LIMITS)
    pids = []
    for max_steps in (1, 2):
        fit(module, PROMPTS, max_steps=max_steps, max_epochs=-1)
        pool = module.reward_set.pool
        assert pool._process.poll() is not None
        pids.append(set(module.rollout.scores.extras["pid"]))
    assert os.getpid() not in pids[0] | pids[1]
    assert pids[0].isdisjoint(pids[1])


def test_the_workers_of_an_environment_end_with_the_run():
    module = make_module(environment=Counted(), rewards=[EnvironmentReward()], reward_workers=LIMITS)
    fit(module, PROMPTS, max_steps=1)
    assert module.conversations.runner.pool._process.poll() is not None


def test_a_reward_is_told_how_far_the_run_is():
    module, _ = run([misbehaving.tells_the_step])
    scores = module.rollout.scores
    assert set(scores.extras["step"]) == {1}
    assert os.getpid() not in scores.extras["pid"]


def test_evaluation_runs_them_there_too():
    module = make_module(rewards=[misbehaving.number_of_process], reward_workers=LIMITS)
    (found,) = make_trainer().predict(module, make_source(module, PROMPTS))
    assert len(found) == len(PROMPTS)
    assert os.getpid() not in {record["reward"] for record in found}


def test_the_reference_scores_while_rewards_run(tmp_path):
    """The reward waits for what the reference pass makes."""

    class Marks(GRPOLightningModule):
        def phase(self, name):
            if name == "ref_logprobs":
                (tmp_path / "scored").touch()
            return super().phase(name)

    rows = [{"prompt": "p", "path": str(tmp_path / "scored")} for _ in range(4)]
    limits = RewardWorkers(num_workers=2, timeout_seconds=60)
    module = make_module(Marks, rewards=[misbehaving.waits_for], reward_workers=limits, objective=Objective(beta=0.04))
    fit(module, rows, max_steps=1)
    assert module.rollout.scores.total.tolist() == [[1.0] * 4] * 4
