"""What the verbs of a training step pass on: the groups of a cycle, their scores, rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning.rewards.scores import Scores, joined_scores

if TYPE_CHECKING:
    from grpo_lightning.core.types import Group


@dataclass
class Rollout:
    """This rank's part of a rollout. Every verb fills in the next field."""

    groups: list[Group]
    """N prompts with G completions each."""

    scores: Scores | None = None
    """The value of every reward, what the rewards logged, and their failures."""

    rewards: Tensor | None = None
    """[N, G] float32: what completions are compared by; NaN where one is not scorable or is left out of its group."""

    advantages: Tensor | None = None
    """[N, G] float32."""

    def select(self, rows: Sequence[int]) -> Rollout:
        """Those of some of the groups of a scored rollout, in the order given."""
        assert self.scores is not None
        assert self.rewards is not None
        rows = list(rows)
        return Rollout([self.groups[row] for row in rows], self.scores.select(rows), self.rewards[rows])


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Scored rollouts as one, their groups one after the other."""
    scores = [part.scores for part in parts if part.scores is not None]
    rewards = [part.rewards for part in parts if part.rewards is not None]
    return Rollout([group for part in parts for group in part.groups], joined_scores(scores), torch.cat(rewards))


def per_completion(values: Tensor | None, groups: Sequence[Group], *, name: str, verb: str) -> Tensor:
    """The values [N, G] that a verb gave. Raises: ValueError naming it, if there is not one per completion."""
    sizes = {len(group.completions) for group in groups}
    shape = None if values is None else tuple(values.shape)
    if values is None or values.ndim != 2 or len(values) != len(groups) or not sizes <= {values.shape[1]}:
        size = sizes.pop() if len(sizes) == 1 else "G"
        raise ValueError(
            f"`{verb}` must return the Rollout with `{name}` [{len(groups)}, {size}], one number per completion; got "
            f"{'none' if shape is None else f'the shape {list(shape)}'}."
        )
    return values
