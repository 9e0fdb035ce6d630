"""DAPO's overlong filter. It masks truncated completions, and can exclude their rewards from a group's mean and std."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.core.types import Group

OverlongFilter = Literal["none", "loss", "group"]
"""How truncated completions are treated (DAPO's overlong filtering, arXiv:2503.14476, sec. 3.4).

`none` trains on truncated completions normally. `loss` masks their tokens, but their rewards still count in the mean
and std of their groups. `group` masks their tokens and excludes their rewards from the mean and std."""


def mask_truncated(groups: Sequence[Group]) -> None:
    """Mask all tokens of truncated completions."""
    for group in groups:
        for completion in group.completions:
            if completion.is_truncated:
                completion.mask = [False] * len(completion.token_ids)


def are_truncated(groups: Sequence[Group]) -> Tensor:
    """[N, G] bool, True for truncated completions."""
    return torch.tensor([[c.is_truncated for c in group.completions] for group in groups], dtype=torch.bool)
