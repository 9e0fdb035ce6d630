"""Arguments of Objective: another loss, the numbers by hand."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.policy.completion_logprobs import Scorer, TokenLogprobs
from grpo_lightning.training.router_loss import make_router_loss
from grpo_lightning.training.token_selection import select_tokens
from tests.arguments.registry import case
from tests.helpers.tiny_models import tiny_model

NOW = torch.log(torch.tensor([[0.9, 0.2, 0.5], [0.6, 0.3, 0.1]]))
OLD = torch.log(torch.tensor([[0.3, 0.4, 0.5], [0.2, 0.3, 0.4]]))  # ratios 3, 1/2, 1 and 3, 1, 1/4
MASK = torch.tensor([[True, True, True], [True, True, False]])
REWARDS = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 3.0]])


def loss(
    objective: Objective,
    advantages: tuple[float, float] = (1.0, -1.0),
    drawn: Tensor = OLD,
    router_loss: Tensor | None = None,
) -> float:
    """Compute the loss of two completions of three and two tokens, sampled with the probabilities `drawn`."""
    ids = torch.zeros(2, 1, dtype=torch.long)
    batch = MicroBatch(
        prompt_ids=ids[:1],
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(2, dtype=torch.long),
        completion_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=MASK,
        completion_mask=MASK,
        advantages=torch.tensor(advantages),
        rollout_logprobs=drawn,
        old_logprobs=OLD,
        ref_logprobs=OLD if objective.needs_reference else None,
        numbers=[0, 1],
    )
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    if objective.selection is not None:
        scores = TokenLogprobs(NOW, entropy)
        actor: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), token_logprobs=lambda batch: scores)
        select_tokens(actor, objective, [batch], seed=0)
    terms = objective(NOW, batch, StepCounts(5, 2), max_completion_length=10, entropy=entropy, router_loss=router_loss)
    return terms.loss.item()


@case(Objective, "ratio")
def test_ratio():
    # the geometric mean of 3, 1/2, 1 is 1.145, inside the clip range; so is 1.8 of 3, 1 where the advantage is negative
    assert loss(Objective(beta=0.0, ratio="sequence")) == pytest.approx(
        (-3 * 1.5 ** (1 / 3) + 2 * 3**0.5) / 5, abs=1e-6
    )
    assert loss(Objective(beta=0.0, ratio="token")) == pytest.approx((-1.2 - 0.5 - 1 + 3 + 1) / 5)
    values = [loss(Objective(beta=0.0, ratio=ratio)) for ratio in ("sequence", "sequence_token")]
    assert values[0] == pytest.approx(values[1])  # their gradients differ


@case(Objective, "surrogate")
def test_surrogate():
    assert loss(Objective(beta=0.0, surrogate="clip")) == pytest.approx((-1.2 - 0.5 - 1 + 3 + 1) / 5)
    first, second = NOW.tolist()
    by_hand = -(1.2 * first[0] + 0.5 * first[1] + first[2]) + 1.2 * second[0] + second[1]
    assert loss(Objective(beta=0.0, surrogate="cispo")) == pytest.approx(by_hand / 5)
    plain = -sum(first) + sum(second[:2])
    assert loss(Objective(beta=0.0, surrogate="reinforce")) == pytest.approx(plain / 5)
    # 3 is clipped to exp(0.2) where the advantage is positive, 1/2 is not
    gmpo = -((math.exp(0.2) * 0.5) ** (1 / 3)) * 3 + 3**0.5 * 2
    assert loss(Objective(beta=0.0, surrogate="gmpo")) == pytest.approx(gmpo / 5)


@case(Objective, "cispo_lower_bound")
def test_cispo_lower_bound():
    first, second = NOW.tolist()
    values = [loss(Objective(beta=0.0, surrogate="cispo", epsilon=0.25, cispo_lower_bound=b)) for b in (False, True)]
    for value, lowest in zip(values, (0.5, 0.75), strict=True):
        by_hand = -(1.25 * first[0] + lowest * first[1] + first[2]) + 1.25 * second[0] + second[1]
        assert value == pytest.approx(by_hand / 5)


@case(Objective, "epsilon")
def test_epsilon():
    # the second completion's ratios are 3 and 1: bounded from below only. The first one's 1/2 counts where it is bad.
    narrow, wide = (loss(Objective(beta=0.0, epsilon=e, epsilon_high=0.2), (-1.0, 1.0)) for e in (0.2, 0.7))
    assert narrow == pytest.approx((3 + 0.8 + 1 - 1.2 - 1) / 5)
    assert wide == pytest.approx((3 + 0.5 + 1 - 1.2 - 1) / 5)


@case(Objective, "epsilon_high")
def test_epsilon_high():
    assert loss(Objective(beta=0.0, epsilon_high=1.0)) == pytest.approx((-2.0 - 0.5 - 1 + 3 + 1) / 5)
    assert loss(Objective(beta=0.0, epsilon_high=None)) == pytest.approx((-1.2 - 0.5 - 1 + 3 + 1) / 5)


@case(Objective, "dual_clip")
def test_dual_clip():
    assert loss(Objective(beta=0.0, dual_clip=2.0)) == pytest.approx((-1.2 - 0.5 - 1 + 2 + 1) / 5)
    assert loss(Objective(beta=0.0, dual_clip=None)) == pytest.approx((-1.2 - 0.5 - 1 + 3 + 1) / 5)


@case(Objective, "aggregate")
def test_aggregate():
    first, second = -1.2 - 0.5 - 1, 3 + 1
    assert loss(Objective(beta=0.0, aggregate="token")) == pytest.approx((first + second) / 5)
    assert loss(Objective(beta=0.0, aggregate="sequence")) == pytest.approx((first / 3 + second / 2) / 2)
    assert loss(Objective(beta=0.0, aggregate="constant")) == pytest.approx((first + second) / (2 * 10))


@case(Objective, "baseline")
def test_baseline():
    means, others = (
        Objective(scale="none", baseline=b).compute_advantages(REWARDS) for b in ("group_mean", "leave_one_out")
    )
    torch.testing.assert_close(means[0], torch.tensor([-2.0, -1.0, 3.0]))
    torch.testing.assert_close(others[0], torch.tensor([0 - 3.0, 1 - 2.5, 5 - 0.5]))


@case(Objective, "baseline")
def test_baselines_by_length_and_by_subsets():
    lengths = torch.tensor([[1, 1, 2], [3, 1, 4]])
    weighted, means = (
        Objective(scale="none", baseline=b).compute_advantages(REWARDS, lengths)
        for b in ("length_weighted", "group_mean")
    )
    torch.testing.assert_close(weighted[0], torch.tensor([0.0, 1.0, 5.0]) - (0 + 1 + 2 * 5) / 4)
    torch.testing.assert_close(means[0], torch.tensor([-2.0, -1.0, 3.0]))


@case(Objective, "pass_k")
def test_pass_k():
    pairs, everyone = (
        Objective(scale="none", baseline="pass_at_k", pass_k=k).compute_advantages(REWARDS) for k in (2, None)
    )
    torch.testing.assert_close(pairs[0], torch.tensor([0.0, (1 - 0) / 2, ((5 - 0) + (5 - 1)) / 2]))
    torch.testing.assert_close(everyone[0], torch.tensor([0.0, 0.0, 5.0 - 1.0]))


@case(Objective, "scale")
def test_scale():
    centered = REWARDS - REWARDS.mean(1, keepdim=True)
    by_hand = {
        "group_std": REWARDS.std(1, keepdim=True),
        "batch_std": REWARDS.std(),
        "batch_advantage_std": centered.std(),
    }
    for scale, std in by_hand.items():
        torch.testing.assert_close(Objective(scale=scale).compute_advantages(REWARDS), centered / (std + 1e-4))
    torch.testing.assert_close(Objective(scale="none").compute_advantages(REWARDS), centered)
    by_mean = Objective(scale="group_mean").compute_advantages(REWARDS)
    torch.testing.assert_close(by_mean, centered / REWARDS.mean(1, keepdim=True))
    with_equal = torch.cat([REWARDS, torch.ones(1, 3)])
    found = Objective(scale="nonzero_fraction").compute_advantages(with_equal)
    torch.testing.assert_close(found[:2], centered * 3 / 2)


@case(Objective, "beta")
def test_beta():
    none, some, more = (loss(Objective(beta=beta)) for beta in (0.0, 0.1, 0.2))
    assert some > none
    assert more - none == pytest.approx(2 * (some - none), rel=1e-4)
    assert not Objective(beta=0.0).needs_reference


@case(Objective, "kl")
def test_kl():
    distance = (NOW - OLD)[MASK]
    by_hand = {"k1": distance, "k2": distance**2 / 2, "k3": (-distance).exp() + distance - 1}
    without = loss(Objective(beta=0.0))
    for estimator, kl in by_hand.items():
        assert loss(Objective(beta=1.0, kl=estimator)) - without == pytest.approx(kl.mean().item(), abs=1e-5)


@case(Objective, "sapo_temperature", "sapo_temperature_negative")
def test_sapo():
    def gate(ratio: float, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    def by_hand(positive: float, negative: float) -> float:
        first = -sum(gate(ratio, positive) for ratio in (3, 0.5, 1))
        return (first + gate(3, negative) + gate(1, negative)) / 5

    sapo = functools.partial(Objective, beta=0.0, surrogate="sapo")
    assert loss(sapo()) == pytest.approx(by_hand(1.0, 1.05))
    assert loss(sapo(sapo_temperature=2.0)) == pytest.approx(by_hand(2.0, 1.05))
    assert loss(sapo(sapo_temperature_negative=2.0)) == pytest.approx(by_hand(1.0, 2.0))


@case(Objective, "vespo_k", "vespo_lambda", "vespo_k_negative", "vespo_lambda_negative")
def test_vespo():
    first, second = NOW.tolist()

    def by_hand(k: float = 2.0, decay: float = 3.0, k_negative: float = 3.0, decay_negative: float = 2.0) -> float:
        # the products of the ratios are 1.5 and 3
        up = math.exp(decay) * 1.5**k * math.exp(-decay * 1.5)
        down = math.exp(decay_negative) * 3**k_negative * math.exp(-decay_negative * 3)
        return (-up * sum(first) + down * sum(second[:2])) / 5

    vespo = functools.partial(Objective, beta=0.0, surrogate="vespo")
    assert loss(vespo()) == pytest.approx(by_hand(), rel=1e-5)
    assert loss(vespo(vespo_k=1.0)) == pytest.approx(by_hand(k=1.0), rel=1e-5)
    assert loss(vespo(vespo_lambda=1.0)) == pytest.approx(by_hand(decay=1.0), rel=1e-5)
    assert loss(vespo(vespo_k_negative=1.0)) == pytest.approx(by_hand(k_negative=1.0), rel=1e-5)
    assert loss(vespo(vespo_lambda_negative=1.0)) == pytest.approx(by_hand(decay_negative=1.0), rel=1e-5)


@case(Objective, "dppo_max_ratio", "epsilon")
def test_dppo():
    # 0.3 to 0.9, 0.4 to 0.2, 0.5; and with a negative advantage 0.2 to 0.6, 0.3
    first, second = NOW.tolist()
    dppo = functools.partial(Objective, beta=0.0, surrogate="dppo_tv")
    inside = -(0.5 * first[1] + first[2]) + 3 * second[0] + second[1]
    assert loss(dppo()) == pytest.approx(inside / 5)
    assert loss(dppo(epsilon=0.7)) == pytest.approx((inside - 3 * first[0]) / 5)
    assert loss(dppo(dppo_max_ratio=2.0)) == pytest.approx((inside - second[0]) / 5)


@case(Objective, "kl_in")
def test_kl_in():
    in_loss, in_reward, without = (
        loss(Objective(**settings)) for settings in ({"beta": 1.0}, {"beta": 1.0, "kl_in": "reward"}, {"beta": 0.0})
    )
    assert in_loss > in_reward == without


@case(Objective, "importance_corrected_kl")
def test_importance_corrected_kl():
    distance = (NOW - OLD)[MASK]
    kl = (-distance).exp() + distance - 1
    plain, corrected = (loss(Objective(beta=1.0, importance_corrected_kl=value)) for value in (False, True))
    assert corrected - plain == pytest.approx((distance.exp() * kl - kl).mean().item(), abs=1e-5)


DRAWN = torch.log(torch.tensor([[0.1, 0.4, 0.4], [0.2, 0.6, 0.4]]))
"""The policy's probabilities were 3, 1, 1.25 and 1, 1/2 times those; the products are 3.75 and 1/2."""


@case(Objective, "rollout_correction", "rollout_correction_low", "rollout_correction_high")
def test_rollout_correction():
    def corrected(**settings: Any) -> float:
        return loss(Objective(beta=0.0, **settings), drawn=DRAWN)

    def by_hand(first: list[float], second: list[float]) -> float:
        plain = [-1.2, -0.5, -1.0, 3.0, 1.0]
        return sum(a * b for a, b in zip(plain, first + second, strict=True)) / 5

    assert corrected() == pytest.approx(by_hand([1, 1, 1], [1, 1]))
    assert corrected(rollout_correction="token_truncate") == pytest.approx(by_hand([2, 1, 1.25], [1, 0.5]))
    assert corrected(rollout_correction="token_mask") == pytest.approx(by_hand([0, 1, 1.25], [1, 0.5]))
    assert corrected(rollout_correction="sequence_truncate") == pytest.approx(by_hand([2, 2, 2], [0.5, 0.5]))
    assert corrected(rollout_correction="sequence_mask") == pytest.approx(by_hand([0, 0, 0], [0.5, 0.5]))
    mean = 3.75 ** (1 / 3), 0.5**0.5  # 1.55 and 0.71
    assert corrected(rollout_correction="geometric_truncate") == pytest.approx(by_hand([mean[0]] * 3, [mean[1]] * 2))
    narrow = corrected(rollout_correction="geometric_mask", rollout_correction_high=1.5)
    assert narrow == pytest.approx(by_hand([0, 0, 0], [mean[1]] * 2))
    higher = corrected(rollout_correction="sequence_mask", rollout_correction_high=4.0)
    assert higher == pytest.approx(by_hand([3.75] * 3, [0.5, 0.5]))
    lower = corrected(rollout_correction="token_truncate", rollout_correction_low=0.75)
    assert lower == pytest.approx(by_hand([2, 1, 1.25], [1, 0.75]))


@case(Objective, "top_entropy_fraction")
def test_top_entropy_fraction():
    # 1, 2, 3 and 4, 5 nats; the losses are -1.2, -0.5, -1 and 3, 1
    for fraction, kept in ((1.0, -2.7 + 4), (0.5, -1.0 + 4), (0.2, 1.0)):
        assert loss(Objective(beta=0.0, top_entropy_fraction=fraction)) == pytest.approx(kept / 5)


@case(Objective, "clip_cov_low", "clip_cov_high", "covariance_fraction")
def test_clip_cov():
    # The losses are -1.2 (clipped), -0.5, -1 and 3, 1; mean advantage 0.2, mean log-prob -0.907: covariances 0.64,
    # -0.56, 0.17, -0.48, 0.36.
    clip_cov = functools.partial(Objective, beta=0.0, surrogate="clip_cov")
    wide = functools.partial(clip_cov, clip_cov_low=0.0)
    assert loss(clip_cov()) == pytest.approx(1.3 / 5), "none is above 1"
    assert loss(wide(covariance_fraction=1.0)) == pytest.approx((1.3 + 1 - 1) / 5), "the third and the last"
    assert loss(wide(covariance_fraction=1.0, clip_cov_high=0.3)) == pytest.approx((1.3 + 1) / 5)
    assert loss(clip_cov(covariance_fraction=1.0, clip_cov_low=0.3)) == pytest.approx((1.3 - 1) / 5)
    assert loss(wide()) == pytest.approx((1.3 + 1) / 5) or loss(wide()) == pytest.approx((1.3 - 1) / 5), "one of them"


@case(Objective, "kl_cov_coefficient", "covariance_fraction")
def test_kl_cov():
    # Without a clip: -3, -0.5, -1 and 3, 1. The first has the highest covariance, then the last (0.64 and 0.36).
    kl_cov = functools.partial(Objective, beta=0.0, surrogate="kl_cov")
    plain = (-3 - 0.5 - 1 + 3 + 1) / 5
    assert loss(kl_cov()) == pytest.approx(plain + math.log(3) / 5)
    assert loss(kl_cov(kl_cov_coefficient=2.0)) == pytest.approx(plain + 2 * math.log(3) / 5)
    every = math.log(3) + math.log(2) + 0 + math.log(3) + 0
    assert loss(kl_cov(covariance_fraction=1.0)) == pytest.approx(plain + every / 5)


@case(Objective, "entropy_coefficient")
def test_entropy_coefficient():
    # 1, 2, 3 and 4, 5 nats: their mean is 3
    plain, bonus = (loss(Objective(beta=0.0, entropy_coefficient=value)) for value in (0.0, 0.1))
    assert bonus == pytest.approx(plain - 0.1 * 3)


@case(Objective, "off_policy_threshold")
def test_off_policy_threshold():
    # The first completion became more likely, 3 x 1/2 x 1; the second one too, 3 x 1: nothing to leave out.
    assert loss(Objective(beta=0.0, off_policy_threshold=0.0)) == loss(Objective(beta=0.0))
    # Had it been drawn with e times its probability, the policy would have moved away by 1 - log(3) / 2 = 0.45 nats.
    kept, left_out = (loss(Objective(beta=0.0, off_policy_threshold=t), drawn=OLD + 1) for t in (0.46, 0.44))
    assert kept == pytest.approx((-1.2 - 0.5 - 1 + 3 + 1) / 5)
    assert left_out == pytest.approx((-1.2 - 0.5 - 1) / 5)


@case(Objective, "multi_objective_aggregation")
def test_multi_objective_aggregation():
    by_reward = {"small": torch.tensor([[0.0, 1.0, 0.5]]), "large": torch.tensor([[90.0, 0.0, 0.0]])}
    total = by_reward["small"] + by_reward["large"]
    summed, each = (
        Objective(multi_objective_aggregation=value).combine_rewards(total, by_reward, [1.0, 1.0])
        for value in ("sum_then_normalize", "normalize_then_sum")
    )
    assert summed.tolist() == [[90.0, 1.0, 0.5]]
    small, large = -0.5 / 0.5, 60 / math.sqrt((60**2 + 2 * 30**2) / 2)
    assert each[0, 0].item() == pytest.approx(small + large, abs=1e-3)


@case(Objective, "router_aux_loss_coef")
def test_router_aux_loss_coef():
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    values = [
        make_router_loss(model, Scorer(), Objective(router_aux_loss_coef=c).router_aux_loss_coef)
        for c in (0.5, None, 0.0)
    ]
    assert values[2] is None
    assert [value and value.coefficient for value in values] == [0.5, model.config.router_aux_loss_coef, None]
    shares = [loss(Objective(beta=0.0, router_aux_loss_coef=c), router_loss=c * torch.tensor(3.0)) for c in (0.5, 2.0)]
    assert shares[1] - shares[0] == pytest.approx(1.5 * 3)
