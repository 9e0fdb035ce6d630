"""From prompts to groups: encode, draw, and put together what belongs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core.types import Completion, Group, Prompt, SamplingParams, VisionInputs
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.vision import needs_blank
from grpo_lightning.rollout.engine import Progress, RolloutEngine


class GroupSource(NamedTuple):
    """What groups are drawn with."""

    engine: RolloutEngine
    encoder: Encoder
    sharding: Sharding

    weight_version: int
    """How many rollouts the weights were synchronised for."""

    def draw(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
    ) -> list[Group]:
        """Draw G completions of N prompts; their images are read here, each once.

        Args:
            prompts: N.
            num_generations: G.
            sampling: How they are drawn. Tokens that stand for images, or that the tokenizer does not have, never are.
            seeds: N.
            progress: Told how far the decoding is.

        Raises:
            ValueError: If a prompt cannot be encoded, or leaves no room for its completions.
        """
        encoded = self.encoder.fitting(prompts, sampling.max_completion_length)
        # Ranks that sample in step run the tower in step, whoever has an image.
        vision = self.encoder.vision_inputs([prompt.vision for prompt in encoded], needs_blank=self.sharding.is_sharded)
        never = {*sampling.suppress_tokens, *self.encoder.never_drawn}
        drawn = self.engine.generate(
            [prompt.token_ids for prompt in encoded],
            num_generations,
            replace(sampling, suppress_tokens=sorted(never)),
            seeds,
            progress,
            **({} if vision is None else {"vision": vision}),  # engines that take none are for text
        )
        return [
            Group(prompt, found.token_ids, completions, self.weight_version, found.image_views, found.vision)
            for prompt, found, completions in zip(prompts, encoded, drawn, strict=True)
        ]


def kl_to_reference(groups: Sequence[Group]) -> Tensor:
    """[N, G] the KL of every completion to the reference: k1, summed over the tokens that the policy sampled, in nats.

    sum over t of (rollout_logprob[t] - ref_logprob[t]). A completion of which no token is trained on counts whole.
    """
    return torch.tensor([[_kl(c) for c in group.completions] for group in groups], dtype=torch.float32)


def _kl(completion: Completion) -> float:
    """Of one completion."""
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
