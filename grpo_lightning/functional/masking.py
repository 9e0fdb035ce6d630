"""Masked means and the normalisers of the loss.

Left out on purpose: any mean over "this micro-batch". A micro-batch contributes its share of a mean over the whole
optimizer step, so how a step is cut into micro-batches and ranks cannot change what is learned.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the values where the mask is True.

        mean = sum(v * m) / max(sum(m), 1)

    Args:
        values: [...] of any float type; may be nan or infinite where the mask is False.
        mask: bool, broadcastable to `values` and back; True counts.
        dim: The dimension averaged over; None averages over all.

    Returns:
        The mean, without `dim`. 0 where nothing is True, with a gradient of 0.
    """
    kept = _keep(values, mask)
    mask = mask.expand_as(kept)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def aggregate(
    values: Tensor,
    mask: Tensor,
    *,
    by: Literal["token", "sequence", "constant"],
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    max_completion_length: int,
) -> Tensor:
    """Sum this micro-batch's share of a mean over the whole optimizer step.

        token:     sum_it(v m) / num_tokens
        sequence:  sum_i( sum_t(v m) / sum_t(m) ) / num_sequences
        constant:  sum_it(v m) / (num_sequences * max_completion_length)

    The shares of all micro-batches of all ranks add up to the mean. Where ranks average their gradients (DDP, FSDP,
    ZeRO), multiply the share by the number of ranks; where micro-batches are averaged, by their number.

    Args:
        values: [B, T] per-token loss, or [B, 1] when it is the same for every token of a row; may be nan or infinite
            where the mask is False.
        mask: [B, T] bool, True where a token is trained on.
        by: "token" weighs every token alike (DAPO, arXiv:2503.14476, sec. 3.3), "sequence" every completion alike
            (GRPO, arXiv:2402.03300, eq. 3), "constant" divides by what does not depend on the lengths (Dr. GRPO,
            arXiv:2503.20783, sec. 3.2).
        num_tokens: Trained tokens of the step, over all micro-batches and ranks; see `step_counts`.
        num_sequences: Completions of the step with at least one trained token.
        max_completion_length: The length limit of sampling, in tokens.

    Returns:
        A scalar. With nothing to train on it is 0 and still connected to `values`.

    Raises:
        ValueError: If `by` is none of the three.
    """
    kept = _keep(values, mask)
    if by == "token":
        return kept.sum() / _at_least_one(num_tokens)
    if by == "sequence":
        return masked_mean(kept, mask, dim=1).sum() / _at_least_one(num_sequences)
    if by == "constant":
        return kept.sum() / (_at_least_one(num_sequences) * max_completion_length)
    raise ValueError(f"by must be 'token', 'sequence' or 'constant', got {by!r}.")


def step_counts(mask: Tensor) -> tuple[int, int]:
    """Count what `aggregate` divides by. Counts add up over micro-batches and ranks.

    Args:
        mask: [B, T] bool, True where a token is trained on.

    Returns:
        The trained tokens, and the completions with at least one of them.
    """
    num_tokens, num_sequences = torch.stack([mask.sum(), mask.any(dim=1).sum()]).tolist()
    return num_tokens, num_sequences


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    # Multiplying by the mask would turn a nan or an infinity at a padded position into a nan of the whole sum.
    return torch.where(mask, values, 0.0)


def _at_least_one(count: int | Tensor) -> int | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
