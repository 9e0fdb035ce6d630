"""The mathematics of GRPO: tensors in, tensors out; no state, no logging, no in-place writes."""

from grpo_lightning.functional.advantages import equal_groups, group_relative_advantages, normalized_sum
from grpo_lightning.functional.kl import is_k3_clamped, kl_divergence
from grpo_lightning.functional.logprobs import token_entropy, token_logprobs
from grpo_lightning.functional.losses import (
    cispo_surrogate,
    clipped_surrogate,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    is_ratio_clamped,
    keeps_sequence,
    rollout_weights,
    sapo_surrogate,
)
from grpo_lightning.functional.masking import aggregate, masked_mean, step_counts

__all__ = [
    "aggregate",
    "cispo_surrogate",
    "clipped_surrogate",
    "equal_groups",
    "group_relative_advantages",
    "importance_ratio",
    "is_clipped_high",
    "is_clipped_low",
    "is_k3_clamped",
    "is_ratio_clamped",
    "keeps_sequence",
    "kl_divergence",
    "masked_mean",
    "normalized_sum",
    "rollout_weights",
    "sapo_surrogate",
    "step_counts",
    "token_entropy",
    "token_logprobs",
]
