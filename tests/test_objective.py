"""An objective is one choice per column, put together right."""

import contextlib
import dataclasses
import re
import textwrap
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import yaml

from grpo_lightning import functional
from grpo_lightning import objective as objective_file
from grpo_lightning.core.types import MicroBatch
from grpo_lightning.functional import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    dppo_surrogate,
    gmpo_surrogate,
    group_relative_advantages,
    high_covariance_tokens,
    high_entropy_tokens,
    importance_ratio,
    keeps_sequence,
    kl_cov_surrogate,
    kl_divergence,
    leaves_trust_region,
    normalized_sum,
    random_covariance_tokens,
    reinforce_surrogate,
    rollout_weights,
    sapo_surrogate,
    vespo_surrogate,
)
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.policy.completion_logprobs import TokenLogprobs
from grpo_lightning.training.token_selection import select_tokens
from tests.helpers.paths import RECIPES

COUNTS = StepCounts(num_tokens=23, num_sequences=7)
LONGEST = 9
FRAGMENTS = RECIPES / "objectives"


def make_batch(with_reference=True):
    """Four completions whose ratios lie in, below and above every clip range; one mask has a hole, one is empty."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 0])[:, None]
    mask[0, 2] = False
    old = -3 * torch.rand(4, 5, generator=generator)
    moved = torch.tensor([0.5, -0.5, 9.0, 0.23, 0.02, 2.5, -0.02, -0.3, 0.1, 0.0] * 2).view(4, 5)
    batch = MicroBatch(
        prompt_ids=torch.zeros(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        completion_ids=torch.zeros(4, 5, dtype=torch.long),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.tensor([1.0, -1.5, 0.5, -0.5]),
        rollout_logprobs=old + torch.tensor([1.0, 0.2, 0.0, -0.9, -0.1] * 4).view(4, 5),
        old_logprobs=old,
        ref_logprobs=old - torch.rand(4, 5, generator=generator) if with_reference else None,
        numbers=[0, 1, 0, 1],
    )
    return (old + moved).requires_grad_(), batch


def with_selection(objective, logprobs, batch):
    """Set what the objective selects, of this micro-batch as the whole step."""
    if objective.selection is not None:
        scores = TokenLogprobs(logprobs.detach(), logprobs.detach() ** 2)
        actor = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), token_logprobs=lambda batch: scores)
        select_tokens(actor, objective, [batch], seed=0)


def loss_and_gradient(objective):
    logprobs, batch = make_batch(objective.needs_reference)
    with_selection(objective, logprobs, batch)
    loss = objective(logprobs, batch, COUNTS, LONGEST, entropy=logprobs**2).loss
    loss.backward()
    return loss.item(), logprobs.grad


def composed(
    *,
    level="token",
    low=0.2,
    high=0.2,
    is_cispo=False,
    is_sapo=False,
    is_gmpo=False,
    is_reinforce=False,
    by="token",
    beta=0.0,
    dual_clip=None,
    keep=None,
    penalize=None,
    surrogate=None,
):
    """Loss and gradient of the pieces, put together here."""
    logprobs, batch = make_batch()
    mask, advantages = batch.completion_mask, batch.advantages.view(-1, 1)
    ratio = importance_ratio(logprobs, batch.old_logprobs, mask, level=level)
    if is_cispo:
        tokens = cispo_surrogate(ratio, advantages, logprobs, epsilon_high=high)
    elif is_sapo:
        tokens = sapo_surrogate(ratio, advantages)
    elif is_reinforce:
        tokens = reinforce_surrogate(advantages, logprobs)
    elif surrogate is not None:
        tokens = surrogate(logprobs, batch.old_logprobs, mask, advantages)
    elif penalize is not None:
        spread = batch.advantages[:, None].expand_as(logprobs)
        selected = torch.zeros_like(mask)
        selected[mask] = penalize(logprobs.detach()[mask], spread[mask])
        tokens = kl_cov_surrogate(logprobs, batch.old_logprobs, mask, advantages, selected)
    elif is_gmpo:
        tokens = gmpo_surrogate(logprobs, batch.old_logprobs, mask, advantages, epsilon=low, epsilon_high=high)
    else:
        tokens = clipped_surrogate(ratio, advantages, epsilon=low, epsilon_high=high, dual_clip=dual_clip)
    if keep is not None:
        kept = torch.zeros_like(mask)
        kept[mask] = keep((logprobs.detach() ** 2)[mask], None)
        assert kept.any()
        tokens = tokens * kept
    tokens = tokens + beta * kl_divergence(logprobs, batch.ref_logprobs, mask, estimator="k3")
    loss = aggregate(tokens, mask, by=by, num_tokens=23, num_sequences=7, max_completion_length=9)
    loss.backward()
    return loss.item(), logprobs.grad


def within_trust_region(divergence, max_ratio=20.0, **limits):
    """DPPO's loss."""

    def loss(logprobs, old_logprobs, mask, advantages):
        low, high = leaves_trust_region(logprobs, old_logprobs, advantages, divergence=divergence, **limits)
        return dppo_surrogate(logprobs, old_logprobs, mask, advantages, low | high, max_ratio=max_ratio)

    return loss


def without_covariant_tokens(logprobs, old_logprobs, mask, advantages, *, limit):
    """Clip-Cov's loss. A single token has a covariance from 1 to 5, so no random number decides."""
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    values = logprobs.detach()[mask], advantages.expand_as(mask)[mask]
    is_clipped = ((ratio > 1 + limit) & (advantages > 0))[mask]
    selected = torch.zeros_like(mask)
    for fraction in (2e-4, 1.0):
        selected[mask] = random_covariance_tokens(*values, is_clipped, torch.zeros(len(is_clipped)), fraction=fraction)
        assert selected.sum() == 1
    return clipped_surrogate(ratio, advantages, epsilon=limit) * ~selected


ROWS = {
    "default": ({}, {"beta": 0.04}),
    "grpo": ({"aggregate": "sequence"}, {"by": "sequence", "beta": 0.04}),
    "dr_grpo": ({"aggregate": "constant", "scale": "none", "beta": 0.0}, {"by": "constant"}),
    "dapo": ({"epsilon_high": 0.28, "beta": 0.0}, {"high": 0.28}),
    "gspo": (
        {"ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "aggregate": "sequence", "beta": 0.0},
        {"level": "sequence", "low": 3e-4, "high": 4e-4, "by": "sequence"},
    ),
    "cispo": ({"surrogate": "cispo", "epsilon_high": 4.0, "beta": 0.0}, {"is_cispo": True, "high": 4.0}),
    "dual clip": ({"dual_clip": 3.0, "beta": 0.0}, {"dual_clip": 3.0}),
    "sapo": ({"surrogate": "sapo", "aggregate": "sequence", "beta": 0.0}, {"is_sapo": True, "by": "sequence"}),
    "gmpo": (
        {"surrogate": "gmpo", "epsilon": 0.4, "aggregate": "sequence", "beta": 0.0},
        {"is_gmpo": True, "low": 0.4, "high": 0.4, "by": "sequence"},
    ),
    "rloo": ({"aggregate": "constant", "scale": "none", "baseline": "leave_one_out", "beta": 0.0}, {"by": "constant"}),
    "opo": (
        {"aggregate": "constant", "scale": "none", "baseline": "length_weighted", "beta": 0.0},
        {"by": "constant"},
    ),
    "gpg": ({"surrogate": "reinforce", "scale": "nonzero_fraction", "beta": 0.0}, {"is_reinforce": True}),
    "pass_at_k": ({"baseline": "pass_at_k", "beta": 0.0}, {}),
    "high_entropy": (
        {"epsilon_high": 0.28, "top_entropy_fraction": 0.2, "beta": 0.0},
        {"high": 0.28, "keep": lambda entropy, _: high_entropy_tokens(entropy, 0.2)},
    ),
    "vespo": ({"surrogate": "vespo", "beta": 0.0}, {"surrogate": vespo_surrogate}),
    "dppo": ({"surrogate": "dppo_tv", "beta": 0.0}, {"surrogate": within_trust_region("tv", epsilon=0.2)}),
    "dppo by kl": (
        {"surrogate": "dppo_kl", "epsilon": 0.05, "epsilon_high": 0.1, "dppo_max_ratio": 1.5, "beta": 0.0},
        {"surrogate": within_trust_region("kl", max_ratio=1.5, epsilon=0.05, epsilon_high=0.1)},
    ),
    "clip_cov": (
        {"surrogate": "clip_cov", "epsilon": 1.0, "epsilon_high": 1.0, "covariance_fraction": 2e-4, "beta": 0.0},
        {"surrogate": lambda *tokens: without_covariant_tokens(*tokens, limit=1.0)},
    ),
    "kl_cov": (
        {"surrogate": "kl_cov", "covariance_fraction": 2e-3, "beta": 0.0},
        {"penalize": lambda logprobs, advantages: high_covariance_tokens(logprobs, advantages, 2e-3)},
    ),
    "maxrl": ({"aggregate": "constant", "scale": "group_mean", "beta": 0.0}, {"by": "constant"}),
    "gspo token": (
        {"ratio": "sequence_token", "epsilon": 3e-4, "epsilon_high": 4e-4, "aggregate": "sequence", "beta": 0.0},
        {"level": "sequence_token", "low": 3e-4, "high": 4e-4, "by": "sequence"},
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_its_pieces(row):
    settings, pieces = ROWS[row]
    loss, gradient = loss_and_gradient(Objective(**settings))
    want_loss, want_gradient = composed(**pieces)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert want_gradient.abs().sum() > 0
    torch.testing.assert_close(gradient, want_gradient)


@pytest.mark.parametrize("row", sorted({path.stem for path in FRAGMENTS.glob("*.yaml")} & set(ROWS)))
def test_the_fragments_are_the_rows(row):
    fragment = yaml.safe_load((FRAGMENTS / f"{row}.yaml").read_text())["model"]["objective"]
    assert Objective(**fragment) == Objective(**ROWS[row][0])


def test_reinforce_plus_plus_divides_by_the_spread_of_the_centered_rewards():
    """Raw rewards of an easy and a hard prompt also spread by the difference between the prompts."""
    fragment = yaml.safe_load((FRAGMENTS / "reinforce_plus_plus.yaml").read_text())["model"]["objective"]
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    centered = rewards - rewards.mean(1, keepdim=True)
    torch.testing.assert_close(Objective(**fragment).compute_advantages(rewards), centered / (centered.std() + 1e-4))


def test_the_table_in_the_docstring_is_true():
    """The table states the ratio, surrogate, aggregation, scale and beta of every fragment."""
    lines = [line for line in objective_file.__doc__.splitlines() if line.startswith("| ")][1:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in table] == [
        *("GRPO", "default", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "GMPO", "VESPO", "DPPO", "RLOO"),
        *("OPO", "GPG", "pass@k", "REINFORCE++", "Clip-Cov", "KL-Cov", "MaxRL"),
    ]
    for name, ratio, surrogate, by, scale, beta in table:
        stem = name.lower().replace(". ", "_").replace("++", "_plus_plus").replace("@", "_at_").replace("-", "_")
        path = FRAGMENTS / f"{stem}.yaml"
        settings = {} if name == "default" else yaml.safe_load(path.read_text())["model"]["objective"]
        objective = Objective(**settings)
        assert (objective.ratio, objective.aggregate, objective.scale) == (ratio, by, scale), name
        assert objective.surrogate == re.match(r"\w+", surrogate)[0], name
        assert objective.beta == float(beta), name


BASE = Objective(beta=0.1)
CHANGES = [
    {"ratio": "sequence"},
    {"surrogate": "cispo"},
    {"surrogate": "cispo", "cispo_lower_bound": True},
    {"epsilon": 0.3},
    {"epsilon_high": 0.3},
    {"dual_clip": 3.0},
    {"aggregate": "sequence"},
    {"aggregate": "constant"},
    {"beta": 0.0},
    {"beta": 0.2},
    {"kl": "k1"},
    {"kl": "k2"},
    {"kl_in": "reward"},
    {"importance_corrected_kl": True},
    {"ratio": "sequence_token"},
    {"surrogate": "sapo"},
    {"surrogate": "reinforce"},
    {"surrogate": "vespo"},
    {"surrogate": "vespo", "vespo_k": 3.0},
    {"surrogate": "vespo", "vespo_lambda": 2.0},
    {"surrogate": "vespo", "vespo_k_negative": 1.0},
    {"surrogate": "vespo", "vespo_lambda_negative": 0.2},
    {"surrogate": "dppo_tv"},
    {"surrogate": "dppo_kl", "epsilon": 0.05},
    {"surrogate": "dppo_tv", "dppo_max_ratio": 1.1},
    {"top_entropy_fraction": 0.5},
    {"surrogate": "clip_cov", "clip_cov_low": 0.0},
    {"surrogate": "clip_cov", "clip_cov_low": 0.0, "clip_cov_high": 0.5, "covariance_fraction": 1.0},
    {"surrogate": "kl_cov"},
    {"surrogate": "kl_cov", "kl_cov_coefficient": 2.0},
    {"surrogate": "gmpo"},
    {"surrogate": "gmpo", "epsilon": 0.4},
    {"surrogate": "sapo", "sapo_temperature": 2.0},
    {"surrogate": "sapo", "sapo_temperature_negative": 2.0},
    {"rollout_correction": "token_truncate"},
    {"rollout_correction": "token_truncate", "rollout_correction_high": 1.5},
    {"rollout_correction": "token_mask", "rollout_correction_low": 0.9},
    {"rollout_correction": "sequence_truncate"},
    {"rollout_correction": "sequence_mask"},
    {"rollout_correction": "geometric_truncate", "rollout_correction_high": 1.1},
    {"rollout_correction": "geometric_mask", "rollout_correction_high": 1.1},
    {"off_policy_threshold": -1.0},
    {"entropy_coefficient": 0.1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_each_option_changes_the_gradient(change):
    _, before = loss_and_gradient(BASE)
    _, after = loss_and_gradient(dataclasses.replace(BASE, **change))
    assert (after - before).abs().max() > 1e-4


def test_a_kl_in_the_reward_is_not_in_the_loss():
    _, without = loss_and_gradient(Objective(beta=0.0))
    _, gradient = loss_and_gradient(Objective(beta=0.1, kl_in="reward"))
    torch.testing.assert_close(gradient, without)
    assert Objective(beta=0.1, kl_in="reward").needs_reference
    assert not Objective(beta=0.1, kl_in="reward").trains_on_zero_advantages


def test_every_surrogate_is_in_the_table():
    assert set(objective_file.SURROGATES) == set(get_args(objective_file.SurrogateName))
    settings = {field.name for field in dataclasses.fields(Objective)}
    assert all(surrogate.settings <= settings for surrogate in objective_file.SURROGATES.values())


def test_every_option_is_in_the_tests():
    tested = {name for change in CHANGES for name in change} | {
        "baseline",
        "pass_k",
        "scale",
        "multi_objective_aggregation",
        "router_aux_loss_coef",
    }
    assert tested == {field.name for field in dataclasses.fields(Objective)}


REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "length_weighted", "pass_at_k"])
@pytest.mark.parametrize(
    "scale", ["group_std", "batch_std", "batch_advantage_std", "group_mean", "nonzero_fraction", "none"]
)
def test_compare_is_the_advantage(baseline, scale):
    if scale == "batch_advantage_std" and baseline in ("length_weighted", "pass_at_k"):
        with pytest.raises(ValueError, match=f"scale 'batch_advantage_std' .* objective.baseline '{baseline}' are not"):
            Objective(baseline=baseline, scale=scale)
        return
    lengths, k = torch.tensor([[1, 5, 2], [3, 1, 1]]), 2 if baseline == "pass_at_k" else None
    got = Objective(baseline=baseline, scale=scale, pass_k=k).compute_advantages(REWARDS, lengths)
    choices = {"baseline": baseline, "scale": scale, "lengths": lengths, "k": k}
    torch.testing.assert_close(got, group_relative_advantages(REWARDS, **choices))
    if (baseline, scale) != ("group_mean", "group_std"):
        assert (got - Objective().compute_advantages(REWARDS)).abs().max() > 1e-3


def test_epsilon_stands_in_for_epsilon_high():
    assert Objective(epsilon=0.3).high == 0.3
    assert Objective(epsilon=0.3, epsilon_high=0.0).high == 0.0
    got, want = (loss_and_gradient(Objective(epsilon=0.3, **o)) for o in ({}, {"epsilon_high": 0.3}))
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("far", [25.0, 89.0, -25.0, -89.0])
def test_one_token_that_has_moved_far_leaves_loss_and_gradient_finite(row, far):
    """Clipped to a finite loss, exp(89) still had a nan gradient: one token ended the run."""
    objective = Objective(**ROWS[row][0])
    logprobs, batch = make_batch(objective.needs_reference)
    batch.old_logprobs[0, 0], batch.rollout_logprobs[0, 0] = -100.0, -100.0
    if objective.needs_reference:
        batch.ref_logprobs[0, 0] = -100.0
    moved = logprobs.detach().clone()
    moved[0, 0] = -100.0 + far
    moved.requires_grad_()
    with_selection(objective, moved, batch)
    terms = objective(moved, batch, COUNTS, LONGEST)
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert moved.grad.isfinite().all()
    by_sequence = objective.ratio != "token"  # a mean of 89 / 4 nats is beyond 20, one of 25 / 4 is not
    is_far = torch.zeros(4, 5, dtype=torch.bool)
    if by_sequence and abs(far) > 80:
        is_far[0] = batch.completion_mask[0]
    elif not by_sequence:
        is_far[0, 0] = True
    assert torch.equal(terms.ratio_clamped, is_far)
    if objective.needs_reference:
        assert terms.kl_clamped.nonzero().tolist() == [[0, 0]]
        assert terms.kl[0, 0] == 10
    else:
        assert terms.kl_clamped is None


def test_only_k3_is_bounded():
    logprobs, batch = make_batch()
    for estimator in ("k1", "k2"):
        assert Objective(kl=estimator)(logprobs, batch, COUNTS, LONGEST).kl_clamped is None


def test_what_the_logs_get():
    logprobs, batch = make_batch()
    terms = Objective(epsilon=0.2, epsilon_high=0.28)(logprobs, batch, COUNTS, LONGEST)
    for tensor in [tensor for tensor in terms[1:] if tensor is not None]:
        assert tensor.shape == (4, 5)
        assert not tensor.requires_grad
        assert not tensor[~batch.completion_mask].any(), "padding must count nowhere"
    # Row 0, advantage 1: ratios e^.5 (clipped high), e^-.5, a hole, e^.23 = 1.26, e^.02. Row 1, advantage -1.5: e^2.5,
    # e^-.02, e^-.3 = 0.74 (clipped low). Row 2, advantage 0.5: e^.5 (clipped high).
    assert terms.clipped_high.nonzero().tolist() == [[0, 0], [2, 0]]
    assert terms.clipped_low.nonzero().tolist() == [[1, 2]]
    torch.testing.assert_close(terms.ratio[1, :3], torch.tensor([2.5, -0.02, -0.3]).exp())
    assert (terms.kl[batch.completion_mask] > 0).all()


def test_the_sign_of_the_advantage_decides_which_side_is_clipped():
    logprobs, batch = make_batch()
    batch.advantages = -batch.advantages
    terms = Objective()(logprobs, batch, COUNTS, LONGEST)
    assert terms.clipped_low.nonzero().tolist() == [[0, 1]]
    assert terms.clipped_high.nonzero().tolist() == [[1, 0]]


def test_sequence_ratios_are_spread_over_their_tokens():
    logprobs, batch = make_batch()
    terms = Objective(ratio="sequence")(logprobs, batch, COUNTS, LONGEST)
    mean = (0.5 - 0.5 + 0.23 + 0.02) / 4  # of row 0, without the hole
    torch.testing.assert_close(terms.ratio[0, :2], torch.full((2,), mean).exp())
    assert terms.ratio[0, 2] == 0


def test_without_a_reference_there_is_no_kl():
    logprobs, batch = make_batch(with_reference=False)
    assert not Objective(beta=0.0)(logprobs, batch, COUNTS, LONGEST).kl.any()
    assert not Objective(beta=0.0).needs_reference
    assert Objective(beta=0.01).needs_reference


def test_zero_advantages_may_be_left_out_only_without_kl():
    """The gradient is as `trains_on_zero_advantages` states."""
    for settings in (
        {},
        {"beta": 0.1},
        {"surrogate": "cispo"},
        {"surrogate": "sapo"},
        {"surrogate": "gmpo"},
        {"surrogate": "reinforce"},
        {"surrogate": "vespo"},
        {"surrogate": "dppo_tv"},
        {"surrogate": "dppo_kl"},
        {"surrogate": "kl_cov"},
        {"surrogate": "clip_cov"},
        {"top_entropy_fraction": 0.5},
        {"entropy_coefficient": 0.1},
    ):
        objective = Objective(**{"beta": 0.0} | settings)
        logprobs, batch = make_batch(objective.needs_reference)
        batch.advantages = torch.zeros(4)
        with_selection(objective, logprobs, batch)
        objective(logprobs, batch, COUNTS, LONGEST, entropy=logprobs**2).loss.backward()
        assert bool(logprobs.grad.any()) == objective.trains_on_zero_advantages


@pytest.mark.parametrize("padding", [-200.0, float("nan"), float("-inf")])
def test_what_stands_at_padding_does_not_matter(padding):
    objective = Objective()
    want = loss_and_gradient(objective)
    logprobs, batch = make_batch()
    is_padding = ~batch.completion_mask
    filled = logprobs.detach().masked_fill(is_padding, padding).requires_grad_()
    loss = objective(filled, batch, COUNTS, LONGEST).loss
    loss.backward()
    assert loss.item() == want[0]
    assert torch.equal(filled.grad, want[1])


def test_unknown_old_logprobs_are_an_error():
    logprobs, batch = make_batch()
    batch.old_logprobs = None
    with pytest.raises(ValueError, match="no old_logprobs"):
        Objective()(logprobs, batch, COUNTS, LONGEST)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 1.1}, r"objective\.epsilon must be .*got 1\.1"),
        ({"epsilon": -0.1}, r"objective\.epsilon must be .*got -0\.1"),
        ({"epsilon_high": -0.1}, r"objective\.epsilon_high must be .*got -0\.1"),
        ({"beta": -1.0}, r"objective\.beta must be .*got -1\.0"),
        ({"dual_clip": 1.2}, r"objective\.dual_clip must be above 1 \+ epsilon_high = 1\.2 \(or null\), got 1\.2"),
        ({"dual_clip": 1.25, "epsilon_high": 0.28}, r"= 1\.28 \(or null\), got 1\.25"),
        (
            {"dual_clip": 3.0, "surrogate": "cispo"},
            r"objective\.dual_clip is 3\.0, but the cispo surrogate does not use it: remove",
        ),
        (
            {"dual_clip": 3.0, "surrogate": "sapo"},
            r"objective\.dual_clip is 3\.0, but the sapo surrogate does not use it",
        ),
        ({"epsilon": 0.1, "surrogate": "sapo"}, r"objective\.epsilon is 0\.1, but the sapo surrogate does not use it"),
        ({"epsilon_high": 0.3, "surrogate": "sapo"}, r"objective\.epsilon_high is 0\.3, but the sapo surrogate"),
        ({"sapo_temperature": 2.0}, r"objective\.sapo_temperature is 2\.0, but the clip surrogate does not use it"),
        ({"sapo_temperature": 0.0, "surrogate": "sapo"}, r"sapo_temperature must be above 0, got 0\.0"),
        ({"importance_corrected_kl": True, "beta": 0.0}, "importance_corrected_kl is True, but beta is 0"),
        ({"importance_corrected_kl": True, "kl_in": "reward"}, "or kl_in is reward: the loss has no KL"),
        ({"scale": "group_mean", "kl_in": "reward"}, "which objective.kl_in 'reward' can make negative"),
        (
            {"scale": "group_mean", "multi_objective_aggregation": "normalize_then_sum"},
            "which objective.multi_objective_aggregation 'normalize_then_sum' can make negative",
        ),
        ({"kl_in": "reward", "beta": 0.0}, "kl_in is 'reward', but beta is 0"),
        ({"kl": "k2", "beta": 0.0}, "kl is 'k2', but beta is 0"),
        (
            {"epsilon": 0.1, "epsilon_high": 4.0, "surrogate": "cispo"},
            r"objective\.epsilon is 0\.1, but the cispo surrogate has a lower bound only with",
        ),
        ({"ratio": "sequence", "surrogate": "gmpo"}, "ratio is 'sequence', but the gmpo surrogate does not use it"),
        ({"dual_clip": 3.0, "surrogate": "gmpo"}, "dual_clip is 3.0, but the gmpo surrogate does not use it"),
        ({"covariance_fraction": 0.1}, "covariance_fraction is 0.1, but the clip surrogate does not use it"),
        (
            {"surrogate": "clip_cov", "kl_cov_coefficient": 2.0},
            "kl_cov_coefficient is 2.0, but the clip_cov surrogate does not use it",
        ),
        (
            {"surrogate": "kl_cov", "top_entropy_fraction": 0.2},
            "top_entropy_fraction is 0.2, but the kl_cov surrogate selects tokens itself",
        ),
        (
            {"surrogate": "gmpo", "top_entropy_fraction": 0.2},
            "top_entropy_fraction is 0.2, but the loss is one per completion, which trains all its tokens: remove",
        ),
        (
            {"ratio": "sequence", "top_entropy_fraction": 0.2},
            "top_entropy_fraction is 0.2, but the loss is one per completion",
        ),
        (
            {"ratio": "sequence", "surrogate": "sapo", "top_entropy_fraction": 0.2},
            "top_entropy_fraction is 0.2, but the loss is one per completion",
        ),
        (
            {"surrogate": "gmpo", "rollout_correction": "token_truncate"},
            "must be one of auto, none, sequence_truncate, .*_mask with objective.surrogate 'gmpo', which has one "
            "loss per completion; got 'token_truncate'",
        ),
        (
            {"surrogate": "gmpo", "rollout_correction": "token_mask"},
            "with objective.surrogate 'gmpo', which has one loss per completion; got 'token_mask'",
        ),
        (
            {"ratio": "sequence", "rollout_correction": "token_mask"},
            "must be one of auto, none, sequence_truncate, .*, geometric_mask with objective.ratio 'sequence': its "
            r"gradient reaches all tokens of a completion \('sequence_token' has .*\); got 'token_mask'",
        ),
        (
            {"ratio": "sequence", "surrogate": "sapo", "rollout_correction": "token_truncate"},
            "with objective.ratio 'sequence': .*got 'token_truncate'",
        ),
        ({"top_entropy_fraction": 0.0}, r"top_entropy_fraction must be above 0 and at most 1, got 0\.0"),
        (
            {"surrogate": "kl_cov", "covariance_fraction": 0.0},
            r"covariance_fraction must be above 0 and at most 1, got 0\.0",
        ),
        ({"surrogate": "kl_cov", "kl_cov_coefficient": -1.0}, r"kl_cov_coefficient must be at least 0, got -1\.0"),
        (
            {"surrogate": "clip_cov", "clip_cov_low": 5.0},
            r"clip_cov_low must be below clip_cov_high \(5\.0\), got 5\.0",
        ),
        ({"vespo_k": 4.0}, "vespo_k is 4.0, but the clip surrogate does not use it"),
        ({"surrogate": "vespo", "epsilon": 0.1}, "epsilon is 0.1, but the vespo surrogate does not use it"),
        ({"surrogate": "vespo", "vespo_lambda": 0.0}, r"vespo_lambda must be above 0, got 0\.0"),
        ({"surrogate": "vespo", "ratio": "sequence"}, "ratio is 'sequence', but the vespo surrogate does not use it"),
        (
            {"surrogate": "vespo", "rollout_correction": "sequence_mask"},
            "must be one of auto, none, token_truncate, token_mask with .*'vespo', .*got 'sequence_mask'",
        ),
        ({"surrogate": "dppo_tv", "dppo_max_ratio": 1.0}, r"dppo_max_ratio must be above 1, got 1\.0"),
        ({"pass_k": 4}, "pass_k is 4, but the baseline is not pass_at_k"),
        ({"pass_k": 1, "baseline": "pass_at_k"}, r"pass_k must be at least 2 \(or null\), got 1"),
        ({"epsilon": 0.1, "surrogate": "reinforce"}, "epsilon is 0.1, but the reinforce surrogate does not use it"),
        ({"cispo_lower_bound": True}, "cispo_lower_bound is True, but the clip surrogate does not use it"),
        (
            {"rollout_correction": "none", "rollout_correction_high": 3.0},
            r"rollout_correction_high is 3\.0, but rollout_correction is none",
        ),
        (
            {"rollout_correction": "token_mask", "rollout_correction_low": 2.0},
            r"rollout_correction_low must be at least 0 and below rollout_correction_high \(2\.0\), got 2\.0",
        ),
    ],
)
def test_refused_settings_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        Objective(**settings)


MASKING = [
    {},
    {"ratio": "sequence_token"},
    {"ratio": "sequence", "surrogate": "cispo"},
    *({"surrogate": surrogate} for surrogate in ("cispo", "sapo", "reinforce", "dppo_tv", "clip_cov", "kl_cov")),
]


@pytest.mark.parametrize("settings", MASKING, ids=str)
def test_a_token_that_the_correction_masks_has_no_gradient(settings):
    """This holds for every loss that allows `token_mask`, except VESPO's, which masks no token."""
    _, batch = make_batch()
    weights = (batch.old_logprobs - batch.rollout_logprobs).exp()
    is_masked = ((weights < 0.9) | (weights > 2.0)) & batch.completion_mask
    _, without = loss_and_gradient(Objective(beta=0.0, **settings))
    assert without[is_masked].any()
    assert without[~is_masked].any()
    objective = Objective(beta=0.0, rollout_correction="token_mask", rollout_correction_low=0.9, **settings)
    _, gradient = loss_and_gradient(objective)
    assert not gradient[is_masked].any()
    assert torch.equal(gradient != 0, (without != 0) & ~is_masked)


def test_the_edges_are_allowed():
    Objective(epsilon=0.0, epsilon_high=0.0, beta=0.0)
    Objective(epsilon=1.0)  # no lower limit
    Objective(surrogate="cispo", ratio="sequence", top_entropy_fraction=0.2)  # its gradient is that of each token
    Objective(surrogate="gmpo", rollout_correction="geometric_mask")
    Objective(dual_clip=1.21)
    assert Objective(surrogate="cispo", epsilon=0.3).high == 0.3, "epsilon stands in for epsilon_high"
    Objective(surrogate="cispo", epsilon_high=4.0)
    Objective(beta=0.1, kl_in="reward", kl="k2")  # the estimator of policy/kl


@pytest.mark.parametrize(
    "name",
    [
        *("ratio", "surrogate", "aggregate", "baseline", "scale", "kl", "kl_in", "rollout_correction"),
        "multi_objective_aggregation",
    ],
)
def test_unknown_choices_are_named_before_anything_is_computed(name):
    with pytest.raises(ValueError, match=rf"objective\.{name} must be one of .*got 'nonsense'"):
        Objective(**{name: "nonsense"})


def clip_by_hand(ratio, advantages, *, epsilon, epsilon_high, unrelated=1.0):
    """The default surrogate, as a user would write it."""
    return -unrelated * torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


PATH = f"{__name__}.clip_by_hand"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.3},
        {"ratio": "sequence", "aggregate": "sequence"},
        {"rollout_correction": "token_truncate", "top_entropy_fraction": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("surrogate", [clip_by_hand, PATH], ids=["function", "path"])
def test_an_own_surrogate_is_composed_as_those_of_the_package(surrogate, settings):
    loss, gradient = loss_and_gradient(Objective(surrogate=surrogate, **settings))
    expected, expected_gradient = loss_and_gradient(Objective(**settings))
    assert loss == expected
    assert torch.equal(gradient, expected_gradient)


def test_an_own_surrogate_gets_all_arguments_if_it_takes_all():
    def takes_all(**arguments):
        seen.update(arguments)
        return -arguments["ratio"] * arguments["advantages"]

    seen, (logprobs, batch) = {}, make_batch()
    terms = Objective(surrogate=takes_all, epsilon=0.3)(logprobs, batch, COUNTS, LONGEST)
    assert tuple(sorted(seen)) == tuple(sorted(objective_file.OWN_ARGUMENTS))
    assert (seen["epsilon"], seen["epsilon_high"]) == (0.3, 0.3)
    assert torch.equal(seen["old_logprobs"], batch.old_logprobs)
    assert (terms.clipped_low, terms.clipped_high) == (None, None), "not known, which is not 0"
    assert Objective(surrogate=takes_all, beta=0.0).trains_on_zero_advantages


def test_epsilon_may_be_set_for_an_own_surrogate_that_takes_only_epsilon_high():
    """A null epsilon_high means epsilon."""

    def takes_high(ratio, advantages, *, epsilon_high):
        return -ratio.clamp(max=1 + epsilon_high) * advantages

    loss, _ = loss_and_gradient(Objective(surrogate=takes_high, epsilon=0.1))
    expected, _ = loss_and_gradient(Objective(surrogate=takes_high, epsilon_high=0.1))
    assert loss == expected
    default, _ = loss_and_gradient(Objective(surrogate=takes_high))
    assert loss != default
    with pytest.raises(ValueError, match=r"epsilon is 0\.1, but the .*takes_high surrogate does not use it"):
        Objective(surrogate=takes_high, epsilon=0.1, epsilon_high=0.3)


def needs_more(ratio, entropy):
    return ratio * entropy


def by_position(ratio, advantages, /):
    return -ratio * advantages


def test_arguments_by_position_may_have_defaults():
    """Even an argument with the name of a known one is then not passed."""

    def with_default(mask=1.0, /, *, ratio, advantages):
        return -mask * ratio * advantages

    loss, _ = loss_and_gradient(Objective(surrogate=with_default))
    expected, _ = loss_and_gradient(Objective(surrogate=lambda ratio, advantages: -ratio * advantages))
    assert loss == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"surrogate": "nonsense"}, r"one of clip, .*, or the import path of your own function .*; got 'nonsense'"),
        ({"surrogate": "no_such_module.f"}, r"surrogate: there is no module 'no_such_module' .*the current folder"),
        ({"surrogate": f"{__name__}.clip_by_hnd"}, r"has no 'clip_by_hnd'\. Did you mean .*clip_by_hand"),
        ({"surrogate": f"{__name__}.LONGEST"}, r"is 9, not a function"),
        ({"surrogate": f"{__name__}.SimpleNamespace"}, r"must be a function, got <class"),
        ({"surrogate": 3}, r"must be a function, got 3"),
        ({"surrogate": needs_more}, r"needs_more requires the argument 'entropy'\. .* have the arguments ratio, adv"),
        (
            {"surrogate": by_position},
            r"by_position takes 'ratio' only by position, .*: remove the / from its",
        ),
        ({"surrogate": max}, r"surrogate max are not known \(no signature.*\)\. Call it from a Python function"),
        ({"surrogate": "builtins.max"}, r"surrogate builtins\.max are not known \("),
        ({"surrogate": PATH, "dual_clip": 3.0}, r"dual_clip is 3\.0, but the \S*clip_by_hand surrogate does not use"),
        ({"surrogate": lambda ratio: ratio, "epsilon": 0.1}, r"epsilon is 0\.1, but the \S*<lambda> surrogate does"),
    ],
)
def test_a_wrong_own_surrogate_is_refused_before_anything_is_computed(settings, message):
    with pytest.raises(ValueError, match=rf"objective\..*{message}"):
        Objective(**settings)


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (lambda ratio: ratio.sum(), r"a Tensor of the shape \[4, 5\]; got \[\]"),
        (lambda ratio: ratio.sum(1), r"got \[4\]"),
        (lambda ratio: None, "got a value of type NoneType"),
        (lambda ratio: ratio.detach(), "loss without a gradient: compute it from `ratio` or `logprobs`"),
    ],
)
def test_what_an_own_surrogate_returns_is_checked(surrogate, message):
    with pytest.raises(ValueError, match=rf"objective\.surrogate \S*<lambda> .*{message}"):
        loss_and_gradient(Objective(beta=0.0, surrogate=surrogate))


def test_cispo_reports_a_token_as_clipped_when_its_ratio_is_capped_whatever_the_sign():
    batch = MicroBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.tensor([0, 0]),
        completion_ids=torch.zeros(2, 2, dtype=torch.long),
        attention_mask=torch.ones(2, 2, dtype=torch.bool),
        completion_mask=torch.ones(2, 2, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0]),
        rollout_logprobs=torch.zeros(2, 2),
        old_logprobs=torch.zeros(2, 2),
    )
    logprobs = torch.tensor([[2.0, -2.0], [2.0, -2.0]])  # ratios 7.4 and 0.14
    terms = Objective(surrogate="cispo", epsilon_high=4.0, beta=0)(logprobs, batch, StepCounts(4, 2), 2)
    assert terms.clipped_high.tolist() == [[True, False], [True, False]]
    assert not terms.clipped_low.any()
    bounded = Objective(surrogate="cispo", epsilon_high=4.0, epsilon=0.5, cispo_lower_bound=True, beta=0)
    terms = bounded(logprobs, batch, StepCounts(4, 2), 2)
    assert terms.clipped_high.tolist() == [[True, False], [True, False]]
    assert terms.clipped_low.tolist() == [[False, True], [False, True]]


def test_gmpo_reports_tokens_as_clipped_by_their_log_ratio():
    logprobs, batch = make_batch()
    terms = Objective(surrogate="gmpo", epsilon=0.25, epsilon_high=0.4)(logprobs, batch, COUNTS, LONGEST)
    # Row 0, advantage 1: 0.5 nats up is clipped, 0.23 is not; row 1, advantage -1.5: 0.3 nats down is clipped.
    assert terms.clipped_high.nonzero().tolist() == [[0, 0], [2, 0]]
    assert terms.clipped_low.nonzero().tolist() == [[1, 2]]
    terms = Objective(surrogate="gmpo", epsilon=0.35, epsilon_high=0.6)(logprobs, batch, COUNTS, LONGEST)
    assert not (terms.clipped_low | terms.clipped_high).any()


def test_token_weights_are_part_of_vespos_ratio():
    """And not a factor of its loss; the logs get them all the same, and off-policy completions are dropped."""
    logprobs, batch = make_batch()
    mask, advantages = batch.completion_mask, batch.advantages.view(-1, 1)
    objective = Objective(beta=0.0, surrogate="vespo", rollout_correction="token_mask", off_policy_threshold=-0.5)
    terms = objective(logprobs, batch, COUNTS, LONGEST)
    weights = rollout_weights(batch.old_logprobs, batch.rollout_logprobs, mask, level="token", outside="mask")
    tokens = vespo_surrogate(logprobs, batch.old_logprobs, mask, advantages, rollout_weights=weights)
    kept = keeps_sequence(logprobs, batch.rollout_logprobs, mask, advantages, threshold=-0.5)
    assert kept.tolist() == [[True], [False], [True], [False]]  # the last has no tokens
    want = aggregate(tokens * kept, mask, by="token", num_tokens=23, num_sequences=7, max_completion_length=9)
    assert terms.loss.item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(terms.rollout_weight, weights * kept * mask)


def test_dppo_reports_tokens_outside_of_the_trust_region():
    logprobs, batch = make_batch()
    terms = Objective(surrogate="dppo_tv", epsilon=0.01)(logprobs, batch, COUNTS, LONGEST)
    p, q = logprobs.detach().exp(), batch.old_logprobs.exp()
    gain = batch.advantages[:, None]
    assert torch.equal(terms.clipped_high, (p - q > 0.01) & (gain > 0) & batch.completion_mask)
    assert torch.equal(terms.clipped_low, (q - p > 0.01) & (gain < 0) & batch.completion_mask)
    assert terms.clipped_high.any()
    assert terms.clipped_low.any()


def test_unselected_tokens_are_an_error():
    logprobs, batch = make_batch()
    for settings, name in (({"top_entropy_fraction": 0.5}, "high_entropy"), ({"surrogate": "kl_cov"}, "high_cov")):
        with pytest.raises(ValueError, match=rf"has no selected tokens, which the objective needs \({name}"):
            Objective(**settings)(logprobs, batch, COUNTS, LONGEST)


def test_tokens_of_low_entropy_have_no_gradient():
    """Whatever the ratio: one loss per completion would train all its tokens, and is refused."""
    for settings in ({}, {"ratio": "sequence_token"}, {"surrogate": "cispo", "ratio": "sequence"}):
        objective = Objective(beta=0.0, top_entropy_fraction=0.3, **settings)
        logprobs, batch = make_batch()
        with_selection(objective, logprobs, batch)
        objective(logprobs, batch, COUNTS, LONGEST).loss.backward()
        assert logprobs.grad.any()
        assert not logprobs.grad[~batch.selected].any()


def test_tokens_of_low_entropy_have_their_kl_and_nothing_else():
    objective = Objective(beta=0.1, top_entropy_fraction=0.3)
    _, gradient = loss_and_gradient(objective)
    logprobs, batch = make_batch()
    with_selection(objective, logprobs, batch)
    terms = objective(logprobs, batch, COUNTS, LONGEST)
    assert torch.equal(terms.selected, batch.selected)
    assert 0 < batch.selected.sum() < batch.completion_mask.sum()
    _, whole = loss_and_gradient(Objective(beta=0.1))
    logprobs, batch = make_batch()
    kl = kl_divergence(logprobs, batch.ref_logprobs, batch.completion_mask).sum() * 0.1 / 23
    (alone,) = torch.autograd.grad(kl, logprobs)
    torch.testing.assert_close(gradient, torch.where(terms.selected, whole, alone))


def test_all_tokens_of_top_entropy_are_all():
    want, got = (loss_and_gradient(Objective(top_entropy_fraction=f)) for f in (1.0, 1 - 1e-9))
    assert torch.equal(want[1], got[1])


def test_clip_cov_leaves_tokens_out():
    logprobs, batch = make_batch()
    batch.selected = batch.completion_mask & (torch.arange(5) == 0)
    plain = Objective(beta=0.0)(logprobs, batch, COUNTS, LONGEST)
    (whole,) = torch.autograd.grad(plain.loss, logprobs)
    terms = Objective(beta=0.0, surrogate="clip_cov")(logprobs, batch, COUNTS, LONGEST)
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    torch.testing.assert_close(found, torch.where(batch.selected, 0.0, whole))
    assert whole[batch.selected].any()
    assert torch.equal(terms.clipped_high, plain.clipped_high)


def test_corrections_multiply_the_surrogate_and_not_the_kl():
    logprobs, batch = make_batch()
    mask, advantages = batch.completion_mask, batch.advantages.view(-1, 1)
    objective = Objective(
        beta=0.1, rollout_correction="token_mask", rollout_correction_low=0.5, off_policy_threshold=0.5
    )
    terms = objective(logprobs, batch, COUNTS, LONGEST)
    ratio = importance_ratio(logprobs, batch.old_logprobs, mask)
    weights = rollout_weights(
        batch.old_logprobs, batch.rollout_logprobs, mask, level="token", outside="mask", low=0.5, high=2.0
    )
    kept = keeps_sequence(logprobs, batch.rollout_logprobs, mask, advantages, threshold=0.5)
    tokens = clipped_surrogate(ratio, advantages, epsilon=0.2) * weights * kept
    tokens = tokens + 0.1 * kl_divergence(logprobs, batch.ref_logprobs, mask)
    want = aggregate(tokens, mask, by="token", num_tokens=23, num_sequences=7, max_completion_length=9)
    assert terms.loss.item() == pytest.approx(want.item(), rel=1e-6)
    assert terms.rollout_weight is not None
    assert terms.is_corrected is not None
    # e^-1 < 0.5 and e^.9 > 2 are out; e^-.2, 1 and e^.1 are in.
    assert terms.is_corrected[0].tolist() == [True, False, False, True, False]
    torch.testing.assert_close(terms.rollout_weight[0, 1], torch.tensor(-0.2).exp())
    assert Objective()(logprobs, batch, COUNTS, LONGEST).rollout_weight is None


def test_a_corrected_kl_is_the_kl_where_nothing_has_moved():
    _, batch = make_batch()
    plain, corrected = (
        Objective(importance_corrected_kl=value)(batch.old_logprobs, batch, COUNTS, LONGEST).loss
        for value in (False, True)
    )
    assert plain == corrected


def test_gspo_token_has_the_gradient_of_gspo_where_advantages_are_those_of_sequences():
    """By completion: GSPO gives every token the slope of the mean, GSPO-token the mean of every slope."""
    settings = {"epsilon": 0.9, "epsilon_high": 9.0, "aggregate": "sequence", "beta": 0.0}
    (loss, gradient), (token_loss, token_gradient) = (
        loss_and_gradient(Objective(ratio=ratio, **settings)) for ratio in ("sequence", "sequence_token")
    )
    assert loss == pytest.approx(token_loss, rel=1e-6)
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(gradient, token_gradient)


@pytest.mark.parametrize("by", ["token", "sequence", "constant"])
def test_the_entropy_is_a_mean_over_tokens_whatever_the_aggregation(by):
    logprobs, batch = make_batch()
    entropy = torch.arange(20.0).view(4, 5).requires_grad_()
    plain, bonus = (
        Objective(aggregate=by, entropy_coefficient=value)(logprobs, batch, COUNTS, LONGEST, entropy=entropy).loss
        for value in (0.0, 0.5)
    )
    kept = entropy[batch.completion_mask]
    assert (plain - bonus).item() == pytest.approx(0.5 * kept.sum().item() / 23, rel=1e-5)
    bonus.backward()
    torch.testing.assert_close(entropy.grad, -0.5 / 23 * batch.completion_mask)
    assert Objective(entropy_coefficient=-0.1).trains_entropy, "less of it"


def test_an_entropy_that_is_not_given_is_an_error():
    logprobs, batch = make_batch()
    with pytest.raises(ValueError, match="entropy_coefficient is set, but no entropy was given"):
        Objective(entropy_coefficient=0.1)(logprobs, batch, COUNTS, LONGEST)


def test_rewards_are_compared_one_by_one():
    total = torch.tensor([[3.0, float("nan"), 1.0], [2.0, 2.0, 2.0]])
    a, b = torch.tensor([[0.0, 1.0, 1.0], [0.0, 2.0, 1.0]]), torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    by_reward = {"a": a, "b": b}
    summed = Objective().combine_rewards(total, by_reward, [1.0, 1.0])
    assert summed is total
    each = Objective(multi_objective_aggregation="normalize_then_sum").combine_rewards(total, by_reward, [1.0, 2.0])
    comparable = torch.stack(list(by_reward.values())).masked_fill(total.isnan(), torch.nan)
    want = normalized_sum(comparable, torch.tensor([1.0, 2.0]))
    assert each.isnan().tolist() == [[False, True, False], [False] * 3]
    torch.testing.assert_close(each[0, [0, 2]], want[0, [0, 2]])
    # Their sum is the same for all of the second group; the rewards themselves are not, and they weigh differently.
    torch.testing.assert_close(each[1], torch.tensor([1.0, -1.0, 0.0]), atol=1e-3, rtol=0)


def test_what_is_left_out_of_a_group_changes_no_normalized_reward():
    nan = float("nan")
    a, b = torch.tensor([[1.0, 0.0, 10.0]]), torch.tensor([[0.0, 1.0, nan]])
    objective = Objective(multi_objective_aggregation="normalize_then_sum")
    combined = objective.combine_rewards(torch.tensor([[1.0, 1.0, nan]]), {"a": a, "b": b}, [1.0, 1.0])
    torch.testing.assert_close(combined, torch.tensor([[0.0, 0.0, nan]]), equal_nan=True)


def test_the_lines_on_the_page_of_the_maths_are_the_default_loss():
    logprobs, batch = make_batch()
    lines = [line for line in functional.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 5
    names = vars(functional) | {
        "rewards": torch.tensor([[1.0, 0.0], [0.25, 0.5]]),
        "token_logprobs": lambda logits, ids: logprobs,
        "logits": None,
        "ids": batch.completion_ids,
        "mask": batch.completion_mask,
        "old": batch.old_logprobs,
        "ref": batch.ref_logprobs,
    }
    exec(textwrap.dedent("\n".join(lines)), names)

    objective, mask = Objective(), batch.completion_mask
    batch.advantages = objective.compute_advantages(names["rewards"]).flatten()
    counts = StepCounts(num_tokens=int(mask.sum()), num_sequences=len(mask))
    torch.testing.assert_close(names["loss"], objective(logprobs, batch, counts, LONGEST).loss)
