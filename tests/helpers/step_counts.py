"""Count by the mask what the loss is divided by."""

import torch
from torch import Tensor


def step_counts(mask: Tensor) -> tuple[int, int]:
    """Count what `aggregate` divides by. Counts add up over micro-batches and ranks.

    Args:
        mask: [B, T] bool, True where a token is trained on.

    Returns:
        The trained tokens, and the completions with at least one of them.
    """
    num_tokens, num_sequences = torch.stack([mask.sum(), mask.any(dim=1).sum()]).tolist()
    return num_tokens, num_sequences
