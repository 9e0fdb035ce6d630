"""Choose the code that computes log-probs, first by the model's declared properties, then by a small probe.

Two things are chosen: the path (extended or dense) and the vocabulary head (full or sliced).
`policy/completion_logprobs.py` describes them. The choice is the same on every rank. In a probe, a model with 32-bit
weights computes in full float32 (except with FlashAttention). TF32 and autocast would change log-probs by larger
amounts than the errors that a probe has to detect.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core.ranks import gather_objects, max_over_ranks
from grpo_lightning.core.types import MicroBatch
from grpo_lightning.policy.adapters import is_adapter_layer
from grpo_lightning.policy.completion_logprobs import (
    Scorer,
    ScoringPath,
    leaves_out_masks,
    logit_scale,
    refuse_transformers_checkpointing,
)
from grpo_lightning.policy.families import unknown_reason
from grpo_lightning.policy.kv_cache import PrefixCache, stores_keys
from grpo_lightning.policy.routers import Routers
from grpo_lightning.policy.sharding import computes_in_32_bits, is_partitioned
from grpo_lightning.policy.transformers_internals import (
    attention_kernel,
    base_model,
    cache_argument,
    compute_device,
    evaluating,
    running_module,
    text_config,
)


def no_cache_reason(model: nn.Module) -> str | None:
    """Reason why completions cannot share their prompt's KV cache. None if they can."""
    base = base_model(model)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if cache_argument(model) is None or not stores_keys(base.config):
        return f"{type(base).__name__} has no KV cache"
    return unknown_reason(base.config)


def dense_reason(model: nn.Module) -> str | None:
    """Reason why a model cannot use the extended path. None if it can."""
    if reason := no_cache_reason(model):
        return reason
    try:
        PrefixCache(base_model(model).config)
    except NotImplementedError as error:
        return str(error)
    return None


@torch.no_grad()
def probe_difference(model: nn.Module, one: Scorer, other: Scorer) -> Tensor:
    """Absolute difference of two scorers' log-probs, for the completion tokens of `probe_batch`: [tokens], nats."""
    batch = probe_batch(model)
    logprobs = [scorer(model, batch, temperature=1.0).logprobs for scorer in (one, other)]
    return (logprobs[0] - logprobs[1]).abs()[batch.attention_mask]


def probe_batch(model: nn.Module) -> MicroBatch:
    """Make a micro-batch of a short and a long prompt with 2 completions each.

    If the model's sliding window has at most 64 tokens, the long prompt exceeds the window.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None) or 0
    length, width, device = max(12, min(window, 64) + 3), 6, next(model.parameters()).device
    # Created on the CPU: Lightning loads models with the GPU as default device, where a CPU generator fails.
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


def prompt_alone(batch: MicroBatch, prompt: int) -> MicroBatch:
    """Select one prompt of a micro-batch with its completions, without left padding."""
    rows, tokens = batch.prompt_index == prompt, batch.prompt_mask[prompt]
    return dataclasses.replace(
        batch,
        prompt_ids=batch.prompt_ids[prompt : prompt + 1, tokens],
        prompt_mask=batch.prompt_mask[prompt : prompt + 1, tokens],
        prompt_index=torch.zeros_like(batch.prompt_index[rows]),
        completion_ids=batch.completion_ids[rows],
        attention_mask=batch.attention_mask[rows],
        completion_mask=batch.completion_mask[rows],
        advantages=batch.advantages[rows],
        rollout_logprobs=batch.rollout_logprobs[rows],
    )


@torch.no_grad()
def scored_alone(model: nn.Module, scorer: Scorer, batch: MicroBatch) -> Tensor:
    """[B, T] log-probs at temperature 1. Each prompt is scored alone, without left padding."""
    alone = [prompt_alone(batch, prompt) for prompt in range(len(batch.prompt_ids))]
    return torch.cat([scorer(model, part, temperature=1.0).logprobs for part in alone])


def padding_difference(model: nn.Module, scorer: Scorer) -> Tensor:
    """Absolute change of completions' log-probs due to left padding of their prompts: [completion tokens], nats."""
    batch = probe_batch(model)
    with torch.no_grad():
        together = scorer(model, batch, temperature=1.0).logprobs
    return (together - scored_alone(model, scorer, batch)).abs()[batch.attention_mask]


class Measured(NamedTuple):
    """Difference between two ways of computing log-probs, and the tolerance for rounding."""

    nats: float
    tolerance: float
    failure: str | None = None
    """The exception that one of the two ways raised; `nats` is then infinite."""

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.nats <= self.tolerance

    @property
    def is_wrong(self) -> bool:
        """True if the difference is so large that a run would train on wrong log-probs."""
        return not self.nats <= max(self.tolerance, WRONG)

    def __str__(self) -> str:
        if self.failure is not None:
            return f"raised {self.failure}"
        return f"differs by {self.nats:.1e} nats, more than rounding ({self.tolerance:.0e})"


WRONG = 1e-3
"""Log-probs that differ by more than this many nats are wrong. Rounding in float32 changes log-probs by less than 5e-5
nats. Padding that leaks into a model's state changes log-probs by 0.01 to 1.5 nats."""


def measure(model: nn.Module, one: Scorer, other: Scorer) -> Measured:
    """Compare two scorers (see `compare`)."""
    return compare(model, lambda: probe_difference(model, one, other))


def compare(model: nn.Module, difference: Callable[[], Tensor]) -> Measured:
    """Measure how much two ways of computing log-probs differ in a probe. Every rank gets the same number.

    In float32, each rank takes the maximum over its tokens. In 16 bits, each rank takes the mean. The result is the
    maximum over all ranks.

    Args:
        model: The policy.
        difference: Runs the probe, and returns absolute differences of log-probs ([tokens], in nats). If `difference`
            raises `OutOfMemoryError` or `FloatingPointError` (logits are NaN), `compare` raises the same error. Any
            other exception of `difference` becomes the `failure` of the result.
    """
    failure, device = None, compute_device(model)
    with probe_mode(model):
        is_exact = computes_in_32_bits(model) and not torch.is_autocast_enabled(device.type)
        try:
            found = difference()
        except (torch.OutOfMemoryError, FloatingPointError):  # too little memory or NaN does not mean missing support
            raise
        except Exception as error:  # noqa: BLE001 - modeling code raises any exception for what it does not support
            failure = f"{type(error).__name__}: {error}".rstrip(".")
            found = torch.full((1,), torch.inf, device=device)
    # Rounding gives at most 1.3e-5 in fp32 (found in 87 model families), and a mean of 0.007 in bf16 (0.03 with linear
    # attention).
    nats, tolerance = (found.max(), 5e-5) if is_exact else (found.mean(), 0.05)
    failure = next((each for each in gather_objects(failure) if each is not None), None)
    return Measured(float(max_over_ranks(nats)), tolerance, failure)


@contextlib.contextmanager
def probe_mode(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in eval mode. If the model has 32-bit weights, it computes in full float32.

    FlashAttention's kernels need 16 bits, so a model with FlashAttention and 32-bit weights computes with autocast.
    """
    device = compute_device(model).type
    needs_autocast = uses_flash_attention(model) and computes_in_32_bits(model)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.bfloat16
    with evaluating(model), full_float32(), torch.autocast(device, dtype=dtype, enabled=needs_autocast):
        yield


def uses_flash_attention(model: nn.Module) -> bool:
    """True if the decoder's attention is a FlashAttention kernel."""
    # The name is "flash_attention_2" for the package flash-attn, and "kernels-community/flash-attn2" for a build from
    # the hub.
    return "flash" in attention_kernel(model)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Context in which 32-bit matrix products and convolutions are not rounded to TF32 or bfloat16."""
    backends: Any = torch.backends
    precision = torch.get_float32_matmul_precision()
    # Torch 2.9 and newer also have one setting per backend. Once such a setting was used, reading the older global
    # setting raises an error.
    parts = [backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    before = [(part, part.fp32_precision) for part in parts if hasattr(part, "fp32_precision")]
    try:
        allow_tf32 = backends.cudnn.allow_tf32
    except RuntimeError:
        allow_tf32 = None
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if allow_tf32 is not None:
            backends.cudnn.allow_tf32 = allow_tf32
        for part, value in before:
            if part.fp32_precision != value:
                part.fp32_precision = value


def choose_path(model: nn.Module, requested: Literal["auto", "extended", "dense"] = "auto") -> tuple[ScoringPath, str]:
    """Choose the path for the log-probs of a run. Returns: the path and the reason.

    Raises:
        ValueError: If "extended" is requested and the model does not support it.
        RuntimeError: If transformers' own gradient checkpointing is on.
    """
    refuse_transformers_checkpointing(model)
    if requested == "dense":
        return "dense", "requested"
    reason = dense_reason(model)
    if reason is None:
        measured = measure(model, Scorer("extended", head_chunk_size=None), Scorer("dense", head_chunk_size=None))
        if measured.is_rounding:
            return (
                "extended",
                f"prompts run once per group; a probe differs from the dense path by {measured.nats:.1e} nats",
            )
        reason = f"a probe of both paths {measured}"
    if requested == "extended":
        raise ValueError(f"policy.scoring is 'extended', but {reason}. Set it to 'auto' or 'dense'.")
    return "dense", reason


def check_scorer(scorer: Scorer, model: nn.Module) -> None:
    """Check that the log-probs of completions do not depend on the left padding of their prompts.

    Raises:
        ValueError: If log-probs depend on the padding, or the model's forward pass fails.
    """
    measured = compare(model, lambda: padding_difference(model, scorer))
    if measured.failure is not None:
        raise ValueError(
            f"A policy of model type {model_type(model)} cannot be scored ({scorer.path} path): its forward pass "
            f"{measured}. Use a model of another type, or a release of transformers whose {model_type(model)} runs "
            "batches of padded prompts."
        )
    if measured.is_wrong:
        raise ValueError(
            f"A policy of model type {model_type(model)} cannot be trained: left padding of a prompt changes its "
            f"log-probs (a probe of ragged prompts, scored together and alone, {measured}). The model ignores the "
            "attention mask, as RWKV does: use a model that masks padding."
        )


@torch.no_grad()
def check_routers(scorer: Scorer, model: nn.Module, routers: Routers) -> None:
    """Check that the routing of a model's tokens can be recorded. Raises: UnsupportedRoutersError if not."""
    with probe_mode(model):
        scorer(model, probe_batch(model), temperature=1.0, routers=routers)


def model_type(model: nn.Module) -> str:
    """The `model_type` of the model's config."""
    return str(base_model(model).config.model_type)


def choose_head(scorer: Scorer, model: nn.Module) -> tuple[Scorer, str]:
    """Choose the sliced vocabulary head if the model supports it, and the full head if not. Also return the reason."""
    full = dataclasses.replace(scorer, head_chunk_size=None)
    if scorer.head_chunk_size is None:
        return full, "full logits: requested"
    reason = no_slices_reason(model)
    with probe_mode(model):
        scale = logit_scale(model) if reason is None else None
    if reason is None and scale is None:
        reason = "the model does more than scale the output of its head"
    if reason is not None or scale is None:
        return full, f"full logits: {reason}"
    # Few tokens per slice, so that the probe runs several slices.
    sliced = Scorer(scorer.path, head_chunk_size=5, logit_scale=scale)
    measured = compare(model, lambda: slices_difference(model, sliced))
    if not measured.is_rounding:
        return full, f"full logits: a probe of slices {measured}"
    reason = f"a probe differs from full logits by {measured.nats:.1e} nats"
    return dataclasses.replace(scorer, logit_scale=scale), f"{scorer.head_chunk_size} tokens at a time: {reason}"


def slices_difference(model: nn.Module, sliced: Scorer) -> Tensor:
    """Absolute differences between log-probs of the sliced and the full head: [tokens], nats; [2 * tokens] on a GPU.

    On a GPU, the sliced head's prompt pass can leave out the mask if attention computes in 16 bits. If attention
    computes in 32 bits, the prompt pass normally has a mask (`columns_of_prompts`). The probe can compute in 32 bits
    even if the run computes in 16 bits. On a GPU, the log-probs are therefore compared a second time. If the model
    supports a prompt pass without a mask, the sliced head leaves out the mask in the second comparison, even in 32
    bits.
    """
    full = Scorer(sliced.path, head_chunk_size=None)
    found = [probe_difference(model, sliced, full)]
    if compute_device(model).type != "cpu":
        token = leaves_out_masks.set(True)
        try:
            found.append(probe_difference(model, sliced, full))
        finally:
            leaves_out_masks.reset(token)
    return torch.cat(found)


@torch.no_grad()
def check_head_runs(scorer: Scorer, model: nn.Module) -> None:
    """Check that the model computes its logits by calling its output head.

    Raises:
        ValueError: If the model's forward does not call its head.
    """
    calls: list[str] = []
    head = base_model(model).get_output_embeddings()
    handle = head.register_forward_hook(lambda *_: calls.append("head"))
    try:
        with probe_mode(model):
            dataclasses.replace(scorer, head_chunk_size=None)(model, probe_batch(model), temperature=1.0)
    finally:
        handle.remove()
    if not calls:
        raise ValueError(
            f"policy.head_dtype is 'float32', but the forward of {type(base_model(model)).__name__} computes its "
            "logits without calling its output head (get_output_embeddings), so the setting would have no effect. Set "
            "it to 'auto', or let the model call its head instead of reading the head's weight."
        )


def no_slices_reason(model: nn.Module) -> str | None:
    """Reason why a model's head cannot run in slices. None if it can."""
    base = base_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        return f"{type(base).__name__} does not declare its head (get_output_embeddings)"
    head = running_module(head)
    is_gathered_by_module = not is_adapter_layer(head) or any(map(is_partitioned, head.parameters()))
    if next(head.children(), None) is not None and is_gathered_by_module:
        # ZeRO-3 gathers weights per module, and the number of slices differs between ranks.
        return f"its head, {type(head).__name__}, consists of several modules"
    return None
