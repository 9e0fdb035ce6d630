"""Log-probabilities and entropies of tokens.

In this file, `logits[:, t]` are the logits that `token_ids[:, t]` was sampled from. These logits are the model's output
at the position before the token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under the softmax at the sampling temperature.

        logprob[b, t] = z[token] - log(sum_v exp(z[v])),   z = logits[b, t] / temperature

    Args:
        logits: [B, T, V] of any float type; -inf forbids a token.
        token_ids: [B, T] ids in [0, V), also where they are padding.
        temperature: Divides the logits; positive.

    Returns:
        [B, T] float32, nats.

    Raises:
        ValueError: If `temperature` is not positive.
    """
    scaled = _scale_logits(logits, temperature)
    # logsumexp and gather keep one tensor [B, T, V] for the backward pass; log_softmax would keep a second one.
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy of the next-token distribution, exact over the vocabulary.

        H[b, t] = -sum_v p[v] log p[v],   p = softmax(logits[b, t] / temperature)

    Args:
        logits: [B, T, V] of any float type; -inf forbids a token, which then adds 0 to the entropy.
        temperature: Divides the logits; positive.

    Returns:
        [B, T] float32, nats, between 0 and log V.

    Raises:
        ValueError: If `temperature` is not positive.
    """
    logprobs = _scale_logits(logits, temperature).log_softmax(dim=-1)
    # p log p is 0 at p = 0, but computing it as 0 x -inf would give nan.
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(dim=-1)


def _scale_logits(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(
            f"temperature must be positive to score tokens, got {temperature}. Greedy sampling has no log-probs."
        )
    # In bf16 the rounding error of a sum over 100k exponentials exceeds the clip range of the ratio.
    logits = logits.float()
    # Dividing by 1 would allocate another tensor [B, T, V].
    return logits if temperature == 1 else logits / temperature
