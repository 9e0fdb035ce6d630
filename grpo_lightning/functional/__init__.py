"""The mathematics of GRPO.

These lines compute the loss of N prompts with G completions each. The inputs are the rewards [N, G], the completions'
tokens `ids` [N * G, T] with their `mask`, and the logits [N * G, T, V]. Two more inputs are log-probs of the tokens.
`old` has those under the policy before the first update on these completions, and `ref` has those under the reference.

    advantages = group_relative_advantages(rewards).view(-1, 1)
    logprobs = token_logprobs(logits, ids)
    ratio = importance_ratio(logprobs, old, mask)
    loss = clipped_surrogate(ratio, advantages) + 0.04 * kl_divergence(logprobs, ref, mask)
    loss = masked_mean(loss, mask)

If an optimizer step has several micro-batches, `aggregate` replaces `masked_mean` in the last line.
"""

from grpo_lightning.functional.advantages import (
    group_relative_advantages,
    groups_without_gradient,
    normalized_sum,
    turn_credits,
    zero_variance_groups,
)
from grpo_lightning.functional.logprobs import token_entropy, token_logprobs
from grpo_lightning.functional.losses import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    dppo_surrogate,
    gmpo_surrogate,
    importance_ratio,
    is_clipped_high,
    is_clipped_low,
    is_k3_clamped,
    is_ratio_clamped,
    keeps_sequence,
    kl_cov_surrogate,
    kl_divergence,
    leaves_trust_region,
    masked_mean,
    reinforce_surrogate,
    rollout_weights,
    sapo_surrogate,
    vespo_surrogate,
)
from grpo_lightning.functional.routing import load_balancing_loss, max_expert_load, router_load, total_load
from grpo_lightning.functional.selection import (
    high_covariance_tokens,
    high_entropy_tokens,
    random_covariance_tokens,
    token_covariances,
)

__all__ = [
    "aggregate",
    "cispo_surrogate",
    "clipped_surrogate",
    "dppo_surrogate",
    "gmpo_surrogate",
    "group_relative_advantages",
    "groups_without_gradient",
    "high_covariance_tokens",
    "high_entropy_tokens",
    "importance_ratio",
    "is_clipped_high",
    "is_clipped_low",
    "is_k3_clamped",
    "is_ratio_clamped",
    "keeps_sequence",
    "kl_cov_surrogate",
    "kl_divergence",
    "leaves_trust_region",
    "load_balancing_loss",
    "masked_mean",
    "max_expert_load",
    "normalized_sum",
    "random_covariance_tokens",
    "reinforce_surrogate",
    "rollout_weights",
    "router_load",
    "sapo_surrogate",
    "token_covariances",
    "token_entropy",
    "token_logprobs",
    "total_load",
    "turn_credits",
    "vespo_surrogate",
    "zero_variance_groups",
]
