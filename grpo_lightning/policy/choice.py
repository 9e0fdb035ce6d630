"""Which scoring path and which head a model takes: by what it declares, then by a small probe.

Chosen once per run, the same on every rank.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.policy.families import unknown_reason
from grpo_lightning.policy.head import logit_scale
from grpo_lightning.policy.inputs import accepts, base_model, text_config
from grpo_lightning.policy.prefix_cache import PrefixCache
from grpo_lightning.policy.scoring import Scorer, ScoringPath
from grpo_lightning.ranks import max_over_ranks
from grpo_lightning.types import MicroBatch


def dense_reason(model: nn.Module) -> str | None:
    """Why this model cannot take the extended path, by what it declares; None if it can."""
    base = base_model(model)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not accepts(model, "past_key_values"):
        return f"{type(base).__name__}.forward takes no past_key_values"
    if reason := unknown_reason(base.config):
        return reason
    try:
        PrefixCache(base.config)
    except NotImplementedError as error:
        return str(error)
    return None


@torch.no_grad()
def probe_difference(model: nn.Module, one: Scorer, other: Scorer) -> Tensor:
    """|one - other| log-probs of 2 ragged prompts x 2 completions: [real tokens], nats."""
    batch = probe_batch(model)
    scores = [scorer(model, batch, temperature=1.0).logprobs for scorer in (one, other)]
    return (scores[0] - scores[1]).abs()[batch.attention_mask]


def probe_batch(model: nn.Module) -> MicroBatch:
    """2 ragged prompts x 2 completions, longer than a small sliding window."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None) or 0
    length, width, device = max(12, min(window, 64) + 3), 6, next(model.parameters()).device
    # On the CPU by name: Lightning loads models under the GPU as default device, where a CPU generator draws nothing.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, length + 2 * width), generator=generator, device="cpu")
    prompt_mask = torch.ones(2, length, dtype=torch.bool, device="cpu")
    prompt_mask[0, : length // 2] = False
    mask = torch.ones(4, width, dtype=torch.bool, device="cpu")
    mask[1, width // 2 :] = False
    return MicroBatch(
        prompt_ids=ids[:, :length],
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor([0, 0, 1, 1], device="cpu"),
        completion_ids=ids[:, length:].reshape(4, width),
        attention_mask=mask,
        completion_mask=mask,
        advantages=mask[:, 0].float(),
        rollout_logprobs=mask.float(),
    ).to(device)


class Measured(NamedTuple):
    """How far two ways of scoring differ, and how far rounding takes them."""

    nats: float
    tolerance: float

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.nats <= self.tolerance


def measure(model: nn.Module, one: Scorer, other: Scorer) -> Measured:
    """Two ways of scoring, compared: the largest difference in fp32, the mean one at 16 bits, over all ranks."""
    difference = probe_difference(model, one, other)
    is_exact = computes_in_float32(model) and not torch.is_autocast_enabled(difference.device.type)
    # Rounding alone: at most 1.3e-5 in fp32 over 87 families, a mean of 0.007 in bf16 (0.03 with linear attention).
    nats, tolerance = (difference.max(), 5e-5) if is_exact else (difference.mean(), 0.05)
    return Measured(float(max_over_ranks(nats)), tolerance)


def computes_in_float32(model: nn.Module) -> bool:
    """False if a weight is stored or used in fewer bits: quantised ones are computed with in 16."""
    if getattr(base_model(model).config, "quantization_config", None) is not None:
        return False  # whatever the codes are stored as
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    return all(dtype in (None, torch.float32) for dtype in gathered_dtypes(model))


def gathered_dtypes(model: nn.Module) -> set[torch.dtype | None]:
    """What FSDP2 gathers shards in (`mp_policy.param_dtype`), which the shards do not show; None: as they are."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {part._get_fsdp_state()._mp_policy.param_dtype for part in parts}


def choose_path(model: nn.Module, requested: Literal["auto", "extended", "dense"] = "auto") -> tuple[ScoringPath, str]:
    """The scoring path of a run and the reason for it: by static rule, then by a small probe.

    Raises:
        ValueError: If "extended" is asked for and the model cannot take it.
    """
    if requested == "dense":
        return "dense", "asked for"
    reason = dense_reason(model)
    if reason is None:
        measured = measure(model, Scorer("extended", head_chunk_size=None), Scorer("dense", head_chunk_size=None))
        if measured.is_rounding:
            return (
                "extended",
                f"prompts run once per group; a probe differs from the dense path by {measured.nats:.1e} nats",
            )
        reason = (
            f"a probe of both paths differs by {measured.nats:.1e} nats, more than rounding ({measured.tolerance:.0e})"
        )
    if requested == "extended":
        raise ValueError(f"policy.scoring is 'extended', but {reason}. Set it to 'auto' or 'dense'.")
    return "dense", reason


def choose_head(scorer: Scorer, model: nn.Module) -> tuple[Scorer, str]:
    """The scorer with a head that the model can take, whole logits if need be, and the reason for it."""
    whole = dataclasses.replace(scorer, head_chunk_size=None)
    if scorer.head_chunk_size is None:
        return whole, "whole logits: asked for"
    reason = whole_reason(model)
    scale = logit_scale(model) if reason is None else None
    if reason is None and scale is None:
        reason = "the model does more than scale what its head gives"
    if reason is not None or scale is None:
        return whole, f"whole logits: {reason}"
    # A few tokens per slice, so that the probe has several.
    sliced = Scorer(scorer.path, head_chunk_size=5, logit_scale=scale)
    measured = measure(model, sliced, Scorer(scorer.path, head_chunk_size=None))
    said = f"a probe differs from whole logits by {measured.nats:.1e} nats"
    if not measured.is_rounding:
        return whole, f"whole logits: {said}, more than rounding ({measured.tolerance:.0e})"
    return dataclasses.replace(scorer, logit_scale=scale), f"{scorer.head_chunk_size} tokens at a time: {said}"


def whole_reason(model: nn.Module) -> str | None:
    """Why this model's head cannot be run in slices, by what it declares; None if it can."""
    base = base_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        return f"{type(base).__name__} names no head (get_output_embeddings)"
    if next(head.children(), None) is not None:
        # How many slices there are follows from a rank's tokens, and modules are what gathers sharded weights.
        return f"its head, {type(head).__name__}, is made of several modules"
    return None
