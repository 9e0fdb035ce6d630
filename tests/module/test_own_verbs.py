"""Verbs and hooks overridden without `super()`: what is logged, dynamic sampling, validation and resume stay."""

import json
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.core.seeding import derived_seed
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.schedules import Linear
from grpo_lightning.training.micro_batches import CompletionRow, Cycle, collate
from tests.helpers.module_runs import (
    PROMPTS,
    AnotherRank,
    History,
    are_equal,
    fit,
    make_module,
    make_source,
    make_trainer,
    weights_of,
)
from tests.marks import SLOW, few


class OwnSample(GRPOLightningModule):
    """Seeds of its own."""

    def sample(self, prompts, indices=None):
        seeds = [derived_seed(0, "mine", self.run.rollout_index, prompt.index) for prompt in prompts]
        return Rollout(self.generate(prompts, self.num_generations, self.sampling, seeds))


class OwnRewards(GRPOLightningModule):
    """A rule instead of reward functions; groups of prompts with an odd index are all alike."""

    def score_rewards(self, rollout):
        of_tokens = [[float(sum(c.token_ids) % 7) for c in group.completions] for group in rollout.groups]
        is_odd = torch.tensor([[group.prompt.index % 2 == 1] for group in rollout.groups])
        rollout.rewards = torch.tensor(of_tokens).masked_fill(is_odd, 1.0)
        return rollout


class OwnResample(GRPOLightningModule):
    """Leaves out the last group."""

    def resample(self, rollout):
        return rollout.select(range(len(rollout.groups) - 1))


class OwnCompare(GRPOLightningModule):
    """No division by the standard deviation."""

    def compute_advantages(self, rollout):
        rollout.advantages = rollout.rewards - rollout.rewards.mean(dim=1, keepdim=True)
        return rollout


class OwnPlan(GRPOLightningModule):
    """One group in every micro-batch."""

    def split_rollout(self, rollout):
        micro_batches, counts = [], []
        for number, (group, advantages) in enumerate(zip(rollout.groups, rollout.advantages.tolist(), strict=True)):
            rows = [
                CompletionRow(number, group.prompt_ids, c, a)
                for c, a in zip(group.completions, advantages, strict=True)
            ]
            micro_batches.append(collate(rows, self.tokenizer.pad_token_id))
            counts.append(StepCounts(sum(len(row.completion.token_ids) for row in rows), len(rows)))
        return Cycle(micro_batches, counts, self.num_iterations)


class OwnUpdate(GRPOLightningModule):
    """REINFORCE: no ratio, no clipping."""

    def update(self, micro_step):
        batch = micro_step.batch
        logprobs = self.actor.token_logprobs(batch).logprobs
        return -(logprobs * batch.completion_mask * batch.advantages[:, None]).sum() / micro_step.counts.num_tokens


OWN = [OwnSample, OwnRewards, OwnResample, OwnCompare, OwnPlan, OwnUpdate]


def settings_for(own):
    """`OwnPlan` cuts four micro-batches, of four updates."""
    return {"updates_per_rollout": 4 if own is OwnPlan else 2}


@few(2, slow=True)
@pytest.mark.parametrize("own", OWN)
def test_what_is_logged_stays(own, tmp_path):
    history = History()
    module = make_module(own, objective=Objective(beta=0.04), **settings_for(own))
    fit(module, max_epochs=1, callbacks=[history, CompletionLog(dirpath=str(tmp_path))], shuffle=False)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    groups = 3 if own is OwnResample else 4
    assert [line["rollout"] for line in lines] == [0] * 4 * groups + [1] * 4 * groups
    assert all(line["reward"] is not None and line["advantage"] is not None for line in lines)
    assert torch.tensor([line["advantage"] for line in lines]).std() > 0
    first = history.steps[0]
    known = {"reward/mean", "reward/std", "rollout/length", "rollout/padding", "rollout/empty_updates"}
    assert known | {"rollout/tokens_per_second", "time/rollout"} <= first.keys()
    assert "time/update" in module.trainer.callback_metrics
    if own is not OwnResample:  # which takes groups out after they were counted
        assert first["reward/mean"] == pytest.approx(sum(line["reward"] for line in lines[:16]) / 16)
    assert {"policy/loss", "policy/entropy"} <= first.keys()
    if own is not OwnUpdate:
        assert {"policy/kl", "policy/ratio"} <= first.keys()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loss_of_an_own_update_is_logged(accumulate):
    """The logged loss is the mean that the optimizer minimizes, however many micro-batches the step has."""

    class Constant(GRPOLightningModule):
        def update(self, micro_step):
            return 0.0 * super().update(micro_step) + 3.0

    history = History()
    fit(make_module(Constant), max_steps=1, accumulate_grad_batches=accumulate, callbacks=[history])
    assert history.of("policy/loss") == [3.0]


def test_an_update_that_returns_a_loss_per_completion_is_named():
    class PerCompletion(GRPOLightningModule):
        def update(self, micro_step):
            return super().update(micro_step).expand(4)

    with pytest.raises(ValueError, match=r"^`update` returned a Tensor of the shape \[4\]; it must return the loss of"):
        fit(make_module(PerCompletion), max_steps=1)


@few(2, slow=True)
@pytest.mark.parametrize("own", OWN)
def test_a_killed_run_resumes_to_the_same_weights(own, tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 3

    def run(folder, *callbacks, ckpt_path=None):
        module = make_module(own, objective=Objective(beta=0.04), **settings_for(own))
        saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        trainer = make_trainer(max_epochs=2, callbacks=[*callbacks, saving], enable_checkpointing=True)
        trainer.fit(module, make_source(module), ckpt_path=ckpt_path)
        return weights_of(module)

    unbroken = run(tmp_path / "unbroken")
    run(tmp_path / "stopped", Stop())
    resumed = run(tmp_path / "stopped", ckpt_path=str(tmp_path / "stopped" / "step=3.ckpt"))
    assert are_equal(resumed, unbroken)


@few(1, slow=True)
@pytest.mark.parametrize("own", [GRPOLightningModule, OwnPlan])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_ranks_agree_on_the_passes_of_a_rollout_once(own, beta, monkeypatch):
    """This holds for an own `split_rollout` too. Unequal numbers of passes would hang where weights are sharded."""
    other = AnotherRank(monkeypatch)
    fit(make_module(own, objective=Objective(beta=beta), **settings_for(OwnPlan)), max_epochs=1, callbacks=[other])
    other.check()
    num_rollouts = 2
    assert other.num_agreed == num_rollouts * (2 if beta else 1)  # the reference has micro-batches of its own


@few(2)
@pytest.mark.parametrize("own", [own for own in OWN if own is not OwnResample])
def test_dynamic_sampling_replaces_groups(own):
    history = History()

    def if_even(completions, prompts):
        return [float(len(set(text))) * ("x" not in p) for text, p in zip(completions, prompts, strict=True)]

    module = make_module(own, rewards=[if_even], dynamic_sampling=DynamicSampling(), **settings_for(own))
    prompts = [f"{'x' * (i % 2)}prompt {i}" for i in range(12)]
    fit(module, prompts, max_steps=1, max_epochs=-1, callbacks=[history], shuffle=False)
    assert history.of("rollout/skipped_prompts")[0] > 0
    assert history.of("rollout/kept_zero_variance_groups")[0] == 0
    assert all(group.prompt.index % 2 == 0 for group in module.rollout.groups)


def test_dynamic_sampling_by_a_reward_needs_its_values():
    module = make_module(OwnRewards, dynamic_sampling=DynamicSampling(reward="vowel_share"))
    with pytest.raises(ValueError, match=r"'vowel_share', but `score_rewards` returned no values of that name"):
        fit(module, max_steps=1, max_epochs=-1)


@few(2, slow=True)
@pytest.mark.parametrize("own", OWN)
def test_validation_does_not_ask_the_verbs(own):
    metrics = []
    for kind in (GRPOLightningModule, own):
        module = make_module(kind)
        (found,) = make_trainer().validate(module, make_source(module, PROMPTS), verbose=False)
        metrics.append(found)
    assert metrics[0] == metrics[1]


@few(1)
@pytest.mark.parametrize("given", [None, torch.zeros(4), torch.zeros(3, 4), torch.zeros(4, 5)])
def test_a_verb_that_gives_the_wrong_shape_is_named(given):
    class Rewards(GRPOLightningModule):
        def score_rewards(self, rollout):
            rollout.rewards = given
            return rollout

    class Advantages(GRPOLightningModule):
        def compute_advantages(self, rollout):
            rollout.advantages = given
            return rollout

    got = "none" if given is None else rf"the shape \[{', '.join(map(str, given.shape))}\]"
    for kind, verb, name in ((Rewards, "score_rewards", "rewards"), (Advantages, "compute_advantages", "advantages")):
        with pytest.raises(ValueError, match=rf"`{verb}` must return the Rollout with `{name}` \[4, 4\].* got {got}"):
            fit(make_module(kind), max_steps=1)


@pytest.mark.parametrize(
    ("num_batches", "num_counts", "got"),
    [
        (3, 2, "3 micro-batches and counts of 2 updates"),
        (8, 4, "8 micro-batches and counts of 4 updates"),
        (0, 0, "0 micro-batches and counts of 0 updates"),
    ],
)
def test_a_cycle_of_the_wrong_length_is_named(num_batches, num_counts, got):
    class Split(GRPOLightningModule):
        def split_rollout(self, rollout):
            cycle = super().split_rollout(rollout)
            batches, counts = cycle.micro_batches * 2, cycle.counts * 2
            return Cycle(batches[:num_batches], counts[:num_counts], self.num_iterations)

    expected = (
        r"`split_rollout` must return a Cycle with 4 micro-batches \(accumulate_grad_batches 2 x updates_per_rollout "
        r"2\) and the counts of 2 updates; got "
    )
    with pytest.raises(ValueError, match=f"{expected}{got}"):
        fit(make_module(Split, updates_per_rollout=2), max_steps=2, accumulate_grad_batches=2)


def test_a_rollout_without_completions_is_reported(caplog):
    class Nothing(GRPOLightningModule):
        def resample(self, rollout):
            return rollout.select([])

    history = History()
    fit(make_module(Nothing), max_steps=1, callbacks=[history])
    assert history.steps[0]["rollout/empty_updates"] == 1
    (message,) = [record.getMessage() for record in caplog.records if "advantages" in record.getMessage()]
    assert "the rollout has no completions. Check what `sample` and `resample` return" in message


def test_advantages_as_a_list_are_named():
    class Advantages(GRPOLightningModule):
        def compute_advantages(self, rollout):
            rollout.advantages = rollout.rewards.tolist()
            return rollout

    with pytest.raises(ValueError, match=r"`compute_advantages` must return .* got a list: use torch\.tensor"):
        fit(make_module(Advantages), max_steps=1)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_advantages_must_be_finite(wrong):
    class Advantages(OwnCompare):
        def compute_advantages(self, rollout):
            rollout = super().compute_advantages(rollout)
            rollout.advantages[1, 2] = rollout.advantages[3, 0] = wrong
            return rollout

    module = make_module(Advantages)
    with pytest.raises(ValueError, match=r"`compute_advantages` returned 2 of 16 `advantages` that are nan or inf"):
        fit(module, max_steps=1)
    assert are_equal(weights_of(module), weights_of(fit_nothing()))


def fit_nothing():
    """A module whose weights are loaded and not trained."""
    module = make_module()
    module.configure_model()
    return module


@few(3)
@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("sample", r"the Rollout \(add `return rollout`\)"),
        ("score_rewards", r"the Rollout \(add `return rollout`\)"),
        ("resample", r"the Rollout \(add `return rollout`\)"),
        ("compute_advantages", r"the Rollout \(add `return rollout`\)"),
        ("split_rollout", "a Cycle "),
        ("update", "the loss, a Tensor "),
    ],
)
@pytest.mark.parametrize("wrong", [None, 3.5])
def test_a_verb_that_returns_something_else_is_named(verb, expected, wrong):
    def override(self, *args, **kwargs):
        getattr(GRPOLightningModule, verb)(self, *args, **kwargs)
        return wrong

    kind = type("Own", (GRPOLightningModule,), {verb: override})
    got = "None" if wrong is None else "a value of type float"
    with pytest.raises(ValueError, match=rf"^`{verb}` returned {got}; it must return {expected}"):
        fit(make_module(kind), max_steps=1)


class BareAdvantages(GRPOLightningModule):
    """Returns the groups and their advantages only."""

    def compute_advantages(self, rollout):
        return Rollout(rollout.groups, advantages=rollout.rewards - rollout.rewards.mean(dim=1, keepdim=True))


class BareResample(GRPOLightningModule):
    """Returns some groups and their rewards only."""

    def resample(self, rollout):
        return Rollout(rollout.groups[1:], rewards=rollout.rewards[1:])


@pytest.mark.parametrize(("own", "num_groups"), [(BareAdvantages, 4), (BareResample, 3)])
def test_what_a_step_leaves_out_is_filled_in(own, num_groups, tmp_path):
    module = make_module(own)
    fit(module, max_steps=1, callbacks=[CompletionLog(dirpath=str(tmp_path))], shuffle=False)
    rewards = module.rollout.scores.total
    assert rewards.shape == (num_groups, 4)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == pytest.approx(rewards.flatten().tolist())


def test_other_groups_without_rewards_are_named():
    class Own(GRPOLightningModule):
        def resample(self, rollout):
            return Rollout(rollout.groups[1:])

    with pytest.raises(ValueError, match="`resample` must return the Rollout with `rewards` of its groups; got none"):
        fit(make_module(Own), max_steps=1)


class Mine(L.Callback):
    """A callback of the module."""


class OwnHooks(GRPOLightningModule):
    """Hooks as Lightning documents them: its own ones are empty, so nobody calls `super()`."""

    def setup(self, stage):
        self.prompts = PROMPTS

    def train_dataloader(self):
        return make_source(self, self.prompts, batch_size=2)

    def configure_model(self):
        self.seen = ["model"]

    def configure_callbacks(self):
        return Mine()

    def on_fit_start(self):
        self.seen.append("fit")

    def on_train_start(self):
        self.seen.append("train")

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["seen"]


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_hooks_without_super_change_neither_a_run_nor_its_resumption(tmp_path):
    settings = {"scheduler": Linear, "updates_per_rollout": 2, "length": 3}
    plain, own = History(), History()
    want = make_module(**settings)
    fit(want, batch_size=2, max_steps=3, max_epochs=-1, callbacks=[plain])
    saving = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=3)
    options = {"max_steps": 3, "max_epochs": -1}
    module = make_module(OwnHooks, **settings)
    trainer = make_trainer(**options, callbacks=[own, saving], enable_checkpointing=True)
    trainer.fit(module)
    assert trainer.global_step == 4, "rounded up"
    assert sum(isinstance(callback, Mine) for callback in trainer.callbacks) == 1
    assert are_equal(weights_of(module), weights_of(want))
    assert own.of("policy/lr") == plain.of("policy/lr")
    assert own.of("policy/grad_norm") == plain.of("policy/grad_norm")
    again = make_module(OwnHooks, **settings)
    make_trainer(**options).fit(again, ckpt_path=tmp_path / "a.ckpt")
    assert again.loaded == ["model", "fit", "train"]
    assert again.run.rollout_index == 2
    assert are_equal(weights_of(again), weights_of(want))


class CallsSuper(GRPOLightningModule):
    def teardown(self, stage):
        super().teardown(stage)


class WithoutSuper(GRPOLightningModule):
    def teardown(self, stage):
        pass


class ChildWithSuper(WithoutSuper):
    def teardown(self, stage):
        super().teardown(stage)


class ChildWithout(CallsSuper):
    def teardown(self, stage):
        pass


class Inherits(WithoutSuper):
    pass


class Mixin:
    def teardown(self, stage):
        pass


class Mixed(Mixin, GRPOLightningModule):
    pass


@pytest.mark.parametrize("own", [CallsSuper, WithoutSuper, ChildWithSuper, ChildWithout, Inherits, Mixed])
def test_a_hook_of_the_module_runs_exactly_once(own):
    module = make_module(own)
    with mock.patch.object(module.reward_set.pool, "close") as close:
        module.teardown(stage="fit")
        module.teardown(stage="fit")
    assert close.call_count == 2
