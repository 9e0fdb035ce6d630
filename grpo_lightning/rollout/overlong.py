"""What becomes of completions that the length limit cut: DAPO's overlong filtering (arXiv:2503.14476, sec. 3.4).

Their rewards say little: a right chain of thought that was cut looks like a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.core.types import Group

OverlongFilter = Literal["none", "loss", "group"]
"""`none` trains on them as on all others. `loss` does not, and still counts their rewards in their groups' mean and
spread. `group` leaves them out of these too: they are not scorable."""


def mask_truncated(groups: Sequence[Group], overlong_filter: OverlongFilter) -> None:
    """Train on no token of the completions that were cut, unless the filter is "none"."""
    if overlong_filter == "none":
        return
    for group in groups:
        for completion in group.completions:
            if completion.is_truncated:
                completion.mask = [False] * len(completion.token_ids)


def is_emptied(groups: Sequence[Group]) -> Tensor:
    """[N] bool, True for groups of which no token is trained on."""
    masks = [[completion.mask for completion in group.completions] for group in groups]
    return torch.tensor([all(mask is not None and not any(mask) for mask in row) for row in masks], dtype=torch.bool)


def without_truncated(rewards: Tensor, groups: Sequence[Group], overlong_filter: OverlongFilter) -> Tensor:
    """The rewards, without those that the filter leaves out of their groups. Args: rewards: [N, G].

    Returns:
        [N, G]; with the filter "group" nan (not scorable) for completions that were cut.
    """
    if overlong_filter != "group":
        return rewards
    truncated = [[completion.is_truncated for completion in group.completions] for group in groups]
    return rewards.masked_fill(torch.tensor(truncated, dtype=torch.bool).view_as(rewards), torch.nan)
