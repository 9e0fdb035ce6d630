"""The training objective, computed by `functional/`. Each row of the table gives the settings of one method.

| row         | ratio    | surrogate           | aggregate | scale               | beta |
|-------------|----------|---------------------|-----------|---------------------|------|
| GRPO        | token    | clip                | sequence  | group_std           | 0.04 |
| default     | token    | clip                | token     | group_std           | 0.04 |
| Dr. GRPO    | token    | clip                | constant  | none                | 0    |
| DAPO        | token    | clip, high 0.28     | token     | group_std           | 0    |
| GSPO        | sequence | clip 3e-4 / 4e-4    | sequence  | group_std           | 0    |
| CISPO       | token    | cispo, cap 1 + high | token     | group_std           | 0    |
| SAPO        | token    | sapo                | sequence  | group_std           | 0    |
| GMPO        | token    | gmpo, 0.4 nats      | sequence  | group_std           | 0    |
| VESPO       | token    | vespo               | token     | group_std           | 0    |
| DPPO        | token    | dppo_tv, 0.2        | token     | group_std           | 0    |
| RLOO        | token    | clip                | constant  | none                | 0    |
| OPO         | token    | clip                | constant  | none                | 0    |
| GPG         | token    | reinforce           | token     | nonzero_fraction    | 0    |
| pass@k      | token    | clip                | token     | group_std           | 0    |
| REINFORCE++ | token    | clip                | token     | batch_advantage_std | 1e-3 |
| Clip-Cov    | token    | clip_cov, low 1     | token     | group_std           | 0    |
| KL-Cov      | token    | kl_cov              | token     | group_std           | 0    |
| MaxRL       | token    | clip                | constant  | group_mean          | 0    |

In the surrogate column, "low" and "high" mean `epsilon` and `epsilon_high`, and "cap" is the maximum ratio. A pair such
as 3e-4 / 4e-4 gives `epsilon` and `epsilon_high`. Three rows also set a baseline: RLOO `leave_one_out`, OPO
`length_weighted`, and pass@k `pass_at_k`. REINFORCE++ also sets `kl: k2`. Each row except the default is a YAML file in
`recipes/objectives/`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from grpo_lightning.core.import_paths import import_object
from grpo_lightning.core.types import MicroBatch, check_ranges
from grpo_lightning.functional import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    dppo_surrogate,
    gmpo_surrogate,
    group_relative_advantages,
    groups_without_gradient,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    is_k3_clamped,
    is_ratio_clamped,
    keeps_sequence,
    kl_cov_surrogate,
    kl_divergence,
    leaves_trust_region,
    normalized_sum,
    reinforce_surrogate,
    rollout_weights,
    sapo_surrogate,
    vespo_surrogate,
)

log = logging.getLogger(__name__)

SurrogateName = Literal[
    "clip", "cispo", "sapo", "gmpo", "vespo", "dppo_tv", "dppo_kl", "reinforce", "clip_cov", "kl_cov"
]


class StepCounts(NamedTuple):
    """Counts of an optimizer step, summed over all ranks. The divisor of the loss depends on one of these counts."""

    num_tokens: int
    """Number of completion tokens that are not masked."""

    num_sequences: int
    """Number of completions with at least one such token."""


class ObjectiveTerms(NamedTuple):
    """Loss of a micro-batch, and its per-token terms for the logs.

    The terms are 0 or False at masked tokens.
    """

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss."""

    kl: Tensor
    """[B, T] KL to the reference, in nats; 0 without a reference. With `importance_corrected_kl`, the KL is multiplied
    by `ratio`."""

    clipped_low: Tensor | None
    """[B, T] bool, True where the surrogate clips the ratio from below. None for your own surrogate."""

    clipped_high: Tensor | None
    """[B, T] bool, True where the surrogate clips the ratio from above; None if that is not known."""

    ratio: Tensor
    """[B, T] importance ratio."""

    rollout_weight: Tensor | None = None
    """[B, T] off-policy correction weight; None without a correction."""

    is_corrected: Tensor | None = None
    """[B, T] bool, True where the weight was out of range, or `off_policy_threshold` masked the completion."""

    ratio_clamped: Tensor | None = None
    """[B, T] bool, True where the log-ratio exceeded 20 nats in absolute value."""

    kl_clamped: Tensor | None = None
    """[B, T] bool, True where k3 was clipped to 10 nats; None for the other estimators, and without a reference."""

    selected: Tensor | None = None
    """[B, T] bool, True at selected tokens; None if the objective selects none (`Objective.selection`)."""


@dataclass
class Objective:
    """The loss, composed of one choice per setting.

    loss = aggregate( rollout_weight * surrogate(ratio, advantage) + beta * kl )
           - entropy_coefficient * mean of entropy over tokens
           + router_aux_loss_coef * load-balancing loss            mixtures of experts only
    """

    # Ratio and surrogate

    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """`token` is one importance ratio per token. `sequence` is one importance ratio per completion (GSPO).
    `sequence_token` has the value of `sequence`, but each token's ratio has the gradient of the token's own log-prob
    (GSPO-token)."""

    surrogate: SurrogateName | str | Callable[..., Any] = "clip"
    """The policy loss of a token. `clip` is minus the clipped ratio times the advantage (PPO). `cispo` is minus the
    capped, detached ratio times advantage times log-prob. `sapo` is minus a sigmoid of the ratio (a soft gate) times
    the advantage. `gmpo` is minus the geometric mean of the completion's clipped ratios times the advantage. `vespo` is
    minus a detached weight times advantage times log-prob. This weight is small if the product of the completion's
    ratios is far from 1. `dppo_tv` and `dppo_kl` are minus the detached ratio times advantage times log-prob, but 0 for
    tokens whose probability has moved too far in the direction of their advantage (DPPO). The total variation
    (`dppo_tv`) or the KL (`dppo_kl`) measures how far a probability has moved. `reinforce` is minus the advantage times
    log-prob (GPG). `clip_cov` is `clip` without some of the tokens that lower the entropy most. `kl_cov` is minus the
    unclipped ratio times the advantage, plus a penalty for changing the log-prob of the tokens that lower the entropy
    most. A value with a dot is the import path of your own function of `ratio`, `advantages`, ... that returns the loss
    of each token, such as `my_losses.my_surrogate` (see docs/grpo.md)."""

    epsilon: float = 0.2
    """Lower clip limit: the ratio is clipped from below at 1 - epsilon; an epsilon of 1 means no limit. GMPO clips it
    at exp(-epsilon) instead. CISPO has a lower limit only with `cispo_lower_bound`. For DPPO, epsilon is the maximum
    divergence of tokens that become less likely."""

    epsilon_high: float | None = None
    """Upper clip limit: the ratio is clipped from above at 1 + epsilon_high. GMPO clips it at exp(epsilon_high)
    instead. For DPPO, epsilon_high is the maximum divergence of tokens that become more likely. Null uses epsilon."""

    dual_clip: float | None = None
    """Maximum ratio where the advantage is negative; must be above 1 + epsilon_high. Null means no limit."""

    cispo_lower_bound: bool = False
    """Also cap CISPO's weight from below, at 1 - epsilon, as verl does. The paper's authors do not."""

    dppo_max_ratio: float = 20.0
    """Maximum ratio of DPPO; higher ratios are clipped to it."""

    # Token selection

    top_entropy_fraction: float = 1.0
    """Only this fraction of the tokens of an optimizer step gets a policy loss: the tokens of highest entropy
    (arXiv:2506.01939). KL and entropy bonus still use all tokens. A value below 1 costs one more forward pass of every
    micro-batch. The selection needs a loss per token, so use the ratio `sequence_token` instead of `sequence`."""

    covariance_fraction: float = 2e-4
    """Fraction of the tokens of an optimizer step that Clip-Cov or KL-Cov selects by the covariance of log-prob and
    advantage. Clip-Cov selects at random among the tokens with a covariance between `clip_cov_low` and `clip_cov_high`.
    KL-Cov selects the tokens of highest covariance."""

    clip_cov_low: float = 1.0
    """Lower limit of Clip-Cov's covariance, exclusive."""

    clip_cov_high: float = 5.0
    """Upper limit of Clip-Cov's covariance, exclusive."""

    kl_cov_coefficient: float = 1.0
    """Weight of KL-Cov's penalty, the absolute log-ratio."""

    # From tokens to the loss

    aggregate: Literal["token", "sequence", "constant"] = "token"
    """`token` is the mean over all tokens. `sequence` is the mean over completions of the mean over each completion's
    tokens. `constant` is the sum over all tokens, divided by (number of completions * maximum completion length)."""

    # From rewards to advantages

    baseline: Literal["group_mean", "leave_one_out", "length_weighted", "pass_at_k"] = "group_mean"
    """The value subtracted from a completion's reward. `group_mean` is the mean reward of the group. `leave_one_out` is
    the mean reward of the other completions in the group (RLOO). `length_weighted` is the mean reward of the group,
    with completions weighted by their lengths (OPO). `pass_at_k` does not subtract a value. Instead, it replaces the
    reward by what the completion adds to the best reward of k - 1 other completions in the group, averaged over all
    choices of these others."""

    pass_k: int | None = None
    """k of the baseline `pass_at_k`, from 2 to `num_generations`. Groups with fewer than k scorable completions get
    advantage 0. Null uses all scorable completions of the group."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """`sum_then_normalize` sums the weighted rewards, and then normalizes the sum within the group.
    `normalize_then_sum` normalizes each reward within the group, and then sums the weighted results (for GDPO, also set
    `scale: batch_std`)."""

    scale: Literal["group_std", "batch_std", "batch_advantage_std", "group_mean", "nonzero_fraction", "none"] = (
        "group_std"
    )
    """Divisor of reward minus baseline. `group_std` is the std of the rewards in the group. `batch_std` is the std of
    the rewards in the rollout. `batch_advantage_std` is the std of reward minus baseline in the rollout
    (REINFORCE++-baseline). Each std is unbiased, and 1e-4 is added to it. `group_mean` is the group's mean reward
    (MaxRL); negative rewards raise an error. `nonzero_fraction` is the fraction of groups in the rollout that have an
    advantage other than 0 (GPG). `none` does not divide."""

    # KL to the reference, and entropy

    beta: float = 0.04
    """Weight of the KL to the reference; 0 loads no reference."""

    kl: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator in the loss and in `policy/kl`."""

    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss of each token. `reward` subtracts the KL, summed over a completion's tokens, from
    the completion's reward, as in arXiv:2203.02155. The estimator is then always k1."""

    importance_corrected_kl: bool = False
    """Multiply each token's KL by the token's importance ratio, so that the KL estimate stays unbiased after updates of
    the policy (DeepSeek-V3.2)."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0 disables the bonus. The entropy is averaged over all tokens, whatever `aggregate`
    is."""

    # Mixtures of experts

    router_aux_loss_coef: float | None = None
    """Weight of the load-balancing loss of a mixture of experts (arXiv:2101.03961, eq. 4 to 6). Null uses the
    `router_aux_loss_coef` of the policy's config; 0 disables the loss. If the policy is dense, a value above 0 is an
    error. With several micro-batches per step, the loss costs one more forward pass of every micro-batch except the
    first."""

    # SAPO

    sapo_temperature: float = 1.0
    """Temperature (tau) of SAPO's gate where the advantage is positive; a larger tau closes the gate at ratios closer
    to 1."""

    sapo_temperature_negative: float = 1.05
    """Temperature of SAPO's gate where the advantage is not positive."""

    # VESPO

    vespo_k: float = 2.0
    """Exponent (k) of VESPO's weight where the advantage is not negative. A larger k gives a smaller weight to
    completions that have become less likely."""

    vespo_lambda: float = 3.0
    """Decay (lambda) of VESPO's weight where the advantage is not negative. A larger lambda gives a smaller weight to
    completions that have become more likely."""

    vespo_k_negative: float = 3.0
    """Exponent of VESPO's weight where the advantage is negative."""

    vespo_lambda_negative: float = 2.0
    """Decay of VESPO's weight where the advantage is negative."""

    # Off-policy corrections

    rollout_correction: Literal[
        "auto",
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_truncate",
        "geometric_mask",
    ] = "auto"
    """Off-policy correction: the surrogate is multiplied by a weight. The weight of a token is its probability under
    the old policy (see `model.old_logprobs`), divided by its probability under the engine that sampled it. The first
    part of the setting is the level: `token` is one weight per token; `sequence` is one weight per completion, the
    product of its tokens' weights; `geometric` is one weight per completion, the geometric mean of its tokens' weights.
    The second part is the treatment of weights outside of the range from `rollout_correction_low` to
    `rollout_correction_high`: `truncate` clips these weights to the range; `mask` masks their tokens or completions.
    For asynchronous rollouts (`max_staleness`) with `old_logprobs: recompute`, `auto` is "token_truncate", or
    "sequence_truncate" if the loss needs one weight per completion. In all other cases, `auto` is "none". With
    `geometric`, set a narrow range, such as 0.99 to 1.01. VESPO does not multiply its loss by the token weights, but
    includes them in the product of the completion's ratios. GMPO and the ratio `sequence` (except with CISPO) need one
    weight per completion."""

    rollout_correction_low: float = 0.0
    """Minimum weight of `rollout_correction`."""

    rollout_correction_high: float = 2.0
    """Maximum weight of `rollout_correction`."""

    off_policy_threshold: float | None = None
    """Mask a completion of negative advantage if its mean log-prob per token has fallen by more than this many nats
    since it was sampled (DeepSeek-V3.2); null masks none."""

    def __post_init__(self) -> None:
        """Check choices, ranges and combinations. Raises: ValueError if one is invalid."""
        check_objective(self)

    def resolve(self, *, is_off_policy: bool) -> Objective:
        """Replace the `rollout_correction` "auto" by the correction that the run needs, if any.

        Args:
            is_off_policy: True if the weights that sample the completions are older than the weights that compute the
                old log-probs of the ratio.

        Raises:
            ValueError: If limits of the correction are set, but the run needs no correction.
        """
        if self.rollout_correction != "auto":
            return self
        if not is_off_policy:
            replace(self, rollout_correction="none")  # checks the limits
            return self
        levels, _ = correction_levels(self)
        chosen: Any = f"{levels[0]}_truncate"
        return replace(self, rollout_correction=chosen)

    @property
    def high(self) -> float:
        """`epsilon_high`, or `epsilon` if `epsilon_high` is null."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_reference(self) -> bool:
        """True if the KL is part of the loss or of the rewards."""
        return self.beta > 0

    @property
    def has_kl_loss(self) -> bool:
        """True if the KL is a term of the loss."""
        return self.beta > 0 and self.kl_in == "loss"

    @property
    def has_kl_reward(self) -> bool:
        """True if the KL is subtracted from the rewards."""
        return self.beta > 0 and self.kl_in == "reward"

    @property
    def trains_on_zero_advantages(self) -> bool:
        """False if completions of advantage 0 have no gradient and can be skipped in forward and backward passes."""
        return self.has_kl_loss or self.trains_entropy or surrogate_of(self).trains_on_zero_advantages

    @property
    def selection(self) -> Literal["high_entropy", "high_covariance", "random_covariance"] | None:
        """How tokens are selected before an optimizer step; None if the objective selects none."""
        return "high_entropy" if self.top_entropy_fraction < 1 else surrogate_of(self).selection

    @property
    def has_loss_per_completion(self) -> bool:
        """True if all tokens of a completion share one policy loss; False if each token has a loss of its own."""
        # CISPO multiplies the sequence ratio by the log-prob of each token.
        is_sequence_loss = self.ratio == "sequence" and self.surrogate != "cispo"
        return is_sequence_loss or surrogate_of(self).is_per_completion

    @property
    def trains_entropy(self) -> bool:
        """True if the entropy is part of the loss."""
        return self.entropy_coefficient != 0

    def combine_rewards(self, total: Tensor, by_reward: Mapping[str, Tensor], weights: Sequence[float]) -> Tensor:
        """Combine several rewards into one reward, from which the advantages are computed.

        Args:
            total: [N, G] the weighted sum of the rewards; nan where a completion is left out.
            by_reward: Name of each reward, and its values [N, G].
            weights: One per reward.

        Returns:
            [N, G], nan where `total` is nan.
        """
        if self.multi_objective_aggregation == "sum_then_normalize":
            return total
        is_left_out = total.isnan()
        values = torch.stack(list(by_reward.values())).masked_fill(is_left_out, torch.nan)
        return normalized_sum(values, torch.tensor(weights)).masked_fill(is_left_out, torch.nan)

    def compute_advantages(self, rewards: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute advantages [N, G] from rewards [N, G] and, for `length_weighted`, trained lengths [N, G]."""
        return group_relative_advantages(
            rewards, baseline=self.baseline, scale=self.scale, lengths=lengths, k=self.pass_k
        )

    def groups_without_gradient(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Find groups without a policy gradient. The arguments are those of `compute_advantages`. Returns: [N] bool."""
        return groups_without_gradient(rewards, lengths, baseline=self.baseline, k=self.pass_k)

    @property
    def zero_advantage_reason(self) -> str:
        """Why all advantages of a group are 0, for messages."""
        if self.baseline != "pass_at_k":
            return "zero reward variance"
        others = "all others" if self.pass_k is None else f"{self.pass_k - 1} others"
        return f"no completion whose reward is above those of {others} (objective.baseline pass_at_k)"

    def __call__(
        self,
        logprobs: Tensor,
        batch: MicroBatch,
        counts: StepCounts,
        max_completion_length: int,
        *,
        entropy: Tensor | None = None,
        router_loss: Tensor | None = None,
    ) -> ObjectiveTerms:
        """Compute the micro-batch's share of the optimizer step's loss.

        Args:
            logprobs: [B, T] nats, of the current policy, with gradients.
            batch: The micro-batch. `old_logprobs` is required. `selected` is required if the objective has a
                `selection`. `ref_logprobs` is required if the loss has a KL.
            counts: Counts of the entire optimizer step, over all ranks.
            max_completion_length: Tokens; used by the aggregation "constant".
            entropy: [B, T] nats, of the current policy; with gradients if `trains_entropy`.
            router_loss: Scalar, the micro-batch's share of the weighted load-balancing loss; None for no such loss.

        Raises:
            ValueError: If the batch has no old log-probs.
            ValueError: If the objective has a `selection`, and the batch has no selected tokens.
            ValueError: If `trains_entropy` is True, and no entropy is given.
        """
        surrogate, selection = surrogate_of(self), self.selection
        if batch.old_logprobs is None:
            raise ValueError("The micro-batch has no old_logprobs; set them before computing the objective.")
        if selection is not None and batch.selected is None:
            raise ValueError(
                f"The micro-batch has no selected tokens, which the objective needs ({selection}); set `selected` "
                "of all micro-batches of the optimizer step (training.token_selection.select_tokens)."
            )
        if self.trains_entropy and entropy is None:
            raise ValueError("objective.entropy_coefficient is set, but no entropy was given; pass `entropy`.")
        mask = batch.completion_mask  # [B, T]
        tokens = self._tokens(logprobs, batch)
        loss = surrogate.loss(self, tokens)  # [B, T] or [B, 1]
        if selection == "high_entropy":
            loss = torch.where(tokens.selected, loss, 0.0)
        correction = self._correction(tokens, batch, surrogate)
        if correction is not None:
            loss = torch.where(mask, loss, 0.0) * correction.factor
        kl, kl_clamped = self._token_kl(tokens, batch.ref_logprobs)  # [B, T] each
        if self.has_kl_loss and batch.ref_logprobs is not None:
            loss = loss + self.beta * kl
        clipped_low, clipped_high = self._find_clipped(tokens, surrogate) if surrogate.knows_clipped else (None, None)
        mean = functools.partial(
            aggregate,
            mask=mask,
            num_tokens=counts.num_tokens,
            num_sequences=counts.num_sequences,
            max_completion_length=max_completion_length,
        )
        total = mean(loss.expand_as(mask), by=self.aggregate)  # scalar
        if self.trains_entropy:
            assert entropy is not None
            total = total - self.entropy_coefficient * mean(entropy, by="token")
        return ObjectiveTerms(
            loss=total if router_loss is None else total + router_loss,
            kl=kl.detach(),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
            ratio=tokens.ratio.detach().expand_as(mask) * mask,
            rollout_weight=None if correction is None else correction.weight,
            is_corrected=None if correction is None else correction.is_corrected,
            ratio_clamped=is_ratio_clamped(logprobs, batch.old_logprobs, mask, level=self.ratio),
            kl_clamped=kl_clamped,
            selected=None if batch.selected is None else batch.selected & mask,
        )

    def find_clipped(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Find trained tokens clipped from below and from above.

        Returns:
            Two [B, T] bool; False everywhere if the surrogate is your own function.
        """
        return self._find_clipped(self._tokens(logprobs.detach(), batch), surrogate_of(self))

    def _find_clipped(self, tokens: Tokens, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
        low, high = surrogate.clipped(self, tokens)
        return low.expand_as(tokens.mask) & tokens.mask, high.expand_as(tokens.mask) & tokens.mask

    def _tokens(self, logprobs: Tensor, batch: MicroBatch) -> Tokens:
        """The inputs of the surrogate. If the batch has no old log-probs, the current log-probs take their place."""
        mask = batch.completion_mask
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        selected = mask if batch.selected is None else batch.selected
        ratio = importance_ratio(logprobs, old, mask, level=self.ratio)
        weights = self._rollout_weights(old, batch)
        return Tokens(logprobs, old, mask, batch.token_advantages, ratio, selected, weights)

    def _rollout_weights(self, old_logprobs: Tensor, batch: MicroBatch, *, bounded: bool = True) -> Tensor | None:
        """Off-policy weights [B, T] or [B, 1], limited to their range if `bounded`; None without a correction."""
        if self.rollout_correction in ("auto", "none"):
            return None
        level: Any
        outside: Any
        level, outside = self.rollout_correction.split("_")
        low, high = (self.rollout_correction_low, self.rollout_correction_high) if bounded else (0.0, math.inf)
        choices = {"level": level, "outside": outside, "low": low, "high": high}
        return rollout_weights(old_logprobs, batch.rollout_logprobs, batch.completion_mask, **choices)

    def _token_kl(self, tokens: Tokens, ref_logprobs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """KL to the reference, with gradients, and where k3 was clipped: `kl` and `kl_clamped` of `ObjectiveTerms`."""
        if ref_logprobs is None:
            return torch.zeros_like(tokens.logprobs), None
        kl = kl_divergence(tokens.logprobs, ref_logprobs, tokens.mask, estimator=self.kl)
        is_clamped = is_k3_clamped(kl.detach()) if self.kl == "k3" else None
        return tokens.ratio * kl if self.importance_corrected_kl else kl, is_clamped

    def _correction(self, tokens: Tokens, batch: MicroBatch, surrogate: Surrogate) -> Correction | None:
        """Off-policy correction of the policy loss; None if not configured."""
        mask, weight = tokens.mask, tokens.rollout_weights
        kept = torch.ones_like(mask)
        if (threshold := self.off_policy_threshold) is not None:
            advantages = tokens.advantages
            kept = keeps_sequence(tokens.logprobs, batch.rollout_logprobs, mask, advantages, threshold=threshold)
        if weight is None:
            factor = (kept & mask).to(tokens.logprobs.dtype)
            return None if threshold is None else Correction(factor, factor, ~kept & mask)
        unbounded = self._rollout_weights(tokens.old_logprobs, batch, bounded=False)
        factor = kept & mask if surrogate.folds_rollout_weights else weight * (kept & mask)
        return Correction(factor, weight * (kept & mask), ((weight != unbounded) | ~kept) & mask)


class Correction(NamedTuple):
    """Off-policy correction of a micro-batch."""

    factor: Tensor
    """[B, T] factors by which the policy losses of the tokens are multiplied."""

    weight: Tensor
    """[B, T] off-policy weights, for the logs. The weights equal `factor`, except with VESPO, because its loss
    already contains the weights."""

    is_corrected: Tensor
    """[B, T] bool, True where the weight was out of range, or `off_policy_threshold` masked the completion."""


class Tokens(NamedTuple):
    """The inputs of a surrogate."""

    logprobs: Tensor
    """[B, T] nats, of the current policy, with gradients."""

    old_logprobs: Tensor
    """[B, T] nats."""

    mask: Tensor
    """[B, T] bool, True where a token is trained on."""

    advantages: Tensor
    """[B, 1]; or [B, T] if the credit of turns is included (`Surrogate.takes_turn_credit`)."""

    ratio: Tensor
    """[B, T], or [B, 1] if `Objective.ratio` is `sequence`; importance ratios, with gradients."""

    selected: Tensor
    """[B, T] bool, True at the tokens that the objective has selected before the optimizer step."""

    rollout_weights: Tensor | None
    """[B, T] or [B, 1] off-policy weights; None without a correction."""


class Surrogate(NamedTuple):
    """One choice of `Objective.surrogate`."""

    loss: Callable[[Objective, Tokens], Tensor]
    """Returns the policy loss of each token, before the KL: [B, T], or [B, 1] if it is the same for all tokens."""

    clipped: Callable[[Objective, Tokens], tuple[Tensor, Tensor]]
    """Returns which tokens are clipped from below and from above: two bool tensors [B, T] or [B, 1]."""

    settings: frozenset[str]
    """Names of the settings that this surrogate uses."""

    selection: Literal["high_covariance", "random_covariance"] | None = None
    """How the surrogate selects tokens before an optimizer step; None if it selects none."""

    folds_rollout_weights: bool = False
    """True if the loss itself applies the off-policy weights. A correction then needs one weight per token."""

    takes_turn_credit: bool = False
    """True if the advantages may differ between the tokens of a completion."""

    trains_on_zero_advantages: bool = False
    """True if completions of advantage 0 have a gradient."""

    is_per_completion: bool = False
    """True if there is one loss per completion, [B, 1]. A correction then needs one weight per completion."""

    knows_clipped: bool = True
    """False if it is not known which tokens are clipped."""


def _clip(objective: Objective, tokens: Tokens) -> Tensor:
    return clipped_surrogate(
        tokens.ratio,
        tokens.advantages,
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        dual_clip=objective.dual_clip,
    )


def _clip_clipped(objective: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    ratio = tokens.ratio.detach()
    low = is_clipped_low(ratio, tokens.advantages, epsilon=objective.epsilon)
    return low, is_clipped_high(ratio, tokens.advantages, epsilon_high=objective.high)


def _cispo(objective: Objective, tokens: Tokens) -> Tensor:
    low = objective.epsilon if objective.cispo_lower_bound else None
    return cispo_surrogate(tokens.ratio, tokens.advantages, tokens.logprobs, epsilon_high=objective.high, epsilon=low)


def _cispo_clipped(objective: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Find tokens with a capped weight, whatever the sign of the advantage."""
    ratio = tokens.ratio.detach()
    low = (ratio < 1 - objective.epsilon) & objective.cispo_lower_bound
    return low, ratio > 1 + objective.high


def _sapo(objective: Objective, tokens: Tokens) -> Tensor:
    positive, negative = objective.sapo_temperature, objective.sapo_temperature_negative
    return sapo_surrogate(tokens.ratio, tokens.advantages, temperature_positive=positive, temperature_negative=negative)


def _gmpo(objective: Objective, tokens: Tokens) -> Tensor:
    limits = {"epsilon": objective.epsilon, "epsilon_high": objective.high}
    return gmpo_surrogate(tokens.logprobs, tokens.old_logprobs, tokens.mask, tokens.advantages, **limits)


def _gmpo_clipped(objective: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Find clipped tokens. GMPO's limits are in nats, so they are converted to limits of the ratio."""
    ratio = tokens.ratio.detach()
    low = is_clipped_low(ratio, tokens.advantages, epsilon=1 - math.exp(-objective.epsilon))
    return low, is_clipped_high(ratio, tokens.advantages, epsilon_high=math.exp(objective.high) - 1)


def _reinforce(_: Objective, tokens: Tokens) -> Tensor:
    return reinforce_surrogate(tokens.advantages, tokens.logprobs)


def _vespo(objective: Objective, tokens: Tokens) -> Tensor:
    return vespo_surrogate(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.mask,
        tokens.advantages,
        rollout_weights=tokens.rollout_weights,
        positive=(objective.vespo_k, objective.vespo_lambda),
        negative=(objective.vespo_k_negative, objective.vespo_lambda_negative),
    )


def _dppo(objective: Objective, tokens: Tokens) -> Tensor:
    low, high = _dppo_clipped(objective, tokens)
    return dppo_surrogate(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.mask,
        tokens.advantages,
        low | high,
        max_ratio=objective.dppo_max_ratio,
    )


def _dppo_clipped(objective: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    return leaves_trust_region(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        divergence="tv" if objective.surrogate == "dppo_tv" else "kl",
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
    )


def _clip_cov(objective: Objective, tokens: Tokens) -> Tensor:
    return torch.where(tokens.selected, 0.0, _clip(objective, tokens))


def _kl_cov(objective: Objective, tokens: Tokens) -> Tensor:
    return kl_cov_surrogate(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.mask,
        tokens.advantages,
        tokens.selected,
        coefficient=objective.kl_cov_coefficient,
    )


def _never_clipped(_: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(tokens.mask), torch.zeros_like(tokens.mask)


SURROGATES = {
    "clip": Surrogate(
        _clip, _clip_clipped, frozenset({"ratio", "epsilon", "epsilon_high", "dual_clip"}), takes_turn_credit=True
    ),
    "cispo": Surrogate(
        _cispo,
        _cispo_clipped,
        frozenset({"ratio", "epsilon", "epsilon_high", "cispo_lower_bound"}),
        takes_turn_credit=True,
    ),
    "sapo": Surrogate(
        _sapo,
        _never_clipped,
        frozenset({"ratio", "sapo_temperature", "sapo_temperature_negative"}),
        takes_turn_credit=True,
    ),
    "gmpo": Surrogate(_gmpo, _gmpo_clipped, frozenset({"epsilon", "epsilon_high"}), is_per_completion=True),
    "vespo": Surrogate(
        _vespo,
        _never_clipped,
        frozenset({"vespo_k", "vespo_lambda", "vespo_k_negative", "vespo_lambda_negative"}),
        folds_rollout_weights=True,
    ),
    "dppo_tv": Surrogate(_dppo, _dppo_clipped, frozenset({"epsilon", "epsilon_high", "dppo_max_ratio"})),
    "dppo_kl": Surrogate(_dppo, _dppo_clipped, frozenset({"epsilon", "epsilon_high", "dppo_max_ratio"})),
    "reinforce": Surrogate(_reinforce, _never_clipped, frozenset(), takes_turn_credit=True),
    "clip_cov": Surrogate(
        _clip_cov,
        _clip_clipped,
        frozenset({"epsilon", "epsilon_high", "covariance_fraction", "clip_cov_low", "clip_cov_high"}),
        "random_covariance",
    ),
    "kl_cov": Surrogate(
        _kl_cov,
        _never_clipped,
        frozenset({"covariance_fraction", "kl_cov_coefficient"}),
        "high_covariance",
        trains_on_zero_advantages=True,
    ),
}
"""Every surrogate of the package, by its name in `Objective.surrogate`."""

OWN_ARGUMENTS = ("ratio", "advantages", "logprobs", "old_logprobs", "mask", "epsilon", "epsilon_high")
"""Arguments that a user's own surrogate may take."""


def surrogate_of(objective: Objective) -> Surrogate:
    """The surrogate of an objective.

    Raises:
        ValueError: If the value of `objective.surrogate` is not allowed (see `Objective.surrogate`).
    """
    given = objective.surrogate
    if not isinstance(given, str):
        function = given
    elif given in SURROGATES:
        return SURROGATES[given]
    elif "." not in given.strip("."):
        raise ValueError(
            f"objective.surrogate must be one of {', '.join(SURROGATES)}, or the import path of your own function "
            f"(my_losses.my_surrogate); got {given!r}."
        )
    else:
        try:
            function = import_object(given)
        except ValueError as error:
            raise ValueError(f"objective.surrogate: {error}") from error
    return own_surrogate(function, name_of(objective))


def name_of(objective: Objective) -> str:
    """Name of the surrogate for messages."""
    given = objective.surrogate
    return given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))


def own_surrogate(function: Callable[..., Any], name: str) -> Surrogate:
    """Make a surrogate of a user's own function.

    The function returns the loss of each token as [B, T]. If `Objective.ratio` is `sequence`, the function can instead
    return [B, 1]. Masked tokens can have any loss.

    The arguments are passed by keyword. If the function takes `**kwargs`, it gets all arguments listed below.
    Otherwise, it gets the listed arguments that its signature names. The function needs a default for every other
    argument.

        ratio         [B, T], or [B, 1] if `Objective.ratio` is `sequence`; importance ratios, with gradients
        advantages    [B, 1], or [B, T] with `turn_credit`
        logprobs      [B, T] nats, of the current policy, with gradients
        old_logprobs  [B, T] nats
        mask          [B, T] bool, True where a token is trained on
        epsilon       `Objective.epsilon`
        epsilon_high  `Objective.epsilon_high`; if that is null, `Objective.epsilon`

    Raises:
        ValueError: If `function` is not a function, or if Python does not know its arguments.
        ValueError: If `function` requires an argument that is not in the list above.
        ValueError: If `function` takes a required argument only by position.
    """
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"objective.surrogate must be a function, got {function!r}.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # some functions that are written in C
        raise ValueError(
            f"The arguments of objective.surrogate {name} are not known ({error}). Call it from a Python function "
            "that names its arguments, and set objective.surrogate to this function."
        ) from error
    check_own_arguments(parameters, name)
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    taken = {each for each in OWN_ARGUMENTS if takes_all or each in named}

    def loss(objective: Objective, tokens: Tokens) -> Tensor:
        known = tokens._asdict() | {"epsilon": objective.epsilon, "epsilon_high": objective.high}
        return check_own_loss(function(**{each: known[each] for each in taken}), tokens, name)

    return Surrogate(
        loss,
        _never_clipped,
        frozenset(taken & {"ratio", "epsilon", "epsilon_high"}),
        takes_turn_credit=True,
        trains_on_zero_advantages=True,  # an unknown function may have a gradient there
        knows_clipped=False,
    )


def check_own_arguments(parameters: Iterable[inspect.Parameter], name: str) -> None:
    """Check what a user's own surrogate requires. Raises: ValueError if it cannot be called with `OWN_ARGUMENTS`."""
    for each in parameters:
        if each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if each.kind == each.POSITIONAL_ONLY:
            raise ValueError(
                f"objective.surrogate {name} takes {each.name!r} only by position, but all arguments are passed by "
                "keyword: remove the / from its arguments."
            )
        if each.name not in OWN_ARGUMENTS:
            raise ValueError(
                f"objective.surrogate {name} requires the argument {each.name!r}. The function can have the "
                f"arguments {', '.join(OWN_ARGUMENTS)}; give any other argument a default."
            )


def check_own_loss(loss: Any, tokens: Tokens, name: str) -> Tensor:
    """Check what a user's own surrogate returned. Raises: ValueError if it is not the loss of each token."""
    shape = tokens.mask.shape
    # A tensor [B] would broadcast along T if B equals T.
    if not isinstance(loss, Tensor) or loss.shape not in (shape, tokens.ratio.shape):
        got = list(loss.shape) if isinstance(loss, Tensor) else f"a value of type {type(loss).__name__}"
        raise ValueError(
            f"objective.surrogate {name} must return the loss of each token, a Tensor of the shape {list(shape)}; got "
            f"{got}."
        )
    if tokens.logprobs.requires_grad and not loss.requires_grad:
        raise ValueError(
            f"objective.surrogate {name} returned a loss without a gradient: compute it from `ratio` or `logprobs`, "
            "without detach()."
        )
    return loss


def check_objective(objective: Objective) -> None:
    """Check choices, ranges and combinations. Raises: ValueError if one is invalid."""
    surrogate_of(objective)
    for name, kind in get_type_hints(type(objective)).items():
        choices, value = get_args(kind), getattr(objective, name)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"objective.{name} must be one of {', '.join(choices)}, got {value!r}.")
    _check_ranges(objective)
    _check_unused(objective)
    _check_scale(objective)
    _check_correction(objective)


def _check_ranges(objective: Objective) -> None:
    """Check numeric ranges. Raises: ValueError."""
    high, largest = objective.high, objective.rollout_correction_high
    limits = [
        ("epsilon", 0 <= objective.epsilon <= 1, "at least 0 and at most 1"),
        ("epsilon_high", high >= 0, "at least 0, or null for epsilon"),
        ("beta", objective.beta >= 0, "at least 0 (0 for no reference)"),
        (
            "router_aux_loss_coef",
            objective.router_aux_loss_coef is None or objective.router_aux_loss_coef >= 0,
            "at least 0 (0 for no load-balancing loss), or null for the policy's own",
        ),
        (
            "dual_clip",
            objective.dual_clip is None or objective.dual_clip > 1 + high,
            f"above 1 + epsilon_high = {1 + high:g} (or null)",
        ),
        ("pass_k", objective.pass_k is None or objective.pass_k >= 2, "at least 2 (or null)"),
        ("top_entropy_fraction", 0 < objective.top_entropy_fraction <= 1, "above 0 and at most 1"),
        ("covariance_fraction", 0 < objective.covariance_fraction <= 1, "above 0 and at most 1"),
        (
            "clip_cov_low",
            objective.clip_cov_low < objective.clip_cov_high,
            f"below clip_cov_high ({objective.clip_cov_high})",
        ),
        ("dppo_max_ratio", objective.dppo_max_ratio > 1, "above 1"),
        ("vespo_k", objective.vespo_k >= 0, "at least 0"),
        ("vespo_k_negative", objective.vespo_k_negative >= 0, "at least 0"),
        ("vespo_lambda", objective.vespo_lambda > 0, "above 0"),
        ("vespo_lambda_negative", objective.vespo_lambda_negative > 0, "above 0"),
        ("kl_cov_coefficient", objective.kl_cov_coefficient >= 0, "at least 0"),
        ("sapo_temperature", objective.sapo_temperature > 0, "above 0"),
        ("sapo_temperature_negative", objective.sapo_temperature_negative > 0, "above 0"),
        (
            "rollout_correction_low",
            0 <= objective.rollout_correction_low < largest,
            f"at least 0 and below rollout_correction_high ({largest})",
        ),
    ]
    check_ranges("objective", objective, limits)


def _check_unused(objective: Objective) -> None:
    """Refuse settings without an effect. Raises: ValueError if one differs from its default."""
    own = surrogate_of(objective).settings
    if "epsilon_high" in own and objective.epsilon_high is None:
        own |= {"epsilon"}  # a null epsilon_high means epsilon
    others = sorted(frozenset().union(*(surrogate.settings for surrogate in SURROGATES.values())) - own)
    is_capped = objective.surrogate == "cispo" and objective.epsilon_high is not None
    has_low = not is_capped or objective.cispo_lower_bound
    is_corrected = objective.rollout_correction != "none"
    uses = [
        (False, f"the {name_of(objective)} surrogate does not use it", others),
        (
            surrogate_of(objective).selection is None,
            f"the {name_of(objective)} surrogate selects tokens itself",
            ["top_entropy_fraction"],
        ),
        (
            not objective.has_loss_per_completion,
            "the loss is one per completion, which trains all its tokens",
            ["top_entropy_fraction"],
        ),
        (has_low, "the cispo surrogate has a lower bound only with cispo_lower_bound", ["epsilon"]),
        (objective.beta > 0, "beta is 0, which disables the KL", ["kl_in", "kl"]),
        (objective.has_kl_loss, "beta is 0, or kl_in is reward: the loss has no KL", ["importance_corrected_kl"]),
        (objective.baseline == "pass_at_k", "the baseline is not pass_at_k", ["pass_k"]),
        (is_corrected, "rollout_correction is none", ["rollout_correction_low", "rollout_correction_high"]),
    ]
    unused = {name: why for is_used, why, names in uses if not is_used for name in names}
    for setting in fields(objective):
        value = getattr(objective, setting.name)
        if setting.name in unused and value != setting.default:
            raise ValueError(f"objective.{setting.name} is {value!r}, but {unused[setting.name]}: remove the setting.")


def _check_scale(objective: Objective) -> None:
    """Refuse a scale that is not defined for the baseline or the rewards. Raises: ValueError."""
    if objective.scale == "batch_advantage_std" and objective.baseline in ("length_weighted", "pass_at_k"):
        raise ValueError(
            "objective.scale 'batch_advantage_std' is a std around 0, which the advantages of objective.baseline "
            f"{objective.baseline!r} are not centered on: change one of the two."
        )
    if objective.scale != "group_mean":
        return
    others = {"kl_in": "reward", "multi_objective_aggregation": "normalize_then_sum"}
    for name, value in others.items():
        if getattr(objective, name) == value:
            raise ValueError(
                f"objective.scale 'group_mean' divides by the mean reward, which objective.{name} {value!r} can make "
                "negative: remove one of the two."
            )


def _check_correction(objective: Objective) -> None:
    """Refuse a `rollout_correction` that the loss cannot use. Raises: ValueError."""
    levels, reason = correction_levels(objective)
    allowed = ["auto", "none", *(f"{level}_{outside}" for level in levels for outside in ("truncate", "mask"))]
    if objective.rollout_correction not in allowed:
        raise ValueError(
            f"objective.rollout_correction must be one of {', '.join(allowed)} with {reason}; got "
            f"{objective.rollout_correction!r}."
        )


def correction_levels(objective: Objective) -> tuple[list[str], str]:
    """The levels of `rollout_correction` that the loss can use, default first, and why it can use no others."""
    own = surrogate_of(objective)
    surrogate = f"objective.surrogate {name_of(objective)!r}"
    if own.folds_rollout_weights:
        return ["token"], f"{surrogate}, which multiplies the weights of the tokens itself"
    if own.is_per_completion:
        return ["sequence", "geometric"], f"{surrogate}, which has one loss per completion"
    if objective.has_loss_per_completion:
        return ["sequence", "geometric"], (
            "objective.ratio 'sequence': its gradient reaches all tokens of a completion ('sequence_token' has the "
            "same ratio, but a gradient per token, as verl's GSPO)"
        )
    return ["token", "sequence", "geometric"], ""


def warn_of_length_weights(objective: Objective) -> None:
    """Warn if a loss per completion is summed over tokens, which is rarely intended."""
    if objective.aggregate == "token" and objective.ratio != "token":
        log.warning(
            "objective.ratio %r with objective.aggregate 'token' (the default) weights each completion by its length. "
            "Set objective.aggregate to 'sequence' for GSPO, or to 'constant' for LUSPO.",
            objective.ratio,
        )
    if objective.surrogate == "gmpo" and objective.aggregate != "sequence":
        log.warning(
            "objective.surrogate 'gmpo' with objective.aggregate %r%s weights each completion by its length. Set "
            "objective.aggregate to 'sequence'.",
            objective.aggregate,
            " (the default)" if objective.aggregate == "token" else "",
        )
