"""The KL as part of the reward: what a completion's tokens lost against the reference, before it is compared."""

import pytest
import torch

from grpo_lightning.functional import group_relative_advantages
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from tests.helpers.module_runs import History, fit, make_module, vowel_share
from tests.helpers.tiny_models import tiny_tokenizer
from tests.marks import SLOW

BETA = 0.7


class Kept(GRPOLightningModule):
    """Keeps what every rollout was."""

    def split_rollout(self, rollout):
        self.seen = (rollout.groups, rollout.advantages)
        return super().split_rollout(rollout)


def trained(steps=2, **options):
    """A module after some steps, so that policy and reference differ."""
    objective = Objective(beta=BETA, kl_in="reward")
    module, history = make_module(Kept, **({"objective": objective, "lr": 0.02} | options)), History()
    fit(module, max_steps=steps, max_epochs=-1, callbacks=[history])
    return module, history


@torch.no_grad()
def plain_logprobs(model, prompt, completion):
    """Log-probs of a completion among the tokens that there are: one sequence, no padding, no cache."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1, : len(tiny_tokenizer())].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def test_advantages_are_those_of_rewards_less_the_kl():
    module, _ = trained()
    groups, advantages = module.seen
    rewards = [vowel_share([completion.text for completion in group.completions]) for group in groups]
    kl = []
    for group in groups:
        sums = []
        for completion in group.completions:
            under_reference = plain_logprobs(module.reference.model, group.prompt_ids, completion.token_ids)
            sums.append((torch.tensor(completion.logprobs) - under_reference).sum().item())
        kl.append(sums)
    assert torch.tensor(kl).abs().max() > 0.05, "the policy has moved"
    want = group_relative_advantages(torch.tensor(rewards) - BETA * torch.tensor(kl))
    torch.testing.assert_close(advantages, want, atol=2e-4, rtol=1e-3)


@SLOW
def test_the_distance_is_logged_and_holds_the_policy_back():
    _, held = trained(steps=12, objective=Objective(beta=5.0, kl_in="reward"))
    _, free = trained(steps=12, objective=Objective(beta=1e-6, kl_in="reward"))
    assert held.of("policy/kl")[-1] < 0.5 * free.of("policy/kl")[-1]


def test_the_reference_is_asked_before_the_rewards_are_compared():
    """With a KL in the loss too: the reference pass runs while rewards are computed elsewhere."""
    module, history = trained(objective=Objective(beta=0.04))
    groups, _ = module.seen
    assert all(len(c.ref_logprobs) == len(c.token_ids) for group in groups for c in group.completions)
    assert history.of("policy/kl")[-1] > 0


def test_completions_that_are_not_trained_on_have_one_too():
    module, _ = trained(overlong_filter="loss")
    completions = [completion for group in module.seen[0] for completion in group.completions]
    assert any(completion.is_truncated for completion in completions)
    assert all(completion.ref_logprobs is not None for completion in completions)


@SLOW
def test_dynamic_sampling_needs_a_reward_to_look_at():
    options = {"objective": Objective(beta=0.1, kl_in="reward")}
    with pytest.raises(ValueError, match=r"name the reward that must vary in model\.dynamic_sampling\.reward"):
        make_module(dynamic_sampling=DynamicSampling(), **options)
    module = make_module(Kept, dynamic_sampling=DynamicSampling(reward="vowel_share"), **options)
    fit(module, max_steps=1)
    assert all(c.ref_logprobs is not None for group in module.seen[0] for c in group.completions)
