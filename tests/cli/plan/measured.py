"""Real forwards whose memory is counted: what the tests of the formulas compare with."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.completion_logprobs import Scorer


def ragged_batch(num_prompts: int, num_generations: int, prompt_length: int, completion_length: int) -> MicroBatch:
    """Whole groups at their longest; one prompt is a token shorter, so that there is padding to mask."""
    B = num_prompts * num_generations
    prompt_mask = torch.ones(num_prompts, prompt_length, dtype=torch.bool)
    prompt_mask[0, 0] = False
    mask = torch.ones(B, completion_length, dtype=torch.bool)
    return MicroBatch(
        prompt_ids=torch.randint(2, 100, (num_prompts, prompt_length)),
        prompt_mask=prompt_mask,
        prompt_index=torch.arange(num_prompts).repeat_interleave(num_generations),
        completion_ids=torch.randint(2, 100, (B, completion_length)),
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.ones(B),
        rollout_logprobs=torch.zeros(B, completion_length),
    )


def saved_bytes(model: nn.Module, scorer: Scorer, batch: MicroBatch, *, is_mixed: bool = False) -> int:
    """Bytes of the storages that autograd keeps of one scoring, without the weights and their 16-bit copies."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(reversed(p.shape)))}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not (is_mixed and tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes):
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
    ):
        scorer(model, batch, temperature=1.0)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in weights)


def peak_bytes(model: nn.Module, scorer: Scorer, batch: MicroBatch) -> int:
    """Bytes allocated at the highest moment of a scoring and its backward pass, gradients among them."""
    model.zero_grad(set_to_none=True)
    gc.collect()  # what is freed inside would be subtracted, though it was allocated before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        scorer(model, batch, temperature=1.0).logprobs.sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        highest = max(highest, allocated)
    return highest
