"""Training raises the reward, for the reason GRPO gives; every verb can be replaced on its own."""

import functools

import pytest
import torch

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import few


class ShuffledRewards(GRPOLightningModule):
    """Rewards land on the wrong completions of their group."""

    def compute_advantages(self, rollout):
        generator = torch.Generator().manual_seed(self.run.rollout_index)
        rollout.rewards = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in rollout.rewards])
        return super().compute_advantages(rollout)


class FlippedAdvantages(GRPOLightningModule):
    """The worst completions are reinforced."""

    def compute_advantages(self, rollout):
        rollout = super().compute_advantages(rollout)
        rollout.advantages = -rollout.advantages
        return rollout


@functools.cache
def rewards_of_run(module_class, lr):
    """Mean reward of the first and of the last five steps: of 4 prompts x 8 completions of 8 tokens each."""
    history = History()
    module = make_module(module_class, length=8, lr=lr, num_generations=8)
    fit(module, max_steps=30, max_epochs=-1, callbacks=[history])
    rewards = history.of("reward/mean")
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


def test_training_raises_the_reward():
    before, after = rewards_of_run(GRPOLightningModule, 3e-3)
    assert before < 0.2
    assert after > 0.7


@few(1)
@pytest.mark.parametrize(
    ("module_class", "lr"), [(ShuffledRewards, 3e-3), (FlippedAdvantages, 3e-3), (GRPOLightningModule, 0.0)]
)
def test_what_is_not_grpo_does_not(module_class, lr):
    before, after = rewards_of_run(module_class, lr)
    assert after < before + 0.1


def test_learning_rate_zero_changes_nothing():
    module = make_module(lr=0.0)
    module.configure_model()
    before = weights_of(module)
    fit(module, max_steps=2)
    assert are_equal(weights_of(module), before)


class OwnSample(GRPOLightningModule):
    """Every completion's last token is cut off."""

    def sample(self, prompts):
        rollout = super().sample(prompts)
        for group in rollout.groups:
            for completion in group.completions:
                completion.token_ids, completion.logprobs = completion.token_ids[:3], completion.logprobs[:3]
        return rollout


class OwnCompare(GRPOLightningModule):
    """Nothing is better than anything else."""

    def compute_advantages(self, rollout):
        rollout.advantages = torch.zeros_like(rollout.rewards)
        return rollout


class OwnUpdate(GRPOLightningModule):
    """Half the loss."""

    def update(self, micro_step):
        return super().update(micro_step) / 2


def one_sgd_step(module_class):
    """How one step at learning rate 1 moves the weights, and the module."""
    module = make_module(module_class, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    module.configure_model()
    before = weights_of(module)
    fit(module, max_steps=1, shuffle=False)
    return {name: weights - before[name] for name, weights in weights_of(module).items()}, module


def test_sample_can_be_replaced():
    _, module = one_sgd_step(OwnSample)
    assert module.run.cycle.micro_batches[0].completion_ids.shape[1] == 3


def test_compare_can_be_replaced():
    moved, _ = one_sgd_step(OwnCompare)
    assert not any(change.any() for change in moved.values())


def test_update_can_be_replaced():
    whole, _ = one_sgd_step(GRPOLightningModule)
    half, _ = one_sgd_step(OwnUpdate)
    for name, change in whole.items():
        torch.testing.assert_close(half[name], change / 2, atol=1e-7, rtol=1e-4)


@few(1)
@pytest.mark.parametrize("coefficient", [1.0, -1.0])
@pytest.mark.parametrize("head_chunk_size", [None, 4])
def test_the_entropy_bonus_alone_moves_the_entropy(coefficient, head_chunk_size):
    """Equal rewards teach nothing: what moves is what the coefficient asks for."""
    history = History()
    policy = PolicyLoader(
        model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), head_chunk_size=head_chunk_size
    )
    objective = Objective(beta=0.0, entropy_coefficient=coefficient)
    module = make_module(policy=policy, rewards=[lambda completions: [1.0] * len(completions)], objective=objective)
    fit(module, max_steps=8, callbacks=[history])
    entropies = [step["policy/entropy"] for step in history.steps]
    moved = entropies[-1] - entropies[0]
    assert moved * coefficient > 0.02
    assert all(step["reward/zero_variance_groups"] == 1 for step in history.steps)
