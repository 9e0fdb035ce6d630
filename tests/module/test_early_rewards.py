"""A run whose rewards start while other groups are sampled ends with the weights of calls after sampling."""

import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.core.types import SamplingParams
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import RewardWorkers, WeightedReward
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.groups import GroupSource, Rollout
from tests.helpers.early_calls import Calls
from tests.helpers.module_runs import (
    PROMPTS,
    History,
    ScriptedEngine,
    are_equal,
    fit,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)
from tests.helpers.tiny_models import tiny_model
from tests.marks import SLOW
from tests.rewards import misbehaving

LIMITS = RewardWorkers(num_workers=2, timeout_seconds=60)


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


class Loaded(L.Callback):
    """Waits for the workers, so that calls can start during the first rollout too."""

    def on_train_start(self, trainer, pl_module):
        pl_module.reward_set.pool.wait()

    on_validation_start = on_train_start


class OneByOne(ScriptedEngine):
    """Its first group ends before the others are sampled, which takes until the reward has been called."""

    def __init__(self, called):
        super().__init__([[5, 6, 7]] * 4)
        self.called = called

    def generate(self, prompts, num_generations, sampling, seeds, progress=None, on_group=None):
        groups = super().generate(prompts, num_generations, sampling, seeds, progress)
        if on_group is not None:
            on_group(0, groups[0])
        deadline = time.monotonic() + 20
        while not self.called.exists():
            assert time.monotonic() < deadline, "the reward was not called"
            time.sleep(0.01)
        self.called.unlink()
        return groups


def rows(tmp_path):
    """The first row's reward makes a file."""
    return [{"prompt": f"p{i}", "own": str(tmp_path / f"called {i}"), "path": "/"} for i in range(4)]


def test_a_reward_is_called_while_other_groups_are_sampled(tmp_path):
    engine = OneByOne(tmp_path / "called 0")
    module = make_module(rewards=[misbehaving.waits_for], reward_workers=LIMITS, engine=engine)
    fit(module, rows(tmp_path), max_steps=2, max_epochs=-1, shuffle=False, callbacks=[Loaded()])
    assert module.rollout.scores.total.tolist() == [[1.0] * 4] * 4


def test_a_reward_is_called_while_other_groups_are_sampled_in_validation(tmp_path):
    engine = OneByOne(tmp_path / "called 0")
    module = make_module(rewards=[misbehaving.waits_for], reward_workers=LIMITS, engine=engine)
    source = make_source(module, rows(tmp_path), shuffle=False)
    (metrics,) = make_trainer(callbacks=[Loaded()]).validate(module, source, verbose=False)
    assert metrics["val/reward"] == 1


REWARDS = [
    misbehaving.at_random,
    misbehaving.varies_with_the_step,
    WeightedReward(misbehaving.wrong, on_error="none"),
    WeightedReward(misbehaving.dies, on_error="value", error_value=-1),
]
TEXTS = ["one", "raise", "nan", "is killed", "two", "three", "none", "leaves", *PROMPTS]


def policy():
    """A model whose completions end at different steps."""
    model = tiny_model("qwen2", hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    model.generation_config.eos_token_id = list(range(2, 14))
    return model


def trained(*, early, kind=GRPOLightningModule, ckpt_path=None, callbacks=(), **options):
    """Two rollouts. Returns: the module and the metrics of its steps, without times."""
    settings = {"policy": policy(), "rewards": REWARDS, "reward_workers": LIMITS, "length": 12}
    module = make_module(kind, **settings | options)
    module.reward_set.starts_early = early
    history = History()
    trainer = {"max_steps": 3, "max_epochs": -1, "enable_checkpointing": bool(callbacks)}
    fit(module, TEXTS, callbacks=[Loaded(), history, *callbacks], ckpt_path=ckpt_path, **trainer)
    timed = ("time/", "rollout/tokens_per_second")
    return module, [{n: v for n, v in step.items() if not n.startswith(timed)} for step in history.steps]


@SLOW
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=SLOW),
        {"dynamic_sampling": DynamicSampling(), "rewards": REWARDS[2:]},
        pytest.param({"overlong_filter": "group"}, marks=SLOW),
    ],
)
def test_a_run_is_that_with_calls_after_sampling(calls, options):
    late, late_steps = trained(early=False, **options)
    assert calls.num_early == 0
    num_sent = calls.num_sent
    module, steps = trained(early=True, **options)
    assert are_equal(weights_of(module), weights_of(late))
    assert steps == late_steps
    assert module.rollout.scores.extras == late.rollout.scores.extras
    assert (calls.num_sent, calls.num_early, calls.num_unused) == (2 * num_sent, num_sent, 0)
    assert module.reward_set.starts_early


@SLOW
def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    def saving():
        return [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")]

    unbroken, _ = trained(early=True, callbacks=saving())
    resumed, steps = trained(early=True, callbacks=saving(), ckpt_path=str(tmp_path / "step=1.ckpt"))
    assert len(steps) == 2
    assert are_equal(weights_of(resumed), weights_of(unbroken))


class OtherTexts(GRPOLightningModule):
    """Changes completions after they were sampled."""

    def sample(self, prompts, indices=None):
        rollout = super().sample(prompts, indices)
        for group in rollout.groups:
            for number, completion in enumerate(group.completions):
                completion.text = f"{number}"
        return rollout


class InTwoParts(GRPOLightningModule):
    """Samples the prompts one after the other, in another order."""

    def sample(self, prompts, indices=None):
        parts = [super(InTwoParts, self).sample([prompt], [number]) for number, prompt in enumerate(prompts)]
        return Rollout([part.groups[0] for part in reversed(parts)])


class NoRewards(GRPOLightningModule):
    """Scores by itself."""

    def score_rewards(self, rollout):
        rollout.rewards = torch.tensor([[float(len(c.token_ids)) for c in g.completions] for g in rollout.groups])
        return rollout


class Rescaled(GRPOLightningModule):
    """Uses the rewards."""

    def score_rewards(self, rollout):
        rollout = super().score_rewards(rollout)
        rollout.rewards = rollout.rewards * 2
        return rollout


@SLOW
@pytest.mark.parametrize(
    ("kind", "is_of_use"),
    [
        (OtherTexts, False),
        pytest.param(InTwoParts, True, marks=SLOW),
        pytest.param(NoRewards, False, marks=SLOW),
        pytest.param(Rescaled, True, marks=SLOW),
    ],
)
def test_an_own_sample_or_score_rewards_is_the_same_run(kind, is_of_use, calls):
    late, late_steps = trained(early=False, kind=kind)
    module, steps = trained(early=True, kind=kind)
    assert are_equal(weights_of(module), weights_of(late))
    assert steps == late_steps
    assert module.reward_set.starts_early == is_of_use
    num_calls = 4 * len(REWARDS)
    assert calls.num_early == (3 if is_of_use else 1) * num_calls
    assert calls.num_unused == (0 if is_of_use else num_calls)


def test_engines_without_reports_work_as_before(calls):
    module = make_module(rewards=[misbehaving.at_random], reward_workers=LIMITS, engine=ScriptedEngine([[5, 6]] * 4))
    fit(module, max_steps=1, callbacks=[Loaded()])
    assert (calls.num_sent, calls.num_early) == (4, 0)
    assert module.reward_set.starts_early


def test_an_engine_must_sample_every_prompt():
    class Lazy(ScriptedEngine):
        def generate(self, prompts, *args, **options):
            return super().generate(prompts[1:], *args, **options)

    module = make_module(engine=Lazy([[5, 6]] * 4))
    module.configure_model()
    source = GroupSource(module.engine, module.encoder, module.sharding, 0)
    prompts = make_source(module).prompts[:2]
    with pytest.raises(ValueError, match="zip"):
        source.sample(prompts, 4, SamplingParams(max_completion_length=2), [0, 0])
