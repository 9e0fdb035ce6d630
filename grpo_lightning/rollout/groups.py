"""A rollout: prompts are encoded and sampled into groups, and the `Rollout` of them travels through a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core.types import Completion, Group, Prompt, SamplingParams, VisionInputs
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.vision import needs_blank
from grpo_lightning.rewards.scoring import Scores, concatenate_scores
from grpo_lightning.rollout.engine import Progress, RolloutEngine

if TYPE_CHECKING:
    from grpo_lightning.core.types import Group


class GroupSource(NamedTuple):
    """Samples groups with an engine, from encoded prompts."""

    engine: RolloutEngine
    encoder: Encoder
    sharding: Sharding

    weight_version: int
    """How many rollouts the weights were synchronised for."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
    ) -> list[Group]:
        """Sample G completions of N prompts; their images are read here, each once.

        Args:
            prompts: N.
            num_generations: G.
            sampling: The distribution. Tokens that stand for images, or that the tokenizer does not have, are left out.
            seeds: N.
            progress: Told how far the decoding is.

        Raises:
            ValueError: If a prompt cannot be encoded, or leaves no room for its completions.
        """
        encoded = self.encoder.fitting(prompts, sampling.max_completion_length)
        # Ranks that sample in step run the tower in step, whoever has an image.
        vision = self.encoder.vision_inputs([prompt.vision for prompt in encoded], needs_blank=self.sharding.is_sharded)
        never = {*sampling.suppress_tokens, *self.encoder.never_sampled}
        sampled = self.engine.generate(
            [prompt.token_ids for prompt in encoded],
            num_generations,
            replace(sampling, suppress_tokens=sorted(never)),
            seeds,
            progress,
            **({} if vision is None else {"vision": vision}),  # engines that take none are for text
        )
        return [
            Group(prompt, found.token_ids, completions, self.weight_version, found.image_views, found.vision)
            for prompt, found, completions in zip(prompts, encoded, sampled, strict=True)
        ]


def kl_to_reference(groups: Sequence[Group]) -> Tensor:
    """[N, G] the KL of every completion to the reference: k1, summed over the tokens that the policy sampled, in nats.

    sum over t of (rollout_logprob[t] - ref_logprob[t]). A completion of which no token is trained on counts whole.
    """
    return torch.tensor([[_kl(c) for c in group.completions] for group in groups], dtype=torch.float32)


def _kl(completion: Completion) -> float:
    """The KL of one completion."""
    assert completion.ref_logprobs is not None
    mask = completion.mask if completion.mask and any(completion.mask) else [True] * len(completion.logprobs)
    sampled = zip(completion.logprobs, completion.ref_logprobs, mask, strict=True)
    return sum(own - ref for own, ref, is_sampled in sampled if is_sampled)


def vision_of(groups: Sequence[Group], encoder: Encoder, policy: nn.Module, sharding: Sharding) -> VisionInputs | None:
    """The images of a rollout, for the passes that score it; None if the policy sees none. Every rank takes part."""
    if not encoder.sees_images:
        return None
    vision = [group.vision for group in groups]
    return encoder.vision_inputs(vision, needs_blank=needs_blank(policy, vision, is_sharded=sharding.is_sharded))


OverlongFilter = Literal["none", "loss", "group"]
"""How truncated completions are treated (DAPO's overlong filtering, arXiv:2503.14476, sec. 3.4).

Their rewards say little: a right chain of thought that was truncated looks like a wrong one. `none` trains on them like
on all others. `loss` masks them, and still counts their rewards in their groups' mean and spread. `group` masks them
and does not count their rewards either: they are not scorable."""


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
    return Rollout([group for part in parts for group in part.groups], concatenate_scores(scores), torch.cat(rewards))


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
