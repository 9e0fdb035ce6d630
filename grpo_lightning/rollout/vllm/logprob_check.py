"""Check that vLLM's log-probs of a small rollout equal those that training computes with the policy.

The check finds three errors:

- A server computes log-probs from logits that are not divided by the temperature.
- vLLM's weights differ from the policy's weights.
- The log-probs of vLLM's kernels differ from the log-probs of training by more than rounding.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.core import ranks
from grpo_lightning.core.types import MicroBatch, SamplingParams, VisionInputs
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.probe import probe_mode
from grpo_lightning.policy.sharding import full_shape
from grpo_lightning.policy.transformers_internals import base_model, compute_device, left_pad
from grpo_lightning.rollout.engine import RolloutEngine
from grpo_lightning.rollout.vllm import images

log = logging.getLogger(__name__)

PROBE_TEMPERATURE = 0.5
"""Temperature of the probe. It is not 1, so that log-probs with and without the temperature differ."""

LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest accepted mean |difference| of log-probs in the probe, in nats, by the coarser dtype of vLLM's and the
policy's weights."""

QUANTIZED_DIFFERENCE = 0.5
"""Largest accepted mean |difference| if `quantization` is set, in nats."""


def check_difference(difference: float, dtypes: Iterable[torch.dtype], *, is_server: bool, is_quantized: bool) -> None:
    """Check that vLLM's log-probs differ from the policy's only by rounding.

    `difference` is the mean |difference| in nats. The dtype of a server is unknown, so the tolerance is at least that
    of bfloat16.

    Raises:
        ValueError: If they differ by more than rounding.
    """
    tolerance = max(LARGEST_DIFFERENCE.get(dtype, 0.1) for dtype in dtypes)
    if is_server:
        tolerance = max(tolerance, LARGEST_DIFFERENCE[torch.bfloat16])
    if is_quantized:
        tolerance = max(tolerance, QUANTIZED_DIFFERENCE)
    if not difference <= tolerance:
        remedy = "Start the server with --logprobs-mode processed_logprobs." if is_server else "Use LocalEngine."
        raise ValueError(
            f"vLLM's log-probs of sampled tokens differ from the policy's by {difference:.2g} nats on average, "
            f"more than rounding explains ({tolerance:g}). {remedy}"
        )
    log.info("vLLM's log-probs differ from the policy's by %.1e nats on average (probe).", difference)


class LogprobProbe(NamedTuple):
    """Compares an engine's log-probs with those of training, on 2 prompts x 2 completions."""

    engine: RolloutEngine
    """The engine, with the policy's current weights."""

    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    processor: Any
    """The processor of a multimodal policy; None for a text-only policy."""

    stop_ids: Iterable[int]
    """Tokens that end a completion."""

    scorer: Scorer
    """Computes the policy's log-probs in training."""

    def mean_difference(self) -> float:
        """The largest mean of `differences` on any rank. Collective: every rank must call it."""
        with probe_mode(self.policy):
            return float(ranks.max_over_ranks(self.differences().mean()))

    @torch.no_grad()
    def differences(self) -> Tensor:
        """|engine's log-probs - scorer's log-probs|: [sampled tokens], nats."""
        device = compute_device(self.policy)
        prompts, vision = self.prompts()
        ids, mask = left_pad(prompts, pad_id=0)
        # Stop tokens are suppressed, so that all completions have the same length.
        never = tuple(sorted({*self.scorer.never, *self.stop_ids}))
        sampling = SamplingParams(max_completion_length=8, temperature=PROBE_TEMPERATURE, suppress_tokens=list(never))
        groups = self.engine.generate(prompts, 2, sampling, seeds=[0, 1], vision=vision)
        rows = [completion for group in groups for completion in group]
        everything = torch.ones(len(rows), 8, dtype=torch.bool, device=device)
        logprobs = torch.tensor([row.logprobs for row in rows], device=device)
        batch = MicroBatch(
            prompt_ids=ids.to(device),
            prompt_mask=mask.to(device),
            prompt_index=torch.tensor([0, 0, 1, 1], device=device),
            completion_ids=torch.tensor([row.token_ids for row in rows], device=device),
            attention_mask=everything,
            completion_mask=everything,
            advantages=logprobs.new_ones(len(rows)),
            rollout_logprobs=logprobs,
            vision=vision,
        )
        scorer = dataclasses.replace(self.scorer, never=never)
        return (logprobs - scorer(self.policy, batch, temperature=PROBE_TEMPERATURE).logprobs).abs().flatten()

    def prompts(self) -> tuple[list[list[int]], VisionInputs | None]:
        """Make two prompts of random tokens; for a multimodal policy, the second one is an image and a word."""
        size = full_shape(self.policy.get_input_embeddings().weight)[0]  # type: ignore[operator,union-attr]
        # A prompt without images must not contain image tokens.
        known = torch.tensor(sorted(set(range(size)) - set(self.scorer.never)), device="cpu")
        generator = torch.Generator().manual_seed(0)
        prompts = known[torch.randint(len(known), (2, 8), generator=generator, device="cpu")].tolist()
        if self.processor is None:
            return prompts, None
        encoder = Encoder(self.tokenizer, self.processor, base_model(self.policy).config)
        encoded = encoder(images.probe_prompt())
        vision = encoder.vision_inputs([None, encoded.vision], needs_blank=False)
        return [prompts[0], encoded.token_ids], vision
