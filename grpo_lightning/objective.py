"""What the policy is trained towards: a paper is one row of settings, each a pure function of `functional/`.

| row         | ratio    | surrogate           | aggregate | scale     | beta |
|-------------|----------|---------------------|-----------|-----------|------|
| GRPO        | token    | clip, low = high    | sequence  | group_std | 0.04 |
| default     | token    | clip                | token     | group_std | 0.04 |
| Dr. GRPO    | token    | clip                | constant  | none      | 0    |
| DAPO        | token    | clip, high 0.28     | token     | group_std | 0    |
| GSPO        | sequence | clip 3e-4 / 4e-4    | sequence  | group_std | 0    |
| CISPO       | token    | cispo, cap 1 + high | token     | group_std | 0    |

The rows are recipe fragments under `recipes/objectives/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from grpo_lightning.functional import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    group_relative_advantages,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    kl_divergence,
)
from grpo_lightning.types import MicroBatch


class StepCounts(NamedTuple):
    """What one optimizer step trains on, over all its micro-batches and ranks: the loss is divided by these."""

    num_tokens: int
    num_sequences: int


class ObjectiveTerms(NamedTuple):
    """The loss of a micro-batch and the per-token quantities behind it, for the logs.

    Zeros where nothing is trained.
    """

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss."""

    kl: Tensor
    """[B, T] nats to the reference."""

    clipped_low: Tensor
    """[B, T] bool."""

    clipped_high: Tensor
    """[B, T] bool."""

    ratio: Tensor
    """[B, T]."""


@dataclass
class Objective:
    """The loss, as one choice per column.

    loss = aggregate( surrogate(ratio, advantage) + beta * kl )
    """

    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or one per completion (GSPO)."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """Clipped ratio times advantage (PPO), or capped constant ratio times advantage times log-prob (CISPO)."""

    epsilon: float = 0.2
    """The ratio is clipped below 1 - epsilon."""

    epsilon_high: float | None = None
    """The ratio is clipped above 1 + epsilon_high; null takes epsilon."""

    dual_clip: float | None = None
    """Largest ratio counted where the advantage is negative; above 1 + epsilon_high. Null is unlimited."""

    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Every token weighs the same, every completion weighs the same, or tokens over the longest length allowed."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What a reward is compared with."""

    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What the difference is divided by (unbiased std + 1e-4)."""

    beta: float = 0.04
    """Weight of the KL to the reference; 0 trains without a reference."""

    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""

    def __post_init__(self) -> None:
        """Check choices, ranges and combinations. Raises: ValueError naming the setting, its value and what to do."""
        for name, kind in get_type_hints(type(self)).items():
            choices, value = get_args(kind), getattr(self, name)
            if get_origin(kind) is Literal and value not in choices:
                raise ValueError(f"objective.{name} must be one of {', '.join(choices)}, got {value!r}.")
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"objective.epsilon must be at least 0 and below 1, got {self.epsilon}.")
        if self.epsilon_high is not None and self.epsilon_high < 0:
            raise ValueError(
                f"objective.epsilon_high must be at least 0, or null for epsilon, got {self.epsilon_high}."
            )
        if self.beta < 0:
            raise ValueError(f"objective.beta must be at least 0 (0 is no reference), got {self.beta}.")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.high:
            raise ValueError(
                f"objective.dual_clip must be above 1 + epsilon_high = {1 + self.high:g}, got {self.dual_clip}. "
                "Raise it, or set it to null."
            )
        if self.surrogate == "cispo" and self.dual_clip is not None:
            raise ValueError(
                "objective.dual_clip has no meaning for the cispo surrogate: its ratio is capped. Set it to null."
            )

    @property
    def high(self) -> float:
        """`epsilon_high` with its default filled in."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_reference(self) -> bool:
        """True if the KL term is trained on."""
        return self.beta > 0

    @property
    def trains_on_zero_advantages(self) -> bool:
        """False if a completion of advantage 0 adds nothing to the gradient and may be left out of the passes."""
        return self.beta > 0

    def compare(self, rewards: Tensor) -> Tensor:
        """Advantages [N, G] of rewards [N, G]."""
        return group_relative_advantages(rewards, baseline=self.baseline, scale=self.scale)

    def __call__(
        self, logprobs: Tensor, batch: MicroBatch, counts: StepCounts, max_completion_length: int
    ) -> ObjectiveTerms:
        """The micro-batch's share of the step's loss.

        Args:
            logprobs: [B, T] nats, of the policy now, with gradients.
            batch: Its `old_logprobs` must be known, and with beta > 0 its `ref_logprobs`.
            counts: Of the whole optimizer step over all ranks.
            max_completion_length: Tokens; the divisor of the "constant" aggregation.
        """
        if batch.old_logprobs is None:
            raise ValueError("The micro-batch has no old_logprobs; set them before the objective is computed.")
        mask = batch.completion_mask
        advantages = batch.advantages[:, None]
        ratio = importance_ratio(logprobs, batch.old_logprobs, mask, level=self.ratio)
        if self.surrogate == "cispo":
            loss = cispo_surrogate(ratio, advantages, logprobs, epsilon_high=self.high)
        else:
            loss = clipped_surrogate(
                ratio, advantages, epsilon=self.epsilon, epsilon_high=self.epsilon_high, dual_clip=self.dual_clip
            )
        kl = torch.zeros_like(logprobs)
        if batch.ref_logprobs is not None:
            kl = kl_divergence(logprobs, batch.ref_logprobs, mask, estimator=self.kl)
            loss = loss + self.beta * kl
        with torch.no_grad():
            # CISPO caps a ratio whatever the advantage's sign, and bounds nothing from below.
            sign = torch.ones_like(advantages) if self.surrogate == "cispo" else advantages
            clipped_low = is_clipped_low(ratio, sign, epsilon=self.epsilon).expand_as(mask) & mask
            clipped_high = is_clipped_high(ratio, sign, epsilon_high=self.high).expand_as(mask) & mask
        total = aggregate(
            loss.expand_as(mask),
            mask,
            by=self.aggregate,
            num_tokens=counts.num_tokens,
            num_sequences=counts.num_sequences,
            max_completion_length=max_completion_length,
        )
        return ObjectiveTerms(total, kl.detach(), clipped_low, clipped_high, ratio.detach().expand_as(mask) * mask)
