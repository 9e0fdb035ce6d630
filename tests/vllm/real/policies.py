"""Policies for the real vLLM, and what they say of its completions."""

from __future__ import annotations

from typing import Any

import torch

from grpo_lightning.core.types import Completion, Group, SamplingParams
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.token_sampler import NextToken, TokenSettings, log_distribution
from grpo_lightning.training.micro_batches import give_images, plan_micro_batches
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_vlms import TinyVLM, build, rope
from tests.helpers.vision_prompts import encoder_of, prompt_of

SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
"""Heads of 32 features, the fewest that vLLM's kernels take."""

PROMPTS = [[40, 50, 60, 61, 62, 63], [41, 42], [5 + i % 90 for i in range(150)]]
"""Three prompts of different lengths, the last one longer than a block of the prefix cache (128 tokens)."""


def policy(**changes: Any) -> Any:
    """A tiny qwen2 with tied embeddings."""
    return tiny_model("qwen2", **SIZE | {"tie_word_embeddings": True} | changes)


def step(model: Any, seed: int) -> None:
    """Move every trained weight, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def scored(model: Any, prompt: list[int], completion: Completion, sampling: SamplingParams) -> torch.Tensor:
    """[T] log-probs of a completion's tokens under the distribution that `LocalEngine` samples them from."""
    ids = torch.tensor([prompt + completion.token_ids])
    logits = model(ids).logits[0]
    processors = NextToken(TokenSettings.of(sampling), logits.shape[1], logits.device).processors
    found = []
    for position in range(len(prompt), ids.shape[1]):
        distribution = log_distribution(processors, ids[:, :position], logits[position - 1][None])
        found.append(distribution[0, ids[0, position]])
    return torch.stack(found)


def largest_gap(model: Any, prompts: Any, groups: Any, sampling: SamplingParams) -> float:
    """The largest |difference| of the engine's and the policy's log-probs, in nats."""
    return max(
        float((torch.tensor(completion.logprobs) - scored(model, prompt, completion, sampling)).abs().max())
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    )


def vlm() -> TinyVLM:
    """A tiny Qwen2.5-VL whose heads have 32 features."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope([4, 6, 6])}
    return build("qwen2_5_vl", **heads)


def sampled_groups(
    engine: Any, tiny: TinyVLM, prompts: list[list[Any]], sampling: SamplingParams, num_generations: int = 3
) -> list[Group]:
    """The groups that an engine samples for prompts of texts and images."""
    source = GroupSource(engine, encoder_of(tiny), Sharding(), 0)
    seeds = list(range(1, 1 + len(prompts)))
    return source.sample([prompt_of(*parts) for parts in prompts], num_generations, sampling, seeds)


@torch.no_grad()
def largest_vision_gap(tiny: TinyVLM, groups: list[Group], sampling: SamplingParams) -> float:
    """The largest |difference| of the engine's and the policy's log-probs, in nats."""
    encoder, advantages = encoder_of(tiny), torch.ones(len(groups), len(groups[0].completions))
    (batch,), _ = plan_micro_batches(groups, advantages, updates=1, accumulate=1, pad_id=0, skip_zero_advantages=False)
    for group in groups:
        group.vision.features = None  # of an earlier tower
    give_images([batch], encoder.vision_inputs([group.vision for group in groups], needs_blank=False))
    scorer = Scorer(never=encoder.never_sampled)
    logprobs = scorer(tiny.model, batch, temperature=sampling.temperature).logprobs
    return float((batch.rollout_logprobs - logprobs)[batch.attention_mask].abs().max())
