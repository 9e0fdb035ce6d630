"""Policies for the real vLLM, and what they say of its completions."""

from __future__ import annotations

from typing import Any

import torch

from grpo_lightning.core.types import Completion, SamplingParams
from grpo_lightning.rollout.token_sampler import DrawSettings, NextToken, log_distribution
from tests.tiny_models import tiny_model

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
    processors = NextToken(DrawSettings.of(sampling), logits.shape[1], logits.device).processors
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
